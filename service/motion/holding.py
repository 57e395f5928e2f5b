"""Holding a robot: why, since when, and what it is told meanwhile. HOLD is at once, RAMP slows it down before."""

from dataclasses import dataclass

import numpy as np

from service.motion.buffer import Lack
from service.safety.ramp import Ramp
from service.stats import Tally


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

    def enter(self, lack: Lack, now: float, *, is_moving: bool, ramp: Ramp | None = None) -> None:
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
