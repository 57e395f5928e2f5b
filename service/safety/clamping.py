"""The nearest motion to a planned one that stays inside the limits, action by action."""

import numpy as np

# Stands for "no limit" where a sum with infinity would be no number.
FAR = 1e30


class Clamping:
    """Limits per action, ready for the loop over a chunk.

    Position, step and velocity always hold in what comes out. Acceleration holds as long as the motion before left
    room for it: a joint is slowed down in time to come to rest at the end of its range. Jerk is brought as near as
    those before it let it.
    """

    def __init__(
        self, low: np.ndarray, high: np.ndarray, speed: np.ndarray, acceleration: np.ndarray, jerk: np.ndarray
    ):
        """Arrays (a,); speed, acceleration and jerk per action and its powers, infinite for none."""
        self.low, self.high = np.maximum(low, -FAR), np.minimum(high, FAR)
        self.speed = np.minimum(speed, FAR)
        self.acceleration, self.jerk = np.minimum(acceleration, FAR), np.minimum(jerk, FAR)
        self.is_smooth = bool((np.minimum(acceleration, jerk) < FAR).any())
        # Braking in no time, where nobody limits it; infinity would be no number in the sums below.
        widest = np.where(self.speed < FAR, self.speed, np.minimum(self.high - self.low, 1e6))
        self._brake = np.minimum(self.acceleration, 1e3 * widest)

    def clamp(self, chunk: np.ndarray, position: np.ndarray, speed: np.ndarray, acceleration: np.ndarray) -> np.ndarray:
        """(t, a) float64 actions that follow a motion at this position, speed and acceleration (per action)."""
        targets = np.clip(chunk, self.low, self.high)
        if self.is_smooth:
            return self._smooth(targets, position, speed, acceleration)
        most, least = self.speed, -self.speed
        change, place = np.empty(len(position)), position
        for row in targets:
            np.subtract(row, place, change)
            np.minimum(change, most, out=change)
            np.maximum(change, least, out=change)
            place = np.add(place, change, row)
        return targets

    def _smooth(
        self, targets: np.ndarray, position: np.ndarray, speed: np.ndarray, acceleration: np.ndarray
    ) -> np.ndarray:
        place, before, bent, change = position, speed.copy(), acceleration.copy(), np.empty(len(position))
        has_jerk, jerk = bool((self.jerk < FAR).any()), self.jerk
        harder, softer = self.acceleration, -self.acceleration
        fastest, above, below = self.speed, np.empty(len(place)), np.empty(len(place))
        # How fast it may go to still come to rest at the end of the range: v = sqrt(b^2 + 2 b room) - b, for both ends.
        # Krauss, Phys. Rev. E 55 (1997) 5597, eq. 4, for a leader at rest. What is kept is the radicand; a joint that
        # is outside has no room.
        brake = self._brake
        twice = 2 * brake
        top = brake**2 + twice * np.maximum(self.high - place, 0.0)
        bottom = brake**2 + twice * np.maximum(place - self.low, 0.0)
        for row in targets:
            np.subtract(row, place, change)
            np.subtract(change, before, change)  # how the speed changes, from here on
            if has_jerk:
                np.minimum(change, np.add(bent, jerk, above), out=change)
                np.maximum(change, np.subtract(bent, jerk, below), out=change)
            np.minimum(change, harder, out=change)
            np.maximum(change, softer, out=change)
            np.add(change, before, change)
            np.subtract(np.sqrt(top, above), brake, above)
            np.minimum(change, np.minimum(above, fastest, out=above), out=change)
            np.subtract(brake, np.sqrt(bottom, below), below)
            np.maximum(change, np.maximum(below, -fastest, out=below), out=change)
            np.multiply(change, twice, above)
            np.subtract(top, above, top)
            np.add(bottom, above, bottom)
            np.subtract(change, before, bent)
            before, change = change, before
            place = np.add(place, before, row)
        return targets
