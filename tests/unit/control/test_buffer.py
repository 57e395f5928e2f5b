from dataclasses import replace

import numpy as np
import pytest

from service.control.joints import SO100, JointTable
from service.control.observation_buffer import NotReady, ObservationBuffer, ObservationHistory, Snapshot

FRAME = np.zeros((48, 64, 3), np.uint8)
POSE = {joint.name: float(joint.index) for joint in SO100}


def buffer(*cameras: str) -> ObservationBuffer:
    return ObservationBuffer(cameras or ("front",), JointTable(SO100))


def observed_at(moment: float) -> ObservationBuffer:
    """Return a buffer with one frame and all joints of this time."""
    observed = buffer()
    observed.put_frame("front", FRAME, moment)
    observed.put_joints(POSE, moment)
    return observed


def test_a_snapshot_names_every_missing_camera_and_joint() -> None:
    observed = buffer("front", "top")
    observed.put_frame("top", FRAME, 1.0)
    observed.put_joints({"Rotation": 1.0, "Pitch": 2.0}, 1.0)
    missing = observed.snapshot(1.1)
    assert missing == NotReady(
        "camera_missing", "camera 'front': no frame yet; joints: no value yet of Elbow, Wrist_Pitch, Wrist_Roll, Jaw"
    )


def test_an_old_frame_is_stale_but_old_joints_are_not() -> None:
    observed = observed_at(1.0)
    assert observed.not_ready(1.299) is None
    assert observed.not_ready(1.412) == NotReady("camera_stale", "camera 'front': frame is 412 ms old, limit 300 ms")
    observed = buffer()
    observed.put_joints(POSE, 0.0)
    observed.put_frame("front", FRAME, 3600.0)
    assert observed.snapshot(3600.1).joints.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_snapshot_is_as_old_as_its_oldest_frame() -> None:
    observed = buffer("front", "top")
    observed.put_frame("front", FRAME, 1.0)
    observed.put_frame("top", np.ones((24, 32, 3), np.uint8), 1.2)
    observed.put_joints(POSE, 0.5)
    snapshot = observed.snapshot(1.25)
    assert snapshot.observed_at == 1.0
    assert snapshot.sizes == {"front": (48, 64), "top": (24, 32)}
    observation = snapshot.observation()
    assert {name: (value.shape, value.dtype) for name, value in observation.items()} == {
        "observation.images.front": ((1, 48, 64, 3), np.uint8),
        "observation.images.top": ((1, 24, 32, 3), np.uint8),
        "observation.state": ((1, 6), np.float32),
    }


def test_usable_parts_of_updates_are_merged_by_name() -> None:
    observed = buffer()
    observed.put_joints({}, 1.0)
    observed.put_joints({"tail": 1.0}, 1.0)
    assert (observed.joint_updates.count, observed.last_input_at, observed.pose) == (0, None, None)
    observed.put_joints(POSE, 1.0)
    observed.put_joints({"elbow_flex": 42.0, "Jaw": float("nan"), "tail": 1.0}, 2.0)
    assert observed.pose.tolist() == [0, 1, 42, 3, 4, 5]
    assert observed.dropped.by_reason() == {"not_finite": 1, "unknown_joint": 2}


@pytest.mark.parametrize(
    ("camera", "image", "reason"),
    [
        ("front", np.zeros((48, 64, 3), np.float32), "frame_format"),
        ("front", np.zeros((48, 64), np.uint8), "frame_format"),
        ("front", np.zeros((48, 64, 4), np.uint8), "frame_format"),
        ("front", np.zeros((0, 64, 3), np.uint8), "frame_format"),
        ("front", np.broadcast_to(np.zeros((), np.uint8), (9000, 9000, 3)), "frame_too_large"),
        ("back", FRAME, "unknown_camera"),
    ],
)
def test_an_unusable_frame_is_dropped_and_counted(camera: str, image: np.ndarray, reason: str) -> None:
    observed = buffer()
    observed.put_frame(camera, image, 1.0)
    assert observed.dropped.by_reason() == {reason: 1}
    assert observed.sizes == {}


def test_an_older_frame_never_replaces_a_newer_one() -> None:
    observed = buffer()
    observed.put_frame("front", FRAME, 2.0)
    observed.put_frame("front", FRAME + 1, 1.0)
    assert observed.observed_at == {"front": 2.0}
    assert observed.dropped["frame_out_of_order"] == 1


def test_motion_needs_all_joints_after_the_joint_room_is_lost() -> None:
    observed = observed_at(1.0)
    observed.distrust_joints()
    assert observed.not_ready(1.0).code == "joints_missing"
    assert observed.pose is not None
    observed.put_joints(POSE, 1.1)
    assert observed.not_ready(1.1) is None


def test_a_snapshot_does_not_change_when_joints_do() -> None:
    observed = observed_at(1.0)
    snapshot = observed.snapshot(1.0)
    observed.put_joints({"Elbow": 99.0}, 1.0)
    assert snapshot.joints[2] == 2


def observe(observed: ObservationBuffer, now: float) -> Snapshot:
    """Return the snapshot of a tick with its past."""
    snapshot = observed.snapshot(now)
    observed.history.add(now, snapshot)
    return replace(snapshot, past=observed.history.before(now, snapshot))


def look_back(steps: int, period: float, rate: float, until: float, gap: tuple[float, float] = (9, 9)) -> Snapshot:
    """Return the last snapshot after ticks at this rate. Joint 0 and the pixels hold the time. The gap has no input."""
    observed = ObservationBuffer(("front",), JointTable(SO100), history=ObservationHistory(steps, period))
    for tick in range(round(until * rate) + 1):
        now = tick / rate
        if gap[0] <= now < gap[1]:
            continue
        observed.put_frame("front", np.full((4, 4, 3), round(now * 100), np.uint8), now)
        observed.put_joints(POSE | {"Rotation": now * 100}, now)
        snapshot = observe(observed, now)
    return snapshot


@pytest.mark.parametrize(
    ("steps", "period", "rate", "until", "expected"),
    [
        (1, 0.1, 50, 1.0, [100]),
        (2, 0.1, 50, 1.0, [90, 100]),
        (3, 0.1, 50, 1.0, [80, 90, 100]),
        (3, 0.1, 10, 1.0, [80, 90, 100]),
        (3, 0.1, 50, 0.0, [0, 0, 0]),  # At the start, the oldest observation replaces the missing ones.
        (3, 0.1, 50, 0.12, [2, 2, 12]),
        (2, 0.02, 10, 1.0, [100, 100]),  # Ticks slower than the policy's steps have no observation in between.
    ],
)
def test_several_observations_are_spaced_at_the_policy_rate(steps, period, rate, until, expected) -> None:
    observation = look_back(steps, period, rate, until).observation()
    state, pictures = observation["observation.state"], observation["observation.images.front"]
    shape = () if steps == 1 else (steps,)
    assert (state.shape, pictures.shape) == ((1, *shape, 6), (1, *shape, 4, 4, 3))
    assert np.round(state[..., 0]).reshape(-1).tolist() == expected
    assert pictures[..., 0, 0, 0].reshape(-1).tolist() == expected


def test_the_past_ends_at_a_hold_a_new_picture_size_and_a_start() -> None:
    observation = look_back(2, 0.1, 50, 1.0, gap=(0.5, 0.96)).observation()
    assert np.round(observation["observation.state"][0, :, 0]).tolist() == [100, 100]
    observed = ObservationBuffer(("front",), JointTable(SO100), history=ObservationHistory(2, 0.1))
    for now, size in ((0.0, 4), (0.1, 8)):
        observed.put_frame("front", np.zeros((size, size, 3), np.uint8), now)
        observed.put_joints(POSE | {"Rotation": now}, now)
        found = observe(observed, now)
    assert found.observation()["observation.images.front"].shape == (1, 2, 8, 8, 3)
    assert [joints[0] for _, joints in found.past] == [np.float32(0.1)]
    observed.history.clear()
    observed.put_frame("front", np.ones((8, 8, 3), np.uint8), 0.2)
    found = observe(observed, 0.2)
    assert found.observation()["observation.images.front"][0, 0].min() == 1
