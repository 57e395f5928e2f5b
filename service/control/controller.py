"""Controller: one tick from observation to command; pure."""

import math
from dataclasses import dataclass, replace

import numpy as np

from service.control.action_queue import ActionQueue
from service.control.chunk_scheduler import ChunkScheduler, InFlight, prefix_of
from service.control.config import ControlConfig
from service.control.guard import Guard, Judged, Motion
from service.control.hold import OF_POLICY, TOO_SLOW, CommandHistory, Hold, Holding
from service.control.limits import MotionLimits, motion_limits
from service.control.observation_buffer import NotReady, ObservationBuffer, Snapshot
from service.stats import Recent, Tally

# An absolute grid is computed with floats: a tick may come this much early and still be that tick.
_EARLY = 1e-6


@dataclass(frozen=True)
class Due:
    """A tick to be done.

    Attributes:
        deadline: when it was due.
        missed: how many before it nobody woke up for.
        late: seconds from the deadline of the tick that should have come next.
    """

    deadline: float
    missed: int
    late: float


class TickClock:
    """Ticks ``period`` seconds apart, each done once or not at all."""

    def __init__(self, period: float):
        self.period = period
        self._anchor = 0.0
        self._index = -1

    def begin(self, now: float, *, is_done: bool = False) -> None:
        """Lay the grid anew: a tick is due now, and then every period. ``is_done`` says that this one is over."""
        self._anchor, self._index = now, 0 if is_done else -1

    def next_deadline(self, now: float) -> float:
        """When the next tick is due."""
        return self._anchor + max(self._index + 1, self.slot(now)) * self.period

    def slot(self, now: float) -> int:
        """The number of the tick that was due last."""
        return math.floor((now - self._anchor) / self.period + _EARLY)

    def take(self, now: float) -> Due | None:
        """The newest tick that is due, or None when it was done already; older ones are passed over."""
        index = self.slot(now)
        if index <= self._index:
            return None
        due = Due(
            self._anchor + index * self.period,
            index - self._index - 1,
            # Late against the tick that should have come next, not only against the newest.
            max(now - self._anchor - (self._index + 1) * self.period, 0.0),
        )
        self._index = index
        return due


# Differences of what a policy asks for must be numbers, whatever it asks for.
_WILDEST = 1e30


def planned(
    chunk: np.ndarray,
    actions: ActionQueue,
    guard: Guard,
    motion: Motion,
    first: int,
    *,
    seen_at: float,
    now: float,
    fade: int | None,
) -> tuple[np.ndarray, Judged]:
    """The plan (t, 2 a): each action as the guard lets it pass, and beside it as the policy wanted it.

    Args:
        chunk: (t, a) finite floats.
        actions: what it is joined with; nothing of them changes.
        motion, first: what the plan follows, and its first action that can still be done.
        fade: so many actions lead over from what another policy planned; None for the same policy.

    Returns:
        also what the guard said; without its ``actions`` the plan is refused.
    """
    width = chunk.shape[1]
    wanted = np.clip(chunk, -_WILDEST, _WILDEST).astype(np.float32)
    plan = np.concatenate([wanted, wanted], axis=1)
    plan = actions.joined(plan, seen_at, first) if fade is None else actions.faded(plan, seen_at, now, fade)
    judged = guard.judge(plan[:, :width], motion, first)
    if judged.actions is not None and judged.clamped:
        plan[:, :width] = judged.actions
        if actions.is_between and first:
            # Ticks take points between the action before and this one, so that one is where the motion comes from.
            plan[first - 1, :width] = motion.position
    return plan, judged


@dataclass(frozen=True)
class TickResult:
    """What one tick asks for.

    Attributes:
        command: (a,) to be sent now.
        ask: to infer from.
        due: when the plan runs dry unless the answer is there; None when there is no plan.
        is_overtaken: the process stood still while this was decided; the command is not for now any more.
    """

    command: np.ndarray | None = None
    ask: Snapshot | None = None
    due: float | None = None
    is_overtaken: bool = False


# What of a pace may change while a robot moves.
ADJUSTABLE = ("overlap", "ask_ahead", "action_steps")
# Code of an obstacle: the link is up, and takes no command.
CHOKED = "link_choked"


class Controller:
    """Decides; never sleeps, sends or computes. Every method takes the time.

    Every chunk passes the guard before its first action can be sent, and every command of a motion passes it again.
    What the policy wanted is kept beside what the guard made of it, for whoever judges the policy.

    Attributes:
        guard: holds chunks and commands to the limits; always there.
        fault: set when the policy raised too often in a row; the session ends in an error then.
        stop_wanted: code and text of why the robot has to be stopped until somebody resets it.
        is_running: between ``begin`` and ``halt``.
        command: the last command given out (a,), or None.
        starvations: how often the queue ran dry in the middle of a motion.
        missed_ticks: ticks that were skipped because a wake-up came too late for them.
        ticks, chunks: how many there were.
        rejected: chunks refused because they were not finite, not of the right shape, or outside the limits.
        rejected_for: code of the newest of them: ``not_finite``, ``shape``, ``position``, ``seam``, ...
        largest_step: (a,) the largest change that the policy wanted of each joint from one tick to the next since it
            was last set to zeros, before the guard. After a pause, of what was commanded and where the robot is the
            nearer one counts.
        lateness: seconds from a tick's deadline to its run.
        late_by_chunk: how many actions of each of the newest chunks were over when it came.
    """

    def __init__(self, buffer: ObservationBuffer, pace: ControlConfig, limits: MotionLimits | None = None):
        """Without limits, those that the joint table knows hold."""
        self.pace = pace
        self.period = 1 / pace.rate
        self.guard = Guard(
            limits or motion_limits(buffer.joints), rate=pace.rate, action_rate=pace.action_rate, chunk=pace.chunk
        )
        self.fault: str | None = None
        self.stop_wanted: tuple[str, str] | None = None
        self.is_running = False
        self.command: np.ndarray | None = None
        self.largest_step = np.zeros(pace.width, np.float32)
        self.starvations = self.missed_ticks = self.ticks = self.chunks = 0
        self.rejected = 0
        self.rejected_for: str | None = None
        self.lateness = Recent(pace.samples)
        self.late_by_chunk = Recent(64)
        # Each action twice, side by side: as the guard lets it pass, and as the policy wanted it.
        self.actions = ActionQueue(1 / pace.action_rate, self.period, pace.overlap)
        self._buffer = buffer
        self._grid = TickClock(self.period)
        self._asking = ChunkScheduler(pace)
        self._holding = Holding(pace.hold_repeats)
        self._failures = 0
        self._is_moving = False
        self._is_dry = False
        self._keeps_grip = False
        self._moved_at = 0.0
        self._refused_since: float | None = None
        self._trail = CommandHistory(pace.rate)
        self._wanted: np.ndarray | None = None
        self._obstacles: dict[str, str] = {}

    # What happens to a session.

    def adjust(self, pace: ControlConfig) -> None:
        """Another way to join chunks, or other moments to ask for them, from the next chunk on.

        Raises:
            ValueError: it has another rate, chunk or width, which is another control.
        """
        if replace(pace, **{name: getattr(self.pace, name) for name in ADJUSTABLE}) != self.pace:
            raise ValueError(f"only {', '.join(ADJUSTABLE)} can be adjusted")
        if pace.overlap != self.pace.overlap:
            self.actions.join_by(pace.overlap)
        self.pace = self._asking.pace = pace

    def begin(self, now: float) -> None:
        """Start, or start anew: the first tick is now, and nothing of an earlier motion is left."""
        self._grid.begin(now)
        self._flush()
        self._trail.clear()
        self._holding.end()
        self.release_grip()
        self._failures = 0
        self._refused_since = None
        self.clear(CHOKED)
        self.fault = self.stop_wanted = None
        self.is_running = True

    def halt(self, now: float, *, always_hold: bool = False) -> TickResult:
        """Stop. The step is to be done at once; the ticks that follow repeat the hold.

        A robot that was never commanded is not told to hold, unless ``always_hold``. One that stands, and of which
        nobody knows where it is now, is told nothing: where it was may be far away.
        """
        is_known = self.is_running or self._holding.left > 0 or self._buffer.is_felt
        if not self.is_running and not self._holding.left:
            self._grid.begin(now, is_done=True)
        self.is_running = False
        self._flush()
        self.release_grip()
        self._holding.at_once(is_known and (always_hold or self.command is not None))
        return TickResult(command=self._hold_pose())

    def forget(self) -> None:
        """Another robot may come: nothing of this one's motion, plan or hold is for it."""
        self._flush()
        self._trail.clear()
        self._holding.end()
        self.release_grip()
        self.command = None

    def release_grip(self) -> None:
        """Where grippers were told to go does not hold any more, as after a stop: they are where they are measured."""
        self._keeps_grip = False

    @property
    def hold(self) -> Hold | None:
        """Why the robot is held, or None while it may move."""
        return self._holding.hold

    @property
    def holds(self) -> Tally:
        """How often each reason held the robot."""
        return self._holding.counts

    @property
    def latency(self) -> Recent:
        """Seconds from asking to answer, on the event loop's side."""
        return self._asking.latency

    @property
    def asking(self) -> dict[str, object]:
        """When it asks, and how late answers are; JSON-ready."""
        return self._asking.figures(self.actions.period)

    @property
    def discarded(self) -> int:
        """Answers that came back after a hold or a stop and were thrown away."""
        return self._asking.discarded

    @property
    def is_idle(self) -> bool:
        """Whether ticks have nothing to do until ``begin``."""
        return not self.is_running and not self._holding.left

    @property
    def is_waiting(self) -> bool:
        """Whether an inference is in flight."""
        return self._asking.request is not None

    @property
    def stands_for_policy(self) -> bool:
        """Whether the robot stands because the policy is too slow; not while one answers for the first time."""
        return self.is_running and self.hold is not None and self.hold.code in TOO_SLOW

    def obstruct(self, code: str, text: str) -> None:
        """Something outside (a lost link, a compile) forbids motion until ``clear`` of the same code."""
        self._obstacles[code] = text

    def clear(self, code: str) -> None:
        """That obstacle is gone."""
        self._obstacles.pop(code, None)

    # Ticks.

    def next_deadline(self, now: float) -> float:
        """When the next tick is due: on the grid of ``begin``."""
        return self._grid.next_deadline(now)

    def tick(self, now: float) -> TickResult:
        """Do the newest tick that is due; older ones that nobody woke up for are skipped and counted."""
        due = None if self.is_idle else self._grid.take(now)
        if due is None:
            return TickResult()
        self.lateness.add(due.late)
        self.missed_ticks += due.missed
        self.ticks += 1
        if due.missed * self.period > self.pace.starved_after:
            self._holding.rest()
        if not self.is_running:
            return TickResult(command=self._hold_pose())
        obstacle = self._obstacle(now)
        if obstacle is not None:
            self._enter_hold(obstacle, now)
            self._flush()
            return TickResult(command=self._hold_pose())
        return self._move(due.deadline, now)

    def _obstacle(self, now: float) -> NotReady | None:
        for code, text in self._obstacles.items():
            return NotReady(code, text)
        return self._buffer.lacking(now)

    def _move(self, deadline: float, now: float) -> TickResult:
        taken = self.actions.take(deadline, now)
        if taken is None:
            self._wait_for_policy(now)
            return self._asked(self._hold_pose(), now)
        allowed, wanted = taken[: self.pace.width], taken[self.pace.width :]
        pose = self._buffer.pose
        assert pose is not None, "a chunk is only asked for when every joint is known"
        self._note(wanted, pose)
        if not self._trail:
            self._trail.add(self._gripping(pose))
        self.command = self.guard.limit(allowed, self._trail.newest)
        self._trail.add(self.command)
        self._holding.end()
        self._moved_at = now
        self._is_moving, self._is_dry, self._keeps_grip = True, False, True
        return self._asked(self.command, now)

    def acknowledge(self, is_taken: bool, now: float) -> None:
        """Whether a link that is up took the newest command; when not, the robot is where it was sent before."""
        if is_taken:
            self._refused_since = None
            self.clear(CHOKED)
        elif not self.is_running:
            self._holding.repeat()
        elif self._is_moving:
            self.command = self._trail.take_back()
            self._refused_since = self._refused_since or now
            if now - self._refused_since > self.pace.starved_after:
                limit = self.pace.starved_after * 1e3
                self.obstruct(CHOKED, f"the link took no command for longer than {limit:.0f} ms")
        elif CHOKED in self._obstacles:
            self._holding.left += 1  # until it is taken

    def _note(self, wanted: np.ndarray, pose: np.ndarray) -> None:
        if self.command is not None:
            # A robot that stood may have been moved by hand; a gripper that holds something is never where it was sent.
            other = self._wanted if self._is_moving else pose
            step = np.abs(wanted - self.command)
            if other is not None:
                np.minimum(step, np.abs(wanted - other), out=step)
            np.maximum(self.largest_step, step, out=self.largest_step)
        self._wanted = wanted

    def _wait_for_policy(self, now: float) -> None:
        if self.hold is not None and self.hold.code not in OF_POLICY:
            self._holding.hold = None  # the robot can be seen again; the policy has yet to answer
        if not self._is_moving:
            return
        self._trail.rest()
        if not self._is_dry and not len(self.actions):
            self._is_dry = True
            self.starvations += 1
        waited = now - self._moved_at
        if waited > self.pace.starved_after:
            latest = self.latency.percentile(50)
            known = "" if latest is None else f"; an inference takes {latest * 1e3:.0f} ms"
            text = f"no action for {waited * 1e3:.0f} ms, limit {self.pace.starved_after * 1e3:.0f} ms{known}"
            self._enter_hold(NotReady("starved", text), now)

    # Asking the policy.

    def _asked(self, command: np.ndarray | None, now: float) -> TickResult:
        if not self._asking.is_wanted(self.actions):
            return TickResult(command)
        snapshot = self._buffer.snapshot(now)
        if isinstance(snapshot, NotReady):
            return TickResult(command)
        if self.pace.overlap.sends_plan:
            _, plan, _ = self.actions.planned(snapshot.seen_at, self.pace.chunk)
            delay = self._asking.delay_expected(self.actions.period)
            snapshot = replace(snapshot, prefix=prefix_of(plan[:, : self.pace.width], delay, self.pace))
        due = self.actions.dry_at
        self._asking.ask(snapshot, now, is_moving=due is not None)
        return TickResult(command, snapshot, due)

    def hurry(self) -> None:
        """What is in flight is not wanted, another chunk is, at the next tick; what is planned is done until then."""
        self._asking.hurry()
        self._failures = 0

    def answer(self, chunk: object, now: float, *, fade: int | None = None) -> None:
        """The policy's answer to the snapshot asked with: (1, t, a). Refused whole, or brought inside the limits.

        ``fade`` says that it is the first of another policy, and how many of its actions lead over from what the one
        before planned; nothing else of that remains.
        """
        request = self._asking.close()
        if request is None:
            return
        wrong = self.guard.form(chunk)
        if wrong is not None:
            self._reject(*wrong, now)
            return
        assert isinstance(chunk, np.ndarray)
        seen_at = request.snapshot.seen_at
        motion, first = self._motion(seen_at, now)
        plan, judged = planned(chunk[0], self.actions, self.guard, motion, first, seen_at=seen_at, now=now, fade=fade)
        if judged.actions is None:
            self._reject(judged.reason or "", judged.text, now)
            return
        self._take(plan, request, now, is_fresh=fade is not None)

    def _take(self, plan: np.ndarray, request: InFlight, now: float, *, is_fresh: bool) -> None:
        self._failures = 0
        self._asking.took(request, self.actions, now)
        if is_fresh:
            self.actions.clear()
        self.chunks += 1
        late = self.actions.late
        usable = self.actions.push(plan, request.snapshot.seen_at, now)
        self.late_by_chunk.add(self.actions.late - late)
        if not usable:
            covered = self.pace.chunk / self.pace.action_rate
            age = now - request.snapshot.seen_at
            text = (
                f"the policy answers {age * 1e3:.0f} ms after its frame, its chunk covers only {covered * 1e3:.0f} ms"
            )
            # After a pause of the whole process its answer may be heard first, and what it saw is over like the frames.
            self._enter_hold(self._obstacle(now) or NotReady("policy_late", text), now)

    def _motion(self, seen_at: float, now: float) -> tuple[Motion, int]:
        """What a chunk follows, and its first action that can still be done."""
        first, share = self.actions.first_after(self._grid.next_deadline(now) - self.period, seen_at)
        first = min(first, self.pace.chunk)
        pose = self._buffer.pose
        assert pose is not None, "a chunk is only asked for when every joint is known"
        ahead = (1 - share) * self.actions.period
        return self._trail.motion(self._gripping(pose), ahead=ahead, is_between=self.actions.is_between), first

    def refuse(self, text: str, now: float) -> None:
        """The policy raised instead of answering."""
        if self._asking.close() is not None:
            self._fail("policy_failed", text, now)

    def withdraw(self) -> None:
        """The request was not carried out, and that is nobody's fault."""
        self._asking.request = None

    def _reject(self, reason: str, text: str, now: float) -> None:
        self.rejected += 1
        self.rejected_for = reason
        self._fail("policy_invalid", text, now)

    def _fail(self, code: str, text: str, now: float) -> None:
        self._failures += 1
        self._enter_hold(NotReady(code, text), now)
        self._flush()
        if self._failures >= self.pace.failures_allowed:
            text = f"{text} ({self._failures} times in a row)"
            if code == "policy_invalid":
                self.stop_wanted = (code, text)
            else:
                self.fault = text

    # Holding.

    def _enter_hold(self, lack: NotReady, now: float) -> None:
        ramp = None
        if self.hold is None and self._is_moving:
            # After a pause the arm rests already, perhaps elsewhere than where it was sent.
            is_over = now - self._moved_at > max(self.pace.starved_after, 2 * self.period)
            if self.pace.on_hold == "ramp" and not is_over:
                ramp = self._trail.ramp(self.guard.limits)
            if ramp is None:
                self._trail.clear()
        self._holding.enter(lack, now, is_moving=self._is_moving, ramp=ramp)
        self.actions.clear()
        self._is_moving = False

    def _hold_pose(self) -> np.ndarray | None:
        slower = self._holding.slowing()
        if slower is not None:
            self._trail.add(slower)
            self.command = slower
            return slower
        if not self._holding.take():
            return None
        self._trail.clear()
        pose = self._buffer.pose
        if pose is not None:
            self.command = pose = self._gripping(pose)
        return pose

    def _gripping(self, pose: np.ndarray) -> np.ndarray:
        """Where a robot stays that is held at this measured pose (a,), and where its next motion begins.

        A gripper that holds something is not where it was told to be, and presses by the difference: told to be where
        it is measured, it presses no more, and what it holds falls.
        """
        if not self._keeps_grip or self.command is None:
            return pose
        return np.where(self._buffer.joints.grippers, self.command, pose)

    def _flush(self) -> None:
        """Nothing planned before this moment may still move the robot."""
        self.actions.clear()
        self._asking.part()
        self._is_moving = self._is_dry = False
        self._wanted = None
