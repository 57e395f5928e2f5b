"""Config of a robot, read from LeRobot's flags, and the opening of its arm."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from robojax.robot.arm import JOINTS, Arm, Calibration, JointCalibration, find_calibration, read_calibration
from robojax.robot.bus import HOMING_OFFSET, INSTALL, MAX_POSITION, MIN_POSITION, Bus
from robojax.robot.cameras import CameraConfig
from robojax.robot.errors import RobotError
from robojax.robot.simulated_bus import Servo, SimulatedBus

DEFAULT_ID = "my_arm"  # for simulated arms; a real arm needs the id of its calibration file
TYPES = ("so101_follower", "so100_follower", "simulated")
MAX_RELATIVE_TARGET = 20.0  # degrees or percent of the range: enough for quick motions, but prevents a swing
UNITS = (
    "give --robot.use_degrees=true or false, as your demonstrations were recorded: LeRobot's default was false up to "
    "0.4.3 and is true since. A joint beyond 100 or -100 in the dataset's meta/stats.json means degrees"
)


@dataclass(frozen=True)
class RobotConfig:
    """Config of a robot, with LeRobot's fields.

    Attributes:
        id: name of the calibration file.
        use_degrees: whether joints except the gripper are in degrees, else in -100..100 of their range.
        max_relative_target: largest distance of a target from the joint's position; None for no limit.
        disable_torque_on_disconnect: whether to release the arm at the end, so that it falls.
    """

    type: str
    port: str = ""
    id: str = DEFAULT_ID
    use_degrees: bool = False
    cameras: Mapping[str, CameraConfig] = field(default_factory=dict)
    calibration_dir: Path | None = None
    max_relative_target: float | Mapping[str, float] | None = MAX_RELATIVE_TARGET
    disable_torque_on_disconnect: bool = False

    @property
    def is_simulated(self) -> bool:
        """Whether the robot is simulated, without an arm."""
        return self.type == "simulated"


def join_problems(problems: Mapping[str, RobotError]) -> RobotError:
    """Join the problems of ``read_robot_config`` into one error."""
    errors = problems.values()
    return RobotError("\n".join(map(str, errors)), "\n".join(error.then for error in errors))


def read_robot_config(**flags: str | None) -> tuple[RobotConfig, dict[str, RobotError]]:
    """Read a robot's config from the texts of the flags ``--robot.NAME`` by field; None for flags that are not given.

    Returns:
        The config, with defaults for invalid flags; and the problems by part of the robot: type, port, id, units,
        cameras, max_relative_target, disable_torque_on_disconnect.
    """
    problems: dict[str, RobotError] = {}
    type_, port, robot_id = flags.get("type"), flags.get("port"), flags.get("id")
    if type_ not in TYPES:
        problems["type"] = RobotError(f"--robot.type is {type_!r}", f"give {', '.join(TYPES[:-1])} or {TYPES[-1]}")
    is_real = type_ != "simulated"
    if is_real and not port:
        then = "e.g. --robot.port=/dev/ttyACM0; lerobot-find-port finds it"
        problems["port"] = RobotError("--robot.port is missing", then)
    if is_real and not robot_id:
        problems["id"] = RobotError("--robot.id is missing", "give the id that the arm was calibrated with")
    if is_real and flags.get("use_degrees") is None:
        problems["units"] = RobotError("the unit of the joints is not known", UNITS)
    values: dict[str, Any] = {}
    for name, read in READERS.items():
        if (text := flags.get(name)) is not None:
            try:
                values[name] = read(text)
            except RobotError as error:
                problems["units" if name == "use_degrees" else name] = error
    return RobotConfig(type=type_ or "", port=port or "", id=robot_id or DEFAULT_ID, **values), problems


def read_cameras(text: str) -> dict[str, CameraConfig]:
    """Parse ``{ front: {type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}}``; raises RobotError."""
    example = '--robot.cameras="{ front: {type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}}"'
    parsed = _yaml("robot.cameras", text, example)
    if not isinstance(parsed, dict) or not all(
        isinstance(name, str) and isinstance(camera, dict) for name, camera in parsed.items()
    ):
        raise RobotError("--robot.cameras is not a map from name to camera", f"write it like {example}")
    known = {field.name for field in fields(CameraConfig)}
    cameras, wrong = {}, []
    for name, each in parsed.items():
        if strange := sorted(set(map(str, each)) - known):
            wrong.append(f"camera {name!r}: {', '.join(strange)} is unknown; known are {', '.join(sorted(known))}")
            continue
        try:
            cameras[name] = CameraConfig(**each)
        except (ValueError, TypeError) as error:
            wrong.append(f"camera {name!r}: {error}")
    if wrong:
        raise RobotError("; ".join(wrong), f"write it like {example}")
    return cameras


def read_max_relative_target(text: str) -> float | dict[str, float] | None:
    """Parse a number, a map from joint to number, or none; raise ``RobotError`` for other texts."""
    parsed = _yaml("robot.max_relative_target", text, "--robot.max_relative_target=10")
    if parsed in (None, "none"):
        return None
    values: dict[str, Any] = parsed if isinstance(parsed, dict) else dict.fromkeys(JOINTS, parsed)
    good = all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        for value in values.values()
    )
    if set(values) != set(JOINTS) or not good:
        raise RobotError(
            "--robot.max_relative_target is neither a positive number nor one for each joint",
            f"the joints are {', '.join(JOINTS)}; none removes the limit",
        )
    numbers = {name: float(value) for name, value in values.items()}
    return numbers if isinstance(parsed, dict) else next(iter(numbers.values()))


def _boolean(name: str, text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise RobotError(f"--{name} is {text!r}", "give true or false")


READERS: Mapping[str, Callable[[str], Any]] = {
    "use_degrees": partial(_boolean, "robot.use_degrees"),
    "cameras": read_cameras,
    "calibration_dir": lambda text: Path(text).expanduser(),
    "max_relative_target": read_max_relative_target,
    "disable_torque_on_disconnect": partial(_boolean, "robot.disable_torque_on_disconnect"),
}


def _yaml(name: str, text: str, example: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise RobotError(f"{error.name} is not installed, which reads --{name}", INSTALL) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise RobotError(f"--{name} cannot be read: {first}", f"write it like {example}") from error


LOW, HIGH = 700, 3395  # calibrated range of the simulated arm: two thirds of a turn
SIMULATED_PACKET_TIMEOUT = 1000.0  # milliseconds; simulated servos may be slow on a busy machine


def load_calibration(config: RobotConfig) -> Calibration:
    """Load the robot's calibration; raise ``RobotError`` if it is missing or invalid."""
    if config.is_simulated:
        return {name: JointCalibration(servo, 0, 0, LOW, HIGH) for name, servo in JOINTS.items()}
    return read_calibration(find_calibration(config.type, config.id, config.calibration_dir), JOINTS)


@contextmanager
def open_bus(config: RobotConfig, servos: Mapping[int, Servo] | None = None) -> Iterator[Bus]:
    """Open the bus of the arm's servos, as a context manager; ``servos`` (by id) are simulated with physics.

    Raise ``RobotError`` if the port cannot be opened or a package is missing.
    """
    if not config.is_simulated or config.port:
        with Bus(config.port) as bus:
            yield bus
        return
    servos = {servo: Servo() for servo in JOINTS.values()} if servos is None else servos
    for servo in servos.values():
        servo[HOMING_OFFSET], servo[MIN_POSITION], servo[MAX_POSITION] = 0, LOW, HIGH
    with SimulatedBus(servos) as simulated, Bus(simulated.port, SIMULATED_PACKET_TIMEOUT) as bus:
        yield bus


@contextmanager
def open_arm(config: RobotConfig, servos: Mapping[int, Servo] | None = None) -> Iterator[Arm]:
    """Open the arm as a context manager, without writing to its servos; ``servos`` and errors as in ``open_bus``."""
    calibration = load_calibration(config)
    with open_bus(config, servos) as bus:
        yield Arm(bus, calibration, config.use_degrees)
