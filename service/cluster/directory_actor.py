"""The directory as an actor of Ray: one for all fronts, restarted elsewhere when its machine fails."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.experimental import internal_kv  # pyright: ignore[reportMissingImports]

from service.cluster.directory import Directory, DirectoryRefused, Entry, Front, Told
from service.cluster.messages import Refused
from service.cluster.pool import NAMESPACE, ON_THE_HEAD

NAME = "robojax-directory"
# Of the keys in Ray's own store (GCS), which lives as long as the cluster's head; with Ray's fault tolerance (Redis)
# longer.
_SPACE = b"robojax"


class RayStore:
    """A `Store` in Ray's own."""

    def put(self, key: str, text: str) -> None:
        """Keep it."""
        internal_kv._internal_kv_put(key.encode(), text.encode(), overwrite=True, namespace=_SPACE)

    def drop(self, key: str) -> None:
        """Forget it."""
        internal_kv._internal_kv_del(key.encode(), namespace=_SPACE)

    def all(self) -> Mapping[str, str]:
        """What is kept."""
        found = {}
        for key in internal_kv._internal_kv_list(b"", namespace=_SPACE):
            text = internal_kv._internal_kv_get(key, namespace=_SPACE)
            if text is not None:
                found[key.decode()] = text.decode()
        return found


class DirectoryActor:
    """Calls one after the other, on this actor's clock."""

    def __init__(self) -> None:
        self._directory = Directory(RayStore(), time.monotonic())

    def claim(self, front: str, session_id: str, owner: str | None) -> Refused | None:
        """See `Directory.claim`."""
        return _told(lambda: self._directory.claim(front, session_id, owner, time.monotonic()))

    def beat(
        self, front: str, url: str, held: Sequence[str], news: Sequence[Entry], gone: Sequence[str], machine: str
    ) -> Told:
        """See `Directory.beat`."""
        return self._directory.beat(front, url, held, news, time.monotonic(), gone=gone, machine=machine)

    def release(self, front: str, session_id: str) -> None:
        """See `Directory.release`."""
        self._directory.release(front, session_id)

    def list(self) -> Sequence[Entry]:
        """See `Directory.list`."""
        return self._directory.list(time.monotonic())

    def of(self, front: str) -> Sequence[Entry]:
        """See `Directory.of`."""
        return self._directory.of(front)

    def find(self, session_id: str) -> tuple[Entry, str | None] | None:
        """See `Directory.find`."""
        return self._directory.find(session_id, time.monotonic())

    def front(self, name: str) -> Front | None:
        """See `Directory.front`."""
        return self._directory.front(name)

    def adopt(self, front: str, session_id: str) -> Entry | Refused:
        """See `Directory.adopt`."""
        return _told(lambda: self._directory.adopt(front, session_id, time.monotonic()))

    def forget(self, session_id: str) -> Refused | None:
        """See `Directory.forget`."""
        return _told(lambda: self._directory.forget(session_id, time.monotonic()))


def _told(ask: Any) -> Any:
    try:
        return ask()
    except DirectoryRefused as error:
        return Refused(error.kind, str(error))


def find_directory() -> Any:
    """The directory of the cluster that this process is connected to, made if there is none; blocks."""
    kind: Any = ray.remote(DirectoryActor)
    return kind.options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=ON_THE_HEAD,
        max_restarts=-1,
        max_task_retries=3,
    ).remote()
