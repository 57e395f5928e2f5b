"""What a recording is about, as it stands at the head of its file."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from service.motion.joints import SO100, Joint

# LeRobot's name of the robot whose joints these are.
SO100_ROBOT = "so100_follower"
HEAD, END = "robojax", "robojax.end"
FORMAT = "robojax-recording-1"
# Of steps per second, of joints or cameras, and of letters in the name of one.
LOWEST_RATE, HIGHEST_RATE = 1e-3, 1e5
MOST_NAMES, LONGEST_NAME = 1000, 200


@dataclass(frozen=True)
class Subject:
    """The session, its robot and its policy.

    Attributes:
        rate: control ticks per second.
        action_rate: actions per second that the policy's chunks are meant for.
        joints: wire names, in the order of all values.
        features: the same joints as LeRobot calls them, e.g. ``shoulder_pan.pos``.
        low, high: range of each joint, None where nobody knows it.
        task: what the robot is to do, in words.
        owner: whose key made the session; None where there are no keys.
        limits: of motion, by joint, as the session's stats show them.
        wall_ns, monotonic_ns: one moment on both clocks: the time since 1970, and that of the control loop.
    """

    session_id: str
    policy_path: str
    policy_type: str
    commit: str | None
    rate: float
    action_rate: float
    joints: tuple[str, ...]
    features: tuple[str, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    cameras: tuple[str, ...]
    task: str
    is_dry_run: bool
    version: str
    wall_ns: int
    monotonic_ns: int
    robot_type: str | None = None
    owner: str | None = None
    limits: Mapping[str, object] | None = None

    def to_metadata(self) -> dict[str, str]:
        """Text for every field, as an MCAP metadata record holds it."""
        return {"format": FORMAT, **{name: json.dumps(value) for name, value in asdict(self).items()}}

    @classmethod
    def from_metadata(cls, found: Mapping[str, str]) -> "Subject":
        """The inverse.

        Raises:
            ValueError: another format, or a field is missing or garbled.
        """
        if found.get("format") != FORMAT:
            raise ValueError(f"its format is {str(found.get('format'))[:40]!r}, wanted {FORMAT!r}")
        values = {}
        for field in fields(cls):
            if field.name not in found:
                raise ValueError(f"{field.name} is missing")
            value = json.loads(found[field.name])
            value = tuple(value) if isinstance(value, list) else value
            if not _KINDS[field.name](value):
                raise ValueError(f"{field.name} is {str(value)[:40]!r}")
            values[field.name] = value
        subject = cls(**values)
        width = len(subject.joints)
        if not (width and len(subject.features) == len(subject.low) == len(subject.high) == width):
            raise ValueError("joints, their names and their ranges differ in number")
        return subject


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_rate(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and LOWEST_RATE <= value <= HIGHEST_RATE


def _are_names(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= MOST_NAMES
        and all(isinstance(name, str) and len(name) <= LONGEST_NAME for name in value)
        and len(set(value)) == len(value)
    )


def _are_bounds(value: object) -> bool:
    return isinstance(value, tuple) and all(
        one is None or (not isinstance(one, bool) and isinstance(one, int | float) and abs(one) < 1e30) for one in value
    )


def _is_time(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int) and 0 <= value < 1 << 63


# Checked one by one: a file that a stranger wrote is listed beside all others.
_KINDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("session_id", "policy_path", "policy_type", "task", "version"), _is_text),
    **dict.fromkeys(("commit", "robot_type", "owner"), _is_text_or_none),
    **dict.fromkeys(("rate", "action_rate"), _is_rate),
    **dict.fromkeys(("joints", "features", "cameras"), _are_names),
    **dict.fromkeys(("low", "high"), _are_bounds),
    **dict.fromkeys(("wall_ns", "monotonic_ns"), _is_time),
    "is_dry_run": lambda value: isinstance(value, bool),
    "limits": lambda value: value is None or isinstance(value, dict),
}


def feature_names(joints: Sequence[Joint]) -> tuple[tuple[str, ...], str | None]:
    """LeRobot's names of these joints, and its name of the robot when it is one that it knows."""
    if tuple(joints) == SO100:
        return tuple(f"{joint.alias}.pos" for joint in joints), SO100_ROBOT
    return tuple(joint.name if "." in joint.name else f"{joint.name}.pos" for joint in joints), None


def bounds(values: Sequence[float]) -> tuple[float | None, ...]:
    """The same, with None for what is infinite: JSON has no such number."""
    return tuple(value if math.isfinite(value) else None for value in values)
