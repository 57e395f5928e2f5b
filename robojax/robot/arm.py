"""A SO-100 or SO-101 arm over its bus: calibration files, units, joints.

Three units: -100..100 of the calibrated range, 0..100 of it (grippers), or degrees from the middle of the range.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from robojax.robot import bus as registers
from robojax.robot.bus import RESOLUTION, Bus, Register, describe_alarms
from robojax.robot.errors import BusLost, RobotError

# LeRobot has one folder for both arms since 0.4.3; earlier versions had a folder per type.
FOLDERS = {
    "so101_follower": ("so_follower", "so101_follower"),
    "so100_follower": ("so_follower", "so100_follower"),
}


@dataclass(frozen=True)
class JointCalibration:
    """Calibration of one joint, as LeRobot's MotorCalibration; positions in servo steps.

    `drive_mode` 1 reverses the direction; the servo subtracts `homing_offset` from its encoder's position.
    """

    id: int
    drive_mode: int
    homing_offset: int
    range_min: int
    range_max: int


Calibration = Mapping[str, JointCalibration]
JointRanges = Mapping[str, tuple[float, float]]  # Lowest and highest value by joint.


def get_calibration_folder() -> Path:
    """Return the folder of LeRobot's calibrations, from LeRobot's environment variables."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    hub = Path(os.environ.get("HF_HOME", cache / "huggingface")).expanduser()
    home = Path(os.environ.get("HF_LEROBOT_HOME", hub / "lerobot")).expanduser()
    return Path(os.environ.get("HF_LEROBOT_CALIBRATION", home / "calibration")).expanduser()


def find_calibration(robot_type: str, robot_id: str, folder: Path | None = None) -> Path:
    """Return the path of an arm's ID.json in a folder (None: LeRobot's); raise ``RobotError`` if it is missing."""
    folders = (
        [folder] if folder is not None else [get_calibration_folder() / "robots" / name for name in FOLDERS[robot_type]]
    )
    if not robot_id or robot_id in (".", "..") or "/" in robot_id or "\0" in robot_id:
        raise RobotError(
            f"robot id {robot_id!r} cannot be a file's name", "give the id that the arm was calibrated with"
        )
    files = [file for directory in folders if (file := directory / f"{robot_id}.json").is_file()]
    if not files:
        candidates = " and ".join(str(directory / f"{robot_id}.json") for directory in folders)
        raise RobotError(
            f"there is no calibration of {robot_id!r}: looked for {candidates}",
            f"lerobot-calibrate --robot.type={robot_type} --robot.port=... --robot.id={robot_id} makes it; "
            "or give --robot.calibration_dir",
        )
    if len(files) == 2 and files[0].read_bytes() != files[1].read_bytes():
        raise RobotError(
            f"there are two calibrations of {robot_id!r} that differ: {files[0]} and {files[1]}",
            "give the folder of the right one with --robot.calibration_dir",
        )
    return files[0]


def read_calibration(file: Path, joints: Mapping[str, int]) -> dict[str, JointCalibration]:
    """Read a calibration file, in the order of ``joints`` (name to servo id).

    Raises:
        RobotError: the file is unreadable or does not fit these joints; the text lists all errors.
    """
    repair = "calibrate the arm again with lerobot-calibrate"
    try:
        entries = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RobotError(f"the calibration {file} cannot be read: {error}", repair) from error
    if not isinstance(entries, dict):
        raise RobotError(f"the calibration {file} is not a JSON object", repair)
    wrong = [f"joint {name!r} is missing" for name in joints if name not in entries]
    wrong += [f"joint {name!r} does not belong to this arm" for name in entries if name not in joints]
    result = {}
    for name, servo in joints.items():
        if name not in entries:
            continue
        try:
            result[name] = _joint(entries[name], servo)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        raise RobotError(f"the calibration {file} does not fit: " + "; ".join(wrong), repair)
    return result


def _joint(entry: object, servo: int) -> JointCalibration:
    if not isinstance(entry, dict):
        raise ValueError("is not an object")
    values = {}
    for field in fields(JointCalibration):
        value = entry.get(field.name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{field.name} is not an integer")
        values[field.name] = value
    joint = JointCalibration(**values)
    if joint.id != servo:
        raise ValueError(f"is servo {joint.id}, wanted {servo}")
    if joint.drive_mode not in (0, 1):
        raise ValueError(f"drive_mode is {joint.drive_mode}, wanted 0 or 1")
    if not -2047 <= joint.homing_offset <= 2047:
        raise ValueError(f"homing_offset {joint.homing_offset} is more than half a turn")
    if not 0 <= joint.range_min < joint.range_max < RESOLUTION:
        raise ValueError(f"range {joint.range_min}..{joint.range_max}: wanted a range within 0..{RESOLUTION - 1}")
    return joint


class Unit(StrEnum):
    """Units of joint values, by LeRobot's names."""

    PERCENT = "range_m100_100"
    GRIPPER = "range_0_100"
    DEGREES = "degrees"


def from_steps(steps: int, joint: JointCalibration, unit: Unit) -> float:
    """Convert a servo's position to a policy's unit. Degrees are not clipped to the range, the other units are."""
    low, high = joint.range_min, joint.range_max
    if unit is Unit.DEGREES:
        return (steps - (low + high) / 2) * 360 / (RESOLUTION - 1)
    least = 0 if unit is Unit.GRIPPER else -100
    percent = (min(high, max(low, steps)) - low) / (high - low) * (100 - least) + least
    return least + 100 - percent if joint.drive_mode else percent


def compute_ranges(calibration: Calibration) -> JointRanges:
    """Return the calibrated range of each joint in degrees from its middle."""
    ends = {name: from_steps(joint.range_max, joint, Unit.DEGREES) for name, joint in calibration.items()}
    return {name: (-end, end) for name, end in ends.items()}


def to_steps(value: float, joint: JointCalibration, unit: Unit) -> int:
    """Convert a target to a servo's position within the calibrated range; raise ``ValueError`` if it is not finite.

    LeRobot sends degrees beyond the range and relies on the servo's limits; this function also applies the file's.
    """
    if not math.isfinite(value):
        raise ValueError(f"target {value}: wanted a finite number")
    low, high = joint.range_min, joint.range_max
    if unit is Unit.DEGREES:
        steps = int(value * (RESOLUTION - 1) / 360 + (low + high) / 2)
    else:
        least = 0.0 if unit is Unit.GRIPPER else -100.0
        percent = least + 100 - value if joint.drive_mode else value
        steps = int((min(100.0, max(least, percent)) - least) / (100 - least) * (high - low) + low)
    return min(high, max(low, steps))


# Joint to servo id, as in LeRobot.
JOINTS = {"shoulder_pan": 1, "shoulder_lift": 2, "elbow_flex": 3, "wrist_flex": 4, "wrist_roll": 5, "gripper": 6}
GRIPPER = "gripper"
# Names of joints on the wire to LeRobot's names.
WIRE_NAMES = {
    "Rotation": "shoulder_pan",
    "Pitch": "shoulder_lift",
    "Elbow": "elbow_flex",
    "Wrist_Pitch": "wrist_flex",
    "Wrist_Roll": "wrist_roll",
    "Jaw": "gripper",
}
POSITION_MODE = 0
# Register to value, as in LeRobot: quick responses, and soft enough to prevent vibration.
SET_UP = {
    registers.RETURN_DELAY: 0,
    registers.MAX_ACCELERATION: 254,
    registers.ACCELERATION: 254,
    registers.OPERATING_MODE: POSITION_MODE,
    registers.P_COEFFICIENT: 16,
    registers.I_COEFFICIENT: 0,
    registers.D_COEFFICIENT: 32,
}
# Half of the maximum, so that a gripper that holds an object does not overheat.
SET_UP_GRIPPER = {registers.MAX_TORQUE: 500, registers.PROTECTION_CURRENT: 250, registers.OVERLOAD_TORQUE: 25}
CALIBRATED = (registers.HOMING_OFFSET, registers.MIN_POSITION, registers.MAX_POSITION)
# Possible positions, with a margin of one turn for the homing offset.
BELIEVABLE = range(-RESOLUTION, 2 * RESOLUTION)
FAILURES = 3  # consecutive failed readings after which a servo counts as lost
SENSOR = describe_alarms(2)[0]


def normalize_joint_name(name: str) -> str:
    """Return LeRobot's name of a joint, e.g. of ``Rotation``, ``shoulder_pan.pos`` or ``main_shoulder_pan``."""
    name = name.removesuffix(".pos").removeprefix("main_")
    return WIRE_NAMES.get(name, name)


class Figures(NamedTuple):
    """Voltage and temperature of a servo, their limits, and whether its torque is on."""

    volts: float
    lowest: float
    highest: float
    celsius: int
    hottest: int
    is_held: bool


class Arm:
    """Arm on an open bus, for one thread at a time; ``servo_errors`` are the joints' errors in the last reading."""

    def __init__(self, bus: Bus, calibration: Calibration, use_degrees: bool):
        self._bus, self._calibration = bus, calibration
        body = Unit.DEGREES if use_degrees else Unit.PERCENT
        self._units = {name: Unit.GRIPPER if name == GRIPPER else body for name in JOINTS}
        self._names = {servo: name for name, servo in JOINTS.items()}
        self._failed = 0
        self.servo_errors: dict[str, list[str]] = {}

    def find_missing_servos(self) -> dict[str, str]:
        """Return the joints whose servo does not answer or is another model, with the reason."""
        models = {name: self._bus.ping(servo) for name, servo in JOINTS.items()}
        return {
            name: f"servo {JOINTS[name]} does not answer"
            if model is None
            else f"servo {JOINTS[name]} has model {model}, wanted {registers.MODEL_NUMBER} (STS3215)"
            for name, model in models.items()
            if model != registers.MODEL_NUMBER
        }

    def find_miscalibrated_servos(self, joints: Iterable[str] = JOINTS) -> dict[str, str]:
        """Return the joints whose servo has another zero or range than the calibration file, with the difference."""
        wrong = {}
        for name in joints:
            servo, joint = JOINTS[name], self._calibration[name]
            expected = (joint.homing_offset, joint.range_min, joint.range_max)
            actual = tuple(self._bus.read(servo, register) for register in CALIBRATED)
            if actual != expected:
                wrong[name] = f"zero and limits in the servo are {actual}, in the file {expected}"
        return wrong

    def read_figures(self, joint: str) -> Figures:
        """Read voltage and temperature of a joint's servo, and their limits."""
        servo = JOINTS[joint]

        def read(register: Register) -> int:
            return self._bus.read(servo, register)

        return Figures(
            read(registers.PRESENT_VOLTAGE) / 10,
            read(registers.MIN_VOLTAGE) / 10,
            read(registers.MAX_VOLTAGE) / 10,
            read(registers.PRESENT_TEMPERATURE),
            read(registers.MAX_TEMPERATURE),
            bool(read(registers.TORQUE_ENABLE)),
        )

    def read_status(self, joint: str) -> list[str]:
        """Read the errors that a joint's servo reports."""
        return self._bus.status(JOINTS[joint])

    @property
    def held(self) -> list[str]:
        """Joints whose torque is on."""
        return [name for name, servo in JOINTS.items() if self._bus.read(servo, registers.TORQUE_ENABLE)]

    def enable_torque(self) -> None:
        """Configure the servos and hold the arm in its present pose; the arm neither moves nor falls.

        Servos that already hold the arm are not configured, because that needs their torque off.

        Raises:
            RobotError: a servo is missing, has another model, or differs from the calibration file.
        """
        if missing := self.find_missing_servos():
            raise RobotError(
                "; ".join(f"{name}: {text}" for name, text in missing.items()),
                "check power and cables; `robojax robot --check` checks each servo",
            )
        if wrong := self.find_miscalibrated_servos():
            raise RobotError(
                "the calibration file does not belong to this arm: "
                + "; ".join(f"{name}: {text}" for name, text in wrong.items()),
                "give the right --robot.id, or run lerobot-calibrate: it offers to write the file to the servos",
            )
        held = self.held
        for name, servo in JOINTS.items():
            if name not in held:
                self._set_up(name, servo)
            elif self._bus.read(servo, registers.OPERATING_MODE) != POSITION_MODE:
                raise RobotError(
                    f"{name}: servo {servo} is on and not in position mode",
                    "lay the arm down, switch its power off and on, and start again",
                )
        self._write({name: value for name, value in self._steps().items() if name not in held})
        for name in JOINTS:
            if name not in held:
                self._bus.write(JOINTS[name], registers.TORQUE_ENABLE, 1)
                self._bus.write(JOINTS[name], registers.LOCK, 1)

    def read_pose(self) -> dict[str, float] | None:
        """Read the joints' positions; None after a failed reading; raise ``BusLost`` after several failures."""
        try:
            steps = self._steps()
            self._check_plausible(steps)
        except BusLost:
            self._failed += 1
            if self._failed >= FAILURES:
                raise
            return None
        self._failed = 0
        return {name: from_steps(value, self._calibration[name], self._units[name]) for name, value in steps.items()}

    def move(self, targets: Mapping[str, float]) -> None:
        """Send targets, limited to the calibrated range; other joints keep their targets.

        Raises:
            BusLost: the port is lost. Servos do not confirm targets, so only ``read_pose`` detects a lost servo.
        """
        self._write(
            {name: to_steps(value, self._calibration[name], self._units[name]) for name, value in targets.items()}
        )

    def hold_responding_servos(self) -> list[str]:
        """Hold every servo that still answers at its present position; return the held joints."""
        held = []
        for name, servo in JOINTS.items():
            try:
                at = self._bus.read(servo, registers.PRESENT_POSITION)
                if at not in BELIEVABLE or SENSOR in self._bus.status(servo):
                    continue  # A wrong position as target would drive the joint to its end.
                if name != GRIPPER:
                    self._bus.write(servo, registers.GOAL_POSITION, at)
                held.append(name)
            except BusLost:
                continue
        return held

    def disable_torque(self) -> None:
        """Switch the torque off; the arm falls unless it is supported."""
        for servo in JOINTS.values():
            self._bus.write(servo, registers.TORQUE_ENABLE, 0)
            self._bus.write(servo, registers.LOCK, 0)

    def _set_up(self, name: str, servo: int) -> None:
        settings = SET_UP | (SET_UP_GRIPPER if name == GRIPPER else {})
        # Only different values are written, because most registers are in memory that wears out.
        different = {
            register: value for register, value in settings.items() if self._bus.read(servo, register) != value
        }
        if different:
            self._bus.write(servo, registers.LOCK, 0)
        for register, value in different.items():
            self._bus.write(servo, register, value)

    def _steps(self) -> dict[str, int]:
        values, alarms = self._bus.read_all(list(JOINTS.values()), registers.PRESENT_POSITION)
        self.servo_errors = {self._names[servo]: errors for servo, errors in alarms.items()}
        return {self._names[servo]: value for servo, value in values.items()}

    def _check_plausible(self, steps: Mapping[str, int]) -> None:
        """Refuse impossible positions, because a joint that is held there would drive to the end of its range."""
        for name, value in steps.items():
            if value not in BELIEVABLE or SENSOR in self.servo_errors.get(name, ()):
                raise BusLost(
                    f"{name}: servo {JOINTS[name]} does not know its position: it reports {value}",
                    "switch the arm's power off and on; if the servo still reports it, the servo is broken",
                    (JOINTS[name],),
                )

    def _write(self, steps: Mapping[str, int]) -> None:
        if steps:
            self._bus.write_all({JOINTS[name]: value for name, value in steps.items()}, registers.GOAL_POSITION)
