"""A policy without a network: computes its chunk from the observation, and fails the way a test tells it to."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError, ObservationError
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, TASK

SO100_REQUIREMENTS = Requirements(
    policy_type="act", cameras={"front": (48, 64)}, state=6, action=6, chunk=20, action_steps=20
)


@dataclass
class ScriptedPolicy:
    """Moves every joint away from where it is, by ``step`` per action.

    Attributes:
        requirements: what it says it needs.
        latency: seconds that ``act`` takes.
        compile_latency: seconds that compiling for one new set of sizes takes.
        failures: what the next calls of ``act`` do instead, one each: an exception is raised, an array returned,
            an event waited for.
        acted: how often ``act`` was called.
        compiled: the sets of sizes it was compiled for, for a batch of one.
        batches: larger batches it was compiled for, each with the sizes.
        threads: names of the threads that ``act`` ran on.
        told: what it was told at each call of ``act``, one text per member.
        unreadable: a text that it cannot read.
    """

    requirements: Requirements = SO100_REQUIREMENTS
    step: float = 0.1
    latency: float = 0.0
    compile_latency: float = 0.0
    compile_failure: Exception | None = None
    failures: list[Exception | np.ndarray | threading.Event] = field(default_factory=list)
    acted: int = 0
    compiled: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    batches: list[tuple[int, dict[str, tuple[int, int]]]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    told: list[tuple[str, ...]] = field(default_factory=list)
    unreadable: str | None = None
    device: str = "scripted:0"
    commit: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """(b, chunk, action) float32, or the next failure."""
        self.acted += 1
        self.threads.add(threading.current_thread().name)
        started = time.perf_counter()
        if self.latency:
            time.sleep(self.latency)
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            if isinstance(failure, np.ndarray):
                return failure
            failure.wait()
        wanted = {f"observation.images.{camera}" for camera in self.requirements.cameras}
        wanted |= {"observation.state"} if self.requirements.state is not None else set()
        wanted |= {TASK} if self.requirements.language else set()
        if self.requirements.takes_prefix and PREFIX_ACTIONS in observation:
            wanted |= {PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH}
        if wanted != set(observation):
            raise ObservationError(f"observation has {sorted(observation)}, wanted {sorted(wanted)}")
        if TASK in observation:
            self.told.append(tuple(map(str, observation[TASK])))
            for text in self.told[-1]:
                self.prepare_task(text)
        need = self.requirements
        batch = len(next(iter(observation.values())))
        state = observation.get("observation.state", np.zeros((batch, need.action), np.float32))
        steps = np.arange(1, need.chunk + 1, dtype=np.float32)[None, :, None] * np.float32(self.step)
        chunk = (state[:, None, :] + steps).astype(np.float32)
        if PREFIX_ACTIONS in observation:
            # What will have been done when this answer comes is done: the chunk begins with it.
            over = (
                np.arange(need.chunk)[None, :]
                < np.minimum(observation[PREFIX_DELAY], observation[PREFIX_LENGTH])[:, None]
            )
            chunk = np.where(over[..., None], observation[PREFIX_ACTIONS], chunk)
        self.timings = {"to_device": 0.0, "compute": time.perf_counter() - started, "to_host": 0.0}
        return chunk

    def prepare_task(self, text: str) -> None:
        """Refuse the text that it cannot read."""
        if text == self.unreadable:
            raise ObservationError(f"the instruction {text!r} is no instruction")

    def compile(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Take as long as told, then know these sizes."""
        time.sleep(self.compile_latency)
        if self.compile_failure is not None:
            raise self.compile_failure
        sizes = dict(self.requirements.cameras if cameras is None else cameras)
        if batch == 1:
            self.compiled.append(sizes)
        else:
            self.batches.append((batch, sizes))

    def is_compiled(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None) -> bool:
        """Whether ``compile`` was called for these sizes."""
        sizes = dict(self.requirements.cameras if cameras is None else cameras)
        return sizes in self.compiled if batch == 1 else (batch, sizes) in self.batches

    def on(self, device: str) -> "ScriptedPolicy":
        """One that does the same, and fails when it is told to itself."""
        return replace(self, device=device, failures=[], acted=0, compiled=[], batches=[], threads=set(), told=[])

    def rehearse(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None) -> float:
        """What it is said to take; nothing is done."""
        return self.latency


@dataclass
class ScriptedLoader:
    """A ``LoadPolicy`` that gives out one policy per path.

    Attributes:
        make: what a load gives, or raises.
        loads: the paths that were loaded.
        gate: set it to hold loading until the test sets the event.
        words: what it reports as progress.
    """

    make: Callable[[], ScriptedPolicy] = ScriptedPolicy
    loads: list[str] = field(default_factory=list)
    gate: threading.Event | None = None
    failure: Exception | None = None
    words: Sequence[str] = ("reading", "ready")

    def __call__(
        self,
        path: str,
        revision: str | None = None,
        /,
        *,
        like: object = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> ScriptedPolicy:
        """Load, in the engine's loader thread."""
        self.loads.append(path)
        for word in self.words:
            if on_progress is not None:
                on_progress(word)
        if self.gate is not None and not self.gate.wait(30):
            raise JaxModelsError("the test never opened the gate")
        if self.failure is not None:
            raise self.failure
        return self.make()
