"""Loaded policies: copies per device, what they read, and results of inference."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxmodels import Requirements
from jaxmodels.types import CUT_TASK, PREFIX_ACTIONS, PROMPT_CUT, TASK, rename_cameras
from service.errors import PolicyFailed
from service.inference.batching import IMAGES, FrameSizesKey, LatencyModel

# (height, width) by camera. The size of a plan that the policy continues is an additional entry; see `add_plan`.
FrameSizes = Mapping[str, tuple[int, int]]
Value = TypeVar("Value")
# How often a batch size is tried: three times, and more often where there is time for it.
PROFILE_RUNS = (3, 16)


class Policy(Protocol):
    """Interface of a policy that the engine runs; ``jaxmodels.Policy`` is one."""

    @property
    def requirements(self) -> Requirements: ...
    @property
    def timings(self) -> Mapping[str, float]: ...
    @property
    def device(self) -> str: ...

    commit: str | None
    """Commit on the Hub or content hash of its files, or None."""

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the action chunk (b, t, a), float32, for feature names to arrays with a batch axis."""
        ...

    def prepare_task(self, text: str, prompt_cut: str | None = None) -> int:
        """Encode an instruction ahead of ``act``; called only for policies that read language.

        ``prompt_cut`` is one of ``jaxmodels.types.PROMPT_CUTS``; None is the policy's own. Returns the number of
        ignored tokens. Raises JaxModelsError with a text for clients if the instruction cannot be read.
        """
        ...

    def compile(self, batch: int = 1, cameras: FrameSizes | None = None, *, with_plan: bool = False) -> None:
        """Compile ``act`` for batches of frames of these sizes, ``with_plan`` also for plans that it continues."""
        ...

    def is_compiled(self, batch: int = 1, cameras: FrameSizes | None = None, *, with_plan: bool = False) -> bool:
        """Return whether ``act`` is compiled for them."""
        ...

    def profile(self, batch: int = 1, cameras: FrameSizes | None = None, *, with_plan: bool = False) -> float:
        """Return the seconds that ``act`` takes now for such a batch of zeros; it is compiled before."""
        ...

    def on(self, device: str) -> "Policy":
        """Return a copy on another device; a copy on its own device shares the weights."""
        ...


# Loads a policy in a thread: (path, revision, *, like, on_progress). May reuse the compiled programs of ``like``.
# Raises JaxModelsError with a text for clients.
LoadPolicy = Callable[..., Policy]


class InferenceResult(NamedTuple):
    """An action chunk, its times in seconds (``total`` end to end, ``queue`` waiting) and its batch size."""

    chunk: np.ndarray
    queue: float
    to_device: float
    compute: float
    to_host: float
    total: float
    batch: int = 1


class InferenceStuck(PolicyFailed):
    """An inference did not return in time."""

    @classmethod
    def after(cls, seconds: float) -> "InferenceStuck":
        """Create the error of an inference that was given up after this many seconds."""
        return cls(f"inference did not return in {seconds:g} s; increase the setting stuck_after for a slower policy")


class LatencyModels(dict[FrameSizesKey, LatencyModel]):
    """Latencies of batches by frame sizes, empty for new sizes. Read by any thread."""

    def __missing__(self, frames: FrameSizesKey) -> LatencyModel:
        return self.setdefault(frames, LatencyModel())


def add_plan(sizes: FrameSizes, requirements: Requirements) -> FrameSizes:
    """Return the sizes of the inputs of a robot that also sends the rest of its plan, which needs another program."""
    return {**sizes, PREFIX_ACTIONS: (requirements.chunk, requirements.action)}


def _drop_plan(sizes: FrameSizes) -> FrameSizes:
    return {camera: size for camera, size in sizes.items() if camera != PREFIX_ACTIONS}


class Replica:
    """A policy's copy on the device of one worker, with latencies and compiled batch sizes by frame sizes."""

    def __init__(self, policy: Policy, worker_id: int = 0):
        self.policy = policy
        self.worker_id = worker_id
        self.latencies = LatencyModels()
        self.batch_sizes: dict[FrameSizesKey, tuple[int, ...]] = {}
        self._inherited: dict[FrameSizesKey, list[int]] = {}

    @property
    def trained_frames(self) -> FrameSizesKey:
        """Frame sizes that the policy was trained with."""
        return frozenset(self.policy.requirements.cameras.items())

    @property
    def compiled_frames(self) -> Sequence[FrameSizesKey]:
        """Frame sizes that batches of one are compiled for."""
        return tuple(self.batch_sizes)

    @property
    def inherited_frames(self) -> Sequence[FrameSizesKey]:
        """Frame sizes whose programs and latencies come from another policy."""
        return tuple(self._inherited)

    def get_latency_stats(self) -> dict[str, dict[str, float]]:
        """Return batch size to median and p90 in milliseconds; frame sizes other than the trained ones are named."""
        own = self.latencies[trained := self.trained_frames].get_stats()
        others = {
            describe_sizes(dict(frames)): costs for frames, costs in tuple(self.latencies.items()) if frames != trained
        }
        return own | {
            f"{size} of {words}": figures
            for words, costs in sorted(others.items(), key=lambda other: other[0])
            for size, figures in costs.get_stats().items()
        }

    def is_compiled(self, batch: int, sizes: FrameSizes) -> bool:
        """Return whether a batch size is compiled."""
        return self.policy.is_compiled(batch, _drop_plan(sizes), with_plan=PREFIX_ACTIONS in sizes)

    def prepare(self, batch: int, sizes: FrameSizes | None, profile_seconds: float = 0.0) -> None:
        """Compile a batch size and measure its latency for up to ``profile_seconds``. Blocks; call it in a thread."""
        frames = self.trained_frames if sizes is None else frozenset(sizes.items())
        cameras, with_plan = (None, False) if sizes is None else (_drop_plan(sizes), PREFIX_ACTIONS in sizes)
        self.policy.compile(batch, cameras, with_plan=with_plan)
        if batch not in self._inherited.get(frames, ()):
            profile = partial(self.policy.profile, batch, cameras, with_plan=with_plan)
            self._profile(batch, profile, self.latencies[frames], profile_seconds)
        self.batch_sizes[frames] = tuple(sorted({1, *self.batch_sizes.get(frames, ()), batch}))

    def _profile(self, batch: int, profile: Callable[[], float], latency: LatencyModel, profile_seconds: float) -> None:
        spent: list[float] = []
        fewest, most = PROFILE_RUNS
        while len(spent) < fewest or (len(spent) < most and sum(spent) < profile_seconds):
            spent.append(profile())
            latency.record(batch, spent[-1])
        latency.mark_fresh()

    def take_latencies(self, measured: Mapping[FrameSizesKey, Mapping[int, float]]) -> None:
        """Take the seconds that another process measured, by frame and batch size, where this one has no figure."""
        for frames, seconds in measured.items():
            self.batch_sizes[frames] = tuple(sorted(seconds))
            for size, median in seconds.items():
                if size not in self.latencies[frames].sizes:
                    self.latencies[frames].record(size, median)

    def inherit_latency(self, before: "Replica") -> None:
        """Copy the latencies of a replica with the same program. Call it before ``prepare``, which then only tests."""
        if before.policy.requirements != self.policy.requirements:
            return
        for frames, sizes in tuple(before.batch_sizes.items()):
            shared = [size for size in sizes if self.is_compiled(size, dict(frames))]
            if inherited := [
                size for size in shared if self.latencies[frames].copy_from(before.latencies[frames], size)
            ]:
                self._inherited[frames] = inherited


class LoadedPolicy:
    """One policy in memory, shared by all sessions of the same path and revision.

    Attributes:
        policy: the copy on the first device.
        requirements: inputs and outputs of the policy.
        replicas: all copies.
        usable: copies that accept requests; empty while no device works and others may join.
        is_on_several_devices: whether a failed request can go to another device.
        users: sessions that hold it.
        own_names: the robot's names to the policy's, where they differ.
    """

    own_names: Mapping[str, str] = MappingProxyType({})

    def __init__(self, policy: Policy, replicas: Sequence[Replica] = ()):
        self.policy = policy
        self.requirements = policy.requirements
        self.replicas: tuple[Replica, ...] = tuple(replicas) or (Replica(policy),)
        self.users = 0
        self._compiled: set[FrameSizesKey] = set()
        self._use(self.replicas)

    @property
    def commit(self) -> str | None:
        """Commit or content hash of its files, or None."""
        return self.policy.commit

    def add_replica(self, replica: Replica) -> None:
        """Add a copy on one more device; it is compiled for all that the others are compiled for."""
        self.replicas = (*self.replicas, replica)
        self._compiled.clear()

    def use_working(self, works: Callable[[Replica], bool], *, may_wait: bool) -> None:
        """Restrict requests to working replicas; if none works, requests wait (``may_wait``) or try all."""
        working = tuple(filter(works, self.replicas))
        if len(working) not in (0, len(self.replicas)):
            self.replicas, self.policy = working, working[0].policy
            self._compiled.clear()
        self._use(working or (() if may_wait else self.replicas))

    @property
    def unnamed(self) -> "LoadedPolicy":
        """The policy with its own names of cameras, which engines run."""
        return self

    def to_own_names(self, named: Mapping[str, Value]) -> Mapping[str, Value]:
        """Return what comes by a robot's names of cameras or of features by the policy's."""
        return named

    def _use(self, replicas: tuple[Replica, ...]) -> None:
        self.usable = replicas
        self.is_on_several_devices = len({replica.policy.device for replica in replicas}) > 1

    def is_compiled(self, sizes: FrameSizes) -> bool:
        """Return whether all replicas are compiled for frames of these sizes. Asked at every inference, so cached."""
        key = frozenset(sizes.items())
        if key not in self._compiled:
            for replica in self.replicas:
                if not replica.is_compiled(1, sizes):
                    return False
            self._compiled.add(key)
        return True


class RenamedPolicy(LoadedPolicy):
    """A loaded policy for a session whose robot names cameras differently; ``rename`` maps policy to robot names.

    Raises:
        ConfigError: a name is not the policy's, or two names become one.
    """

    def __init__(self, policy: LoadedPolicy, rename: Mapping[str, str]):
        self._policy = policy
        self.own_names = {prefix + name: prefix + own for own, name in rename.items() for prefix in ("", IMAGES)}
        self.requirements = rename_cameras(policy.requirements, rename)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def unnamed(self) -> LoadedPolicy:
        return self._policy

    def to_own_names(self, named: Mapping[str, Value]) -> Mapping[str, Value]:
        return {self.own_names.get(name, name): value for name, value in named.items()}

    def is_compiled(self, sizes: FrameSizes) -> bool:
        return self._policy.is_compiled(self.to_own_names(sizes))


def describe_sizes(sizes: FrameSizes) -> str:
    """Describe frame sizes as ``480x640 frames``, or camera by camera when they differ; then a plan, if any."""
    cameras, plan = _drop_plan(sizes), " and a plan" if PREFIX_ACTIONS in sizes else ""
    different = {f"{height}x{width}" for height, width in cameras.values()}
    if len(different) == 1:
        return f"{different.pop()} frames{plan}"
    named = (f"{height}x{width} frames of {camera!r}" for camera, (height, width) in sorted(cameras.items()))
    return ", ".join(named) + plan


# Characters of an instruction, as in the API: one width, so that different instructions share a batch.
MAX_INSTRUCTION_LENGTH = 4096
STATE = "observation.state"


def task_input(instruction: str | None, prompt_cut: str = CUT_TASK) -> dict[str, np.ndarray]:
    """Return an instruction (at most ``MAX_INSTRUCTION_LENGTH`` characters) as features; empty if there is none.

    The default ``prompt_cut`` is left out, so that such robots share a batch.
    """
    if instruction is None:
        return {}
    cut = {} if prompt_cut == CUT_TASK else {PROMPT_CUT: np.array([prompt_cut])}
    return {TASK: _encode_instruction(instruction)} | cut


@lru_cache(maxsize=64)
def _encode_instruction(instruction: str) -> np.ndarray:
    """Return an instruction as a read-only (1,) array of 16 KiB; cached, as robots repeat theirs."""
    text = np.array([instruction], f"<U{MAX_INSTRUCTION_LENGTH}")
    text.flags.writeable = False
    return text


def unread_features(requirements: Requirements) -> frozenset[str]:
    """Return the features of a robot's observation that a policy does not read; frame sizes are compared elsewhere."""
    state = () if requirements.state is not None else (STATE,)
    task = () if requirements.language else (TASK,)
    return frozenset((*state, *task, *(() if requirements.prompt_cuts else (PROMPT_CUT,))))


def select_features(requirements: Requirements, observation: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the features that a policy reads."""
    unread = unread_features(requirements)
    return {name: value for name, value in observation.items() if name not in unread}


INSTRUCTION_UNREAD = (
    "the policy reads no language: language_instruction changes nothing that it does, and only names the task of "
    "recordings"
)


def check_instruction(requirements: Requirements, instruction: str | None) -> str | None:
    """Return why a policy cannot use an instruction; None when it can, or reads no language."""
    if not requirements.language:
        return None
    if instruction is None or not instruction.strip():
        return "the policy follows instructions; send language_instruction, e.g. 'pick up the red cube'"
    return None
