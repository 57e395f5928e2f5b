"""A calibration file of LeRobot: per joint its servo, its zero and how far it goes."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from robojax.robot.errors import RobotError
from robojax.robot.registers import RESOLUTION

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
