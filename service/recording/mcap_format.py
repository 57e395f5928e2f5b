"""Topics, schemas and header of a recording.

Pictures and events have Foxglove's schemas (https://docs.foxglove.dev/docs/sdk/schemas); other messages can be plotted
by their path, e.g. ``/joints.position.Rotation``.
"""

import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from pydantic import AfterValidator, FailFast, Field, TypeAdapter, ValidationError

from service.control.joints import SO100, Joint

SO100_ROBOT = "so100_follower"  # LeRobot's name of the robot with these joints.
HEADER_METADATA, END_METADATA = "robojax", "robojax.end"
FORMAT = "robojax-recording-1"


def _check_unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a name occurs twice")
    return names


# Limits of the fields of a header, which may come from a hostile file.
Rate = Annotated[float, Field(ge=1e-3, le=1e5)]
Names = Annotated[
    tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=1000), FailFast(), AfterValidator(_check_unique)
]
Bounds = Annotated[tuple[Annotated[float, Field(gt=-1e30, lt=1e30)] | None, ...], FailFast()]
Nanoseconds = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True)
class RecordingHeader:
    """Header of a recording: the session, its robot and its policy.

    Attributes:
        rate: control ticks per second.
        action_rate: actions per second of the policy's chunks.
        joints: wire names, in the order of all values.
        features: LeRobot's names of the joints, e.g. ``shoulder_pan.pos``.
        low, high: range of each joint, None if unknown.
        owner: owner of the session; None without keys.
        limits: motion limits by joint, as in the session's stats.
        protocol: of the robot, as in the session's stats; None in recordings before version 0.2.
        wall_ns, monotonic_ns: the same moment in nanoseconds since 1970, and on the clock of the control loop.
    """

    session_id: str
    policy_path: str
    policy_type: str
    commit: str | None
    rate: Rate
    action_rate: Rate
    joints: Names
    features: Names
    low: Bounds
    high: Bounds
    cameras: Names
    task: str
    is_dry_run: bool
    version: str
    wall_ns: Nanoseconds
    monotonic_ns: Nanoseconds
    robot_type: str | None = None
    owner: str | None = None
    limits: Mapping[str, object] | None = None
    protocol: str | None = None

    def to_metadata(self) -> dict[str, str]:
        """Return the text of every field for an MCAP metadata record."""
        return {"format": FORMAT, **{name: json.dumps(value) for name, value in asdict(self).items()}}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> "RecordingHeader":
        """Parse the fields of an MCAP metadata record.

        Raises:
            ValueError: the format differs, or a field is missing or invalid.
        """
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {str(metadata.get('format'))[:40]!r}, wanted {FORMAT!r}")
        values = {field.name: json.loads(metadata[field.name]) for field in fields(cls) if field.name in metadata}
        try:
            subject = _HEADER.validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            name = first["loc"][0] if first["loc"] else "the header"
            raise ValueError(f"{name} is {str(first['input'])[:40]!r}: {first['msg'][:80]}") from error
        width = len(subject.joints)
        if not (width and len(subject.features) == len(subject.low) == len(subject.high) == width):
            raise ValueError("joints, their names and their ranges differ in number")
        return subject


_HEADER: TypeAdapter[RecordingHeader] = TypeAdapter(RecordingHeader)


def feature_names(joints: Sequence[Joint]) -> tuple[tuple[str, ...], str | None]:
    """Return LeRobot's names of these joints, and LeRobot's name of the robot or None."""
    if tuple(joints) == SO100:
        return tuple(f"{joint.alias}.pos" for joint in joints), SO100_ROBOT
    return tuple(joint.name if "." in joint.name else f"{joint.name}.pos" for joint in joints), None


def replace_infinite(values: Sequence[float]) -> tuple[float | None, ...]:
    """Replace infinite values by None, because JSON has no infinity."""
    return tuple(value if math.isfinite(value) else None for value in values)


IMAGE, LOG = "foxglove.CompressedImage", "foxglove.Log"
JOINTS, COMMANDS, TICKS, CHUNKS, EVENTS = "/joints", "/commands", "/ticks", "/chunks", "/events"
CAMERAS = "/cameras/"
INFO, WARNING, ERROR = 2, 3, 4
TASK = "task"  # Event with the instruction from then on.

Json = dict[str, Any]

_TIME: Json = {
    "type": "object",
    "title": "time",
    "properties": {
        "sec": {"type": "integer", "minimum": 0},
        "nsec": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
    },
}
_POSITION: Json = {"type": "object", "additionalProperties": {"type": "number"}}


def _schema(title: str, **properties: Json) -> Json:
    return {"title": title, "type": "object", "properties": {"timestamp": _TIME, **properties}}


# Topic, or prefix of topics, to schema.
SCHEMAS: Mapping[str, Json] = {
    CAMERAS: _schema(
        IMAGE,
        frame_id={"type": "string"},
        data={"type": "string", "contentEncoding": "base64"},
        format={"type": "string"},
    ),
    JOINTS: _schema("robojax.Joints", position=_POSITION),
    COMMANDS: _schema("robojax.Command", position=_POSITION, is_sent={"type": "boolean"}),
    TICKS: _schema(
        "robojax.Tick",
        since_last_ms={"type": "number", "description": "Since the tick before; 0 for the first."},
        hold={"type": "string", "description": "Why the robot is held; empty while it may move."},
    ),
    CHUNKS: _schema(
        "robojax.Chunk",
        seen_at=_TIME,
        age_ms={"type": "number", "description": "From the frames it belongs to until it was taken."},
        actions={"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    ),
    EVENTS: _schema(
        LOG,
        level={"type": "integer"},
        message={"type": "string"},
        name={"type": "string"},
        file={"type": "string"},
        line={"type": "integer"},
    ),
}


def camera_topic(camera: str) -> str:
    """Return the topic of this camera's pictures."""
    return f"{CAMERAS}{camera}"


def camera_of(topic: str) -> str | None:
    """Return the camera of a topic, or None."""
    return topic.removeprefix(CAMERAS) if topic.startswith(CAMERAS) else None


def build_image(at: int, camera: str, jpeg: bytes) -> bytes:
    """Build the message of one frame; ``at`` is nanoseconds since 1970, here and below."""
    # The JSON encoder would take longer than the JPEG encoder.
    head = build_message(at, frame_id=camera, format="jpeg")
    return b"".join((head[:-1], b',"data":"', binascii.b2a_base64(jpeg, newline=False), b'"}'))


def build_message(at: int, **fields: object) -> bytes:
    """Build a message of these fields."""
    return json.dumps({"timestamp": build_time(at), **fields}, separators=(",", ":"), allow_nan=False).encode()


def build_time(at: int) -> dict[str, int]:
    """Return a time in the format of Foxglove's schemas."""
    return {"sec": at // 1_000_000_000, "nsec": at % 1_000_000_000}
