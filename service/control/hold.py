"""Holds and ramps, and the command history they start from."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from service.control.guard import Motion
from service.control.limits import MotionLimits
from service.control.observation_buffer import NotReady
from service.stats import Tally

# From the largest speed to rest where no acceleration is given, and the longest that a ramp may take.
USUAL, LONGEST = 0.25, 0.5


class Ramp:
    """Commands that go on in the direction of the motion, ever slower; every joint comes to rest at the same time."""

    def __init__(self, limits: MotionLimits, position: np.ndarray, velocity: np.ndarray, rate: float):
        """From a command (a,) that moved with this velocity (a,), in units per second."""
        fastest = np.minimum(limits.velocity, limits.step * rate)
        velocity = np.clip(velocity, -fastest, fastest)
        braking = np.where(np.isfinite(limits.acceleration), limits.acceleration, fastest / USUAL)
        needed = np.where(np.isfinite(braking), np.abs(velocity) / braking, np.where(velocity == 0, 0.0, USUAL))
        self._ticks = int(np.ceil(min(float(needed.max(initial=0.0)), LONGEST) * rate))
        self._limits = limits
        self._position = position.astype(np.float64)
        self._change = velocity / rate
        self._done = 0

    def next(self) -> np.ndarray | None:
        """The command of this tick (a,) float32, or None when the arm was told to stand."""
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
    """Why the robot is held.

    Attributes:
        code: stable, e.g. ``camera_stale``.
        text: for people.
        since: monotonic time.
    """

    code: str
    text: str
    since: float


# A stop that the link does not take is tried so many times as often as it would be repeated.
TRIES = 25

# Holds that end when the policy gives a usable chunk; all others end when what they name is back.
OF_POLICY = frozenset({"policy_invalid", "policy_failed", "policy_late", "starved"})
# Holds that say that the policy is too slow; one may give way to another while the robot stands all the time.
TOO_SLOW = frozenset({"inference_slow", "action_stale", "policy_late", "starved"})


class Holding:
    """One robot's.

    Attributes:
        hold: why it is held, or None while it may move.
        counts: how often each reason held it.
        left: how often it will still be sent the measured pose.
    """

    def __init__(self, repeats: int):
        self.hold: Hold | None = None
        self.counts = Tally()
        self.left = 0
        self._repeats = repeats
        self._tries = 0
        self._ramp: Ramp | None = None

    def enter(self, lack: NotReady, now: float, *, is_moving: bool, ramp: Ramp | None = None) -> None:
        """Hold the robot for this; the first reason decides how, later ones only say why."""
        if self.hold is None and is_moving:
            # Of a robot that does not move, a hold that is not over yet goes on: its reason may come and go.
            self.left, self._ramp = self._repeats, ramp
        if self.hold is None or self.hold.code != lack.code:
            self.counts.add(lack.code)
            self.hold = Hold(lack.code, lack.text, now)
        else:
            self.hold = Hold(lack.code, lack.text, self.hold.since)

    def at_once(self, is_told: bool) -> None:
        """Hold it without a reason of its own: a stop. Without ``is_told`` nothing is sent."""
        self.hold, self._ramp = None, None
        self.left = self._repeats if is_told else 0
        self._tries = TRIES * self._repeats

    def repeat(self) -> None:
        """It did not get through: once more, unless that goes on for too long."""
        if self._tries:
            self._tries -= 1
            self.left += 1

    def end(self) -> None:
        """It moves."""
        self.hold, self._ramp, self.left = None, None, 0

    def rest(self) -> None:
        """It stood still for a while without being told: there is nothing to slow down any more."""
        self._ramp = None

    def slowing(self) -> np.ndarray | None:
        """The next command of a ramp (a,), or None when there is none, or no more."""
        command = self._ramp.next() if self._ramp else None
        if command is None:
            self._ramp = None
        return command

    def take(self) -> bool:
        """Whether the measured pose is to be sent now."""
        if not self.left:
            return False
        self.left -= 1
        return True


class CommandHistory:
    """At most three commands, before them the pose that the motion began from; empty when the robot stands."""

    def __init__(self, rate: float):
        """``rate``: commands per second."""
        self._rate = rate
        self._commands: deque[np.ndarray] = deque(maxlen=3)

    def __bool__(self) -> bool:
        return bool(self._commands)

    @property
    def newest(self) -> np.ndarray:
        """(a,) the last command, or where the motion begins."""
        return self._commands[-1]

    def add(self, command: np.ndarray) -> None:
        """It is sent."""
        self._commands.append(command)

    def rest(self) -> None:
        """A tick without a command: it goes where it was sent and rests there."""
        if self._commands:
            self._commands.append(self._commands[-1])

    def take_back(self) -> np.ndarray:
        """The newest command was not taken: the robot is where it was sent before, (a,)."""
        self._commands[-1] = self._commands[-2]
        return self._commands[-1]

    def clear(self) -> None:
        """The robot stands."""
        self._commands.clear()

    def motion(self, pose: np.ndarray, *, ahead: float, is_between: bool) -> Motion:
        """What a chunk follows that is done from now on.

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
        """How it is slowed down to a stop; None when there is no speed to lose."""
        if len(self._commands) < 2:
            return None
        velocity = (self.newest - self._before).astype(np.float64) * self._rate
        return Ramp(limits, self.newest, velocity, self._rate)

    @property
    def _before(self) -> np.ndarray:
        return self._commands[-2] if len(self._commands) > 1 else self._commands[-1]
