"""One robot's control: what to send at each tick, when to ask the policy, when to hold."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from service.actions import ActionQueue, EnsembledActions
from service.buffer import Buffer, Lack, Snapshot
from service.stats import Recent, Tally

# An absolute grid is computed with floats: a tick may come this much early and still be that tick.
_EARLY = 1e-6


@dataclass(frozen=True)
class Pace:
    """How fast, and how patient.

    Attributes:
        rate: ticks per second.
        action_rate: actions per second that the policy's chunks are meant for.
        action_steps: actions of a chunk to do before the next one takes over.
        chunk: steps of one chunk.
        width: values of one action.
        ensemble: LeRobot's temporal ensembling coefficient, or None for off.
        hold_repeats: how often a hold sends the measured pose.
        starved_after: seconds without an action after which waiting for the policy is a hold.
        failures_allowed: failed inferences in a row that end in an error.
        samples: how many of the newest samples percentiles are taken of.
    """

    rate: float
    action_rate: float
    action_steps: int
    chunk: int
    width: int
    ensemble: float | None = None
    hold_repeats: int = 4
    starved_after: float = 0.3
    failures_allowed: int = 3
    samples: int = 2048


@dataclass(frozen=True)
class Hold:
    """Why the robot is held.

    Attributes:
        code: stable, e.g. ``camera_stale``.
        text: for people.
        since: monotonic time.
    """

    code: str
    text: str
    since: float


@dataclass(frozen=True)
class Step:
    """What one tick asks for: a command to send now (a,), and a snapshot to infer from."""

    command: np.ndarray | None = None
    ask: Snapshot | None = None


@dataclass(frozen=True)
class InFlight:
    """An inference that was asked for: from which snapshot, when, and for which stretch of motion."""

    snapshot: Snapshot
    asked_at: float
    stretch: int


class Control:
    """Decides; never sleeps, sends or computes. Every method takes the time.

    Attributes:
        hold: why the robot is held, or None while it may move.
        fault: set when the policy failed too often in a row; the session ends in an error then.
        stop_wanted: code and text of why the robot has to be stopped until somebody resets it.
        is_running: between ``begin`` and ``halt``.
        command: the last command given out (a,), or None.
        starvations: how often the queue ran dry in the middle of a motion.
        missed_ticks: ticks that were skipped because a wake-up came too late for them.
        ticks, chunks: how many there were.
        rejected: chunks refused because they were not finite or not of the right shape.
        discarded: answers that came back after a hold or a stop and were thrown away.
        holds: how often each reason held the robot.
        largest_step: (a,) the largest change of each joint's command from one tick to the next since it was last
            set to zeros. After a pause, of what was commanded and where the robot is the nearer one counts.
        lateness: seconds from a tick's deadline to its run.
        latency: seconds from asking to answer, on the event loop's side.
        late_by_chunk: how many actions of each of the newest chunks were over when it came.
    """

    def __init__(self, buffer: Buffer, pace: Pace):
        self.pace = pace
        self.period = 1 / pace.rate
        self.hold: Hold | None = None
        self.fault: str | None = None
        self.stop_wanted: tuple[str, str] | None = None
        self.is_running = False
        self.command: np.ndarray | None = None
        self.largest_step = np.zeros(pace.width, np.float32)
        self.starvations = self.missed_ticks = self.ticks = self.chunks = 0
        self.rejected = self.discarded = 0
        self.holds = Tally()
        self.lateness = Recent(pace.samples)
        self.latency = Recent(32)
        self.late_by_chunk = Recent(64)
        action_period = 1 / pace.action_rate
        self.actions: ActionQueue = (
            ActionQueue(action_period, self.period)
            if pace.ensemble is None
            else EnsembledActions(action_period, pace.ensemble, self.period)
        )
        self._buffer = buffer
        self._anchor = 0.0
        self._index = -1
        self._request: InFlight | None = None
        self._is_hurried = False
        self._stretch = 0
        self._usual_latency = 0.0
        self._failures = 0
        self._is_moving = False
        self._is_dry = False
        self._moved_at = 0.0
        self._holds_left = 0
        self._obstacles: dict[str, str] = {}

    # What happens to a session.

    def begin(self, now: float) -> None:
        """Start, or start anew: the first tick is now, and nothing of an earlier motion is left."""
        self._anchor, self._index = now, -1
        self._flush()
        self._holds_left = 0
        self._failures = 0
        self.fault = self.stop_wanted = None
        self.hold = None
        self.is_running = True

    def halt(self, now: float, *, always_hold: bool = False) -> Step:
        """Stop. The step is to be done at once; the ticks that follow repeat the hold.

        A robot that was never commanded is not told to hold, unless ``always_hold``.
        """
        if not self.is_running and not self._holds_left:
            self._anchor, self._index = now, 0
        self.is_running = False
        self.hold = None
        self._flush()
        self._holds_left = self.pace.hold_repeats if always_hold or self.command is not None else 0
        return Step(command=self._hold_pose())

    @property
    def is_idle(self) -> bool:
        """Whether ticks have nothing to do until ``begin``."""
        return not self.is_running and not self._holds_left

    @property
    def is_waiting(self) -> bool:
        """Whether an inference is in flight."""
        return self._request is not None

    def obstruct(self, code: str, text: str) -> None:
        """Something outside (a lost link, a compile) forbids motion until ``clear`` of the same code."""
        self._obstacles[code] = text

    def clear(self, code: str) -> None:
        """That obstacle is gone."""
        self._obstacles.pop(code, None)

    # The grid.

    def next_deadline(self, now: float) -> float:
        """When the next tick is due: on the grid of ``begin``, so that lateness never adds up."""
        return self._anchor + max(self._index + 1, self._grid_index(now)) * self.period

    def _grid_index(self, now: float) -> int:
        return math.floor((now - self._anchor) / self.period + _EARLY)

    def tick(self, now: float) -> Step:
        """Do the newest tick that is due; older ones that nobody woke up for are skipped and counted."""
        index = self._grid_index(now)
        if index <= self._index or self.is_idle:
            return Step()
        deadline = self._anchor + index * self.period
        # Late against the tick that should have come next, not only against the newest.
        self.lateness.add(max(now - self._anchor - (self._index + 1) * self.period, 0.0))
        self.missed_ticks += index - self._index - 1
        self._index = index
        self.ticks += 1
        if not self.is_running:
            return Step(command=self._hold_pose())
        obstacle = self._obstacle(now)
        if obstacle is not None:
            self._enter_hold(obstacle, now)
            self._flush()
            return Step(command=self._hold_pose())
        return self._move(deadline, now)

    def _obstacle(self, now: float) -> Lack | None:
        for code, text in self._obstacles.items():
            return Lack(code, text)
        return self._buffer.lacking(now)

    def _move(self, deadline: float, now: float) -> Step:
        action = self.actions.take(deadline, now)
        if action is not None:
            self.hold = None
            if self.command is not None:
                np.maximum(self.largest_step, self._step_to(action, self.command), out=self.largest_step)
            self.command, self._moved_at = action, now
            self._is_moving, self._is_dry, self._holds_left = True, False, 0
            return Step(command=action, ask=self._ask(now))
        self._wait_for_policy(now)
        return Step(command=self._hold_pose(), ask=self._ask(now))

    def _step_to(self, action: np.ndarray, command: np.ndarray) -> np.ndarray:
        step, pose = np.abs(action - command), self._buffer.pose
        # A robot that stood may have been moved by hand; a gripper that holds something is never where it was sent.
        return step if self._is_moving or pose is None else np.minimum(step, np.abs(action - pose))

    def _wait_for_policy(self, now: float) -> None:
        if self.hold is not None and self.hold.code not in _OF_POLICY:
            self.hold = None  # the robot can be seen again; the policy has yet to answer
        if not self._is_moving:
            return
        if not self._is_dry and not len(self.actions):
            self._is_dry = True
            self.starvations += 1
        waited = now - self._moved_at
        if waited > self.pace.starved_after:
            latest = self.latency.percentile(50)
            known = "" if latest is None else f"; an inference takes {latest * 1e3:.0f} ms"
            text = f"no action for {waited * 1e3:.0f} ms, limit {self.pace.starved_after * 1e3:.0f} ms{known}"
            self._enter_hold(Lack("starved", text), now)

    # Asking the policy.

    def _ask(self, now: float) -> Snapshot | None:
        if self._request is not None or not self._is_chunk_wanted():
            return None
        snapshot = self._buffer.snapshot(now)
        if isinstance(snapshot, Lack):
            return None
        self._request = InFlight(snapshot, now, self._stretch)
        self._is_hurried = False
        return snapshot

    def hurry(self) -> None:
        """What is in flight is not wanted, another chunk is, at the next tick; what is planned is done until then."""
        self._stretch += 1
        self._failures = 0
        self._is_hurried = True

    def _is_chunk_wanted(self) -> bool:
        if self.pace.ensemble is not None or self._is_hurried:
            return True
        delay = self._usual_latency / self.actions.period
        # One action of margin: an answer that comes during a tick is used at the next.
        is_running_dry = len(self.actions) <= math.ceil(delay) + 1
        return is_running_dry or self.actions.consumed + math.floor(delay) >= self.pace.action_steps

    def answer(self, chunk: object, now: float, *, fade: int | None = None) -> None:
        """The policy's answer to the snapshot asked with: (1, t, a). Refused whole when anything of it is wrong.

        ``fade`` says that it is the first of another policy, and how many of its actions lead over from what the one
        before planned; nothing else of that remains.
        """
        request = self._close_request()
        if request is None:
            return
        wrong = self._fault_of(chunk)
        if wrong is not None:
            self.rejected += 1
            self._fail("policy_invalid", wrong, now)
            return
        assert isinstance(chunk, np.ndarray)
        self._failures = 0
        self.latency.add(now - request.asked_at)
        self._usual_latency = self.latency.percentile(90) or 0.0
        self.chunks += 1
        seen_at, actions = request.snapshot.seen_at, chunk[0]
        if fade is not None:
            actions = self.actions.faded(actions, seen_at, now, fade)
            self.actions.clear()
        late = self.actions.late
        usable = self.actions.push(actions, seen_at, now)
        self.late_by_chunk.add(self.actions.late - late)
        if not usable:
            covered = self.pace.chunk / self.pace.action_rate
            age = now - request.snapshot.seen_at
            text = (
                f"the policy answers {age * 1e3:.0f} ms after its frame, its chunk covers only {covered * 1e3:.0f} ms"
            )
            self._enter_hold(Lack("policy_late", text), now)

    def refuse(self, text: str, now: float) -> None:
        """The policy raised instead of answering."""
        if self._close_request() is not None:
            self._fail("policy_failed", text, now)

    def withdraw(self) -> None:
        """The request was not carried out, and that is nobody's fault."""
        self._request = None

    def _close_request(self) -> InFlight | None:
        request, self._request = self._request, None
        if request is not None and request.stretch != self._stretch:
            # Its frames are from before a hold or a stop.
            self.discarded += 1
            return None
        return request

    def _fault_of(self, chunk: object) -> str | None:
        wanted = (1, self.pace.chunk, self.pace.width)
        if not isinstance(chunk, np.ndarray):
            return f"the policy returned a {type(chunk).__name__}, wanted an array {wanted}"
        if chunk.shape != wanted or chunk.dtype.kind != "f":
            return f"the policy returned {chunk.dtype} {chunk.shape}, wanted floats {wanted}"
        if not np.isfinite(chunk).all():
            return f"the policy returned {int((~np.isfinite(chunk)).sum())} values that are not finite"
        return None

    def _fail(self, code: str, text: str, now: float) -> None:
        self._failures += 1
        self._enter_hold(Lack(code, text), now)
        self._flush()
        if self._failures >= self.pace.failures_allowed:
            self.fault = f"{text} ({self._failures} times in a row)"

    # Holding.

    def _enter_hold(self, lack: Lack, now: float) -> None:
        if self.hold is None:
            self._holds_left = self.pace.hold_repeats if self._is_moving else 0
        self.actions.clear()
        self._is_moving = False
        if self.hold is None or self.hold.code != lack.code:
            self.holds.add(lack.code)
            self.hold = Hold(lack.code, lack.text, now)
        else:
            self.hold = Hold(lack.code, lack.text, self.hold.since)

    def _hold_pose(self) -> np.ndarray | None:
        if not self._holds_left:
            return None
        pose = self._buffer.pose
        self._holds_left -= 1
        if pose is not None:
            self.command = pose
        return pose

    def _flush(self) -> None:
        """Nothing planned before this moment may still move the robot."""
        self.actions.clear()
        self._stretch += 1
        self._is_moving = self._is_dry = False


# Holds that end when the policy gives a usable chunk; all others end when what they name is back.
_OF_POLICY = frozenset({"policy_invalid", "policy_failed", "policy_late", "starved"})

# Rounds of the event loop from a readable socket to the session that hears what came: reading, waking, parsing.
_ROUNDS = 8


async def sleep_until(deadline: float) -> None:
    """Sleep on the running loop; never wakes early by more than the grid forgives."""
    # A loop because timers are coarse: uvloop's count in whole milliseconds of a cached clock and may be early.
    while (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left)


class ControlLoop:
    """The only loop that sleeps: absolute deadlines, and what a tick decides is done at once."""

    def __init__(
        self,
        control: Control,
        act: Callable[[Step], None],
        *,
        watch: Callable[[float], None] = lambda now: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = sleep_until,
    ):
        """``watch`` is given the time before each tick: what it finds counts for that tick already."""
        self._control = control
        self._act = act
        self._watch = watch
        self._clock = clock
        self._sleep = sleep
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    def wake(self) -> None:
        """There is something to do again."""
        self._idle.clear()
        self._wake.set()

    async def idle(self) -> None:
        """Wait until there is nothing more to send."""
        await self._idle.wait()

    async def run(self) -> None:
        """Tick until cancelled."""
        before = None
        while True:
            if self._control.is_idle:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                before = None
                continue
            await self._sleep(self._control.next_deadline(self._clock()))
            now = self._clock()
            if before is not None and now - before > 2 * self._control.period:
                # The loop was blocked: what came meanwhile, a stop above all, is heard before anything is sent.
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)
                now = self._clock()
            before = now
            self._watch(now)
            self._act(self._control.tick(now))
