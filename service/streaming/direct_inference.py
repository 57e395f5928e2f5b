"""Inference for clients without rooms: from an observation to a checked chunk or action."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from service.control.guard import Motion
from service.control.joints import Joint, JointTable
from service.control.observation_buffer import Snapshot
from service.control.observers import Tick
from service.control.policy_runner import STAGES
from service.control.robot_io import RobotIO
from service.errors import (
    Compiling,
    InvalidRequest,
    MoveRefused,
    PolicyFailed,
    ServiceError,
    SessionLoading,
    TooManyRequests,
)
from service.inference.engine import Engine
from service.inference.loaded_policy import (
    FrameSizes,
    InferenceResult,
    check_instruction,
    describe_sizes,
    select_features,
    task_input,
)
from service.sessions.interrupted import InterruptedSession
from service.sessions.request import DIRECT
from service.sessions.store import AnySession, Session
from service.stage import Stage
from service.streaming import observation
from service.streaming.direct_transport import DirectLink, DirectTransport
from service.streaming.observation import ClientObservation, ObservationSpec
from service.streaming.observation_window import ObservationWindow

# Stages in which the session's own control loop is idle, so that clients may control the robot.
IDLE_STAGES = frozenset({Stage.READY, Stage.STOPPED, Stage.TIMEOUT})
_PUBLISH_INTERVAL = 0.01  # Seconds.
MAX_PENDING_ACTS = 32  # Largest number of acts in progress of one session.
_MOTION_TIMEOUT = 2.0  # Seconds after a single action after which the next motion begins at the measured pose.
_MAX_RETRY_AFTER = 10  # Largest ``retry-after`` in seconds while the policy loads; used without an estimate.
_NO_ACTIONS = np.zeros((0, 0), np.float32)


class InferenceTrace(NamedTuple):
    """Actions (t, a) float32 inside the limits, reasons for changes, times, joints far out of range, and a warning."""

    actions: np.ndarray
    clamped: tuple[str, ...]
    inference: InferenceResult
    decode_seconds: float
    out_of_range: list[str]
    units_warning: str | None

    def timings(self) -> dict[str, float]:
        """Return milliseconds by stage."""
        stages = {stage: getattr(self.inference, stage) for stage in STAGES}
        return {name: round(seconds * 1e3, 3) for name, seconds in ({"decode": self.decode_seconds} | stages).items()}


class _ModelInput(NamedTuple):
    """Decoded observation of one act with its history, and the seconds to decode its pictures."""

    snapshot: Snapshot
    instruction: str | None
    out_of_range: list[str]
    units_warning: str | None
    decode_seconds: float


class DirectInference:
    """Inference of one client: its current plan, executed actions and observation window.

    Args:
        protocol: of this client, which the session's stats name.
        max_pixels: limit of one picture.
        compile_timeout: seconds to wait for a compile for pictures of a new size.
        on_act: called before each inference, with whether it begins a motion: the first of this client, or after
            ``reset``.
    """

    def __init__(
        self,
        session: AnySession,
        protocol: str,
        transport: DirectTransport,
        engine: Engine,
        max_pixels: int,
        compile_timeout: float,
        on_act: Callable[[Session, bool], None],
    ):
        self.session = session
        self.protocol = protocol
        self._transport = transport
        self._engine = engine
        self._max_pixels = max_pixels
        self._compile_timeout = compile_timeout
        self._on_act = on_act
        self._begins_motion = True
        self._plan: np.ndarray | None = None
        self._next_action = 0
        self._action_at = -math.inf
        self._ticks = -1  # Number of ticks of the session's own loop at the last inference.
        self._spec: ObservationSpec | None = None
        self._table: JointTable | None = None
        self._joints = JointTable(())
        self._stop_count = _count_stops(session)
        self._executed = _NO_ACTIONS  # Newest actions before the plan that the client executed.
        self._window = ObservationWindow()
        self._instruction: str | None = None  # Of the newest observation in the window.
        self._planned_instruction: str | None = None

    def observation_spec(self) -> ObservationSpec:
        """Return the specification of the client's observations.

        Raises:
            MoveRefused, SessionLoading: as ``get_link``.
        """
        return self.spec_for(self.get_link()[1])

    def spec_for(self, robot_io: RobotIO) -> ObservationSpec:
        """Return the specification of the client's observations for the session's robot."""
        spec, cameras = self._spec, self.session.new.camera_names
        steps = robot_io.runner.loaded.requirements.observation_steps
        if self._table is not robot_io.table:
            self._table, self._joints = robot_io.table, _measured_joints(robot_io)
        if spec is None or spec.joints is not self._joints or spec.cameras is not cameras or spec.steps != steps:
            spec = self._spec = ObservationSpec(cameras, self._joints, self._max_pixels, steps)
        return spec

    def get_link(self) -> tuple[DirectLink, RobotIO]:
        """Return the session's link and its robot.

        Raises:
            MoveRefused: the session has no link, or runs no policy.
            SessionLoading: the policy is still being loaded.
        """
        session = self.session
        if not session.new.is_direct:
            raise MoveRefused(
                f"session {session.id!r} commands its robot through rooms; create a session with "
                f'"transport_server_url": "{DIRECT}" for direct inference'
            )
        if isinstance(session, InterruptedSession):
            raise session.make_refusal()
        link = self._transport.links.get(session.id)
        if session.robot_io is None or session.is_closed or link is None:
            if session.stage is Stage.INITIALIZING:
                left = session.progress.estimate_remaining()
                seconds = _MAX_RETRY_AFTER if left is None else min(max(math.ceil(left), 1), _MAX_RETRY_AFTER)
                raise SessionLoading(
                    f"session {session.id!r} is initializing ({session.progress.stage}); ask again in {seconds} s",
                    seconds,
                )
            why = "" if session.reason is None else f" ({session.reason})"
            raise MoveRefused(
                f"session {session.id!r} runs no policy, its status is {session.stage}{why}; delete it and create it "
                "again"
            )
        return link, session.robot_io

    async def explain_refusal(self, refusal: MoveRefused) -> ServiceError:
        """Return why a session that was loading is unusable: its load failed, or it was deleted."""
        assert isinstance(self.session, Session), "an interrupted session does not load"
        try:
            await self.session.ready()
        except ServiceError as failure:
            return failure
        return refusal

    def check_available(self) -> tuple[DirectLink, RobotIO]:
        """Check that clients may control the robot now.

        Raises:
            MoveRefused: an emergency stop, the session's own loop or a dry run forbids it.
            SessionLoading: the policy is still being loaded.
        """
        link, robot_io = self.get_link()
        session = self.session
        assert isinstance(session, Session)
        if session.latch is not None:
            raise MoveRefused(
                f"session {session.id!r} is under an emergency stop ({session.latch}); "
                f"POST /debug/sessions/{session.id}/reset resets it"
            )
        if session.stage not in IDLE_STAGES:
            raise MoveRefused(
                f"session {session.id!r} is {session.stage}: its own control loop moves the robot; stop it first, "
                "or use its commands from the stream"
            )
        if session.new.dry_run:
            raise MoveRefused(f"session {session.id!r} is a dry run, which returns no actions")
        return link, robot_io

    def check_not_stopped(self) -> tuple[DirectLink, RobotIO]:
        """Check that this client may control the robot now, which a stop forbids until ``reset``.

        Raises:
            MoveRefused: as ``check_available``, or the session was stopped.
        """
        found = self.check_available()
        if self._stop_count != _count_stops(self.session):
            raise MoveRefused(
                f'session {self.session.id!r} was stopped; to continue, send "reset": true in the next act, or '
                "connect again"
            )
        return found

    def reset(self) -> None:
        """Drop the plan and history, and allow control after a stop. Raises as ``check_available``."""
        self.check_available()
        self._stop_count = _count_stops(self.session)
        self._begins_motion = True
        self._forget_plan()
        self._window.clear()

    def _forget_plan(self) -> None:
        self._plan, self._next_action, self._executed = None, 0, _NO_ACTIONS

    async def infer(
        self,
        observed: ClientObservation,
        executed: int | None = None,
        *,
        observed_at: float | None = None,
        model_input: _ModelInput | None = None,
        is_new_task: bool = False,
        prefix: Mapping[str, np.ndarray] | None = None,
    ) -> InferenceTrace:
        """Run the policy on a complete observation with its history.

        Args:
            executed: number of actions of the last chunk that will have been executed.
            observed_at: monotonic time at which the observation was received. Defaults to now.
            model_input: the decoded observation, if it was decoded before.
            is_new_task: whether the instruction differs from the plan's, which ends the plan.
            prefix: rest of the plan, for a policy that continues it (``chunk_scheduler.plan_prefix``).

        Raises:
            MoveRefused: this client may not control the robot.
            InvalidRequest: a picture cannot be decoded, or ``executed`` exceeds the last chunk.
            PolicyFailed: the policy raised, or its chunk violates the limits.
            Compiling: the policy is being compiled for pictures of a new size.
            TooManyRequests: the session has too many acts in progress.
        """
        link, robot_io = self.check_not_stopped()
        if link.pending_acts >= MAX_PENDING_ACTS:
            raise TooManyRequests(
                f"session {self.session.id!r} has {MAX_PENDING_ACTS} acts in progress; try again after an answer"
            )
        executed_actions = self._list_executed(executed, robot_io)
        self.session.protocol = self.protocol
        link.pending_acts += 1
        try:
            if model_input is None:
                model_input = await self._read_observation(observed, robot_io, observed_at)
            assert isinstance(self.session, Session), "an interrupted session is refused"
            self._on_act(self.session, self._begins_motion)
            self._begins_motion = False
            if prefix is not None:
                model_input = model_input._replace(snapshot=replace(model_input.snapshot, prefix=prefix))
            trace = await self._infer(link, robot_io, observed, model_input, executed_actions, is_new_task)
        finally:
            link.pending_acts -= 1
        self.check_not_stopped()
        link.answered_acts += 1
        self._plan, self._executed, self._ticks = trace.actions, executed_actions, robot_io.controller.ticks
        self._planned_instruction = model_input.instruction
        return trace

    async def observe(self, observed: ClientObservation, observed_at: float | None = None) -> None:
        """Keep a complete observation for later inferences of a policy that reads several; raises as ``infer``."""
        robot_io = self.get_link()[1]
        # The session's own control loop has a separate history.
        if robot_io.runner.loaded.requirements.observation_steps > 1 and self.session.stage in IDLE_STAGES:
            await self._read_observation(observed, robot_io, observed_at)

    async def _read_observation(
        self, observed: ClientObservation, robot_io: RobotIO, observed_at: float | None
    ) -> _ModelInput:
        """Decode an observation, and add its history."""
        began = time.monotonic()
        instruction = await self.resolve_instruction(observed, robot_io)
        spec = self.spec_for(robot_io)
        pose, out_of_range = observed.get_pose(spec)
        moments = *observed.past, observed
        if len(moments) == 1:  # Without another task.
            pictures = [await observed.decode_images(spec)]
        else:
            pictures = await asyncio.gather(*(one.decode_images(spec) for one in moments))
        *before, frames = pictures
        past = [(images, one.get_pose(spec)[0]) for images, one in zip(before, observed.past, strict=True)]
        decode_seconds = time.monotonic() - began
        sizes = {camera: (image.shape[0], image.shape[1]) for camera, image in frames.items()}
        units_warning = self._check_units(robot_io, [*(before for _, before in past), pose])
        snapshot = Snapshot(frames, pose, began if observed_at is None else observed_at, sizes, past=past)
        for images, _ in past:
            observation.check_same_sizes(images, snapshot.sizes)
        if instruction != self._instruction:
            self._window.clear()  # Observations of another task do not belong to the history.
            self._instruction = instruction
        rate = robot_io.controller.config.action_rate
        snapshot = self._window.add(snapshot, observed.timestamp, spec.steps, 1 / rate)
        return _ModelInput(snapshot, instruction, out_of_range, units_warning, decode_seconds)

    def _check_units(self, robot_io: RobotIO, poses: Sequence[np.ndarray]) -> str | None:
        """Refuse poses (a,) in another unit than the policy's; returns a warning if the last may be in radians.

        Raises:
            UnitsDiffer: a pose is in another unit.
        """
        units = robot_io.buffer.units
        if units is None or units.unchecked is not None:
            return None
        for pose in poses:
            units.check(pose)
        return units.warn_of_radians(poses[-1])

    async def _infer(
        self,
        link: DirectLink,
        robot_io: RobotIO,
        observed: ClientObservation,
        model_input: _ModelInput,
        executed_actions: np.ndarray,
        is_new_task: bool,
    ) -> InferenceTrace:
        snapshot, pose = model_input.snapshot, model_input.snapshot.joints
        now = time.monotonic()
        is_published = now - link.published_at >= _PUBLISH_INTERVAL
        if is_published:
            link.published_at = now
            self._publish_observation(robot_io, snapshot.frames, observed, now)
        runner = robot_io.runner
        loaded = runner.loaded
        all_features = snapshot.observation() | task_input(model_input.instruction, robot_io.runner.prompt_cut)
        inputs = {**select_features(loaded.requirements, all_features), **snapshot.prefix}
        sizes = snapshot.sizes
        if not loaded.is_compiled(sizes):
            await self._compile(robot_io, sizes)
        try:
            inference = await self._engine.infer(loaded, inputs, caller=self)
            motion = None
            if loaded.requirements.controls_joints:
                motion = _create_motion(pose, executed_actions, robot_io.controller.config.action_rate)
                if is_new_task and len(executed_actions):
                    # The motion begins at the measured pose, except for grippers, which keep their grip.
                    position = np.where(robot_io.table.grippers, executed_actions[-1], pose)
                    motion = replace(motion, position=position)
            chunk, clamped = self._check_chunk(robot_io, inference.chunk, motion)
        except PolicyFailed:
            runner.errors += 1
            raise
        # The answer does not wait for the recording.
        tick, done_at = Tick(now, None, False, None if motion is None else pose, None), time.monotonic()
        asyncio.get_running_loop().call_soon(
            self._record_inference, robot_io, inputs, all_features, inference, chunk, tick, done_at, is_published
        )
        odd = model_input.out_of_range, model_input.units_warning
        return InferenceTrace(chunk, clamped, inference, model_input.decode_seconds, *odd)

    def _record_inference(
        self,
        robot_io: RobotIO,
        inputs: Mapping[str, np.ndarray],
        all_features: Mapping[str, np.ndarray],
        inference: InferenceResult,
        chunk: np.ndarray,
        tick: Tick,
        at: float,
        is_published: bool,
    ) -> None:
        """Record an inference: in the figures, for a policy on probation, a shadow, the page and a recording."""
        runner = robot_io.runner
        for stage in STAGES:
            runner.seconds[stage].add(getattr(inference, stage))
        if runner.recent and not is_published:
            # Replace the newest observation of a fast client.
            runner.recent.pop()
        runner.recent.append((inputs, inference.chunk))
        if runner.shadow is not None:
            runner.shadow.compare(all_features, inference.chunk)
        robot_io.observers.notify_tick(tick)
        robot_io.observers.notify_chunk(chunk, tick.at, at)

    def _publish_observation(
        self, robot_io: RobotIO, frames: Mapping[str, np.ndarray], observed: ClientObservation, now: float
    ) -> None:
        """Show the observation to the dashboard, a recording and the figures, at most once in ``_PUBLISH_INTERVAL``."""
        for camera, image in frames.items():
            if robot_io.buffer.put_frame(camera, image, now):
                robot_io.observers.notify_frame(camera, image, now)
        if robot_io.runner.loaded.requirements.controls_joints:
            robot_io.buffer.put_joints(observed.joints, now)

    async def _compile(self, robot_io: RobotIO, sizes: FrameSizes) -> None:
        try:
            async with asyncio.timeout(self._compile_timeout):
                await self._engine.compile(robot_io.runner.loaded, sizes)
        except TimeoutError:
            raise Compiling(f"the policy is being compiled for {describe_sizes(sizes)}; ask again") from None

    def _check_chunk(
        self, robot_io: RobotIO, answer: object, motion: Motion | None
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the chunk inside the limits and why it changed; without ``motion`` only its shape is checked."""
        guard = robot_io.controller.guard
        problem = guard.check_shape(answer)
        if problem is None:
            assert isinstance(answer, np.ndarray)
            if motion is None:
                return answer[0].astype(np.float32), ()
            verdict = guard.judge(answer[0].astype(np.float32), motion)
            if verdict.actions is not None:
                return verdict.actions, verdict.clamped
            problem = verdict.reason or "", verdict.text
        robot_io.controller.rejected += 1
        raise PolicyFailed(problem[1])

    def _list_executed(self, executed: int | None, robot_io: RobotIO) -> np.ndarray:
        """Return the newest actions (n, a) that the next chunk follows; none when the arm is at rest."""
        if robot_io.controller.ticks != self._ticks:
            self._forget_plan()  # The session's own loop has moved the robot.
        if executed is None:
            return _NO_ACTIONS
        plan = _NO_ACTIONS if self._plan is None else self._plan
        if not 0 <= executed <= len(plan):
            raise InvalidRequest(
                f"executed is {executed}, but this client's last chunk has {len(plan)} actions",
                ("body", "executed"),
            )
        parts = [part for part in (self._executed, plan[:executed]) if len(part)]
        return np.concatenate(parts)[-3:] if parts else _NO_ACTIONS

    async def next_action(
        self, observed: ClientObservation, *, observed_at: float | None = None
    ) -> tuple[np.ndarray, int, InferenceTrace | None]:
        """Return one action (a,), the number of actions left of its chunk, and the inference if the policy ran.

        A new instruction starts a new chunk at the measured pose. ``observed_at`` is monotonic seconds, by default now.
        Raises as ``infer``.
        """
        robot_io = self.check_not_stopped()[1]
        spec = self.spec_for(robot_io)  # The next action may come from the plan, without an inference.
        self._check_units(robot_io, [moment.get_pose(spec)[0] for moment in (*observed.past, observed)])
        now, trace = time.monotonic(), None
        if robot_io.controller.ticks != self._ticks or now - self._action_at > _MOTION_TIMEOUT:
            self._forget_plan()
        steps = robot_io.controller.config.action_steps
        model_input = None
        if robot_io.runner.loaded.requirements.observation_steps > 1:
            # The history also needs the observations between two chunks.
            model_input = await self._read_observation(observed, robot_io, observed_at)
            instruction = model_input.instruction
        else:
            instruction = await self.resolve_instruction(observed, robot_io)
        is_new_task = robot_io.runner.loaded.requirements.language and instruction != self._planned_instruction
        if self._plan is None or is_new_task or self._next_action >= min(steps, len(self._plan)):
            executed = None if self._plan is None else self._next_action
            try:
                trace = await self.infer(
                    observed, executed, observed_at=observed_at, model_input=model_input, is_new_task=is_new_task
                )
            except ServiceError:
                self._forget_plan()  # The client got no chunk that could be continued.
                raise
            self._next_action = 0
        assert self._plan is not None
        action = self._plan[self._next_action]
        self._next_action += 1
        self._action_at = time.monotonic()
        return action, min(steps, len(self._plan)) - self._next_action, trace

    async def resolve_instruction(self, observed: ClientObservation, robot_io: RobotIO) -> str | None:
        """Return the client's instruction, or the last one, and store it in the session.

        Raises:
            InvalidRequest: the policy cannot read the instruction, or needs one and has none.
        """
        prompt, session = observed.prompt, self.session
        if prompt is None or not prompt.strip():
            prompt = session.new.language_instruction
        elif prompt != session.new.language_instruction and isinstance(session, Session):
            await session.instruct(prompt)
        if (why := check_instruction(robot_io.runner.loaded.requirements, prompt)) is not None:
            raise InvalidRequest(why, ("body", "prompt"))
        return prompt

    def describe(self) -> Mapping[str, object]:
        """Describe the session for a client: shapes, names, rates.

        Raises:
            MoveRefused: it has no live parts.
        """
        robot_io = self.get_link()[1]
        requirements, config = robot_io.runner.loaded.requirements, robot_io.controller.config
        ranges = {
            joint.name: [end if np.isfinite(end) else None for end in (joint.low, joint.high)]
            for joint in robot_io.table.joints
        }
        return {
            **requirements.metadata,
            "session_id": self.session.id,
            "status": str(self.session.stage),
            "policy_path": self.session.new.policy_path,
            "policy_type": requirements.policy_type,
            "cameras": {camera: list(requirements.cameras[camera]) for camera in self.session.new.camera_names},
            "joint_names": list(robot_io.table.names),
            "joint_ranges": ranges,
            "rate": config.rate,
            "action_rate": config.action_rate,
            "chunk": config.chunk,
            "action_steps": config.action_steps,
            "observation_steps": requirements.observation_steps,
            "reads_prompt": requirements.language,
        }


def _measured_joints(robot_io: RobotIO) -> JointTable:
    """Return the joints of a policy's actions if these are targets of joints, else the numbers of its state."""
    requirements = robot_io.runner.loaded.requirements
    if requirements.controls_joints:
        return robot_io.table
    return JointTable(
        [Joint(f"state_{number + 1}", number, -math.inf, math.inf) for number in range(requirements.state or 0)]
    )


def _create_motion(pose: np.ndarray, executed: np.ndarray, rate: float) -> Motion:
    """Create the motion before a chunk from executed actions (n, a), or from a pose (a,) at rest."""
    if not len(executed):
        rest = np.zeros(len(pose))
        return Motion(pose, rest, rest)
    newest, older, oldest = executed[-1], executed[max(len(executed) - 2, 0)], executed[0]
    velocity = (newest - older).astype(np.float64) * rate
    acceleration = (newest - 2 * older + oldest).astype(np.float64) * rate**2
    return Motion(newest, velocity, acceleration if len(executed) > 2 else None, is_at_rest=False, pose=pose)


def _count_stops(session: AnySession) -> int:
    return session.stops if isinstance(session, Session) else 0
