"""What a recording is about, as it stands at the head of its file."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from service.motion.joints import SO100, Joint

# LeRobot's name of the robot whose joints these are.
SO100_ROBOT = "so100_follower"
HEAD, END = "robojax", "robojax.end"
FORMAT = "robojax-recording-1"


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
            values[field.name] = tuple(value) if isinstance(value, list) else value
        subject = cls(**values)
        width = len(subject.joints)
        if not (width and len(subject.features) == len(subject.low) == len(subject.high) == width and subject.rate > 0):
            raise ValueError("joints, their names and their ranges differ in number, or it has no rate")
        return subject


def feature_names(joints: Sequence[Joint]) -> tuple[tuple[str, ...], str | None]:
    """LeRobot's names of these joints, and its name of the robot when it is one that it knows."""
    if tuple(joints) == SO100:
        return tuple(f"{joint.alias}.pos" for joint in joints), SO100_ROBOT
    return tuple(joint.name if "." in joint.name else f"{joint.name}.pos" for joint in joints), None


def bounds(values: Sequence[float]) -> tuple[float | None, ...]:
    """The same, with None for what is infinite: JSON has no such number."""
    return tuple(value if math.isfinite(value) else None for value in values)
