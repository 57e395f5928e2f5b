"""The directory as an actor of Ray: one for all fronts, restarted elsewhere when its machine fails."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.experimental import internal_kv  # pyright: ignore[reportMissingImports] - an extra

from service.cluster.directory import Directory, DirectoryRefused, Entry, Front, Told
from service.cluster.messages import Refused
from service.cluster.named_actor import find_actor
from service.sessions.latch import Latch

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

    def claim(self, front: str, life: str, session_id: str, owner: str | None) -> Latch | Refused | None:
        """See `Directory.claim`."""
        return _told(lambda: self._directory.claim(front, life, session_id, owner, time.monotonic()))

    def beat(
        self, said: Front, held: Sequence[str], news: Sequence[Entry], gone: Mapping[str, str | None]
    ) -> Told | Refused:
        """See `Directory.beat`."""
        return _told(lambda: self._directory.beat(said, held, news, time.monotonic(), gone=gone))

    def leave(self, front: str, life: str) -> None:
        """See `Directory.leave`."""
        self._directory.leave(front, life)

    def unlatch(self, session_id: str, owners: Sequence[str | None] | None) -> bool:
        """See `Directory.unlatch`."""
        return self._directory.unlatch(session_id, owners)

    def list(self) -> Sequence[Entry]:
        """See `Directory.list`."""
        return self._directory.list(time.monotonic())

    def find(self, session_id: str) -> tuple[Entry, str | None] | None:
        """See `Directory.find`."""
        return self._directory.find(session_id, time.monotonic())

    def front(self, name: str) -> Front | None:
        """See `Directory.front`."""
        return self._directory.front(name)

    def adopt(self, front: str, life: str, session_id: str) -> Entry | Refused:
        """See `Directory.adopt`."""
        return _told(lambda: self._directory.adopt(front, life, session_id, time.monotonic()))

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
    return find_actor(NAME, DirectoryActor, retries=3)
