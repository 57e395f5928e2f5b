import numpy as np
import pytest

from service.control.joints import SO100, JointTable
from service.control.observation_buffer import NotReady, ObservationBuffer, Snapshot

FRAME = np.zeros((48, 64, 3), np.uint8)
POSE = {joint.name: float(joint.index) for joint in SO100}


def buffer(*cameras: str) -> ObservationBuffer:
    return ObservationBuffer(cameras or ("front",), JointTable(SO100))


def test_a_snapshot_needs_every_camera_and_every_joint_and_says_all_that_is_missing() -> None:
    seen = buffer("front", "top")
    seen.put_frame("top", FRAME, 1.0)
    seen.put_joints({"Rotation": 1.0, "Pitch": 2.0}, 1.0)
    lack = seen.snapshot(1.1)
    assert lack == NotReady(
        "camera_missing", "camera 'front': no frame yet; joints: no value yet of Elbow, Wrist_Pitch, Wrist_Roll, Jaw"
    )


def test_a_stale_frame_is_named_with_its_age_and_the_limit() -> None:
    seen = buffer()
    seen.put_frame("front", FRAME, 1.0)
    seen.put_joints(POSE, 1.0)
    assert seen.not_ready(1.299) is None
    assert seen.not_ready(1.412) == NotReady("camera_stale", "camera 'front': frame is 412 ms old, limit 300 ms")


def test_a_silent_robot_is_not_a_stale_one() -> None:
    seen = buffer()
    seen.put_joints(POSE, 0.0)
    seen.put_frame("front", FRAME, 3600.0)
    snapshot = seen.snapshot(3600.1)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.joints.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_snapshot_is_as_old_as_its_oldest_frame_and_has_the_policys_features() -> None:
    seen = buffer("front", "top")
    seen.put_frame("front", FRAME, 1.0)
    seen.put_frame("top", np.ones((24, 32, 3), np.uint8), 1.2)
    seen.put_joints(POSE, 0.5)
    snapshot = seen.snapshot(1.25)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.seen_at == 1.0
    assert snapshot.sizes == {"front": (48, 64), "top": (24, 32)}
    observation = snapshot.observation()
    assert {name: (value.shape, value.dtype) for name, value in observation.items()} == {
        "observation.images.front": ((1, 48, 64, 3), np.uint8),
        "observation.images.top": ((1, 24, 32, 3), np.uint8),
        "observation.state": ((1, 6), np.float32),
    }


def test_partial_updates_merge_by_name_and_the_others_hold() -> None:
    seen = buffer()
    seen.put_joints(POSE, 1.0)
    seen.put_joints({"elbow_flex": 42.0, "Jaw": float("nan"), "tail": 1.0}, 2.0)
    assert seen.pose is not None
    assert seen.pose.tolist() == [0, 1, 42, 3, 4, 5]
    assert seen.dropped.by_reason() == {"not_finite": 1, "unknown_joint": 1}


def test_an_update_without_anything_usable_is_no_input() -> None:
    seen = buffer()
    seen.put_joints({}, 1.0)
    seen.put_joints({"tail": 1.0}, 1.0)
    assert seen.joint_updates.count == 0
    assert seen.last_input_at is None
    assert seen.pose is None


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
def test_a_frame_that_no_policy_could_use_is_dropped_and_counted(camera: str, image: np.ndarray, reason: str) -> None:
    seen = buffer()
    seen.put_frame(camera, image, 1.0)
    assert seen.dropped.by_reason() == {reason: 1}
    assert seen.sizes == {}


def test_an_older_frame_never_replaces_a_newer_one() -> None:
    seen = buffer()
    seen.put_frame("front", FRAME, 2.0)
    seen.put_frame("front", FRAME + 1, 1.0)
    assert seen.frame_ages(2.0) == {"front": 0.0}
    assert seen.dropped["frame_out_of_order"] == 1


def test_after_the_joint_room_was_lost_motion_needs_all_joints_anew_but_a_hold_does_not() -> None:
    seen = buffer()
    seen.put_joints(POSE, 1.0)
    seen.put_frame("front", FRAME, 1.0)
    seen.distrust_joints()
    lack = seen.not_ready(1.0)
    assert lack is not None
    assert lack.code == "joints_missing"
    assert seen.pose is not None
    seen.put_joints(POSE, 1.1)
    assert seen.not_ready(1.1) is None


def test_a_snapshot_does_not_change_when_joints_do() -> None:
    seen = buffer()
    seen.put_joints(POSE, 1.0)
    seen.put_frame("front", FRAME, 1.0)
    snapshot = seen.snapshot(1.0)
    seen.put_joints({"Elbow": 99.0}, 1.0)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.joints[2] == 2
