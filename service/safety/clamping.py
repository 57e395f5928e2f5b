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
        # Two rows: towards the high end, towards the low one.
        self._sign = np.array([[1.0], [-1.0]])
        self._ends = np.stack([self.high, -self.low])
        self._braking = 0.5 / self.acceleration

    def clamp(self, chunk: np.ndarray, position: np.ndarray, speed: np.ndarray, acceleration: np.ndarray) -> np.ndarray:
        """(t, a) float64 actions that follow a motion at this position, speed and acceleration (per action)."""
        targets = np.clip(chunk, self.low, self.high)
        if self.is_smooth:
            return self._smooth(targets, position, speed, acceleration)
        most, least = self.speed, -self.speed
        change, place = np.empty(len(position)), position
        for row in targets:
            np.subtract(row, place, out=change)
            np.minimum(change, most, out=change)
            np.maximum(change, least, out=change)
            place = np.add(place, change, out=row)
        return targets

    def _smooth(
        self, targets: np.ndarray, position: np.ndarray, speed: np.ndarray, acceleration: np.ndarray
    ) -> np.ndarray:
        place, before, bent = position, speed.astype(np.float64), acceleration.astype(np.float64)
        has_jerk = bool((self.jerk < FAR).any())
        most, least = self.acceleration, -self.acceleration
        change, room, brake = np.empty(len(place)), np.empty((2, len(place))), np.empty((2, len(place)))
        for row in targets:
            np.subtract(row, place, out=change)
            change -= before  # how the speed changes, from here on
            if has_jerk:
                np.minimum(change, bent + self.jerk, out=change)
                np.maximum(change, bent - self.jerk, out=change)
            np.minimum(change, most, out=change)
            np.maximum(change, least, out=change)
            change += before
            # How fast it may go to still come to rest at the end of the range: v = sqrt(b^2 + 2 b room) - b, written
            # so that it is right for no limit too. Krauss, Phys. Rev. E 55 (1997) 5597, eq. 4, for a lead at rest.
            np.multiply(self._sign, place, out=room)
            np.subtract(self._ends, room, out=room)
            np.maximum(room, 0.0, out=room)
            np.multiply(room, self._braking, out=brake)
            brake += 0.25
            np.sqrt(brake, out=brake)
            brake += 0.5
            room /= brake
            np.minimum(room, self.speed, out=room)
            np.minimum(change, room[0], out=change)
            np.negative(room[1], out=room[1])
            np.maximum(change, room[1], out=change)
            np.subtract(change, before, out=bent)
            before[:] = change
            place = np.add(place, change, out=row)
        return targets
