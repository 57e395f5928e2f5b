"""LoadedPolicy, its inputs, and results of inference."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxmodels import Requirements
from jaxmodels.types import TASK
from service.errors import PolicyFailed
from service.inference.latency_model import LatencyModel

Sizes = Mapping[str, tuple[int, int]]
# Cameras with the size of their frames, as a key.
Frames = frozenset[tuple[str, tuple[int, int]]]
IMAGES = "observation.images."
# How often a batch size is tried: three times, and more often where there is time for it.
REHEARSALS = (3, 16)


class Policy(Protocol):
    """What the engine needs of a policy; ``jaxmodels.Policy`` is one."""

    @property
    def requirements(self) -> Requirements: ...
    @property
    def timings(self) -> Mapping[str, float]: ...
    @property
    def device(self) -> str: ...

    commit: str | None
    """What its files are called, when that is known: a commit of the Hub, the hash of a folder."""

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Feature names to arrays with a batch axis -> (b, t, a) float32."""
        ...

    def prepare_task(self, text: str) -> None:
        """Read an instruction ahead of ``act``; asked only of policies that read language.

        Raises JaxModelsError with a text that may be shown: it cannot be read.
        """
        ...

    def compile(self, batch: int = 1, cameras: Sizes | None = None) -> None:
        """Make ``act`` quick for batches of frames of these sizes."""
        ...

    def is_compiled(self, batch: int = 1, cameras: Sizes | None = None) -> bool:
        """Whether it is already."""
        ...

    def rehearse(self, batch: int = 1, cameras: Sizes | None = None) -> float:
        """Seconds that ``act`` takes now for such a batch, measured with zeros; compiled before."""
        ...

    def on(self, device: str) -> "Policy":
        """The same on another device; on its own, one that shares the weights."""
        ...


class LoadPolicy(Protocol):
    """``jaxmodels.load_policy``, or a double."""

    def __call__(
        self,
        path: str,
        revision: str | None = None,
        /,
        *,
        like: Any = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> Policy:
        """Called in a worker thread; raises JaxModelsError with a text that may be shown.

        ``like`` is a policy that it gave before: what was compiled for it may be used again.
        """
        ...


class InferenceResult(NamedTuple):
    """A chunk, and where the time went, in seconds.

    ``total`` runs from asking to having the numpy result; ``queue`` is waiting for the device thread. ``batch`` is how
    many were answered together.
    """

    chunk: np.ndarray
    queue: float
    to_device: float
    compute: float
    to_host: float
    total: float
    batch: int = 1


class InferenceStuck(PolicyFailed):
    """An inference did not come back in time; the thread it runs on was given up."""


class Replica:
    """A policy on one device.

    Attributes:
        policy: itself, with its weights there.
        worker_id: number of the device worker that runs it.
    """

    def __init__(self, policy: Policy, worker_id: int = 0):
        self.policy = policy
        self.worker_id = worker_id
        self._costs: dict[Frames, LatencyModel] = {}
        self._sizes: dict[Frames, tuple[int, ...]] = {}
        self._taken_over: dict[Frames, list[int]] = {}

    @property
    def trained(self) -> Frames:
        """The frames that the policy was trained with."""
        return frozenset(self.policy.requirements.cameras.items())

    @property
    def prepared(self) -> Sequence[Frames]:
        """Frames that one at a time can run for."""
        return tuple(self._sizes)

    @property
    def taken_over(self) -> Sequence[Frames]:
        """Frames that other weights were asked with in programs that these have, too."""
        return tuple(self._taken_over)

    def costs(self, frames: Frames) -> LatencyModel:
        """What batches of frames of these sizes take."""
        return self._costs.get(frames) or self._costs.setdefault(frames, LatencyModel())

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Batch size to median and p90, JSON-ready; other frames than the policy was trained with are named, too."""
        own = self.costs(trained := self.trained).milliseconds()
        others = {in_words(dict(frames)): costs for frames, costs in tuple(self._costs.items()) if frames != trained}
        return own | {
            f"{size} of {words}": figures
            for words, costs in sorted(others.items(), key=lambda other: other[0])
            for size, figures in costs.milliseconds().items()
        }

    def can(self, frames: Frames) -> tuple[int, ...]:
        """Batch sizes that can run at once for frames of these sizes."""
        return self._sizes.get(frames, (1,))

    def prepare(self, batch: int, cameras: Sizes | None, rehearsing: float = 0.0) -> None:
        """Compile a batch size and learn what it takes; blocks, for a thread of its own.

        Args:
            rehearsing: seconds there are for learning; none where others may be waiting for the device.
        """
        frames = self.trained if cameras is None else frozenset(cameras.items())
        self.policy.compile(batch, cameras)
        if batch not in self._taken_over.get(frames, ()):
            self._rehearse(batch, cameras, self.costs(frames), rehearsing)
        self._sizes[frames] = tuple(sorted({*self.can(frames), batch}))

    def _rehearse(self, batch: int, cameras: Sizes | None, costs: LatencyModel, rehearsing: float) -> None:
        spent: list[float] = []
        fewest, most = REHEARSALS
        while len(spent) < fewest or (len(spent) < most and sum(spent) < rehearsing):
            spent.append(self.policy.rehearse(batch, cameras))
            costs.learn(batch, spent[-1])
        costs.renew()

    def take_over(self, before: "Replica") -> None:
        """What batches took with other weights they take with these, too, where both run the same program.

        To be asked before anything is prepared: what is compiled by then was compiled for the other one. Preparing it
        is no more than a trial then.
        """
        if before.policy.requirements != self.policy.requirements:
            return
        for frames, sizes in tuple(before._sizes.items()):
            shared = [size for size in sizes if self.policy.is_compiled(size, dict(frames))]
            if known := [size for size in shared if self.costs(frames).take_over(before.costs(frames), size)]:
                self._taken_over[frames] = known


class LoadedPolicy:
    """One policy in memory, shared by all sessions of the same path and revision.

    Attributes:
        policy: itself, on the first device.
        requirements: what the policy needs.
        replicas: it and its copies on other devices.
        usable: the copies that requests may go to; none while no device works and others may come.
        is_on_several_devices: whether a request that one of them fails can go to another device.
        users: sessions that hold it.
    """

    def __init__(self, policy: Policy, replicas: Sequence[Replica] = ()):
        self.policy = policy
        self.requirements = policy.requirements
        self.replicas: tuple[Replica, ...] = tuple(replicas) or (Replica(policy),)
        self.users = 0
        self._compiled: set[Frames] = set()
        self._use(self.replicas)

    @property
    def commit(self) -> str | None:
        """What its files are called, when that is known."""
        return self.policy.commit

    @property
    def costs(self) -> LatencyModel:
        """What batches of the frames that it was trained with take on its first device."""
        return self.replicas[0].costs(self.replicas[0].trained)

    def add(self, replica: Replica) -> None:
        """It runs on one more device, where it was made ready for all that it is ready for here."""
        self.replicas = (*self.replicas, replica)
        self._compiled.clear()

    def keep_working(self, works: Callable[[Replica], bool], *, may_wait: bool) -> None:
        """Send requests to those copies only that work.

        Args:
            may_wait: where none works, requests wait for another device; else they go to all that there are.
        """
        working = tuple(filter(works, self.replicas))
        if len(working) not in (0, len(self.replicas)):
            self.replicas, self.policy = working, working[0].policy
            self._compiled.clear()
        self._use(working or (() if may_wait else self.replicas))

    def _use(self, replicas: tuple[Replica, ...]) -> None:
        self.usable = replicas
        self.is_on_several_devices = len({replica.policy.device for replica in replicas}) > 1

    def is_compiled(self, sizes: Sizes) -> bool:
        """Whether frames of these sizes can be acted on at once. Asked at every inference, so remembered."""
        key = frozenset(sizes.items())
        if key not in self._compiled and all(replica.policy.is_compiled(1, sizes) for replica in self.replicas):
            self._compiled.add(key)
        return key in self._compiled


def frames_of(observation: Mapping[str, np.ndarray]) -> Frames:
    """The sizes of an observation's frames."""
    return frozenset(
        [
            (name[len(IMAGES) :], value.shape[-3:-1])
            for name, value in observation.items()
            if name.startswith(IMAGES) and isinstance(value, np.ndarray) and value.ndim in (4, 5)
        ]
    )


def in_words(sizes: Sizes) -> str:
    """``480x640 frames``, or camera by camera when they differ."""
    different = {f"{height}x{width}" for height, width in sizes.values()}
    if len(different) == 1:
        return f"{different.pop()} frames"
    return ", ".join(f"{height}x{width} frames of {camera!r}" for camera, (height, width) in sorted(sizes.items()))


# Characters of an instruction, as the API takes them: one width for all, so that robots with different ones can be
# inferred for together.
LONGEST = 4096
STATE = "observation.state"


def task_input(instruction: str | None) -> dict[str, np.ndarray]:
    """An instruction as the observation of one robot has it; nothing when there is none.

    Args:
        instruction: of at most ``LONGEST`` characters.
    """
    return {} if instruction is None else {TASK: _written(instruction)}


@lru_cache(maxsize=64)
def _written(instruction: str) -> np.ndarray:
    """(1,) of 16 KiB, which nobody may write to: robots are told the same over and over."""
    text = np.array([instruction], f"<U{LONGEST}")
    text.flags.writeable = False
    return text


def select_features(needs: Requirements, seen: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What this policy reads of it; pictures are compared elsewhere."""
    unread = (None if needs.state is not None else STATE, None if needs.language else TASK)
    return {name: value for name, value in seen.items() if name not in unread}


def check_instruction(needs: Requirements, instruction: str | None) -> str | None:
    """Why this policy cannot be told that; None when it can, or reads no language."""
    if not needs.language:
        return None
    if instruction is None or not instruction.strip():
        return "the policy does what it is told, in words; send language_instruction, e.g. 'pick up the red cube'"
    return None
