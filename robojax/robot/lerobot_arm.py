"""Any robot of LeRobot as an arm: its joints, limits and pictures."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import make_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np

from robojax.robot.arm import FAILURES, GRIPPER, JointRanges, Unit, normalize_joint_name
from robojax.robot.config import RobotConfig
from robojax.robot.errors import BusLost, RobotError

LIMIT = re.compile(r"(.+)=(-?\d+\.?\d*):(-?\d+\.?\d*)")
REPAIR = "check its power, cables and cameras"


def read_limits(texts: Iterable[str]) -> JointRanges:
    """Parse texts of the form JOINT=LOW:HIGH; raise ``RobotError`` for other texts."""
    limits = {}
    for text in texts:
        if (match := LIMIT.fullmatch(text)) is None or float(match[2]) >= float(match[3]):
            raise RobotError(f"--limit is {text!r}", "give JOINT=LOW:HIGH in the robot's unit, e.g. elbow=-90:90")
        limits[normalize_joint_name(match[1])] = float(match[2]), float(match[3])
    return limits


def compute_limits(unit: Unit, range_min: int, range_max: int, resolution: int) -> tuple[float, float]:
    """Return the lowest and highest value of a motor in its unit; its calibrated range is in steps of the encoder."""
    half = (range_max - range_min) / 2 * 360 / (resolution - 1)
    return {Unit.DEGREES: (-half, half), Unit.GRIPPER: (0.0, 100.0), Unit.PERCENT: (-100.0, 100.0)}[unit]


def find_limits(robot: Any) -> JointRanges:
    """Return limits from a robot's calibration and configuration, by motor; a robot of two arms has both arms'."""
    limits: dict[str, tuple[float, float]] = {}
    for side in ("left", "right"):
        if (arm := getattr(robot, f"{side}_arm", None)) is not None:
            limits |= {f"{side}_{name}": ends for name, ends in find_limits(arm).items()}
    bus: Any = getattr(robot, "bus", None)
    # Only buses with this attribute have calibrations in steps of the encoder.
    for name, motor in bus.motors.items() if hasattr(bus, "apply_drive_mode") else ():
        if (joint := robot.calibration.get(name)) is not None:
            resolution, unit = bus.model_resolution_table[motor.model], Unit(motor.norm_mode.value)
            limits[name] = compute_limits(unit, joint.range_min, joint.range_max, resolution)
    return limits | dict(getattr(robot.config, "joint_limits", None) or {})


@contextmanager
def open_lerobot_arm(flags: Sequence[str], limits: JointRanges) -> Iterator["LeRobotArm"]:
    """Make the robot of LeRobot's flags (``--robot.type=...``), and disconnect it at the end; a context manager."""
    try:
        # LeRobot is not a dependency of robojax, because both need different versions of other packages.
        robots, draccus = import_module("lerobot.robots"), import_module("draccus")
    except ImportError as error:
        then = "pip install 'lerobot==0.6.1' in an environment with Python 3.12; see docs/robots/lerobot.md"
        raise RobotError(f"{error.name} is not installed, which --lerobot needs", then) from error
    for package in (robots, import_module("lerobot.cameras")):
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):  # The driver of that robot or camera is not installed.
                import_module(module.name)
    import_module("lerobot.utils.import_utils").register_third_party_plugins()
    try:
        config = draccus.parse(make_dataclass("Flags", [("robot", robots.RobotConfig)]), args=list(flags)).robot
        arm = LeRobotArm(robots.make_robot_from_config(config), limits)
    except (draccus.ParsingError, ImportError, OSError, TypeError, ValueError) as error:
        raise RobotError(f"LeRobot cannot make the robot: {error}", "give the flags of lerobot-teleoperate") from error
    try:
        yield arm
    finally:
        arm.disable_torque()


def configure_lerobot_arm(arm: "LeRobotArm") -> RobotConfig:
    """Return the config of a robot of LeRobot, whose targets may be a tenth of the range away from its joints."""
    steps = {joint: (high - low) / 10 for joint, (low, high) in arm.limits.items()}
    releases = getattr(arm.robot.config, "disable_torque_on_disconnect", True)
    robot_id = arm.robot.id or arm.robot.name
    return RobotConfig(
        "lerobot", "", robot_id, arm.uses_degrees, max_relative_target=steps, disable_torque_on_disconnect=releases
    )


class LeRobotArm:
    """A robot of LeRobot with the methods of ``Arm``; ``given`` limits replace the limits of its calibration.

    ``cameras`` are the names of its color cameras, ``pictures`` the pictures of the last reading by camera.
    ``uses_degrees`` is False if a joint has the range -100..100.
    """

    def __init__(self, robot: Any, given: JointRanges):
        self.robot, actions = robot, list(robot.action_features)
        self._keys = {normalize_joint_name(key): key for key in actions if key.endswith(".pos")}
        if not self._keys or len(self._keys) != len(actions):
            raise RobotError(f"{robot.name} takes {', '.join(actions)}", "use a robot that takes only positions (.pos)")
        found = {normalize_joint_name(name): ends for name, ends in find_limits(robot).items()}
        self.limits, self.uses_degrees = found | dict(given), (-100.0, 100.0) not in found.values()
        if different := sorted(self.limits.keys() ^ self._keys.keys()):
            fix = f"the joints are {', '.join(self._keys)}: calibrate them with lerobot-calibrate, or give --limit"
            raise RobotError(f"{robot.name} has no limits of these joints, or no such joints: {different}", fix)
        features = robot.observation_features.items()
        self.cameras = tuple(name for name, shape in features if isinstance(shape, tuple) and shape[2:] == (3,))
        self.pictures: dict[str, np.ndarray] = {}
        self._pose, self._targets, self._failed = dict[str, float](), dict[str, float](), 0

    def connect(self) -> dict[str, float]:
        """Connect to the robot and return its pose; raise ``RobotError`` if it is not calibrated."""
        try:
            self.robot.connect(calibrate=False)
            is_calibrated = self.robot.is_calibrated
        except Exception as error:  # Drivers may raise any exception.
            raise RobotError(f"{self.robot.name} cannot be connected: {error}", REPAIR) from error
        if not is_calibrated:
            raise RobotError(f"{self.robot.name} differs from its calibration file", "calibrate it (lerobot-calibrate)")
        while (pose := self.read_pose()) is None:
            pass  # Several failures raise.
        return pose

    def enable_torque(self) -> None:
        """Connect to the robot, and hold it in its present pose."""
        self.move(self.connect())

    def read_pose(self) -> dict[str, float] | None:
        """Read joints and cameras; None after a failed reading; raise ``BusLost`` after several failures."""
        try:
            observation = self.robot.get_observation()
            pose = {joint: float(observation[key]) for joint, key in self._keys.items()}
            if not all(map(math.isfinite, pose.values())):
                raise ValueError(f"a position is not finite: {pose}")
            self.pictures = {name: observation[name] for name in self.cameras}
        except Exception as error:  # Drivers may raise any exception.
            self._failed += 1
            if self._failed >= FAILURES:
                raise BusLost(f"{self.robot.name} cannot be read: {error}", REPAIR) from error
            return None
        self._failed, self._pose = 0, pose
        return pose

    def move(self, targets: Mapping[str, float]) -> None:
        """Send targets within the limits; a joint outside its limits may stay where it is; others keep their target."""
        for joint, target in targets.items():
            (low, high), at = self.limits[joint], self._pose[joint]
            self._targets[joint] = min(max(target, min(low, at)), max(high, at))
        try:
            self.robot.send_action({self._keys[joint]: target for joint, target in self._targets.items()})
        except Exception as error:  # Drivers may raise any exception.
            raise BusLost(f"{self.robot.name} takes no action: {error}", REPAIR) from error

    def hold_responding_servos(self) -> list[str]:
        """Hold the robot at its last measured pose, also after it is disconnected; return the held joints."""
        for part in (self.robot, *(getattr(self.robot, f"{side}_arm", None) for side in ("left", "right"))):
            if part is not None:
                part.config.disable_torque_on_disconnect = False
        self.move({joint: at for joint, at in self._pose.items() if not joint.endswith(GRIPPER)})
        return list(self._keys)

    def disable_torque(self) -> None:
        """Disconnect from the robot, which switches its torque off if its configuration says so."""
        if self.robot.is_connected:
            self.robot.disconnect()
