"""Slowing down to a standstill: a hold that does not stop a moving arm in one tick."""

import numpy as np

from service.safety.limits import MotionLimits

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
