"""Action guard: checks whole chunks and limits every command, by the motion of the earlier commands.

A chunk with another shape, or with values that are not finite or far outside the ranges, is refused in every mode. For
other violations (position, step, velocity, acceleration, jerk, seam), the mode selects clamping or refusal.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from service.control.limits import REFUSAL_SLACK, MotionLimits
from service.stats import Tally

UNLIMITED = 1e30  # Replaces infinity, whose differences are NaN.


class ChunkClamp:
    """Clamps chunks to limits per action.

    The result always keeps position, step and velocity. It keeps acceleration if the earlier motion leaves room to
    brake before the end of the range, and jerk if the other limits allow it.
    """

    def __init__(
        self, low: np.ndarray, high: np.ndarray, speed: np.ndarray, acceleration: np.ndarray, jerk: np.ndarray
    ):
        """Create it from arrays (a,); speed, acceleration and jerk are per action and its powers, or infinite."""
        self.low, self.high = np.maximum(low, -UNLIMITED), np.minimum(high, UNLIMITED)
        self.speed = np.minimum(speed, UNLIMITED)
        self.acceleration, self.jerk = np.minimum(acceleration, UNLIMITED), np.minimum(jerk, UNLIMITED)
        self.is_smooth = bool((np.minimum(acceleration, jerk) < UNLIMITED).any())
        # A joint without a limit of braking can stop at once; infinity would make the sums below NaN.
        widest = np.where(self.speed < UNLIMITED, self.speed, np.minimum(self.high - self.low, 1e6))
        self._brake = np.minimum(self.acceleration, 1e3 * widest)

    def clamp_chunk(
        self, chunk: np.ndarray, position: np.ndarray, speed: np.ndarray, acceleration: np.ndarray
    ) -> np.ndarray:
        """Return (t, a) float64 actions that follow a motion at this position, speed and acceleration (per action)."""
        targets = np.clip(chunk, self.low, self.high)
        if self.is_smooth:
            return self._smooth(targets, position, speed, acceleration)
        most, least = self.speed, -self.speed
        change, current = np.empty(len(position)), position
        for row in targets:
            np.subtract(row, current, change)
            np.minimum(change, most, out=change)
            np.maximum(change, least, out=change)
            current = np.add(current, change, row)
        return targets

    def _smooth(
        self, targets: np.ndarray, position: np.ndarray, speed: np.ndarray, acceleration: np.ndarray
    ) -> np.ndarray:
        current, before, bent, change = position, speed.copy(), acceleration.copy(), np.empty(len(position))
        has_jerk, jerk = bool((self.jerk < UNLIMITED).any()), self.jerk
        harder, softer = self.acceleration, -self.acceleration
        fastest, above, below = self.speed, np.empty(len(current)), np.empty(len(current))
        # Largest speed from which a joint stops before the end of its range: v = sqrt(b^2 + 2 b room) - b, for both
        # ends. Source: Krauss, Phys. Rev. E 55 (1997) 5597, eq. 4, for a leader at rest. ``top`` and ``bottom`` are
        # the radicands; a joint outside of its range has no room.
        brake = self._brake
        twice = 2 * brake
        top = brake**2 + twice * np.maximum(self.high - current, 0.0)
        bottom = brake**2 + twice * np.maximum(current - self.low, 0.0)
        for row in targets:
            np.subtract(row, current, change)
            np.subtract(change, before, change)  # From here on, the change of the speed.
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
            current = np.add(current, before, row)
        return targets


_RELATIVE_TOLERANCE, _ROUNDING_ERROR = 1e-4, 4e-7  # Errors of rounding to float32 are allowed.
_FLOAT32_MAX = np.finfo(np.float32).max  # Commands are float32.


@dataclass(frozen=True)
class Motion:
    """Motion of the commands (a,) before a chunk, in units and seconds.

    Attributes:
        position: newest command, or the measured pose of a resting robot.
        acceleration: None if unknown.
        is_at_rest: whether no command was sent since a start or a hold.
        pose: measured pose, which may be outside of the limits; None if it equals ``position``.
    """

    position: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray | None = None
    is_at_rest: bool = True
    pose: np.ndarray | None = None


# Seconds from the largest speed to rest where no acceleration is given, and the longest that a ramp may take.
USUAL_RAMP, LONGEST_RAMP = 0.25, 0.5


class Ramp:
    """Commands that slow a motion down in its own direction; all joints come to rest at the same time."""

    def __init__(self, limits: MotionLimits, position: np.ndarray, velocity: np.ndarray, rate: float):
        """Begin at a command (a,) with this velocity (a,), in units per second."""
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
        """Return the command of this tick (a,) float32, or None when the arm rests."""
        self._done += 1
        if self._done > self._ticks:
            return None
        aim = self._position + self._change * (1 - self._done / (self._ticks + 1))
        # A joint that was pushed out of its range must not move further out.
        low, high = np.minimum(self._limits.low, self._position), np.maximum(self._limits.high, self._position)
        self._position = np.clip(aim, low, high)
        return self._position.astype(np.float32)


class CommandHistory(deque[np.ndarray]):
    """Newest three commands (a,) of a motion, at first the pose of its start; empty for a resting robot."""

    def __init__(self, rate: float):
        """Create an empty history for ``rate`` commands per second."""
        super().__init__(maxlen=3)
        self._rate = rate

    def rest(self) -> None:
        """Note a tick without a command, in which the robot rests at its last command."""
        if self:
            self.append(self[-1])

    def take_back(self) -> np.ndarray:
        """Remove the newest command, which the link refused; returns the command (a,) before."""
        self[-1] = self[-2]
        return self[-1]

    def motion(self, pose: np.ndarray, *, ahead: float, is_between: bool) -> Motion:
        """Return the motion before a chunk that is executed from now on.

        Args:
            pose: measured pose (a,), at which a motion from rest begins.
            ahead: seconds from the due time of the action before the chunk's first action to the newest command.
            is_between: whether commands are interpolated between actions, so that the acceleration is unknown.
        """
        if not self:
            rest = np.zeros(len(pose))
            return Motion(pose, rest, rest)
        newest, older, oldest = self[-1], self[max(len(self) - 2, 0)], self[0]
        velocity = (newest - older).astype(np.float64) * self._rate
        bend = None if is_between else (newest - 2 * older + oldest).astype(np.float64) * self._rate**2
        # Position at the due time of the action before the chunk's first action.
        return Motion(newest - velocity * ahead, velocity, bend, is_at_rest=False, pose=pose)

    def ramp(self, limits: MotionLimits) -> Ramp | None:
        """Return a ramp from the newest commands to a stop; None without a speed."""
        if len(self) < 2:
            return None
        velocity = (self[-1] - self[-2]).astype(np.float64) * self._rate
        return Ramp(limits, self[-1], velocity, self._rate)


@dataclass(frozen=True)
class ChunkVerdict:
    """Result of a check of a chunk.

    Attributes:
        actions: (t, a) float32 inside the limits, or None if the chunk is refused.
        reason, text: stable code and text of a refusal.
        clamped: reasons for which actions were clamped.
    """

    actions: np.ndarray | None
    reason: str | None = None
    text: str = ""
    clamped: tuple[str, ...] = ()


class ActionGuard:
    """Action guard of one robot: checks whole chunks and limits every command.

    Attributes:
        clamped: number of clamped chunks by reason; ``tick`` counts single commands.
        refused: number of refused chunks by reason.
        joints: number of clamped chunks by joint.
    """

    def __init__(self, limits: MotionLimits, *, rate: float, action_rate: float, chunk: int):
        """Create the guard for chunks (chunk, a) of ``action_rate`` actions, and ``rate`` commands per second."""
        self.limits = limits
        self.clamped, self.refused, self.joints = Tally(), Tally(), Tally()
        self._shape = (1, chunk, len(limits.names))
        self._action_rate = action_rate
        by_step, by_velocity = limits.step * rate / action_rate, limits.velocity / action_rate
        self._is_step = by_step < by_velocity
        self._clamping = ChunkClamp(
            limits.low,
            limits.high,
            np.minimum(by_step, by_velocity),
            limits.acceleration / action_rate**2,
            limits.jerk / action_rate**3,
        )
        ends = np.abs(np.stack([limits.low, limits.high]))
        largest = np.where(np.isfinite(ends), ends, 0.0).max(axis=0)
        self._tolerance = _ROUNDING_ERROR * largest
        # Limits as rows of a chunk, because numpy compares arrays of equal shape fastest.
        believable = (-np.inf, np.inf) if limits.believable is None else limits.believable
        rows = np.ones((chunk, 1))
        self._believable = (
            rows * np.maximum(believable[0], -_FLOAT32_MAX),
            rows * np.minimum(believable[1], _FLOAT32_MAX),
        )
        self._believable_float32 = _round_inside_float32(*self._believable)
        self._ends = rows * (self._clamping.low - self._tolerance), rows * (self._clamping.high + self._tolerance)
        self._fastest = rows * (self._clamping.speed * (1 + _RELATIVE_TOLERANCE) + self._tolerance)
        # Limits of positions and of changes, which are compared at once.
        self._lowest = np.concatenate((self._ends[0], -self._fastest))
        self._highest = np.concatenate((self._ends[1], self._fastest))
        self._slack = np.where(np.isfinite(limits.high - limits.low), REFUSAL_SLACK * (limits.high - limits.low), 0.0)
        # Limits per tick, in float32 as commands.
        self._step = np.minimum(limits.step, limits.velocity / rate).astype(np.float32)
        finite = np.where(np.isfinite(self._step), self._step, np.float32(0))
        self._unnoticed = (np.float32(1e-3) * finite + self._tolerance + 1e-6).astype(np.float32)
        self._low, self._high = limits.low.astype(np.float32), limits.high.astype(np.float32)
        self._limits_as_json = limits.as_json()

    def check_shape(self, answer: object) -> tuple[str, str] | None:
        """Return code and text of why a policy's answer is not a chunk (1, t, a) of believable floats, else None."""
        reason = text = None
        if not isinstance(answer, np.ndarray):
            reason, text = "shape", f"the policy returned a {type(answer).__name__}, wanted an array {self._shape}"
        elif answer.shape != self._shape or answer.dtype.kind != "f":
            reason, text = "shape", f"the policy returned {answer.dtype} {answer.shape}, wanted floats {self._shape}"
        else:
            low, high = self._believable_float32 if answer.dtype == np.float32 else self._believable
            chunk = answer[0]
            if np.count_nonzero((chunk >= low) & (chunk <= high)) == chunk.size:  # false of NaN
                return None
            is_finite = np.abs(answer) <= _FLOAT32_MAX
            if not is_finite.all():
                bad = int(answer.size - is_finite.sum())
                reason, text = "not_finite", f"the policy returned {bad} values that are not finite"
            else:
                reason, text = self._check_believable(answer[0])
        if reason is None or text is None:
            return None
        self.refused.add(reason)
        return reason, text

    def _check_believable(self, chunk: np.ndarray) -> tuple[str, str] | tuple[None, None]:
        if self.limits.believable is None:
            return None, None
        low, high = self.limits.believable
        least, most = chunk.min(axis=0), chunk.max(axis=0)
        wild = (least < low) | (most > high)
        if not wild.any():
            return None, None
        index = int(np.flatnonzero(wild)[0])
        worst = float(least[index] if least[index] < low[index] else most[index])
        return "wild", (
            f"the policy wants joint {self.limits.names[index]!r} at {worst:.4g}, further out than its range is wide: "
            "it is broken, or counts in another unit"
        )

    def judge(self, chunk: np.ndarray, before: Motion, first: int = 0) -> ChunkVerdict:
        """Check a chunk (t, a) of finite floats whose actions before ``first`` will not be executed."""
        if first == 0 and self.limits.mode != "refuse" and self._is_plainly_inside(chunk, before.position):
            return ChunkVerdict(chunk)
        whole = chunk.astype(np.float64)
        outside = self._find_violations(whole, before, first)
        if self.limits.mode == "refuse":
            refusable = self._find_refusable(whole, before, outside, first)
            if refusable:
                for reason in refusable:
                    self.refused.add(reason)
                return ChunkVerdict(None, next(iter(refusable)), self._describe_violations(whole, refusable))
        if not outside:
            return ChunkVerdict(chunk)
        for reason in outside:
            self.clamped.add(reason)
        for index in np.flatnonzero(np.any(list(outside.values()), axis=0)):
            self.joints.add(self.limits.names[index])
        actions = np.empty_like(chunk, np.float32)
        np.clip(whole[:first], self._clamping.low, self._clamping.high, out=whole[:first])
        actions[:first] = whole[:first]
        speed, bend = self._per_action(before)
        actions[first:] = self._clamping.clamp_chunk(whole[first:], before.position.astype(np.float64), speed, bend)
        return ChunkVerdict(actions, clamped=tuple(outside))

    def limit(self, action: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Limit the command (a,) of one tick after the command ``before``.

        A joint outside of its range moves back step by step, or slower if the action does.
        """
        change = action - before
        np.abs(change, out=change)
        if ((change <= self._step) & (action >= self._low) & (action <= self._high)).all():
            return action
        limited = np.where(np.isfinite(action), action, before)
        np.maximum(limited, np.where(action > before, np.minimum(self._low, action), self._low), out=limited)
        np.minimum(limited, np.where(action < before, np.maximum(self._high, action), self._high), out=limited)
        np.minimum(limited, before + self._step, out=limited)
        np.maximum(limited, before - self._step, out=limited)
        if not (np.abs(limited - action) <= self._unnoticed).all():
            self.clamped.add("tick")
        return limited

    def stats(self) -> dict[str, object]:
        """Return the guard's figures; JSON-ready."""
        return {
            "mode": self.limits.mode,
            "clamped": self.clamped.by_reason(),
            "clamped_joints": self.joints.by_reason(),
            "refused": self.refused.by_reason(),
            "limits": self._limits_as_json,
            "unlimited": self.limits.unlimited,
            "unmatched": list(self.limits.unmatched),
        }

    def _per_action(self, before: Motion) -> tuple[np.ndarray, np.ndarray]:
        """Return speed and acceleration (a,) of the motion before, per action; zeros for an unknown acceleration."""
        speed = before.velocity / self._action_rate
        if before.acceleration is None:
            return speed, np.zeros_like(speed)
        return speed, before.acceleration / self._action_rate**2

    def _is_plainly_inside(self, chunk: np.ndarray, position: np.ndarray) -> bool:
        """Whether ``_find_violations`` would find nothing; False if that is unknown."""
        count = len(chunk)
        if 2 * count != len(self._lowest) or self._clamping.is_smooth:
            return False
        both = np.empty(self._lowest.shape)
        positions, changes = both[:count], both[count:]
        positions[:] = chunk
        np.subtract(positions[0], position, out=changes[0])
        np.subtract(positions[1:], positions[:-1], out=changes[1:])
        return not np.count_nonzero((both < self._lowest) | (both > self._highest))

    def _find_violations(self, whole: np.ndarray, before: Motion, first: int) -> dict[str, np.ndarray]:
        """Return reason to joints (a,) bool whose actions, from ``first`` on, leave the limits."""
        violations: dict[str, np.ndarray] = {}
        clamping, tolerance = self._clamping, self._tolerance
        # All rows of limits are equal, so one row is enough for a chunk of another length.
        rows = slice(len(whole) if len(whole) <= len(self._fastest) else 1)
        out = (whole < self._ends[0][rows]) | (whole > self._ends[1][rows])
        if np.count_nonzero(out):
            violations["position"] = np.logical_or.reduce(out)
        if first >= len(whole):
            return violations
        left = whole[first:]
        fastest = np.empty_like(left)
        np.subtract(left[0], before.position, out=fastest[0])
        np.subtract(left[1:], left[:-1], out=fastest[1:])
        np.abs(fastest, out=fastest)
        fast = fastest > self._fastest[: len(left) if rows.stop > 1 else 1]
        if np.count_nonzero(fast):
            if (seam := fast[0]).any():
                violations["seam"] = seam
            if (inner := fast[1:].any(axis=0)).any():
                for reason, chosen in (("step", self._is_step), ("velocity", ~self._is_step)):
                    if (joints := inner & chosen).any():
                        violations[reason] = joints
        if clamping.is_smooth:
            # Three positions of the motion before, so that one difference covers the seam and the chunk.
            speed, bend = self._per_action(before)
            position = before.position.astype(np.float64)
            positions = np.concatenate(([position - 2 * speed + bend, position - speed, position], left))
            bends = np.diff(positions, 2, axis=0)
            # Each difference adds rounding errors.
            limit = clamping.acceleration * (1 + _RELATIVE_TOLERANCE) + 8 * tolerance
            if (hard := (np.abs(bends[1:]) > limit).any(axis=0)).any():
                violations["acceleration"] = hard
            jerks = np.abs(np.diff(bends, axis=0))[1 if before.acceleration is None else 0 :]
            limit = clamping.jerk * (1 + _RELATIVE_TOLERANCE) + 16 * tolerance
            if (hard := (jerks > limit).any(axis=0)).any():
                violations["jerk"] = hard
        return violations

    def _find_refusable(
        self, whole: np.ndarray, before: Motion, outside: Mapping[str, np.ndarray], first: int
    ) -> dict[str, np.ndarray]:
        """Return the violations that refuse a chunk, including actions whose time is over.

        Exceptions are a small overshoot, the motion of a resting robot to the first action, and joints measured outside
        of their range.
        """
        pose = before.position if before.pose is None else before.pose
        low = np.minimum(self._clamping.low, pose) - self._slack
        high = np.maximum(self._clamping.high, pose) + self._slack
        refusable: dict[str, np.ndarray] = {}
        if (out := (whole.min(axis=0) < low) | (whole.max(axis=0) > high)).any():
            refusable["position"] = out
        inside = np.clip(whole, self._clamping.low, self._clamping.high)
        if "seam" in outside and not before.is_at_rest:
            # A command inside the range may be far from a chunk that begins at a measured pose outside of it.
            seam = outside["seam"] & (np.abs(inside[first] - before.position) > self._fastest[0])
            if seam.any():
                refusable["seam"] = seam
        rest = Motion(inside[0], np.zeros(inside.shape[1]), None)
        alone = self._find_violations(inside, rest, 0)
        refusable |= {reason: joints for reason, joints in alone.items() if reason in ("step", "velocity")}
        for reason, skipped in (("acceleration", 2), ("jerk", 3)):
            if reason in outside:
                differences = np.abs(np.diff(inside, skipped, axis=0))
                limit = getattr(self._clamping, reason) * (1 + _RELATIVE_TOLERANCE) + 16 * self._tolerance
                hard = (differences > limit).any(axis=0)
                hard = hard if before.is_at_rest else hard | outside[reason]
                if hard.any():
                    refusable[reason] = hard
        return refusable

    def _describe_violations(self, whole: np.ndarray, violations: Mapping[str, np.ndarray]) -> str:
        parts = []
        for reason, joints in violations.items():
            index = int(np.flatnonzero(joints)[0])
            name, others = self.limits.names[index], int(joints.sum()) - 1
            more = f" (and {others} more)" if others else ""
            values = whole[:, index]
            low, high = self.limits.low[index], self.limits.high[index]
            if reason == "position":
                detail = f"{values.min():.4g}..{values.max():.4g}, limits {low:.4g}..{high:.4g}"
            elif reason in ("step", "velocity", "seam"):
                most = float(self._clamping.speed[index])
                largest = np.abs(np.diff(values)).max(initial=0.0)
                which = "the change to what was commanded before" if reason == "seam" else f"changes by {largest:.4g}"
                detail = f"{which}, the limit is {most:.4g} per action"
            else:
                limit = float(getattr(self.limits, reason)[index])
                detail = f"more than the limit of {limit:.4g}"
            parts.append(f"{reason} of joint {name!r}{more}: {detail}")
        return "the chunk leaves the limits: " + "; ".join(parts)


def _round_inside_float32(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round bounds to float32 inside of them, which float32 values are compared with in a third of the time."""
    lows, highs = low.astype(np.float32), high.astype(np.float32)
    far = np.float32(np.inf)
    return (
        np.where(lows < low, np.nextafter(lows, far), lows),
        np.where(highs > high, np.nextafter(highs, -far), highs),
    )
