"""A policy in an engine of the cluster, as the front that asks it sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxmodels import Requirements, find_policy
from jaxmodels.errors import CheckpointError, ObservationError
from service.cluster.messages import Loaded, Refusal, Sizes
from service.cluster.parcels import Parcel, pack
from service.engine.device_lane import DeviceGone
from service.errors import PolicyFailed

Answer = TypeVar("Answer")


class Engines(Protocol):
    """The engines of a cluster, for threads that may wait for them."""

    def pick(self) -> str:
        """The name of one that works, where a policy is loaded first. Raises CheckpointError: there is none."""
        ...

    def call(self, engine: str, method: str, *arguments: Any) -> Any:
        """What its method returns; raises DeviceGone where it is not there any more."""
        ...

    def keep(self, policy: "RemotePolicy") -> None:
        """An engine has this policy for us, as long as it is referred to here."""
        ...

    def put(self, piece: bytes) -> Any:
        """Hand something to the object store, for any number of engines."""
        ...


@dataclass(frozen=True)
class _Shipped:
    """What all copies of one policy share.

    Attributes:
        parcel: its files; kept as long as a copy may have to be made.
    """

    engines: Engines
    parcel: Parcel


class RemotePolicy:
    """Stands where `jaxmodels.Policy` stands. All but its properties and `is_compiled` wait for the engine.

    Attributes:
        commit: what its files are called; not its parcel's name, which is of their contents.
    """

    def __init__(self, shipped: _Shipped, engine: str, loaded: Loaded, commit: str | None):
        self.commit = commit
        self._shipped = shipped
        self._engine = engine
        self._loaded = loaded
        self._compiled = {_key(sizes) for sizes in loaded.compiled}
        self._timings: Mapping[str, float] = {}

    @property
    def requirements(self) -> Requirements:
        """As the engine read them."""
        return self._loaded.requirements

    @property
    def device(self) -> str:
        """The engine's name."""
        return self._engine

    @property
    def handle(self) -> str:
        """What the engine calls it."""
        return self._loaded.handle

    @property
    def timings(self) -> Mapping[str, float]:
        """Of the last `act`."""
        return self._timings

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """See `Policy.act`; yields to robots, which do not come this way."""
        chunk, seconds = self._call("try_out", dict(observation))
        self._timings = {"to_device": 0.0, "compute": seconds, "to_host": 0.0}
        return chunk

    def prepare_task(self, text: str) -> None:
        """Read an instruction ahead."""
        self._call("prepare_task", text)

    def compile(self, batch: int = 1, cameras: Sizes | None = None) -> None:
        """Make it ready for frames of these sizes; which batches there are is the engine's business."""
        sizes = dict(self.requirements.cameras if cameras is None else cameras)
        if not self.is_compiled(batch, sizes):
            self._call("compile", sizes)
            self._compiled.add(_key(sizes))

    def is_compiled(self, batch: int = 1, cameras: Sizes | None = None) -> bool:
        """Whether it is; asks nobody."""
        return _key(self.requirements.cameras if cameras is None else cameras) in self._compiled

    def rehearse(self, batch: int = 1, cameras: Sizes | None = None) -> float:
        """Seconds that an inference takes in the engine."""
        return self._call("rehearse", None if cameras is None else dict(cameras))

    def on(self, device: str) -> "RemotePolicy":
        """The same in another engine, to which its files go."""
        return _load(self._shipped, device, None, self.commit, lambda stage: None)

    def _call(self, method: str, *arguments: Any) -> Any:
        return answered(self._shipped.engines.call(self._engine, method, self.handle, *arguments))


class RemoteLoader:
    """Loads policies into engines: a `LoadPolicy`.

    Args:
        largest: bytes that a repo's files may have.
    """

    def __init__(self, engines: Engines, largest: int | None = None):
        self._engines = engines
        self._largest = largest

    def __call__(
        self,
        path: str,
        revision: str | None = None,
        /,
        *,
        like: Any = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> RemotePolicy:
        """Fetch its files here, send them, and have an engine read them; see `LoadPolicy`."""
        tell = on_progress or (lambda stage: None)
        folder, commit = find_policy(path, revision, on_progress=tell, largest=self._largest)
        tell("reading")
        shipped = _Shipped(self._engines, pack(folder, self._engines.put))
        engine = self._engines.pick()
        before = like.handle if isinstance(like, RemotePolicy) else None
        return _load(shipped, engine, before, commit, tell)


def _load(
    shipped: _Shipped, engine: str, like: str | None, commit: str | None, tell: Callable[[str], None]
) -> RemotePolicy:
    loaded = answered(shipped.engines.call(engine, "load", shipped.parcel, like))
    tell("compiling")
    policy = RemotePolicy(shipped, engine, loaded, commit)
    shipped.engines.keep(policy)
    return policy


def answered(found: Any) -> Any:
    """What an engine answered, or its refusal as the error that it is.

    Raises:
        ObservationError: the policy refused its input.
        CheckpointError: it cannot be loaded.
        DeviceGone: the engine does not have it any more, or cannot be used.
        PolicyFailed: it raised.
    """
    if not isinstance(found, Refusal):
        return found
    if found.kind == "input":
        raise ObservationError(found.text)
    if found.kind == "policy":
        raise CheckpointError(found.text)
    if found.kind in ("unknown", "engine"):
        raise DeviceGone(found.text)
    raise PolicyFailed(found.text)


def _key(sizes: Sizes) -> frozenset[tuple[str, tuple[int, int]]]:
    return frozenset((camera, (height, width)) for camera, (height, width) in sizes.items())
