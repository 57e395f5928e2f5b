"""The newest commands of one motion: where it is, how fast it goes, and what a chunk has to follow."""

from collections import deque

import numpy as np

from service.safety.guard import Motion
from service.safety.limits import MotionLimits
from service.safety.ramp import Ramp


class Trail:
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
