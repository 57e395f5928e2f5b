"""Watchdog of one robot: detects stale, frozen, late or bad input, and demands a hold or a stop."""

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

# Frames are compared at this many points along each axis first, and in full only when those are equal.
POINTS = 32
# Codes of a frozen source, and of joints in another unit.
CAMERA_FROZEN, JOINTS_FROZEN, JOINTS_UNITS = "camera_frozen", "joints_frozen", "joints_units"
# Share of a joint's range that a command must change by for a clear motion: policies dither by 1 % around a goal, and a
# position servo under load may not follow 2 %.
CLEAR_MOTION = 0.03
# Largest change of a resting joint: 0.2 of -100..100, 4 steps of a servo's encoder. Real encoders flicker by one.
NOISE = 0.001
# Share of the commanded motion that a joint has to show to count as following it. Radians in place of degrees or
# percent show 1.6 to 2.2 % of it; joints that follow late or against a load show most of it.
FOLLOWED = 0.04
# A joint whose range comes from data in which it hardly moves counts with this share of the widest joint's range.
NARROW_SHARE = 0.25
# Width of a joint's range at least, if no source knows it: half a turn in radians and less.
UNKNOWN_RANGE = 2.0
# Seconds after a clear motion was commanded within which a joint follows it, or counts as in another unit.
UNITS_AFTER = 1.0
# Seconds between two comparisons of the joints with their commands, at most.
COMPARE_INTERVAL = 0.1
# Seconds without a tick after which a robot is held. The event loop counts as blocked after the same time, and a robot
# without commands holds itself after 0.5 s.
STALL = 0.25
# Seconds in which bad joint values are counted.
BAD_INPUT_WINDOW = 1.0
# Codes of the holds that a check may ask for.
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
        observed_at: when each camera's newest frame was seen, None before the first.
        is_pose_current: whether every joint is known and trusted.
        plan_observed_at: when the frames of the queued actions were seen, or None without actions.
        requested_at: when the running inference was requested, or None.
        pose: (a,) measured, or None while a joint is unknown.
        command: (a,) the newest command of the motion, or None while the robot does not move.
        units: of the pose.
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
        blind: why the robot could not be observed or reached for ``degraded_after`` seconds, or None.
        stop: why it has to be stopped for good, or None.
    """

    holds: Mapping[str, str] = field(default_factory=dict)
    blind: str | None = None
    stop: Stop | None = None


class Watchdog:
    """Checks the input of one moving robot at every tick; takes the time, reads no clock.

    Attributes:
        degraded_after: seconds without input or link after which the session is degraded.
        stop_after: such seconds after which the robot is stopped until a person resets it.
        slow_after: seconds after which an inference is slow.
        frozen: cameras that show the same picture for too long.
        joints: compares the measured joints with their commands; None in a dry run.
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
            frame_age: largest age of a frame, and of a pause of this process (at most ``STALL``), without a hold. A
                large value also raises ``degraded_after`` and ``stop_after``.
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
        """Start watching a robot that begins to move, or begins anew; forgets what was before."""
        self._begun_at = self._resumed_at = now
        self._checked_at = self._pause = None
        self._since.clear()
        self._bad.clear()
        if self.joints is not None:
            self.joints.begin()

    def forget_frozen_joints(self) -> None:
        """Forget frozen joints of a robot that left. Joints in another unit stay, because a program keeps its unit."""
        if self.joints is not None and self.joints.fault is not None and self.joints.fault.code == JOINTS_FROZEN:
            self.joints.begin()

    @property
    def is_pose_doubted(self) -> bool:
        """Whether the robot is held for frozen joints or another unit: it may be elsewhere than measured."""
        fault = None if self.joints is None else self.joints.fault
        return fault is not None and (fault.code == JOINTS_UNITS or self._safety.frozen != "warn")

    def note_frame(self, camera: str, image: np.ndarray, now: float) -> None:
        """Compare a usable frame, uint8 (h, w, 3), with those before it of this camera."""
        height, width = image.shape[:2]
        points = image[:: max(height // POINTS, 1), :: max(width // POINTS, 1)]
        fingerprint = zlib.crc32(points.tobytes(), hash(image.shape) & 0xFFFFFFFF)
        still = self._stills.get(camera)
        if still is not None and still.fingerprint == fingerprint:
            is_equal, still.newest_at = True, now
            if now - still.compared_at >= self._safety.frozen_after:
                # Some points are equal; every so many seconds all of them are compared.
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
        # A camera that sends nothing is not frozen but absent: its newest frame is too old.
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
        """Count joint values that cannot be used; returns a reason to stop when they are too many."""
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
        """Count the joint values within ``bad_input_window`` that could not be used."""
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

        # Cameras whose newest frame is too old, and since when there was no frame.
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
        """Return whether a pause of this process still holds the robot: until each camera sent a frame since.

        The plan from before the pause is outdated, and frames from the pause arrive one by one.
        """
        is_seen = all(
            observed_at is not None and observed_at >= self._resumed_at for observed_at in times.observed_at.values()
        )
        if now == self._resumed_at or (not is_seen and now - self._resumed_at <= self._frame_age):
            return True
        self._pause = None
        return False

    def _find_blindness(self, now: float, times: InputTimes, stale: Mapping[str, float]) -> tuple[str, str, float]:
        """Return the oldest reason why the robot cannot be observed or reached: code, text, and since when."""
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
            reasons["joints_missing"] = ("joints: not all of them are known", since)
        # A lost link is the cause of the others.
        code = "link_lost" if "link_lost" in reasons else min(reasons, key=lambda code: reasons[code][1])
        return code, reasons[code][0], min(since for _, since in reasons.values())


@dataclass
class _FrozenFrame:
    """First of a series of equal frames of one camera."""

    image: np.ndarray
    fingerprint: int
    since: float
    compared_at: float
    newest_at: float


class JointFault(NamedTuple):
    """Measured joints that do not follow their commands.

    Attributes:
        code: ``joints_frozen`` or ``joints_units``.
        text: for people.
    """

    code: str
    text: str


class JointMotion:
    """Compares the measured joints of one robot with the commands that were sent to it.

    Each joint has an anchor: its position when it last moved. Since then, the range of its commands is kept. Joints
    that stay at their anchors while the range of commands gets large are frozen, or are measured in another unit.

    Attributes:
        fault: found and not over yet, or None.
        due_at: time of the next comparison.
    """

    def __init__(self, joints: JointTable, limits: np.ndarray):
        """Create it. Grippers do not count as commanded, because what they hold blocks them.

        Args:
            joints: names, ranges and grippers.
            limits: (a,) width of each joint's limits, for joints without a known range; infinite if unknown, too.
        """
        self.fault: JointFault | None = None
        self.due_at = -math.inf
        self._names, self._arm = joints.names, ~joints.grippers
        spans = np.subtract(joints.ranges[1], joints.ranges[0], dtype=np.float64)
        spans = np.where(np.isfinite(spans), spans, limits)
        # Limits may come from data in which a joint hardly moves; that says nothing about how exactly it follows.
        widest = spans[np.isfinite(spans) & self._arm].max(initial=0.0)
        self._ranges = np.where(self._arm, np.maximum(spans, NARROW_SHARE * widest), spans)
        self._is_begun = False

    def begin(self) -> None:
        """Forget everything: a motion begins."""
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
            # The first command of a motion starts at the measured pose, and a hold sends the robot back to it.
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
        # Without a known range, the largest value that any joint has says how large values are.
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
        # Joints that did not follow, but did not report one and the same value either. An arm counts as a whole.
        still, asked, shown = self._moved_at <= before, self._commanded_at <= before, self._spread > 0
        is_arm_still = still[arm].all() and asked[arm].any() and shown[arm].any()
        still = np.where(arm, is_arm_still, still & asked & shown)
        if units is not None and still.any() and (index := units.find_small_joint(pose, still)) is not None:
            # Joints in the right unit go on to their last command; only the joints at fault can end the hold.
            at_fault = arm if arm[index] else np.arange(len(pose)) == index
            index = worst if arm[index] else index
            tolerance = np.maximum(NOISE * self._spans, FOLLOWED * commanded)
            self._tolerance = np.where(at_fault, tolerance, math.inf)
            text = units.describe_spread(index, float(self._spread[index]), float(commanded[index]))
            return JointFault(JOINTS_UNITS, text)
        is_still = (self._moved_at <= now - frozen_after).all() and (self._spread <= NOISE * self._spans).all()
        if not is_still or not (self._commanded_at <= now - frozen_after).any(where=arm):
            return None
        # Joints that report one and the same value go on with any other; those with noise have to leave it.
        self._tolerance = 2 * self._spread
        return JointFault(
            JOINTS_FROZEN,
            f"the measured joints did not change for {now - self._moved_at.max():.1f} s, while the commands of "
            f"{self._names[worst]!r} moved by {commanded[worst]:.3g} ({self._least[worst]:.4g} to "
            f"{self._most[worst]:.4g}, measured {pose[worst]:.4g}). Check the robot's power and the program that "
            "reports its joints; it goes on when a measured joint changes, when that program connects again, or after "
            "a stop and a start",
        )
