"""Newest frames and joint values of a robot, and snapshots of them while they are fresh."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.control.joints import JointTable
from service.control.units import StateUnits
from service.control.watchdog import JOINTS_UNITS
from service.stats import Rate, Tally


@dataclass(frozen=True)
class NotReady:
    """Reason why a robot must not move now: a stable code, and a text for people."""

    code: str
    text: str


@dataclass(frozen=True)
class Snapshot:
    """Frames and joints of one moment, as input of a policy.

    Attributes:
        frames: camera to picture, uint8 (h, w, 3).
        joints: values (a,) float32 in the order of the joint table.
        observed_at: time of the oldest of these frames.
        sizes: camera to (height, width), and the size of the plan if there is a ``prefix``.
        prefix: rest of the plan, for a policy that continues it (``jaxmodels.types.PREFIX_ACTIONS``).
        past: frames and joints of the ``Requirements.observation_steps - 1`` moments before, oldest first.
    """

    frames: Mapping[str, np.ndarray]
    joints: np.ndarray
    observed_at: float
    sizes: Mapping[str, tuple[int, int]]
    prefix: Mapping[str, np.ndarray] = field(default_factory=dict)
    past: Sequence[tuple[Mapping[str, np.ndarray], np.ndarray]] = ()

    def observation(self) -> dict[str, np.ndarray]:
        """Return LeRobot feature name to array, with a batch axis of 1 and, if there is a past, an axis of time."""
        features = {"observation.state": self.joints[None].copy()}
        for camera, frame in self.frames.items():
            features[f"observation.images.{camera}"] = frame[None]
        if self.past:
            moments = [*self.past, (self.frames, self.joints)]
            features["observation.state"] = np.stack([joints for _, joints in moments])[None]
            for camera in self.frames:
                stacked = np.stack([frames[camera] for frames, _ in moments])
                features[f"observation.images.{camera}"] = stacked[None]
        return features


RECENT_POSES = 1.0  # Seconds for which an old pose still counts as measured, because a hold takes time to arrive.


class ObservationHistory:
    """Past observations of a robot, one per tick, for policies that read several observations at once.

    Args:
        steps: number of observations that the policy reads, including the newest.
        period: seconds between them.
    """

    def __init__(self, steps: int = 1, period: float = 0.0):
        self.steps, self.period = steps, period
        self._moments: deque[tuple[float, Mapping[str, np.ndarray], np.ndarray]] = deque()

    def add(self, now: float, snapshot: Snapshot) -> None:
        """Add the observation of this moment."""
        self._moments.append((now, snapshot.frames, snapshot.joints))
        while now - self._moments[0][0] > self.steps * self.period:
            self._moments.popleft()

    def clear(self) -> None:
        """Forget all observations."""
        self._moments.clear()

    def before(self, now: float, snapshot: Snapshot) -> Sequence[tuple[Mapping[str, np.ndarray], np.ndarray]]:
        """Return the nearest observations of the ``steps - 1`` moments before, oldest first.

        A missing observation is replaced by the next newer observation, as in LeRobot.
        """
        newer = (snapshot.frames, snapshot.joints)
        past = []
        for back in range(1, self.steps):
            at = now - back * self.period
            near = min(self._moments, key=lambda moment: abs(moment[0] - at), default=None)
            # Pictures with another size are from before their camera was reconfigured.
            if near is not None and abs(near[0] - at) <= self.period / 2 and _is_alike(near[1], snapshot.frames):
                newer = near[1:]
            past.append(newer)
        return past[::-1]


def _is_alike(frames: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> bool:
    return all(frames[camera].shape == other.shape for camera, other in others.items())


class ObservationBuffer:
    """Newest frame of each camera and newest joint values of one robot.

    Frames become stale. Joints do not, because a resting robot sends no update.

    Attributes:
        dropped: number of unusable inputs by reason.
        frames: rate of usable frames per camera.
        joint_updates: rate of joint updates with at least one usable value.
        odd: joint name to a newest value that is far outside the joint's range.
        last_input_at: time of the last usable input, or None.
        sizes: (height, width) of each camera's newest frame; replaced by another object when a size changes.
        observed_at: time of each camera's newest frame, None before the first frame.
        pose: newest measured pose (a,), never changed in place; None while a joint has no value.
        is_pose_current: whether every joint has a current value.
        units: units of the pose; None if the policy's unit is unknown.
        units_mismatch: reason why the pose is not in the policy's unit, or None.
    """

    def __init__(
        self,
        cameras: Sequence[str],
        joints: JointTable,
        *,
        frame_age_limit: float = 0.3,
        max_pixels: int = 1920 * 1200,
        history: ObservationHistory | None = None,
        units: StateUnits | None = None,
    ):
        self.joints = joints
        self.units: StateUnits | None = units
        self.units_mismatch: str | None = None
        self.history = history or ObservationHistory()
        self.dropped = Tally()
        self.frames = {camera: Rate() for camera in cameras}
        self.joint_updates = Rate()
        self.odd: dict[str, float] = {}
        self.last_input_at: float | None = None
        self._frame_age_limit = frame_age_limit
        self._max_pixels = max_pixels
        self._trusted_from = -math.inf
        self.sizes: Mapping[str, tuple[int, int]] = {}
        self.observed_at: dict[str, float | None] = dict.fromkeys(cameras)
        self.is_pose_current = not len(joints)
        self._images: dict[str, np.ndarray] = {}
        # Replaced with each update and never changed, because snapshots and commands share it.
        self._values = np.zeros(len(joints), np.float32)
        self._is_known = np.zeros(len(joints), bool)
        self._is_current = np.zeros(len(joints), bool)
        self.pose: np.ndarray | None = None if len(joints) else self._values
        # Recent poses, each with the time of the next pose.
        self._past: deque[tuple[float, np.ndarray]] = deque(maxlen=256)

    def put_frame(self, camera: str, image: np.ndarray, observed_at: float) -> bool:
        """Keep a frame, uint8 (h, w, 3), RGB; count it and return False if it is unusable."""
        newest = self.observed_at.get(camera)
        reason = None
        if camera not in self.frames:
            reason = "unknown_camera"
        elif image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            reason = "frame_format"
        elif image.shape[0] * image.shape[1] > self._max_pixels:
            reason = "frame_too_large"
        elif newest is not None and observed_at < newest:
            reason = "frame_out_of_order"
        if reason is not None:
            self.dropped.add(reason)
            return False
        size = (image.shape[0], image.shape[1])
        if self.sizes.get(camera) != size:
            self.sizes = {**self.sizes, camera: size}
        self._images[camera], self.observed_at[camera] = image, observed_at
        self.frames[camera].add(observed_at)
        self.last_input_at = max(observed_at, self.last_input_at or observed_at)
        return True

    def put_joints(self, values: Mapping[str, object], observed_at: float) -> Mapping[str, int]:
        """Merge a partial update by name; return the number of dropped unusable values by reason."""
        update = self.joints.read_update(values)
        if update.dropped:
            self.refuse_joints(update.dropped)
        if self.odd or update.out_of_range:
            names = self.joints.names
            for position in update.values:
                self.odd.pop(names[position], None)
            self.odd |= {names[position]: value for position, value in update.out_of_range.items()}
        if not update.values:
            return update.dropped
        if self.pose is not None:
            self._past.append((observed_at, self.pose))
        positions = list(update.values)
        self._values = self._values.copy()
        self._values[positions] = list(update.values.values())
        self._values.flags.writeable = False
        if self.is_pose_current:
            self.pose = self._values
        else:
            self._is_known[positions] = True
            self._is_current[positions] = True
            self.is_pose_current = bool(self._is_current.all())
            self.pose = self._values if self._is_known.all() else None
        if self.units is not None and self.units.unchecked is None:
            self.units_mismatch = None if self.pose is None else self.units.find_mismatch(self.pose)
        self.joint_updates.add(observed_at)
        self.last_input_at = max(observed_at, self.last_input_at or observed_at)
        return update.dropped

    def refuse_joints(self, reasons: Mapping[str, int]) -> None:
        """Count unusable joint values by reason."""
        for reason, times in reasons.items():
            self.dropped.add(reason, times)

    def set_units(self, units: StateUnits) -> None:
        """Replace the units, for another policy or to accept the pose's unit."""
        self.units = units
        self.units_mismatch = None if self.pose is None else units.find_mismatch(self.pose)

    def distrust_frames(self, now: float) -> None:
        """Allow motion only with frames from now on, after a link was lost."""
        self._trusted_from = now

    def distrust_joints(self) -> None:
        """Allow motion only with joint values from now on, after their room was lost. Holds still use older values."""
        self._is_current[:] = False
        self.is_pose_current = not len(self.joints)

    def forget_joints(self) -> None:
        """Forget all joint values, because another robot must not move to this robot's pose."""
        self.distrust_joints()
        self._is_known[:] = False
        self.units_mismatch = None
        self.pose = None if len(self.joints) else self._values
        self._past.clear()

    def poses(self, now: float) -> list[np.ndarray]:
        """Return the measured pose (a,) and the poses of the last second."""
        past = [pose for until, pose in self._past if now - until <= RECENT_POSES]
        return past if self.pose is None else [self.pose, *past]

    def measured_joints(self) -> dict[str, float | None]:
        """Return wire name to last measured value, None for a joint without a value."""
        return {
            name: round(float(value), 4) if known else None
            for name, value, known in zip(self.joints.names, self._values, self._is_known, strict=True)
        }

    def not_ready(self, now: float) -> NotReady | None:
        """Return missing and stale input in one text; None if every frame and joint is fresh."""
        snapshot = self.snapshot(now)
        return snapshot if isinstance(snapshot, NotReady) else None

    def snapshot(self, now: float) -> Snapshot | NotReady:
        """Return frames and joints if they are complete, fresh and in the policy's unit, else the reason."""
        frames: dict[str, np.ndarray] = {}
        missing, stale, unseen, oldest = [], [], [], math.inf
        for camera, observed_at in self.observed_at.items():
            if observed_at is None:
                missing.append(f"camera {camera!r}: no frame yet")
            elif observed_at < self._trusted_from:
                stale.append(f"camera {camera!r}: no frame since a link was lost")
            elif now - observed_at > self._frame_age_limit:
                stale.append(
                    f"camera {camera!r}: frame is {(now - observed_at) * 1e3:.0f} ms old, "
                    f"limit {self._frame_age_limit * 1e3:.0f} ms"
                )
            else:
                frames[camera], oldest = self._images[camera], min(oldest, observed_at)
        if not self.is_pose_current:
            names = [name for name, known in zip(self.joints.names, self._is_current, strict=True) if not known]
            unseen.append("joints: no value yet of " + ", ".join(names))
        if missing or stale or unseen:
            code = "camera_missing" if missing else "camera_stale" if stale else "joints_missing"
            return NotReady(code, "; ".join(missing + stale + unseen))
        if self.units_mismatch is not None:
            return NotReady(JOINTS_UNITS, self.units_mismatch)
        # Joint values stay valid until they change.
        return Snapshot(frames, self._values, oldest if frames else now, self.sizes)
