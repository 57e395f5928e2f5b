"""A policy in an engine of the cluster, as the front that asks it sees it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels import PolicyFolder, Requirements, find_policy
from service.cluster.messages import Sizes
from service.cluster.shipment import Copy, Engines, Shipment, answered
from service.edge.policy_places import copies_in
from service.engine.loading import begin_building


class RemotePolicy:
    """Stands where `jaxmodels.Policy` stands. All but its properties and `is_compiled` wait for the engine.

    Attributes:
        commit: what its files are called; not its parcel's name, which is of their contents.
    """

    def __init__(self, shipment: Shipment, copy: Copy, commit: str | None):
        self.commit = commit
        self._shipment = shipment
        self._copy = copy
        self._compiled = {_key(sizes) for sizes in copy.loaded.compiled}
        self._timings: Mapping[str, float] = {}

    @property
    def requirements(self) -> Requirements:
        """As the engine read them."""
        return self._copy.loaded.requirements

    @property
    def device(self) -> str:
        """The engine's name."""
        return self._copy.engine

    @property
    def handle(self) -> str:
        """What the engine calls it."""
        return self._copy.loaded.handle

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
        """The same in another engine, which may be making its copy already.

        Raises:
            CopyRefused, CheckpointError: as of `Shipment.copy`.
        """
        return RemotePolicy(self._shipment, self._shipment.copy(device), self.commit)

    def _call(self, method: str, *arguments: Any) -> Any:
        return answered(self._shipment.engines.ask(self.device, method, self.handle, *arguments).result())


class RemoteLoader:
    """Loads policies into engines: a `LoadPolicy`.

    Args:
        largest, roots: as of `jaxmodels.load_policy`.
        inspect: given the folder before anything of it is sent; raises CheckpointError when it should not be.
    """

    def __init__(
        self,
        engines: Engines,
        largest: int | None = None,
        *,
        roots: Sequence[Path] | None = None,
        inspect: Callable[[PolicyFolder], None] = lambda folder: None,
    ):
        self._engines = engines
        self._largest = largest
        self._roots = roots
        self._inspect = inspect

    def __call__(
        self,
        path: str,
        revision: str | None = None,
        /,
        *,
        like: Any = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> RemotePolicy:
        """Fetch its files here, send them, and have engines read them; see `LoadPolicy`.

        All engines that nobody asks anything load it side by side, the others later, one after the other: robots are
        answered by those that are not loading. So it is with an update, which is ``like`` what runs.
        """
        tell = on_progress or (lambda stage: None)
        folder, commit = find_policy(path, revision, on_progress=tell, largest=self._largest)
        tell("reading")
        roots = self._roots if commit is None and like is None else copies_in(folder)
        with PolicyFolder(folder, roots=roots, largest=self._largest) as opened:
            self._inspect(opened)
        begin_building()
        shipment = Shipment(self._engines, folder, is_update=like is not None)
        engine, idle = self._engines.pick()
        shipment.begin(engine, like.handle if isinstance(like, RemotePolicy) else None)
        for other in idle if like is None else ():
            shipment.begin(other)
        return RemotePolicy(shipment, shipment.first(tell), commit)


def _key(sizes: Sizes) -> frozenset[tuple[str, tuple[int, int]]]:
    return frozenset((camera, (height, width)) for camera, (height, width) in sizes.items())
