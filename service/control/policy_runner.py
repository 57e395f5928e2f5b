"""Runs a session's policy on requests of its controller, and replaces it between two requests."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from jaxmodels.types import CUT_TASK, describe_cut
from service.control.chunk_scheduler import COMPILING, STUCK, ChunkRequest, PolicyAnswer
from service.control.controller import TickResult
from service.control.shadow import Shadow
from service.errors import PolicyFailed
from service.inference.device_worker import EngineLost
from service.inference.engine import Engine
from service.inference.loaded_policy import (
    FrameSizes,
    InferenceStuck,
    LoadedPolicy,
    describe_sizes,
    task_input,
    unread_features,
)
from service.stats import Recent

logger = logging.getLogger(__name__)

STAGES = ("queue", "to_device", "compute", "to_host", "total")
RECENT = 8  # Observations for the trial of a new policy before it may move the robot.
COMPILE_WAIT = 10.0  # Seconds that a robot waits at its start for a compilation, which cannot be cancelled.


@dataclass(frozen=True)
class _Successor:
    loaded: LoadedPolicy
    fade: int
    done: asyncio.Future[None]


@dataclass(frozen=True)
class _Inputs:
    """Inputs of an answer."""

    loaded: LoadedPolicy
    instruction: str | None
    features: Mapping[str, np.ndarray]
    observation: Mapping[str, np.ndarray]


class PolicyRunner:
    """Runs the policy of one session, one request at a time.

    Attributes:
        loaded: present policy.
        shadow: second policy with the same observations, or None.
        seconds: seconds in each stage of the newest inferences.
        errors: number of failed inferences.
        frame_age: age of the oldest frame at each request, in seconds.
        instruction: instruction from the next request on.
        followed: instruction of the newest chunk, or of the first chunk before it exists.
        prompt_cut: key of ``jaxmodels.types.PROMPT_CUTS``.
        tokens_cut: number of tokens of the prompt that the policy does not read.
        recent: newest observations, each with the policy's chunk.
    """

    def __init__(
        self,
        loaded: LoadedPolicy,
        *,
        engine: Engine,
        samples: int = 2048,
        shadow: Shadow | None = None,
        instruction: str | None = None,
        prompt_cut: str = CUT_TASK,
    ):
        """Create a runner; ``samples`` is the number of newest figures for percentiles."""
        self.followed = instruction
        self.prompt_cut = prompt_cut
        self.tokens_cut = 0
        self.instruct(instruction)
        self.loaded = loaded
        self._unread = unread_features(loaded.requirements)
        self.shadow = shadow
        self.seconds = {stage: Recent(samples) for stage in STAGES}
        self.errors = 0
        self.frame_age = Recent(samples)
        self.recent: deque[tuple[Mapping[str, np.ndarray], np.ndarray]] = deque(maxlen=RECENT)
        self._engine = engine
        self._successor: _Successor | None = None
        self._fading: tuple[LoadedPolicy, int] | None = None
        self._has_waited = False
        self._answered_motion = -1
        self._first_failure: asyncio.Future[tuple[str, str]] | None = None

    async def ask(self, request: ChunkRequest) -> PolicyAnswer:
        """Run the policy on a request, before ``due`` if possible, and return a chunk or an error."""
        snapshot, sizes = request.snapshot, request.snapshot.sizes
        if self._successor is not None and self._successor.loaded.is_compiled(sizes):
            self._change_over()
        loaded, instruction = self.loaded, self.instruction
        # The sizes of the training are compiled when the policy is loaded.
        if sizes != loaded.requirements.cameras and not loaded.is_compiled(sizes):
            return PolicyAnswer(request, error=(COMPILING, f"compiling for {describe_sizes(sizes)}"))
        if self._engine.batch_compiler.idle.is_set():
            self._has_waited = False
        elif not self._has_waited and request.motion != self._answered_motion:
            # An engine's report may arrive after the robot's first answer; a robot that moves is not held for it.
            text = "waiting for a compilation that was running when the robot was started"
            return PolicyAnswer(request, error=(COMPILING, text))
        features = snapshot.observation() | self._task
        observation = {**features, **snapshot.prefix}
        for name in self._unread:
            observation.pop(name, None)
        self.frame_age.add(time.monotonic() - snapshot.observed_at)
        inputs = _Inputs(loaded, instruction, features, observation)
        try:
            result = await self._engine.infer(loaded, observation, due=request.due, caller=self)
        except PolicyFailed as error:
            self.errors += 1
            code = STUCK if isinstance(error, InferenceStuck) else "policy_failed"
            return PolicyAnswer(request, error=(code, str(error)), inputs=inputs)
        self._answered_motion = request.motion
        for stage in STAGES:
            self.seconds[stage].add(getattr(result, stage))
        fade = None
        if loaded is self.loaded and self._fading is not None and self._fading[0] is loaded:
            fade = self._fading[1]
        return PolicyAnswer(request, result.chunk, fade=fade, inputs=inputs)

    def follow_up(self, answer: PolicyAnswer, outcome: TickResult) -> None:
        """Report whether the controller accepted an answer to the probation, the shadow and the recording."""
        inputs = answer.inputs
        # Answers of the previous policy do not count.
        if not isinstance(inputs, _Inputs) or inputs.loaded is not self.loaded:
            return
        if outcome.failure is not None and self._first_failure is not None and not self._first_failure.done():
            self._first_failure.set_result(outcome.failure)
        if outcome.is_accepted and isinstance(answer.chunk, np.ndarray):
            # Only an accepted answer ends the fade, and can be compared with other policies.
            self._fading = None
            self.recent.append((inputs.observation, answer.chunk))
            self.followed = inputs.instruction
            if self.shadow is not None:
                self.shadow.compare(inputs.features, answer.chunk)

    @property
    def is_engine_lost(self) -> bool:
        """Whether no engine has the policy until another engine gets it."""
        return not self.loaded.usable

    @property
    def engine_timeout(self) -> float:
        """Seconds that a robot waits for an engine."""
        return self._engine.devices.join_timeout

    def instruct(self, instruction: str | None) -> None:
        """Change the instruction from the next request on."""
        self.instruction, self._task = instruction, task_input(instruction, self.prompt_cut)

    def describe_cut(self) -> str | None:
        """Return a warning if the instruction is too long for the policy's prompt, else None."""
        cuts = self.loaded.requirements.prompt_cuts
        return describe_cut(self.tokens_cut, cuts=cuts, prompt_cut=self.prompt_cut)

    # Other policies.

    def take_over(self, loaded: LoadedPolicy, fade: int = 0, *, at_once: bool = False) -> asyncio.Future[None]:
        """Run another policy from the next request on, when the returned future is done.

        Args:
            loaded: policy with the same requirements, compiled for the present frames.
            fade: number of its first actions that are blended with the old plan.
            at_once: whether it takes over now, without waiting for a request.
        """
        self.cancel_take_over()
        successor = _Successor(loaded, fade, asyncio.get_running_loop().create_future())
        self._successor = successor
        if at_once:
            self._change_over()
        return successor.done

    def cancel_take_over(self) -> None:
        """Cancel a takeover that has not happened yet."""
        if self._successor is not None:
            self._successor.done.cancel()

    def _change_over(self) -> None:
        successor, self._successor = self._successor, None
        if successor is None or successor.done.done():
            return
        self.loaded = successor.loaded
        self._unread = unread_features(self.loaded.requirements)
        self._fading = (successor.loaded, successor.fade)
        self.recent.clear()
        successor.done.set_result(None)

    def begin_probation(self) -> asyncio.Future[tuple[str, str]]:
        """Return a future of the code and text of the policy's first failure or refused answer."""
        self._first_failure = asyncio.get_running_loop().create_future()
        return self._first_failure

    def end_probation(self) -> None:
        """Stop reporting failures."""
        if self._first_failure is not None:
            self._first_failure.cancel()
            self._first_failure = None

    # Compiling.

    async def prepare(self, sizes: FrameSizes) -> None:
        """Compile for frames of these sizes, or wait for the end of a running compilation.

        Raises:
            PolicyFailed: the policy cannot be compiled for these sizes.
        """
        if not self.loaded.is_compiled(sizes):
            # The robot is held while it has no engine, and the next request compiles again.
            with suppress(EngineLost):
                await self._engine.compile(self.loaded, sizes)
            return
        try:
            async with asyncio.timeout(COMPILE_WAIT):
                await self._engine.batch_compiler.idle.wait()
        except TimeoutError:
            logger.warning("a compilation takes more than %g s; the robot moves in parallel", COMPILE_WAIT)
        self._has_waited = True
