"""LeRobot's flags, parsed as LeRobot parses them; all errors are reported at once."""

from pathlib import Path

import pytest

from robojax.robot.arm import JOINTS
from robojax.robot.config import RobotConfig, join_problems, read_cameras, read_max_relative_target, read_robot_config
from robojax.robot.errors import RobotError

LEROBOT = "{ front: {type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}}"
REAL = {"type": "so101_follower", "port": "/dev/ttyACM0", "id": "mine", "use_degrees": "true"}


def build_robot_config(**flags: str | None) -> RobotConfig:
    config, problems = read_robot_config(**flags)
    if problems:
        raise join_problems(problems)
    return config


def test_command_line_of_the_lerobot_guide_is_understood() -> None:
    config = build_robot_config(**REAL, cameras=LEROBOT, max_relative_target="10", calibration_dir="~/here")
    front = config.cameras["front"]
    assert (front.index_or_path, front.width, front.height, front.fps) == (0, 640, 480, 30)
    assert (config.use_degrees, config.max_relative_target) == (True, 10.0)
    assert config.calibration_dir == Path("~/here").expanduser()


def test_unit_of_a_real_arm_is_never_guessed() -> None:
    config = build_robot_config(**REAL)
    assert (config.disable_torque_on_disconnect, config.max_relative_target) == (False, 20.0)
    with pytest.raises(RobotError, match="unit of the joints") as refused:
        build_robot_config(**REAL | {"use_degrees": None})
    assert "stats.json" in refused.value.then
    assert build_robot_config(type="simulated").use_degrees is False


def test_all_missing_flags_are_reported_at_once() -> None:
    with pytest.raises(RobotError) as refused:
        build_robot_config(
            type=None, cameras="{front: 1}", max_relative_target="-1", disable_torque_on_disconnect="maybe"
        )
    for text in ("--robot.type", "--robot.port", "--robot.id", "--robot.cameras", "max_relative_target", "'maybe'"):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{front: {type: zmq, width: 1, height: 1, fps: 1}}", "type is 'zmq'"),
        ("{front: {type: opencv, width: 640, height: 480, fps: 30}}", "index_or_path is missing"),
        ("{front: {type: opencv, index_or_path: 0, width: 640, height: 480}}", "fps is None"),
        ("{front: {type: opencv, index_or_path: 0, widht: 640}}", "widht is unknown"),
        ("{front: {type: opencv, index_or_path: 0, width: -1, height: 480, fps: 30, rotation: 45}}", "rotation is 45"),
        ("{front: {type: opencv, index_or_path: 0, width: 1, height: 1, fps: 1, color_mode: bgr}}", "servers need RGB"),
        ("[1", "cannot be read"),
        ("!!python/object/apply:os.system [echo]", "cannot be read"),
    ],
)
def test_invalid_cameras_are_explained(text: str, message: str) -> None:
    with pytest.raises(RobotError, match="camera") as refused:
        read_cameras(text)
    assert message in str(refused.value)


def test_cap_applies_to_all_joints_or_each_joint() -> None:
    each = {name: 5.0 for name in JOINTS}
    assert read_max_relative_target("none") is None
    assert read_max_relative_target(str(each).replace("'", "")) == each
    for bad in ("0", "{gripper: 5}", "true", ".nan", "yes"):
        with pytest.raises(RobotError, match="max_relative_target"):
            read_max_relative_target(bad)
