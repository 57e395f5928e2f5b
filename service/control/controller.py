"""Controller of one robot: computes commands from observations and policy answers, without I/O or a clock."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from service.control.action_queue import ActionQueue
from service.control.chunk_scheduler import COMPILING, STUCK, ChunkRequest, ChunkScheduler, PolicyAnswer
from service.control.config import ControlConfig
from service.control.guard import ActionGuard, CommandHistory, Ramp
from service.control.limits import MotionLimits, create_motion_limits
from service.control.observation_buffer import NotReady, ObservationBuffer
from service.control.watchdog import HOLDS, InputTimes, JointMotion, Watchdog
from service.stage import Move
from service.stats import Recent, Tally
from service.transport.link import BadInput, LinkDown, LinkEvent, LinkUp, RobotLeft

_EARLY_TOLERANCE = 1e-6  # Share of a period that a tick may be early because of rounding.
_MAX_TARGET = 1e30  # Larger actions of a policy are clipped, so that differences of actions are finite.
ADJUSTABLE = ("overlap", "ask_ahead", "action_steps")  # Fields of a ControlConfig that may change during a motion.
CHOKED = "link_choked"  # Code of an obstacle: the link is up, but refuses commands.


class ControlEvent(NamedTuple):
    """Event of a robot for its session: a move in the table of stages, and a reason for people."""

    move: Move
    reason: str | None


class TickResult(NamedTuple):
    """Decision of a tick.

    Attributes:
        command: command (a,) to send.
        is_accepted: whether the answer's chunk is planned now.
        failure: code and text of the reason why the answer was unusable, or None.
    """

    command: np.ndarray | None = None
    request: ChunkRequest | None = None
    events: tuple[ControlEvent, ...] = ()
    is_accepted: bool = False
    failure: tuple[str, str] | None = None


class DueTick(NamedTuple):
    """A due tick: its deadline, the number of skipped ticks, and seconds since the first skipped deadline."""

    deadline: float
    missed: int
    late: float


class TickClock:
    """Grid of ticks ``period`` seconds apart, each taken at most once."""

    def __init__(self, period: float):
        self.period = period
        self._anchor = 0.0
        self._index = -1

    def begin(self, now: float, *, is_done: bool = False) -> None:
        """Restart the grid: a tick is due now (unless ``is_done``), and then every period."""
        self._anchor, self._index = now, 0 if is_done else -1

    def next_deadline(self, now: float) -> float:
        """Return when the next tick is due."""
        newest = math.floor((now - self._anchor) / self.period + _EARLY_TOLERANCE)
        return self._anchor + max(self._index + 1, newest) * self.period

    def take(self, now: float) -> DueTick | None:
        """Return the newest due tick, and skip older ticks; None if it was taken already."""
        index = math.floor((now - self._anchor) / self.period + _EARLY_TOLERANCE)
        if index <= self._index:
            return None
        missed = index - self._index - 1
        late = max(now - self._anchor - (self._index + 1) * self.period, 0.0)
        self._index = index
        return DueTick(self._anchor + index * self.period, missed, late)


@dataclass(frozen=True)
class Hold:
    """Reason for a hold: a stable code (``camera_stale``), a text for people, and its start (monotonic)."""

    code: str
    text: str
    since: float


STOP_RETRIES = 25  # Largest number of retries of a stop that the link refuses, per repeat of a hold.
# Holds that end with a usable chunk; all other holds end with their cause.
OF_POLICY = frozenset({"policy_invalid", "policy_failed", "policy_late", "starved"})
# Holds because the policy is too slow.
TOO_SLOW = frozenset({"inference_slow", "action_stale", "policy_late", "starved"})


class HoldState:
    """Hold of one robot.

    Attributes:
        hold: reason for the hold, or None while the robot may move.
        counts: number of holds by reason.
        repeats_left: number of times that the measured pose is still to be sent.
        ramp: slows the robot down before the hold, or None.
    """

    def __init__(self, repeats: int):
        self.hold: Hold | None = None
        self.counts = Tally()
        self.repeats_left = 0
        self._repeats = repeats
        self._retries = 0
        self.ramp: Ramp | None = None

    def enter(self, reason: NotReady, now: float, *, is_moving: bool, ramp: Ramp | None = None) -> None:
        """Hold the robot for this reason; only the first reason begins the repeats and the ramp."""
        if self.hold is None and is_moving:
            self.repeats_left, self.ramp = self._repeats, ramp
        if self.hold is None or self.hold.code != reason.code:
            self.counts.add(reason.code)
            self.hold = Hold(reason.code, reason.text, now)
        else:
            self.hold = Hold(reason.code, reason.text, self.hold.since)

    def enter_stop(self, is_sent: bool) -> None:
        """Hold the robot for a stop; ``is_sent`` says whether the pose is sent."""
        self.hold, self.ramp = None, None
        self.repeats_left = self._repeats if is_sent else 0
        self._retries = STOP_RETRIES * self._repeats

    def retry(self) -> None:
        """Repeat a stop that the link refused, up to the limit of retries."""
        if self._retries:
            self._retries -= 1
            self.repeats_left += 1

    def end(self) -> None:
        """Let the robot move again."""
        self.hold, self.ramp, self.repeats_left = None, None, 0


class Controller:
    """Decides for one robot. Every method takes the time and returns a decision; none sleeps, sends or infers.

    Every chunk passes the action guard before its first action is sent, and every command of a motion passes it again.

    Attributes:
        period: seconds from tick to tick.
        clock: grid of the ticks, from ``begin`` on.
        queue: planned actions (2 a,): allowed by the action guard, then as the policy returned them.
        is_running: whether the robot was started and not halted.
        refused_since: when the link refused the first of the newest commands; None if it took the newest command.
        command: newest command (a,), or None.
        lost_rooms: rooms whose connection is lost, with the reason.
        is_blind: whether the session is degraded because the robot cannot be observed or reached.
        starvations: number of times that the queue was empty during a motion.
        missed_ticks: number of skipped ticks.
        rejected: number of refused chunks.
        largest_step: largest change (a,) of each joint from tick to tick that the policy returned, without the action
            guard. After a pause, the change from the nearer of the command and the pose counts.
        lateness: seconds from a tick's deadline to its run.
        late_by_chunk: number of actions of each of the newest chunks whose time was over on arrival.
    """

    def __init__(
        self,
        buffer: ObservationBuffer,
        config: ControlConfig,
        limits: MotionLimits | None = None,
    ):
        """Create a controller; without ``limits``, the limits of the joint table apply."""
        self.config = config
        self.period = 1 / config.rate
        self.buffer = buffer
        self.scheduler = ChunkScheduler(config)
        self.queue = ActionQueue(1 / config.action_rate, self.period, config.overlap)
        self.guard = ActionGuard(
            limits or create_motion_limits(buffer.joints),
            rate=config.rate,
            action_rate=config.action_rate,
            chunk=config.chunk,
        )
        self.watchdog = Watchdog(
            config.safety,
            frame_age=config.control.frame_age_limit,
            executed=config.action_steps / config.action_rate,
            covered=config.chunk / config.action_rate,
            period=self.period,
            joints=JointMotion(buffer.joints, self.guard.limits.high - self.guard.limits.low),
        )
        self.is_running = self.is_blind = False
        self.refused_since: float | None = None
        self.command: np.ndarray | None = None
        self.lost_rooms: dict[str, str] = {}
        self.largest_step = np.zeros(config.width, np.float32)
        self.starvations = self.missed_ticks = self.ticks = self.chunks = self.rejected = 0
        self.lateness = Recent(config.samples)
        self.late_by_chunk = Recent(64)
        self.clock = TickClock(self.period)
        self._hold_state = HoldState(config.control.hold_repeats)
        self._history = CommandHistory(config.rate)
        self._obstacles: dict[str, NotReady] = {}
        self._failures = 0
        self._is_moving = self._is_queue_empty = self._keeps_grip = False
        self._moved_at = 0.0
        self._target: np.ndarray | None = None

    # Ticks.

    def tick(self, now: float) -> TickResult:
        """Run the newest due tick; skip and count older ticks."""
        due = None if self.is_idle else self.clock.take(now)
        if due is None:
            return TickResult()
        self.lateness.add(due.late)
        self.missed_ticks += due.missed
        self.ticks += 1
        if due.missed * self.period > self.config.control.starved_after:
            self._hold_state.ramp = None  # The arm came to rest during the missed ticks.
        events = self._check_input(now) if self.is_running else ()
        if not self.is_running:  # The robot was halted, or the watchdog has just stopped it.
            return TickResult(self._hold_command(), None, events)
        snapshot = next(iter(self._obstacles.values()), None) or self.buffer.snapshot(now)
        if isinstance(snapshot, NotReady):
            self._enter_hold(snapshot, now)
            self._flush()
            return TickResult(self._hold_command(), None, events)
        history = self.buffer.history
        if history.steps > 1:
            history.add(now, snapshot)
        action = self.queue.take(due.deadline, now)
        if action is None:
            self._wait_for_policy(now)
            command = self._hold_command()
        else:
            command = self._move(action, snapshot.joints, now)
        return TickResult(command, self.scheduler.next_request(snapshot, history, self.queue, now), events)

    def _check_input(self, now: float) -> tuple[ControlEvent, ...]:
        """Apply the watchdog's report to this tick; a stop takes effect at once."""
        in_flight = self.scheduler.in_flight
        report = self.watchdog.check(
            now,
            InputTimes(
                self.buffer.observed_at,
                tuple(self.lost_rooms),
                self.buffer.is_pose_current,
                self.queue.observed_at if self.queue.left else None,
                in_flight and in_flight.requested_at,
                self.buffer.pose,
                self.command if self._is_moving else None,
                self.buffer.units,
            ),
        )
        if report.holds or self._obstacles:
            for code in HOLDS:
                if code in report.holds:
                    self._obstacles[code] = NotReady(code, report.holds[code])
                else:
                    self._obstacles.pop(code, None)
        events: tuple[ControlEvent, ...] = ()
        if self.is_blind is not (report.blind is not None):
            self.is_blind = not self.is_blind
            events = (ControlEvent(Move.BLINDED if self.is_blind else Move.RECOVERED, report.blind),)
        if report.stop is not None:
            self._begin_halt(now, always_hold=True)
            events = (*events, ControlEvent(Move.EMERGENCY_STOP, str(report.stop)))
        return events

    def _move(self, action: np.ndarray, pose: np.ndarray, now: float) -> np.ndarray:
        """Return the command (a,) within the limits for an action (2 a,) of the queue and a measured pose (a,)."""
        allowed, target = action[: self.config.width], action[self.config.width :]
        if self.command is not None:
            # A resting robot may have been moved by hand, and a gripper with an object does not reach its command.
            previous = self._target if self._is_moving else pose
            step = np.abs(target - self.command)
            if previous is not None:
                np.minimum(step, np.abs(target - previous), out=step)
            np.maximum(self.largest_step, step, out=self.largest_step)
        self._target = target
        if not self._history:
            self._history.append(self._keep_grip(pose))
        self.command = self.guard.limit(allowed, self._history[-1])
        self._history.append(self.command)
        if not self._is_moving:  # Every hold ends the motion, so a moving robot has no hold.
            self._hold_state.end()
        self._moved_at = now
        self._is_moving, self._is_queue_empty, self._keeps_grip = True, False, True
        return self.command

    def _wait_for_policy(self, now: float) -> None:
        held = self._hold_state
        if held.hold is not None and held.hold.code not in OF_POLICY:
            held.hold = None  # The robot is observed again, but the policy has not answered yet.
        if not self._is_moving:
            return
        self._history.rest()
        if not self._is_queue_empty and not self.queue.left:
            self._is_queue_empty = True
            self.starvations += 1
        waited = now - self._moved_at
        if waited > self.config.control.starved_after:
            latest = self.latency.percentile(50)
            known = "" if latest is None else f"; an inference takes {latest * 1e3:.0f} ms"
            text = f"no action for {waited * 1e3:.0f} ms, limit {self.config.control.starved_after * 1e3:.0f} ms{known}"
            self._enter_hold(NotReady("starved", text), now)

    def confirm(self, is_sent: bool, now: float) -> None:
        """Note whether a link that is up took the newest command; if not, the command before still applies."""
        if is_sent:
            self.refused_since = None
            self.clear(CHOKED)
        elif not self.is_running:
            self._hold_state.retry()
        elif self._is_moving:
            self.command = self._history.take_back()
            self.refused_since = self.refused_since or now
            if now - self.refused_since > self.config.control.starved_after:
                limit = self.config.control.starved_after * 1e3
                self.obstruct(CHOKED, f"the link took no command for longer than {limit:.0f} ms")
        elif CHOKED in self._obstacles:
            self._hold_state.repeats_left += 1  # Repeat the hold until the link takes it.

    # Answers of the policy.

    def accept(self, answer: PolicyAnswer, now: float) -> TickResult:
        """Plan the chunk of an answer within the limits; hold, stop or fail the robot without a usable chunk."""
        request = answer.request
        if answer.error is not None and answer.error[0] in (COMPILING, STUCK):
            code, text = answer.error
            self.scheduler.withdraw()
            if code == STUCK:
                return self.fail(text, now, failure=answer.error)
            self.obstruct(COMPILING, text)
            return TickResult()
        if not self.scheduler.close(answer, self.queue, now):
            return TickResult(failure=answer.error)
        if answer.error is not None:
            return self._note_failure("policy_failed", answer.error[1], now, answer.error)
        executed = self._count_executed(request)
        plan = self._plan(answer.chunk, request, now, answer.fade, executed)
        if isinstance(plan, tuple):
            self.rejected += 1
            return self._note_failure("policy_invalid", plan[1], now, plan)
        self._failures = 0
        if answer.fade is not None:
            self.queue.clear()
        self.chunks += 1
        late = self.queue.late
        usable = self.queue.push(plan, request.snapshot.observed_at, now, executed)
        self.late_by_chunk.add(self.queue.late - late)
        if not usable:
            covered = self.config.chunk / self.config.action_rate
            age = now - request.snapshot.observed_at
            text = (
                f"the policy answers {age * 1e3:.0f} ms after its frame, its chunk covers only {covered * 1e3:.0f} ms"
            )
            # After a pause of the process, the frames of this answer may be outdated.
            not_ready = next(iter(self._obstacles.values()), None) or self.buffer.not_ready(now)
            self._enter_hold(not_ready or NotReady("policy_late", text), now)
        return TickResult(is_accepted=True)

    def _count_executed(self, request: ChunkRequest) -> int | None:
        """Return the number of actions that a resting robot executed since a request; None while it moves."""
        if request.due is None:
            return 0  # The plan was empty at the request, so the robot executed nothing since.
        return None if self._is_moving else self.queue.count_taken_since(request.snapshot.observed_at)

    def _plan(
        self, chunk: object, request: ChunkRequest, now: float, fade: int | None, executed: int | None
    ) -> np.ndarray | tuple[str, str]:
        """Return the plan (t, 2 a) for a policy's chunk (1, t, a), or code and text of why it is refused.

        Each row has the action that the action guard allows, then the action that the policy returned.

        Args:
            executed: result of ``_count_executed``.
        """
        if (wrong := self.guard.check_shape(chunk)) is not None:
            return wrong
        assert isinstance(chunk, np.ndarray)
        queue, width, observed_at = self.queue, chunk.shape[2], request.snapshot.observed_at
        # First action that can still be executed, and the share of a period before it.
        if executed is None:
            first, share = queue.first_after(self.clock.next_deadline(now) - self.period, observed_at)
        else:
            first, share = executed, 1.0
        first = min(first, self.config.chunk)
        pose = self.buffer.pose
        assert pose is not None, "a chunk is requested only with a complete pose"
        motion = self._history.motion(
            self._keep_grip(pose), ahead=(1 - share) * queue.period, is_between=queue.is_between
        )
        target = np.clip(chunk[0], -_MAX_TARGET, _MAX_TARGET).astype(np.float32)
        plan = np.concatenate([target, target], axis=1)
        plan = (
            queue.aggregate(plan, observed_at, first) if fade is None else queue.crossfade(plan, observed_at, now, fade)
        )
        judged = self.guard.judge(plan[:, :width], motion, first)
        if judged.actions is None:
            return judged.reason or "", judged.text
        if judged.clamped:
            plan[:, :width] = judged.actions
            if queue.is_between and first:
                # Ticks interpolate from the action before, so that action is set to the start of the motion.
                plan[first - 1, :width] = motion.position
        return plan

    def _note_failure(self, code: str, text: str, now: float, failure: tuple[str, str]) -> TickResult:
        """Hold the robot after an unusable answer; too many such answers in a row end its motion."""
        self._failures += 1
        self._enter_hold(NotReady(code, text), now)
        self._flush()
        if self._failures < self.config.control.failures_allowed:
            return TickResult(failure=failure)
        text = f"{text} ({self._failures} times in a row)"
        if code == "policy_invalid":
            # Invalid actions are unsafe, and latch the stop.
            return self.fail(f"{code}: {text}", now, move=Move.EMERGENCY_STOP, failure=failure)
        return self.fail(text, now, failure=failure)

    # Events of the session and the link.

    def adjust(self, config: ControlConfig) -> None:
        """Change how chunks are joined and requested, from the next chunk on.

        Raises:
            ValueError: fields other than ``ADJUSTABLE`` differ.
        """
        if replace(config, **{name: getattr(self.config, name) for name in ADJUSTABLE}) != self.config:
            raise ValueError(f"only {', '.join(ADJUSTABLE)} can be adjusted")
        if config.overlap != self.config.overlap:
            self.queue.set_aggregation(config.overlap)
        self.config = config
        self.scheduler.adjust(config)
        self.watchdog.set_chunk_time(
            executed=config.action_steps / config.action_rate, covered=config.chunk / config.action_rate
        )

    def begin(self, now: float) -> None:
        """Start or restart without any state of an earlier motion; the first tick is now."""
        self.clock.begin(now)
        self.watchdog.begin(now)
        self._flush()
        self._history.clear()
        self.buffer.history.clear()
        self._hold_state.end()
        self.release_grip()
        self._failures = 0
        self.refused_since = None
        self.clear(CHOKED)
        self.is_blind = False
        self.is_running = True

    def halt(self, now: float, *, always_hold: bool = False) -> TickResult:
        """Stop. The command must be sent at once; the next ticks repeat the hold.

        A robot that never got a command gets no hold, unless ``always_hold``. A resting robot with an outdated pose
        gets no hold either, because that pose may be far away.
        """
        self._begin_halt(now, always_hold=always_hold)
        return TickResult(self._hold_command())

    def _begin_halt(self, now: float, *, always_hold: bool) -> None:
        is_known = self.is_running or self._hold_state.repeats_left > 0 or self.buffer.is_pose_current
        if not self.is_running and not self._hold_state.repeats_left:
            self.clock.begin(now, is_done=True)
        self.is_running = False
        self._flush()
        self.release_grip()
        self._hold_state.enter_stop(is_known and (always_hold or self.command is not None))

    def fail(
        self, reason: str, now: float, *, move: Move = Move.FAILED, failure: tuple[str, str] | None = None
    ) -> TickResult:
        """Stop until a restart: the session ends in an error, or is latched by an emergency stop."""
        self._begin_halt(now, always_hold=move is Move.EMERGENCY_STOP)
        return TickResult(self._hold_command(), events=(ControlEvent(move, reason),), failure=failure)

    def take_bad_input(self, reasons: Mapping[str, int], now: float) -> TickResult:
        """Count unusable joint values by reason; too many stop a moving robot."""
        stop = self.watchdog.note_bad_input(reasons, now)
        if stop is None or not self.is_running:
            return TickResult()
        return self.fail(str(stop), now, move=Move.EMERGENCY_STOP)

    def take_link_event(self, event: LinkEvent, now: float, *, carries_joints: bool) -> TickResult:
        """Apply an event of the link; ``carries_joints`` says whether the event's room carries the joints."""
        if isinstance(event, BadInput):
            self.buffer.refuse_joints(event.reasons)
            return self.take_bad_input(event.reasons, now)
        if isinstance(event, RobotLeft):
            self.buffer.distrust_joints()
            self.watchdog.forget_frozen_joints()
            # The program may have released the motors, and a jaw that a person opened must not close.
            self.release_grip()
            if event.is_replaced:
                # Now, because the next robot may connect before the next tick.
                self.buffer.forget_joints()
                self._forget_robot()
        elif isinstance(event, LinkDown):
            self.lost_rooms[event.room] = event.reason
            self.buffer.distrust_frames(now)
            if carries_joints:
                self.buffer.distrust_joints()
            self.obstruct("link_lost", self.link_trouble or "")
            self.clear(CHOKED)
            return TickResult(events=(ControlEvent(Move.LINK_LOST, self.link_trouble),))
        elif isinstance(event, LinkUp) and self.lost_rooms.pop(event.room, None) is not None:
            if self.lost_rooms:
                self.obstruct("link_lost", self.link_trouble or "")
            else:
                self.clear("link_lost")
                self.is_blind = False  # A robot that still cannot be observed is reported again.
                return TickResult(events=(ControlEvent(Move.LINK_BACK, None),))
        return TickResult()

    @property
    def link_trouble(self) -> str | None:
        """Lost rooms with their reasons, or None."""
        lost = sorted(self.lost_rooms.items())
        return "; ".join(f"room {room!r} is lost: {reason}" for room, reason in lost) or None

    def _forget_robot(self) -> None:
        """Forget motion, plan and hold, because another robot may join."""
        self._flush()
        self._history.clear()
        self.buffer.history.clear()
        self._hold_state.end()
        self.release_grip()
        self.command = None

    def release_grip(self) -> None:
        """Hold grippers at their measured position from now on, not at their command."""
        self._keeps_grip = False

    def obstruct(self, code: str, text: str) -> None:
        """Forbid motion (for a lost link or a compile) until ``clear`` with the same code."""
        self._obstacles[code] = NotReady(code, text)

    def clear(self, code: str) -> None:
        """Remove the obstacle of this code."""
        self._obstacles.pop(code, None)

    def request_soon(self) -> None:
        """Request another chunk at the next tick, and drop the request in flight; the plan continues."""
        self.scheduler.request_soon()
        self._failures = 0

    # Figures.

    @property
    def hold(self) -> Hold | None:
        """Reason for the hold, or None while the robot may move."""
        return self._hold_state.hold

    @property
    def holds(self) -> Tally:
        """Number of holds by reason."""
        return self._hold_state.counts

    @property
    def latency(self) -> Recent:
        """Seconds from a request to its answer, on the event loop."""
        return self.scheduler.latency

    @property
    def is_idle(self) -> bool:
        """Whether ticks have nothing to do until ``begin``."""
        return not self.is_running and not self._hold_state.repeats_left

    @property
    def is_waiting_for_policy(self) -> bool:
        """Whether the robot is held because the policy is too slow."""
        return self.is_running and self.hold is not None and self.hold.code in TOO_SLOW

    # Holding.

    def _enter_hold(self, reason: NotReady, now: float) -> None:
        ramp = None
        if self.hold is None and self._is_moving:
            # After a pause the arm already rests, perhaps away from its command.
            is_over = now - self._moved_at > max(self.config.control.starved_after, 2 * self.period)
            if self.config.safety.on_hold == "ramp" and not is_over:
                ramp = self._history.ramp(self.guard.limits)
            if ramp is None:
                self._history.clear()
        self._hold_state.enter(reason, now, is_moving=self._is_moving, ramp=ramp)
        self.queue.clear()
        self._is_moving = False

    def _hold_command(self) -> np.ndarray | None:
        """Return the command (a,) of this tick for a robot that is held, or None."""
        held = self._hold_state
        if held.ramp is not None and (slower := held.ramp.next()) is not None:
            self._history.append(slower)
            self.command = slower
            return slower
        held.ramp = None
        if not held.repeats_left:
            return None
        held.repeats_left -= 1
        self._history.clear()
        # A robot whose measured pose is doubtful keeps its last command, because that pose could move it.
        is_doubted = self.buffer.units_mismatch is not None or self.watchdog.is_pose_doubted
        pose = None if is_doubted else self.buffer.pose
        if pose is not None:
            self.command = pose = self._keep_grip(pose)
        return pose

    def _keep_grip(self, pose: np.ndarray) -> np.ndarray:
        """Return the pose (a,) of a hold, at which the next motion begins; grippers keep their command and grip."""
        if not self._keeps_grip or self.command is None:
            return pose
        return np.where(self.buffer.joints.grippers, self.command, pose)

    def _flush(self) -> None:
        """Drop the plan, so that earlier actions cannot move the robot."""
        self.queue.clear()
        self.scheduler.end_motion()
        self._is_moving = self._is_queue_empty = False
        self._target = None
