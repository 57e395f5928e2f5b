"""Arm over its bus: calibration file, units, joints.

Three units: -100..100 of the calibrated range, 0..100 of it (grippers), or degrees from the middle of the range.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from robojax.robot import bus as registers
from robojax.robot.bus import RESOLUTION, Bus, Register, alarms
from robojax.robot.errors import BusLost, RobotError

# LeRobot keeps both arms in one folder since 0.4.3; versions before it had one for each type.
FOLDERS = {
    "so101_follower": ("so_follower", "so101_follower"),
    "so100_follower": ("so_follower", "so100_follower"),
}


@dataclass(frozen=True)
class JointCalibration:
    """One joint, as LeRobot's MotorCalibration has it; positions in servo steps.

    Attributes:
        id: of the servo on the bus.
        drive_mode: 1 where the joint's direction is turned round, else 0.
        homing_offset: what the servo itself takes off its encoder's position.
    """

    id: int
    drive_mode: int
    homing_offset: int
    range_min: int
    range_max: int


Calibration = Mapping[str, JointCalibration]


def calibration_folder() -> Path:
    """Where LeRobot keeps its calibrations, by its own environment variables."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    hub = Path(os.environ.get("HF_HOME", cache / "huggingface")).expanduser()
    home = Path(os.environ.get("HF_LEROBOT_HOME", hub / "lerobot")).expanduser()
    return Path(os.environ.get("HF_LEROBOT_CALIBRATION", home / "calibration")).expanduser()


def find_calibration(robot_type: str, robot_id: str, folder: Path | None = None) -> Path:
    """The file of this arm.

    Args:
        folder: where ID.json lies; LeRobot's own folders when None.

    Raises:
        RobotError: there is none, or two that differ.
    """
    places = (
        [folder] if folder is not None else [calibration_folder() / "robots" / name for name in FOLDERS[robot_type]]
    )
    if not robot_id or robot_id in (".", "..") or "/" in robot_id or "\0" in robot_id:
        raise RobotError(
            f"robot id {robot_id!r} cannot be a file's name", "give the id that the arm was calibrated with"
        )
    files = [file for place in places if (file := place / f"{robot_id}.json").is_file()]
    if not files:
        looked = " and ".join(str(place / f"{robot_id}.json") for place in places)
        raise RobotError(
            f"there is no calibration of {robot_id!r}: looked for {looked}",
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
    """The calibration in this file, in the order of ``joints``.

    Args:
        joints: name to servo id, as the arm is built.

    Raises:
        RobotError: it cannot be read, or is no calibration of these joints; names everything that is wrong.
    """
    repair = "calibrate the arm again with lerobot-calibrate"
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RobotError(f"the calibration {file} cannot be read: {error}", repair) from error
    if not isinstance(found, dict):
        raise RobotError(f"the calibration {file} is no JSON object", repair)
    wrong = [f"joint {name!r} is missing" for name in joints if name not in found]
    wrong += [f"joint {name!r} is none of this arm's" for name in found if name not in joints]
    result = {}
    for name, servo in joints.items():
        if name not in found:
            continue
        try:
            result[name] = _joint(found[name], servo)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        raise RobotError(f"the calibration {file} does not fit: " + "; ".join(wrong), repair)
    return result


def _joint(found: object, servo: int) -> JointCalibration:
    if not isinstance(found, dict):
        raise ValueError("is no object")
    values = {}
    for field in fields(JointCalibration):
        value = found.get(field.name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{field.name} is no whole number")
        values[field.name] = value
    joint = JointCalibration(**values)
    if joint.id != servo:
        raise ValueError(f"is servo {joint.id}, wanted {servo}")
    if joint.drive_mode not in (0, 1):
        raise ValueError(f"drive_mode is {joint.drive_mode}, wanted 0 or 1")
    if not -2047 <= joint.homing_offset <= 2047:
        raise ValueError(f"homing_offset {joint.homing_offset} is more than half a turn")
    if not 0 <= joint.range_min < joint.range_max < RESOLUTION:
        raise ValueError(f"the range {joint.range_min}..{joint.range_max} is none within 0..{RESOLUTION - 1}")
    return joint


class Unit(StrEnum):
    """LeRobot's names of them."""

    PERCENT = "range_m100_100"
    GRIPPER = "range_0_100"
    DEGREES = "degrees"


def from_steps(steps: int, joint: JointCalibration, unit: Unit) -> float:
    """A servo's position in a policy's unit. Degrees are not bounded by the range, the others are."""
    low, high = joint.range_min, joint.range_max
    if unit is Unit.DEGREES:
        return (steps - (low + high) / 2) * 360 / (RESOLUTION - 1)
    share = (min(high, max(low, steps)) - low) / (high - low)
    if unit is Unit.GRIPPER:
        percent = share * 100
        return 100 - percent if joint.drive_mode else percent
    percent = share * 200 - 100
    return -percent if joint.drive_mode else percent


def to_steps(value: float, joint: JointCalibration, unit: Unit) -> int:
    """The position for a target, always within the calibrated range.

    LeRobot sends degrees beyond the range and relies on the servo's own limits; here the limit is the file's, too.

    Raises:
        ValueError: the target is not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"a target of {value} is no position")
    low, high = joint.range_min, joint.range_max
    if unit is Unit.DEGREES:
        steps = int(value * (RESOLUTION - 1) / 360 + (low + high) / 2)
    elif unit is Unit.GRIPPER:
        percent = 100 - value if joint.drive_mode else value
        steps = int(min(100.0, max(0.0, percent)) / 100 * (high - low) + low)
    else:
        percent = -value if joint.drive_mode else value
        steps = int((min(100.0, max(-100.0, percent)) + 100) / 200 * (high - low) + low)
    return min(high, max(low, steps))


# Joint to servo id, as LeRobot numbers them.
JOINTS = {"shoulder_pan": 1, "shoulder_lift": 2, "elbow_flex": 3, "wrist_flex": 4, "wrist_roll": 5, "gripper": 6}
GRIPPER = "gripper"
POSITION_MODE = 0
# Register to value, as LeRobot sets up an arm of this kind: quick answers, soft enough not to shake.
SET_UP = {
    registers.RETURN_DELAY: 0,
    registers.MAX_ACCELERATION: 254,
    registers.ACCELERATION: 254,
    registers.OPERATING_MODE: POSITION_MODE,
    registers.P_COEFFICIENT: 16,
    registers.I_COEFFICIENT: 0,
    registers.D_COEFFICIENT: 32,
}
# Half of everything, so that a gripper that holds something does not burn out.
SET_UP_GRIPPER = {registers.MAX_TORQUE: 500, registers.PROTECTION_CURRENT: 250, registers.OVERLOAD_TORQUE: 25}
CALIBRATED = (registers.HOMING_OFFSET, registers.MIN_POSITION, registers.MAX_POSITION)
# Where a shaft can be, with a turn to spare for what the servo takes off its position.
BELIEVABLE = range(-RESOLUTION, 2 * RESOLUTION)
# Readings in a row that may fail before a servo counts as lost; one lost packet is no lost servo.
FAILURES = 3
SENSOR = alarms(2)[0]


class Figures(NamedTuple):
    """What a servo says of itself."""

    volts: float
    lowest: float
    highest: float
    celsius: int
    hottest: int


class Arm:
    """An arm on an open bus. One thread at a time.

    Attributes:
        complaints: joint to what its servo complains of, as of the last reading.
    """

    def __init__(self, bus: Bus, calibration: Calibration, use_degrees: bool):
        self._bus, self._calibration = bus, calibration
        body = Unit.DEGREES if use_degrees else Unit.PERCENT
        self._units = {name: Unit.GRIPPER if name == GRIPPER else body for name in JOINTS}
        self._names = {servo: name for name, servo in JOINTS.items()}
        self._failed = 0
        self.complaints: dict[str, list[str]] = {}

    def missing(self) -> dict[str, str]:
        """Joint to what is wrong with its servo: none, or none of this kind."""
        found = {name: self._bus.ping(servo) for name, servo in JOINTS.items()}
        return {
            name: f"servo {JOINTS[name]} does not answer"
            if model is None
            else f"servo {JOINTS[name]} is of model {model}, wanted {registers.MODEL_NUMBER} (STS3215)"
            for name, model in found.items()
            if model != registers.MODEL_NUMBER
        }

    def miscalibrated(self) -> dict[str, str]:
        """Joint to how its servo's own zero and limits differ from the file."""
        wrong = {}
        for name, servo in JOINTS.items():
            joint = self._calibration[name]
            wanted = (joint.homing_offset, joint.range_min, joint.range_max)
            found = tuple(self._bus.read(servo, register) for register in CALIBRATED)
            if found != wanted:
                wrong[name] = f"zero and limits in the servo are {found}, in the file {wanted}"
        return wrong

    def figures(self, joint: str) -> Figures:
        """Voltage and temperature of a joint's servo, and between which they should be."""
        servo = JOINTS[joint]

        def read(register: Register) -> int:
            return self._bus.read(servo, register)

        return Figures(
            read(registers.PRESENT_VOLTAGE) / 10,
            read(registers.MIN_VOLTAGE) / 10,
            read(registers.MAX_VOLTAGE) / 10,
            read(registers.PRESENT_TEMPERATURE),
            read(registers.MAX_TEMPERATURE),
        )

    def status(self, joint: str) -> list[str]:
        """What a joint's servo complains of."""
        return self._bus.status(JOINTS[joint])

    @property
    def held(self) -> list[str]:
        """Joints whose torque is on."""
        return [name for name, servo in JOINTS.items() if self._bus.read(servo, registers.TORQUE_ENABLE)]

    def engage(self) -> None:
        """Set the servos up and hold the arm where it is. Nothing moves by it, and nothing falls.

        Servos that hold the arm already are left as they are: setting them up needs their torque off.

        Raises:
            RobotError: a servo is missing, of another kind, or calibrated otherwise than the file says.
        """
        if missing := self.missing():
            raise RobotError(
                "; ".join(f"{name}: {text}" for name, text in missing.items()),
                "look at power and cables; `robojax robot --check` looks at each servo",
            )
        if wrong := self.miscalibrated():
            raise RobotError(
                "the calibration file is not that of this arm: "
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

    def pose(self) -> dict[str, float] | None:
        """Where the joints are; None when it could not be read this once, or a servo does not know it.

        Raises:
            BusLost: that was so several times in a row.
        """
        try:
            steps = self._steps()
            self._believe(steps)
        except BusLost:
            self._failed += 1
            if self._failed >= FAILURES:
                raise
            return None
        self._failed = 0
        return {name: from_steps(value, self._calibration[name], self._units[name]) for name, value in steps.items()}

    def move(self, targets: Mapping[str, float]) -> None:
        """Tell the joints where to go; what is not named keeps its target. Never outside the calibrated range.

        Raises:
            BusLost: the port is gone. A servo that is gone shows in ``pose``: nobody confirms a target.
        """
        self._write(
            {name: to_steps(value, self._calibration[name], self._units[name]) for name, value in targets.items()}
        )

    def hold_what_is_left(self) -> list[str]:
        """Each servo that still answers is told to stay where it is; the joints for which that worked."""
        held = []
        for name, servo in JOINTS.items():
            try:
                at = self._bus.read(servo, registers.PRESENT_POSITION)
                if at not in BELIEVABLE or SENSOR in self._bus.status(servo):
                    continue  # told to go there, it would drive to its end
                if name != GRIPPER:
                    self._bus.write(servo, registers.GOAL_POSITION, at)
                held.append(name)
            except BusLost:
                continue
        return held

    def release(self) -> None:
        """Switch the torque off: the arm falls, unless it lies on something."""
        for servo in JOINTS.values():
            self._bus.write(servo, registers.TORQUE_ENABLE, 0)
            self._bus.write(servo, registers.LOCK, 0)

    def _set_up(self, name: str, servo: int) -> None:
        wanted = SET_UP | (SET_UP_GRIPPER if name == GRIPPER else {})
        # Most of it is memory that wears out, so only what differs is written.
        different = {register: value for register, value in wanted.items() if self._bus.read(servo, register) != value}
        if different:
            self._bus.write(servo, registers.LOCK, 0)
        for register, value in different.items():
            self._bus.write(servo, register, value)

    def _steps(self) -> dict[str, int]:
        values, complaints = self._bus.read_all(list(JOINTS.values()), registers.PRESENT_POSITION)
        self.complaints = {self._names[servo]: found for servo, found in complaints.items()}
        return {self._names[servo]: value for servo, value in values.items()}

    def _believe(self, steps: Mapping[str, int]) -> None:
        """Refuse positions that are none: held there, a joint would drive to the end of its range."""
        for name, value in steps.items():
            if value not in BELIEVABLE or SENSOR in self.complaints.get(name, ()):
                raise BusLost(
                    f"{name}: servo {JOINTS[name]} does not know where it is: it says {value}",
                    "switch the arm's power off and on; a servo that goes on saying so is broken",
                    (JOINTS[name],),
                )

    def _write(self, steps: Mapping[str, int]) -> None:
        if steps:
            self._bus.write_all({JOINTS[name]: value for name, value in steps.items()}, registers.GOAL_POSITION)
