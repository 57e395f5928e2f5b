"""Observation in, judged chunk or action out, without rooms."""

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from service.control.guard import Motion
from service.control.policy_runner import STAGES
from service.control.robot_io import RobotIO
from service.errors import Compiling, InvalidRequest, MoveRefused, PolicyFailed, ServiceError, TooManyRequests
from service.inference.engine import Engine, InferenceResult, Sizes, in_words
from service.inference.loaded_policy import STATE, check_instruction, select_features, task_input
from service.sessions.interrupted import Interrupted
from service.sessions.request import DIRECT
from service.sessions.store import Listed, Session
from service.stage import Stage
from service.streaming import observation
from service.streaming.direct_transport import DirectLink, DirectTransport
from service.streaming.observation import Observation, Wanted

# Stages in which the session's own control loop stands still, and clients may control by themselves.
ASKABLE = frozenset({Stage.READY, Stage.STOPPED, Stage.TIMEOUT})
_SHOWN = 0.01  # seconds
# Of one session, at a time.
MOST = 32
# Seconds after the last single action from which the arm is where it is measured, not where that action led.
_PAUSE = 2.0
_NONE = np.zeros((0, 0), np.float32)


class InferenceTrace(NamedTuple):
    """A chunk that may be done.

    Attributes:
        actions: (t, a) float32, inside the limits.
        clamped: why the guard changed something.
        inference: what it took.
        decode: seconds that pictures took.
        odd: joints whose measured values are far outside of their ranges.
    """

    actions: np.ndarray
    clamped: tuple[str, ...]
    inference: InferenceResult
    decode: float
    odd: list[str]

    def timings(self) -> dict[str, float]:
        """Milliseconds by stage."""
        stages = {stage: getattr(self.inference, stage) for stage in STAGES}
        return {name: round(seconds * 1e3, 3) for name, seconds in ({"decode": self.decode} | stages).items()}


class DirectInference:
    """One client's, with what it was told last.

    Args:
        pixels: of one picture, at most.
        patience: seconds that a compile for pictures of a new size is waited for.
    """

    def __init__(self, session: Listed, transport: DirectTransport, engine: Engine, pixels: int, patience: float):
        self.session = session
        self._transport = transport
        self._engine = engine
        self._pixels = pixels
        self._patience = patience
        self._plan: np.ndarray | None = None
        self._given = 0
        self._given_at = -math.inf
        self._ticks = -1  # of the session's own loop when the plan was made
        self._wanted: Wanted | None = None
        self._stops = _stops(session)
        # The newest actions that were done before the plan, as the client says.
        self._trail = _NONE

    def wanted(self) -> Wanted:
        """What its observations hold.

        Raises:
            MoveRefused: the session cannot be asked.
        """
        return self._wanted_by(self.link()[1])

    def _wanted_by(self, robot_io: RobotIO) -> Wanted:
        known, cameras = self._wanted, self.session.new.camera_names
        if known is None or known.joints is not robot_io.table or known.cameras is not cameras:
            known = self._wanted = Wanted(cameras, robot_io.table, self._pixels)
        return known

    def link(self) -> tuple[DirectLink, RobotIO]:
        """The session's link and live parts.

        Raises:
            MoveRefused: it has none.
        """
        session = self.session
        if not session.new.is_direct:
            raise MoveRefused(
                f"session {session.id!r} has rooms, and its robot is asked there; make one with "
                f'"transport_server_url": "{DIRECT}" for this door'
            )
        if isinstance(session, Interrupted):
            raise session.refusal()
        link = self._transport.links.get(session.id)
        if session.robot_io is None or session.is_over or link is None:
            raise MoveRefused(f"session {session.id!r} is {session.stage} and runs no policy")
        return link, session.robot_io

    def open(self) -> tuple[DirectLink, RobotIO]:
        """Refuse where no client may control by itself now.

        Raises:
            MoveRefused: says why, and what to do.
        """
        link, robot_io = self.link()
        session = self.session
        assert isinstance(session, Session)
        if session.latch is not None:
            raise MoveRefused(
                f"session {session.id!r} is under an emergency stop ({session.latch}); "
                f"POST /debug/sessions/{session.id}/reset takes it off"
            )
        if session.stage not in ASKABLE:
            raise MoveRefused(
                f"session {session.id!r} is {session.stage}: its own control loop drives the robot; stop it first, "
                "or take its commands from the stream"
            )
        if session.new.dry_run:
            raise MoveRefused(f"session {session.id!r} is a dry run, and gives out no actions")
        return link, robot_io

    def check(self) -> tuple[DirectLink, RobotIO]:
        """Refuse where this client may not control by itself now: a stop is for whoever controlled until then.

        Raises:
            MoveRefused: says why, and what to do.
        """
        found = self.open()
        if self._stops != _stops(self.session):
            raise MoveRefused(
                f'session {self.session.id!r} was stopped; when it may go on, say "reset": true in the next act, or '
                "connect anew"
            )
        return found

    def begin_anew(self) -> None:
        """This client takes the robot up, again after a stop; nothing of before counts.

        Raises:
            MoveRefused: nobody may now.
        """
        self.open()
        self._stops = _stops(self.session)
        self._forget()

    def _forget(self) -> None:
        self._plan, self._given, self._trail = None, 0, _NONE

    async def think(self, seen: Observation, executed: int | None = None) -> InferenceTrace:
        """What to do about this observation (with every camera and joint).

        Args:
            executed: how many actions of the last chunk will have been done.

        Raises:
            MoveRefused: it may not be told, or not any more.
            InvalidRequest: a picture cannot be decoded, or so many were not given out.
            PolicyFailed: the policy raised, or gave no chunk that may be done.
            Compiling: for pictures of a new size.
            TooManyRequests: the session has enough to think about.
        """
        link, robot_io = self.check()
        if link.acts_under_way >= MOST:
            raise TooManyRequests(f"session {self.session.id!r} has {MOST} acts under way; ask again when one is done")
        trail = self._done(executed, robot_io)
        link.acts_under_way += 1
        try:
            thought = await self._think(link, robot_io, seen, trail)
        finally:
            link.acts_under_way -= 1
        self.check()
        link.acts += 1
        self._plan, self._trail, self._ticks = thought.actions, trail, robot_io.controller.ticks
        return thought

    async def _think(self, link: DirectLink, robot_io: RobotIO, seen: Observation, trail: np.ndarray) -> InferenceTrace:
        began = time.monotonic()
        instruction = await self.prompted(seen, robot_io)
        wanted = self._wanted_by(robot_io)
        pose, odd = seen.pose(wanted)
        frames = await seen.decoded(wanted) if seen.files else seen.frames
        now = time.monotonic()
        is_shown = now - link.shown_at >= _SHOWN
        if is_shown:
            link.shown_at = now
            self._show(robot_io, frames, seen, now)
        runner = robot_io.runner
        loaded = runner.loaded
        whole = {feature: frames[camera][None] for camera, feature in wanted.features}
        whole[STATE] = pose[None]
        whole |= task_input(instruction)
        observation = select_features(loaded.requirements, whole)
        sizes = {camera: image.shape[:2] for camera, image in frames.items()}
        if not loaded.is_compiled(sizes):
            await self._compile(robot_io, sizes)
        try:
            inference = await self._engine.infer(loaded, observation, caller=self)
            motion = _motion(pose, trail, robot_io.controller.config.action_rate)
            chunk, clamped = self._judged(robot_io, inference.chunk, motion)
        except PolicyFailed:
            runner.errors += 1
            raise
        # What nobody waits for is done when the answer is on its way.
        asyncio.get_running_loop().call_soon(
            self._note, robot_io, observation, whole, inference, now, time.monotonic(), is_shown
        )
        return InferenceTrace(chunk, clamped, inference, now - began, odd)

    def _note(
        self,
        robot_io: RobotIO,
        asked: Mapping[str, np.ndarray],
        whole: Mapping[str, np.ndarray],
        inference: InferenceResult,
        seen_at: float,
        at: float,
        is_shown: bool,
    ) -> None:
        """What came of an inference: for the figures, a policy that is tried out, a shadow, a recording."""
        runner = robot_io.runner
        for stage in STAGES:
            runner.seconds[stage].add(getattr(inference, stage))
        if runner.recent and not is_shown:
            # Of whoever asks as fast as it can, not eight that are nearly the same: their 2.4 MB pushed all else out of
            # the processor's cache, and a request took a tenth longer for it.
            runner.recent.pop()
        runner.recent.append((asked, inference.chunk))
        if runner.shadow is not None:
            runner.shadow.offer(whole, inference.chunk)
        robot_io.observers.planned(inference.chunk[0], seen_at, at)

    def _show(self, robot_io: RobotIO, frames: Mapping[str, np.ndarray], seen: Observation, now: float) -> None:
        """For whoever looks on: the page, a recording, the figures. Not more often than anybody looks (``_SHOWN``)."""
        for camera, image in frames.items():
            if robot_io.buffer.put_frame(camera, image, now):
                robot_io.observers.saw(camera, image, now)
        robot_io.buffer.put_joints(seen.joints, now)

    async def _compile(self, robot_io: RobotIO, sizes: Sizes) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._engine.compile(robot_io.runner.loaded, sizes)
        except TimeoutError:
            raise Compiling(f"the policy is being compiled for {in_words(sizes)}; ask again") from None

    def _judged(self, robot_io: RobotIO, answer: object, motion: Motion) -> tuple[np.ndarray, tuple[str, ...]]:
        guard = robot_io.controller.guard
        wrong = guard.check_shape(answer)
        if wrong is None:
            assert isinstance(answer, np.ndarray)
            judged = guard.judge(answer[0].astype(np.float32), motion)
            if judged.actions is not None:
                return judged.actions, judged.clamped
            wrong = judged.reason or "", judged.text
        robot_io.controller.rejected += 1
        raise PolicyFailed(wrong[1])

    def _done(self, executed: int | None, robot_io: RobotIO) -> np.ndarray:
        """The newest actions (n, a) that the next chunk follows; none of them when the arm is at rest."""
        if robot_io.controller.ticks != self._ticks:
            self._forget()  # the session's own loop drove the robot meanwhile
        if executed is None:
            return _NONE
        plan = _NONE if self._plan is None else self._plan
        if not 0 <= executed <= len(plan):
            raise InvalidRequest(
                f"executed is {executed}, but the last chunk that this client got has {len(plan)} actions",
                ("body", "executed"),
            )
        parts = [part for part in (self._trail, plan[:executed]) if len(part)]
        return np.concatenate(parts)[-3:] if parts else _NONE

    async def next(self, seen: Observation) -> tuple[np.ndarray, int, InferenceTrace | None]:
        """One action (a,), how many are left before the policy is asked again, and what it thought if it was.

        Raises:
            As ``think``.
        """
        robot_io = self.check()[1]
        now, thought = time.monotonic(), None
        if robot_io.controller.ticks != self._ticks or now - self._given_at > _PAUSE:
            self._forget()
        steps = robot_io.controller.config.action_steps
        if self._plan is None or self._given >= min(steps, len(self._plan)):
            executed = None if self._plan is None else self._given
            try:
                thought = await self.think(seen, executed)
            except ServiceError:
                self._forget()  # the client got nothing: it does not go on
                raise
            self._given = 0
        assert self._plan is not None
        action = self._plan[self._given]
        self._given += 1
        self._given_at = time.monotonic()
        return action, min(steps, len(self._plan)) - self._given, thought

    async def prompted(self, seen: Observation, robot_io: RobotIO) -> str | None:
        """What is to be done about this: what the client says, else what it or somebody else said last.

        It is the session's instruction from now on, and what recordings call it.

        Raises:
            InvalidRequest: the policy cannot read it, or wants one and there is none.
        """
        said, session = seen.prompt, self.session
        if said is None or not said.strip():
            said = session.new.language_instruction
        elif said != session.new.language_instruction and isinstance(session, Session):
            await session.tell(said)
        if (why := check_instruction(robot_io.runner.loaded.requirements, said)) is not None:
            raise InvalidRequest(why, ("body", "prompt"))
        return said

    def about(self) -> Mapping[str, object]:
        """What a client has to know of the session: shapes, names, rates.

        Raises:
            MoveRefused: it has no live parts.
        """
        robot_io = self.link()[1]
        needs, config = robot_io.runner.loaded.requirements, robot_io.controller.config
        ends = {
            joint.name: [end if np.isfinite(end) else None for end in (joint.low, joint.high)]
            for joint in robot_io.table.joints
        }
        return {
            "session_id": self.session.id,
            "status": str(self.session.stage),
            "policy_path": self.session.new.policy_path,
            "policy_type": needs.policy_type,
            "cameras": {camera: list(needs.cameras[camera]) for camera in self.session.new.camera_names},
            "joint_names": list(robot_io.table.names),
            "joint_ranges": ends,
            "rate": config.rate,
            "action_rate": config.action_rate,
            "chunk": config.chunk,
            "action_steps": config.action_steps,
            "reads_prompt": needs.language,
        }


def _motion(pose: np.ndarray, trail: np.ndarray, rate: float) -> Motion:
    """What a chunk follows: these actions, or a pose at rest."""
    if not len(trail):
        rest = np.zeros(len(pose))
        return Motion(pose, rest, rest)
    newest, older, oldest = trail[-1], trail[max(len(trail) - 2, 0)], trail[0]
    velocity = (newest - older).astype(np.float64) * rate
    bend = (newest - 2 * older + oldest).astype(np.float64) * rate**2
    return Motion(newest, velocity, bend if len(trail) > 2 else None, is_at_rest=False)


def _stops(session: Listed) -> int:
    return session.stops if isinstance(session, Session) else 0


_WHOLE = 1 << 63


async def act(consultation: DirectInference, message: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to an act; ``docs/robots/direct.md`` has the fields.

    Raises:
        InvalidRequest: something of it cannot be used.
        ServiceError: as ``DirectInference.think``.
    """
    is_new = message.get("reset", False)
    if not isinstance(is_new, bool):
        raise InvalidRequest("reset: wanted true or false", ("body", "reset"))
    robot_io = consultation.open()[1] if is_new else consultation.check()[1]
    want = message.get("want", "chunk")
    if not isinstance(want, str) or want not in ("chunk", "action"):
        raise InvalidRequest("want: wanted chunk or action", ("body", "want"))
    executed, number = (whole_number(message, name) for name in ("executed", "number"))
    seen = observation.read(message, consultation.wanted(), is_whole=True)
    told: dict[str, Any] = {} if number is None else {"number": number}
    thought: InferenceTrace | None
    if is_new:
        consultation.begin_anew()
    if want == "action":
        action, left, thought = await consultation.next(seen)
        told |= {"action": action, "left": left}
    else:
        thought = await consultation.think(seen, executed)
        told |= {"actions": thought.actions}
    config = robot_io.controller.config
    told |= {
        "joint_names": list(robot_io.table.names),
        "action_rate": config.action_rate,
        "action_steps": config.action_steps,
        "clamped": list(thought.clamped) if thought else [],
    }
    if thought is not None:
        told["timings_ms"] = thought.timings()
        if thought.odd:
            told["warnings"] = [
                f"far outside of its range: {name}; is it told in another unit?" for name in thought.odd
            ]
    return told


def whole_number(message: Mapping[str, Any], name: str) -> int | None:
    """An integer of a message, if it has one of this name.

    Raises:
        InvalidRequest: it is something else.
    """
    value = message.get(name)
    if value is not None and (type(value) is not int or not -_WHOLE <= value < _WHOLE):
        raise InvalidRequest(f"{name}: wanted an integer", ("body", name))
    return value
