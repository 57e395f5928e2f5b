"""Watchdog of one robot: detects stale, frozen, late or bad input, and requests a hold or a stop."""

import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from service.control.config import SafetySettings
from service.control.joints import JointTable
from service.control.units import StateUnits

POINTS = 32  # Compared points along each axis of a frame; frames with equal points are compared in full.
# Codes of a frozen source, and of joints in another unit.
CAMERA_FROZEN, JOINTS_FROZEN, JOINTS_UNITS = "camera_frozen", "joints_frozen", "joints_units"
# Share of a joint's range that commands must cover for a clear motion; policies dither by 1 % around a goal.
CLEAR_MOTION = 0.03
NOISE = 0.001  # Largest change of a resting joint, as a share of its range: four steps of a servo's encoder.
# Share of the commanded motion from which a joint follows it. Radians in place of degrees or percent show up to 2.2 %.
FOLLOWED = 0.04
NARROW_SHARE = 0.25  # Smallest range of a joint from training data, as a share of the widest joint's range.
UNKNOWN_RANGE = 2.0  # Smallest range of a joint without a known range: less than half a turn in radians.
UNITS_AFTER = 1.0  # Seconds after a clear motion's command in which a joint must follow, or has another unit.
COMPARE_INTERVAL = 0.1  # Largest number of seconds between two comparisons of the joints with their commands.
STALL = 0.25  # Seconds without a tick after which a robot is held; a robot without commands holds itself after 0.5 s.
BAD_INPUT_WINDOW = 1.0  # Seconds in which bad joint values are counted.
# Codes of the holds that a check may request.
HOLDS = ("paused", "inference_slow", "action_stale", CAMERA_FROZEN, JOINTS_FROZEN, JOINTS_UNITS)


@dataclass(frozen=True)
class Stop:
    """Reason to stop a robot until a person resets it: a stable code, and a text for people."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True)
class InputTimes:
    """One robot's input at one tick; times are monotonic.

    Attributes:
        observed_at: time of each camera's newest frame, None before the first frame.
        is_pose_current: whether every joint has a current value.
        plan_observed_at: time of the frames of the queued actions, or None without actions.
        requested_at: time of the running inference's request, or None.
        pose: measured pose (a,), or None while a joint has no value.
        command: newest command (a,) of the motion, or None while the robot does not move.
        units: units of the pose.
    """

    observed_at: Mapping[str, float | None]
    lost_rooms: Sequence[str] = ()
    is_pose_current: bool = True
    plan_observed_at: float | None = None
    requested_at: float | None = None
    pose: np.ndarray | None = None
    command: np.ndarray | None = None
    units: StateUnits | None = None


@dataclass(frozen=True)
class WatchdogReport:
    """Result of one check.

    Attributes:
        holds: code to text of each reason to hold the robot at this tick.
        blind: reason why the robot could not be observed or reached for ``degraded_after`` seconds, or None.
        stop: reason to stop the robot until a person resets it, or None.
    """

    holds: Mapping[str, str] = field(default_factory=dict)
    blind: str | None = None
    stop: Stop | None = None


class Watchdog:
    """Checks the input of one moving robot at every tick; callers pass the time.

    Attributes:
        degraded_after, stop_after: seconds without input or link until the session is degraded or stopped.
        slow_after: seconds after which an inference is slow.
        frozen: cameras with the same picture for too long.
        joints: comparison of the measured joints with their commands; None in a dry run.
    """

    def __init__(
        self,
        safety: SafetySettings,
        *,
        frame_age: float,
        executed: float,
        covered: float,
        period: float = 0.0,
        joints: "JointMotion | None" = None,
    ):
        """Watch one robot; times in seconds.

        Args:
            frame_age: largest age of a frame, and length of a pause of this process (at most ``STALL``), without a
                hold. A large value also raises ``degraded_after`` and ``stop_after``.
            executed: duration of the executed actions of a chunk.
            covered: duration of all actions of a chunk.
            period: time from one check to the next.
        """
        self.joints = joints
        stretch = max(1.0, 2 * frame_age / safety.degraded_after)
        self.degraded_after, self.stop_after = stretch * safety.degraded_after, stretch * safety.stop_after
        self._safety, self._frame_age, self._period = safety, frame_age, period
        self.set_chunk_time(executed=executed, covered=covered)
        self.frozen: set[str] = set()
        self._begun_at = self._resumed_at = 0.0
        self._checked_at: float | None = None
        self._pause: float | None = None
        self._since: dict[str, float] = {}
        self._stills: dict[str, _FrozenFrame] = {}
        self._bad: deque[tuple[float, int]] = deque()

    def set_chunk_time(self, *, executed: float, covered: float) -> None:
        """Set the duration of the executed actions and of all actions of each chunk from now on."""
        # A slow answer is still usable while its chunk covers the present.
        self.slow_after = max(self._safety.slow_inference * executed, covered)

    def begin(self, now: float) -> None:
        """Forget all earlier input, and watch a robot that starts to move."""
        self._begun_at = self._resumed_at = now
        self._checked_at = self._pause = None
        self._since.clear()
        self._bad.clear()
        if self.joints is not None:
            self.joints.begin()

    def forget_frozen_joints(self) -> None:
        """Forget frozen joints of a robot that left, but not joints in another unit."""
        if self.joints is not None and self.joints.fault is not None and self.joints.fault.code == JOINTS_FROZEN:
            self.joints.begin()

    @property
    def is_pose_doubted(self) -> bool:
        """Whether the measured pose may be wrong, because joints are frozen or in another unit."""
        fault = None if self.joints is None else self.joints.fault
        return fault is not None and (fault.code == JOINTS_UNITS or self._safety.frozen != "warn")

    def note_frame(self, camera: str, image: np.ndarray, now: float) -> None:
        """Compare a usable frame, uint8 (h, w, 3), with earlier frames of this camera."""
        height, width = image.shape[:2]
        points = image[:: max(height // POINTS, 1), :: max(width // POINTS, 1)]
        fingerprint = zlib.crc32(points.tobytes(), hash(image.shape) & 0xFFFFFFFF)
        still = self._stills.get(camera)
        if still is not None and still.fingerprint == fingerprint:
            is_equal, still.newest_at = True, now
            if now - still.compared_at >= self._safety.frozen_after:
                # The points are equal; all pixels are compared once per interval.
                still.compared_at, is_equal = now, np.array_equal(image, still.image)
            if is_equal:
                if now - still.since >= self._safety.frozen_after:
                    self.frozen.add(camera)
                return
        self._stills[camera] = _FrozenFrame(image, fingerprint, now, now, now)
        self.frozen.discard(camera)

    def get_warnings(self, now: float) -> dict[str, str]:
        """Return code to text of frozen cameras and of joints that do not follow their commands."""
        found = self._describe_frozen_cameras(now)
        if self.joints is not None and self.joints.fault is not None:
            found[self.joints.fault.code] = self.joints.fault.text
        return found

    def _describe_frozen_cameras(self, now: float) -> dict[str, str]:
        # A camera without new frames is reported as stale instead.
        oldest = now - max(self._frame_age, self._safety.frozen_after)
        frozen = [(camera, self._stills[camera]) for camera in sorted(self.frozen)]
        frozen = [(camera, still) for camera, still in frozen if still.newest_at >= oldest]
        if not frozen:
            return {}
        names = ", ".join(f"{camera!r} for {now - still.since:.1f} s" for camera, still in frozen)
        return {
            CAMERA_FROZEN: f"camera {names}: the same picture. Check the camera and the program that sends it; for a "
            "simulator whose pictures have no noise, start the server with --frozen warn"
        }

    def note_bad_input(self, reasons: Mapping[str, int], now: float) -> Stop | None:
        """Count unusable joint values; returns a reason to stop if there are too many."""
        self._bad.append((now, sum(reasons.values())))
        count = self.count_bad_inputs(now)
        if not 0 < self._safety.bad_inputs <= count:
            return None
        self._bad.clear()
        named = ", ".join(f"{reason} {times}" for reason, times in sorted(reasons.items()))
        return Stop(
            "bad_input",
            f"{count} joint values in {BAD_INPUT_WINDOW:g} s could not be used, limit "
            f"{self._safety.bad_inputs} (the last ones: {named})",
        )

    def count_bad_inputs(self, now: float) -> int:
        """Return the number of unusable joint values in ``BAD_INPUT_WINDOW``."""
        while self._bad and now - self._bad[0][0] > BAD_INPUT_WINDOW:
            self._bad.popleft()
        return sum(count for _, count in self._bad)

    def check(self, now: float, times: InputTimes) -> WatchdogReport:
        """Check a robot that moves, at the tick of ``now``."""
        safety, holds = self._safety, dict[str, str]()
        pause = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        if pause - self._period > min(self._frame_age, STALL):
            self._resumed_at, self._pause = now, pause
        if self._pause is not None and self._is_paused(now, times):
            holds["paused"] = f"this process did nothing for {self._pause:.2f} s"
        if times.requested_at is not None:
            ran = now - max(times.requested_at, self._resumed_at)
            if ran > self.slow_after:
                holds["inference_slow"] = f"an inference runs for {ran:.2f} s, limit {self.slow_after:.2f} s"
        plan_age = None if times.plan_observed_at is None else now - times.plan_observed_at
        if plan_age is not None and safety.action_age_limit is not None and plan_age > safety.action_age_limit:
            limit = safety.action_age_limit
            holds["action_stale"] = f"the actions belong to what was seen {plan_age:.2f} s ago, limit {limit:g} s"

        # Cameras without a current frame, and the time since when.
        stale: dict[str, float] = {}
        for camera, observed_at in times.observed_at.items():
            if observed_at is None or now - observed_at > self._frame_age:
                stale[camera] = max(self._begun_at, observed_at or self._begun_at)
        blind = stop = None
        if stale or times.lost_rooms or not times.is_pose_current:
            code, text, since = self._find_blindness(now, times, stale)
            if now - since > self.degraded_after:
                blind = f"{code}: {text} for {now - since:.1f} s"
            if now - since > self.stop_after:
                stop = Stop(code, f"{text} for {now - since:.0f} s, limit {self.stop_after:g} s")
        else:
            self._since.clear()
        if self.joints is not None and now >= self.joints.due_at:
            self.joints.compare(now, times, safety.frozen_after)
        if self.frozen or (self.joints is not None and self.joints.fault is not None):
            for code, text in self.get_warnings(now).items():
                if code == JOINTS_UNITS or safety.frozen == "hold":
                    holds[code] = text
                elif safety.frozen == "stop":
                    stop = stop or Stop(code, text)
        return WatchdogReport(holds, blind, stop)

    def _is_paused(self, now: float, times: InputTimes) -> bool:
        """Return whether a pause of this process still holds the robot: until each camera has sent a new frame."""
        is_seen = all(
            observed_at is not None and observed_at >= self._resumed_at for observed_at in times.observed_at.values()
        )
        if now == self._resumed_at or (not is_seen and now - self._resumed_at <= self._frame_age):
            return True
        self._pause = None
        return False

    def _find_blindness(self, now: float, times: InputTimes, stale: Mapping[str, float]) -> tuple[str, str, float]:
        """Return code, text and start of the oldest reason why the robot cannot be observed or reached."""
        reasons: dict[str, tuple[str, float]] = {}
        if times.lost_rooms:
            text = "room " + ", ".join(map(repr, sorted(times.lost_rooms))) + " lost"
            reasons["link_lost"] = (text, self._since.setdefault("link_lost", now))
        else:
            self._since.pop("link_lost", None)
        if stale:
            names = ", ".join(map(repr, sorted(stale)))
            code = (
                "camera_stale" if all(times.observed_at[camera] is not None for camera in stale) else "camera_missing"
            )
            reasons[code] = (f"camera {names}: no new frame", min(stale.values()))
        if times.is_pose_current:
            self._since.pop("joints_missing", None)
        else:
            since = self._since.setdefault("joints_missing", now)
            reasons["joints_missing"] = ("joints: some have no value", since)
        # A lost link causes all other reasons.
        code = "link_lost" if "link_lost" in reasons else min(reasons, key=lambda code: reasons[code][1])
        return code, reasons[code][0], min(since for _, since in reasons.values())


@dataclass
class _FrozenFrame:
    """First frame of a series of equal frames of one camera."""

    image: np.ndarray
    fingerprint: int
    since: float
    compared_at: float
    newest_at: float


class JointFault(NamedTuple):
    """Measured joints do not follow their commands: code (``joints_frozen`` or ``joints_units``) and text."""

    code: str
    text: str


class JointMotion:
    """Compares the measured joints of one robot with its commands.

    Each joint has an anchor: its position when it last moved. Joints at their anchors whose commands have covered a
    large range since then are frozen, or are measured in another unit.

    Attributes:
        fault: present fault, or None.
        due_at: time of the next comparison.
    """

    def __init__(self, joints: JointTable, limits: np.ndarray):
        """Create it. Grippers do not count as commanded, because an object may block them.

        Args:
            joints: names, ranges and grippers.
            limits: width (a,) of each joint's limits for joints without a known range; may be infinite.
        """
        self.fault: JointFault | None = None
        self.due_at = -math.inf
        self._names, self._arm = joints.names, ~joints.grippers
        spans = np.subtract(joints.ranges[1], joints.ranges[0], dtype=np.float64)
        spans = np.where(np.isfinite(spans), spans, limits)
        # Limits may come from data in which a joint hardly moves.
        widest = spans[np.isfinite(spans) & self._arm].max(initial=0.0)
        self._ranges = np.where(self._arm, np.maximum(spans, NARROW_SHARE * widest), spans)
        self._is_begun = False

    def begin(self) -> None:
        """Forget all earlier input, because a motion begins."""
        self.fault, self.due_at, self._is_begun = None, -math.inf, False

    def compare(self, now: float, times: InputTimes, frozen_after: float) -> None:
        """Compare the pose with the commands since the last call; sets or clears ``fault``."""
        self.due_at = now + min(COMPARE_INTERVAL, frozen_after / 4)
        pose, command = times.pose, times.command
        if pose is None:
            self._is_begun = self._is_begun and self.fault is not None
            return
        if self.fault is not None:
            is_over = (np.abs(pose - self._anchor) > self._tolerance).any()
            is_accepted = times.units is not None and times.units.is_accepted
            if is_over or (self.fault.code == JOINTS_UNITS and is_accepted):
                self.begin()
            return
        if command is None or not self._is_begun:
            # Motions and holds begin at the measured pose.
            self._restart(pose, now)
            return
        self._follow(pose, command, now)
        self.fault = self._find_fault(pose, times.units, now, frozen_after)

    def _restart(self, pose: np.ndarray, now: float) -> None:
        self._is_begun = True
        self._anchor = pose.astype(np.float64)
        self._least, self._most = self._anchor.copy(), self._anchor.copy()
        self._spread = np.zeros(len(pose))
        self._moved_at = np.full(len(pose), now)
        self._commanded_at = np.full(len(pose), math.inf)
        # The range of a joint without a known range is estimated by the largest value of all joints.
        widest = max(2 * float(np.abs(pose).max(initial=0.0)), UNKNOWN_RANGE)
        self._spans = np.where(np.isfinite(self._ranges) & (self._ranges > 0), self._ranges, widest)

    def _follow(self, pose: np.ndarray, command: np.ndarray, now: float) -> None:
        """Move the anchors of joints that moved, and extend the ranges of commands of the others."""
        np.minimum(self._least, command, out=self._least)
        np.maximum(self._most, command, out=self._most)
        self._spread = np.maximum(self._spread, np.abs(pose - self._anchor))
        share = (self._most - self._least) / self._spans
        moved = self._spread > np.maximum(NOISE, FOLLOWED * share) * self._spans
        if moved.any():
            self._anchor[moved] = pose[moved]
            self._least[moved] = self._most[moved] = command[moved]
            self._spread[moved] = 0.0
            self._moved_at[moved], self._commanded_at[moved] = now, math.inf
        self._commanded_at[~moved & (share >= CLEAR_MOTION) & np.isinf(self._commanded_at)] = now

    def _find_fault(
        self, pose: np.ndarray, units: StateUnits | None, now: float, frozen_after: float
    ) -> JointFault | None:
        arm, commanded, before = self._arm, self._most - self._least, now - UNITS_AFTER
        worst = int(np.where(arm, commanded / self._spans, -1.0).argmax())
        # Joints that did not follow, but did not report a constant value either. All joints of an arm count together.
        still, asked, shown = self._moved_at <= before, self._commanded_at <= before, self._spread > 0
        is_arm_still = still[arm].all() and asked[arm].any() and shown[arm].any()
        still = np.where(arm, is_arm_still, still & asked & shown)
        if units is not None and still.any() and (index := units.find_small_joint(pose, still)) is not None:
            # Only joints at fault can end the hold, because other joints still move to their last command.
            at_fault = arm if arm[index] else np.arange(len(pose)) == index
            index = worst if arm[index] else index
            tolerance = np.maximum(NOISE * self._spans, FOLLOWED * commanded)
            self._tolerance = np.where(at_fault, tolerance, math.inf)
            text = units.describe_spread(index, float(self._spread[index]), float(commanded[index]))
            return JointFault(JOINTS_UNITS, text)
        is_still = (self._moved_at <= now - frozen_after).all() and (self._spread <= NOISE * self._spans).all()
        if not is_still or not (self._commanded_at <= now - frozen_after).any(where=arm):
            return None
        # Any change ends the fault of joints with a constant value; noisy joints must change by more than the noise.
        self._tolerance = 2 * self._spread
        return JointFault(
            JOINTS_FROZEN,
            f"the measured joints did not change for {now - self._moved_at.max():.1f} s, while the commands of "
            f"{self._names[worst]!r} moved by {commanded[worst]:.3g} ({self._least[worst]:.4g} to "
            f"{self._most[worst]:.4g}, measured {pose[worst]:.4g}). Check the robot's power and the program that "
            "reports its joints. The hold ends when a measured joint changes, when that program connects again, or "
            "after a stop and a start",
        )
