"""Holds and ramps of one robot, and the history of its commands that they start from."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from service.control.guard import Motion
from service.control.limits import MotionLimits
from service.control.observation_buffer import NotReady
from service.stats import Tally

# Seconds from the largest speed to rest where no acceleration is given, and the longest that a ramp may take.
USUAL_RAMP, LONGEST_RAMP = 0.25, 0.5


class Ramp:
    """Commands that slow a motion down in its own direction; all joints come to rest at the same time."""

    def __init__(self, limits: MotionLimits, position: np.ndarray, velocity: np.ndarray, rate: float):
        """Begin at a command (a,) that moved with this velocity (a,), in units per second."""
        fastest = np.minimum(limits.velocity, limits.step * rate)
        velocity = np.clip(velocity, -fastest, fastest)
        braking = np.where(np.isfinite(limits.acceleration), limits.acceleration, fastest / USUAL_RAMP)
        needed = np.where(np.isfinite(braking), np.abs(velocity) / braking, np.where(velocity == 0, 0.0, USUAL_RAMP))
        self._ticks = int(np.ceil(min(float(needed.max(initial=0.0)), LONGEST_RAMP) * rate))
        self._limits = limits
        self._position = position.astype(np.float64)
        self._change = velocity / rate
        self._done = 0

    def next(self) -> np.ndarray | None:
        """The command of this tick (a,) float32, or None when the arm has come to rest."""
        self._done += 1
        if self._done > self._ticks:
            return None
        aim = self._position + self._change * (1 - self._done / (self._ticks + 1))
        # Not further out of its range than it is: a joint may have been pushed there.
        low, high = np.minimum(self._limits.low, self._position), np.maximum(self._limits.high, self._position)
        self._position = np.clip(aim, low, high)
        return self._position.astype(np.float32)


@dataclass(frozen=True)
class Hold:
    """Reason for which the robot is held.

    Attributes:
        code: stable, e.g. ``camera_stale``.
        text: for people.
        since: monotonic time.
    """

    code: str
    text: str
    since: float


# A stop that the link does not take is sent again, at most so many times as often as a hold is repeated.
STOP_RETRIES = 25

# Holds that end when the policy gives a usable chunk; all others end when what they name is back.
OF_POLICY = frozenset({"policy_invalid", "policy_failed", "policy_late", "starved"})
# Holds that say that the policy is too slow; one may give way to another while the robot stands all the time.
TOO_SLOW = frozenset({"inference_slow", "action_stale", "policy_late", "starved"})


class HoldState:
    """Whether and why one robot is held, and what is still to be sent for it.

    Attributes:
        hold: why it is held, or None while it may move.
        counts: how often each reason held it.
        repeats_left: how often the measured pose is still to be sent.
    """

    def __init__(self, repeats: int):
        self.hold: Hold | None = None
        self.counts = Tally()
        self.repeats_left = 0
        self._repeats = repeats
        self._retries = 0
        self._ramp: Ramp | None = None

    def enter(self, reason: NotReady, now: float, *, is_moving: bool, ramp: Ramp | None = None) -> None:
        """Hold the robot for this reason; the first one decides how, later ones only say why."""
        if self.hold is None and is_moving:
            # Of a robot that does not move, a hold that is not over yet goes on: its reason may come and go.
            self.repeats_left, self._ramp = self._repeats, ramp
        if self.hold is None or self.hold.code != reason.code:
            self.counts.add(reason.code)
            self.hold = Hold(reason.code, reason.text, now)
        else:
            self.hold = Hold(reason.code, reason.text, self.hold.since)

    def enter_stop(self, is_sent: bool) -> None:
        """Hold the robot without a reason of its own: a stop. Without ``is_sent`` no pose is sent."""
        self.hold, self._ramp = None, None
        self.repeats_left = self._repeats if is_sent else 0
        self._retries = STOP_RETRIES * self._repeats

    def retry(self) -> None:
        """Send a stop that the link did not take once more, unless that goes on for too long."""
        if self._retries:
            self._retries -= 1
            self.repeats_left += 1

    def end(self) -> None:
        """Let the robot move again."""
        self.hold, self._ramp, self.repeats_left = None, None, 0

    def end_ramp(self) -> None:
        """Drop the ramp of a robot that came to rest meanwhile: there is nothing to slow down any more."""
        self._ramp = None

    def next_of_ramp(self) -> np.ndarray | None:
        """The next command of a ramp (a,), or None when there is none, or no more."""
        command = self._ramp.next() if self._ramp else None
        if command is None:
            self._ramp = None
        return command

    def take_repeat(self) -> bool:
        """Whether the measured pose is to be sent now; counts it as sent."""
        if not self.repeats_left:
            return False
        self.repeats_left -= 1
        return True


class CommandHistory:
    """The newest three commands of a motion, or the pose that it began from; empty when the robot stands."""

    def __init__(self, rate: float):
        """``rate``: commands per second."""
        self._rate = rate
        self._commands: deque[np.ndarray] = deque(maxlen=3)

    def __bool__(self) -> bool:
        return bool(self._commands)

    @property
    def newest(self) -> np.ndarray:
        """(a,) the last command, or the pose that the motion begins from."""
        return self._commands[-1]

    def add(self, command: np.ndarray) -> None:
        """Note a command (a,) that is sent."""
        self._commands.append(command)

    def rest(self) -> None:
        """Note a tick without a command: the robot goes where it was sent and rests there."""
        if self._commands:
            self._commands.append(self._commands[-1])

    def take_back(self) -> np.ndarray:
        """Take back the newest command, which the link did not take; returns the one before (a,)."""
        self._commands[-1] = self._commands[-2]
        return self._commands[-1]

    def clear(self) -> None:
        """Forget all commands: the robot stands."""
        self._commands.clear()

    def motion(self, pose: np.ndarray, *, ahead: float, is_between: bool) -> Motion:
        """Motion that a chunk follows which is done from now on.

        Args:
            pose: (a,) where a robot that stands begins.
            ahead: seconds that the newest command is past the due time of the action before the chunk's first.
            is_between: whether commands are points between two actions: their bends are no matter of the policy then.
        """
        if not self._commands:
            rest = np.zeros(len(pose))
            return Motion(pose, rest, rest)
        newest, older = self.newest, self._before
        oldest = self._commands[0]
        velocity = (newest - older).astype(np.float64) * self._rate
        bend = None if is_between else (newest - 2 * older + oldest).astype(np.float64) * self._rate**2
        # On the grid of actions: where it was when the action before the first one was due.
        return Motion(newest - velocity * ahead, velocity, bend, is_at_rest=False)

    def ramp(self, limits: MotionLimits) -> Ramp | None:
        """Ramp from the newest commands to a stop; None when the robot has no speed."""
        if len(self._commands) < 2:
            return None
        velocity = (self.newest - self._before).astype(np.float64) * self._rate
        return Ramp(limits, self.newest, velocity, self._rate)

    @property
    def _before(self) -> np.ndarray:
        return self._commands[-2] if len(self._commands) > 1 else self._commands[-1]
