"""Messages of the RobotHub wire: parsing and building.

A joined socket carries ``Message`` both ways; the first frame is ``Join``. A frame is one JSON object with finite
numbers, because browsers cannot read NaN. Servers write ``timestamp`` (ISO-8601, UTC). None is left out, except for the
fields in ``nulls``. A ``WireError`` carries the message type, which selects the answer.

``service.http.strict_json`` reads JSON, then pydantic checks the message's dataclass. Pydantic's own parser and writer
refuse half a surrogate pair, which an emergency stop may contain; its parser also reads 1e999 as infinity.
"""

import json
import math
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BeforeValidator, GetPydanticSchema, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import core_schema

from service.errors import InvalidRequest, TransportError
from service.http.strict_json import loads
from service.setting_types import NAME
from service.transport.link import Rooms

MAX_JOINTS = 256  # per frame; the REST command allows 20, a WebSocket frame had no limit in the reference
MAX_NAME = 100


def is_finite(value: object) -> bool:
    """Whether this is a number that a double can hold; booleans are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the doubles
        return False


def _check_name(value: Any) -> str:
    # By Python and not by pydantic's limits, which do not take half a surrogate pair.
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise ValueError(f"a string of 1 to {MAX_NAME} characters was wanted")
    return value


def _check_description(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value.get("sdp"), str):
        raise ValueError("an object with a string 'sdp' was wanted")
    return value


def _check_finite(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not all(is_finite(entry) for entry in value.values()):
        raise ValueError("an object of finite numbers was wanted")
    return value


def _check_joints(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_JOINTS:
        raise ValueError(f"a list of at most {MAX_JOINTS} joints was wanted")
    for joint in value:
        if not isinstance(joint, dict) or not is_finite(joint.get("value")):
            raise ValueError("joints like {'name': 'Jaw', 'value': 12.5} with finite values were wanted")
        _check_name(joint.get("name"))
    return tuple(value)


# An object as it came: joints are relayed with the order of their keys, which a model of pydantic's would not keep.
Json = Annotated[Mapping[str, Any], GetPydanticSchema(lambda source, handler: core_schema.is_instance_schema(dict))]
Name = Annotated[str, PlainValidator(_check_name)]
SessionDescription = Annotated[Json, AfterValidator(_check_description)]
Joints = Annotated[tuple[Json, ...], PlainValidator(_check_joints)]
StreamConfig = Annotated[Json, BeforeValidator(lambda value: {} if value is None else value)]
# Never refused: a stop that is badly worded is still a stop.
LenientText = Annotated[str | None, PlainValidator(lambda value: value if isinstance(value, str) else None)]


class Role(StrEnum):
    """Role of a participant in a room, for the life of its socket."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True)
class Join:
    """The first frame of a client."""

    participant_id: Name
    role: Role


@dataclass(frozen=True)
class Joined:
    """The join was accepted; the video service leaves ``workspace_id`` out."""

    type: ClassVar[str] = "joined"
    room_id: str
    role: Role
    workspace_id: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class StateSync:
    """Every joint that was reported in the room, sent once to a robotics consumer before ``Joined``."""

    type: ClassVar[str] = "state_sync"
    data: Annotated[Json, AfterValidator(_check_finite)]
    timestamp: str | None = None


@dataclass(frozen=True)
class JointUpdate:
    """Joints as sent: objects with ``name`` and ``value``; other keys are relayed.

    Servers send changed joints only, with ``timestamp`` and ``source`` (a participant id or ``api``).
    """

    type: ClassVar[str] = "joint_update"
    data: Joints = ()
    timestamp: str | None = None
    source: str | None = None

    @property
    def values(self) -> dict[str, float]:
        """Joint name to value; a name sent twice keeps its last value."""
        return {joint["name"]: float(joint["value"]) for joint in self.data}


@dataclass(frozen=True)
class Heartbeat:
    """Are you there; answered to the sender only."""

    type: ClassVar[str] = "heartbeat"


@dataclass(frozen=True)
class HeartbeatAck:
    """The answer to a heartbeat."""

    type: ClassVar[str] = "heartbeat_ack"
    timestamp: str | None = None


@dataclass(frozen=True)
class EmergencyStop:
    """Emergency stop by any participant, sent to all in the room and its sender. The room does not latch it."""

    type: ClassVar[str] = "emergency_stop"
    reason: LenientText = None
    source: LenientText = None
    timestamp: LenientText = None


@dataclass(frozen=True)
class Error:
    """A refusal. A refused join of the robotics service has no timestamp."""

    type: ClassVar[str] = "error"
    message: str
    timestamp: str | None = None


@dataclass(frozen=True)
class JoinRefused:
    """The robotics service's refusal of a join: an error that never gets a timestamp (read back as ``Error``)."""

    type: ClassVar[str] = "error"
    message: str = "Cannot join room"


@dataclass(frozen=True)
class VideoError:
    """A refusal by the video service (``code`` null), or by the robotics service for a session's room."""

    type: ClassVar[str] = "error"
    nulls: ClassVar[frozenset[str]] = frozenset({"code"})
    message: str
    code: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class _ParticipantEvent:
    room_id: str
    participant_id: str
    role: Role
    timestamp: str | None = None


@dataclass(frozen=True)
class ParticipantJoined(_ParticipantEvent):
    """Another participant joined this video room."""

    type: ClassVar[str] = "participant_joined"


@dataclass(frozen=True)
class ParticipantLeft(_ParticipantEvent):
    """Another participant left this video room."""

    type: ClassVar[str] = "participant_left"


@dataclass(frozen=True)
class StreamStarted:
    """A producer's camera runs."""

    type: ClassVar[str] = "stream_started"
    config: StreamConfig = field(default_factory=dict)
    participant_id: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class StreamStopped:
    """A producer's camera stopped."""

    type: ClassVar[str] = "stream_stopped"
    nulls: ClassVar[frozenset[str]] = frozenset({"reason"})
    participant_id: str | None = None
    reason: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class VideoConfigUpdate:
    """New video settings; the room keeps them when they come from its producer."""

    type: ClassVar[str] = "video_config_update"
    config: StreamConfig = field(default_factory=dict)
    source: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class StatusUpdate:
    """Free-form status of a video participant."""

    type: ClassVar[str] = "status_update"
    nulls: ClassVar[frozenset[str]] = frozenset({"data"})
    status: Any = None
    data: Any = None
    timestamp: str | None = None


@dataclass(frozen=True)
class StreamStats:
    """Free-form figures of a stream."""

    type: ClassVar[str] = "stream_stats"
    stats: Any = None
    timestamp: str | None = None


@dataclass(frozen=True)
class RecoveryTriggered:
    """A stream went over to its recovery policy."""

    type: ClassVar[str] = "recovery_triggered"
    nulls: ClassVar[frozenset[str]] = frozenset({"policy"})
    policy: str | None = None
    reason: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcOffer:
    """The producer's session description, relayed to one consumer: ``{"type": "offer", "sdp": ...}``."""

    type: ClassVar[str] = "webrtc_offer"
    offer: SessionDescription
    from_producer: str
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcAnswer:
    """A consumer's session description, relayed to the producer: ``{"type": "answer", "sdp": ...}``."""

    type: ClassVar[str] = "webrtc_answer"
    answer: SessionDescription
    from_consumer: str
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcIce:
    """A candidate from a producer or consumer (one id is set), possibly empty or an mDNS ``.local`` name."""

    type: ClassVar[str] = "webrtc_ice"
    nulls: ClassVar[frozenset[str]] = frozenset({"from_producer", "from_consumer"})
    candidate: Json
    from_producer: str | None = None
    from_consumer: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class Unknown:
    """A JSON object whose type this wire does not have; ``type`` is None when it had none."""

    type: str | None


Message = (
    Joined
    | StateSync
    | JointUpdate
    | Heartbeat
    | HeartbeatAck
    | EmergencyStop
    | Error
    | JoinRefused
    | VideoError
    | ParticipantJoined
    | ParticipantLeft
    | StreamStarted
    | StreamStopped
    | VideoConfigUpdate
    | StatusUpdate
    | StreamStats
    | RecoveryTriggered
    | WebrtcOffer
    | WebrtcAnswer
    | WebrtcIce
    | Unknown
)


# Longest text. The largest useful one (1024 joints) has 128 KiB; a MiB takes several ms of the event loop.
MAX_FRAME_BYTES = 1 << 18
MAX_VALUES = 4096  # in a frame; as many take 5 ms


class WireError(TransportError):
    """A frame that is not a message of this wire.

    Attributes:
        type: the message's ``type``, if readable.
        position: character at which the JSON is malformed, or None.
    """

    def __init__(self, text: str, type: str | None = None, position: int = 0):
        super().__init__(text)
        self.type = type
        self.position = position


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # ``json.dumps`` would create an encoder per frame


class _NotFinite(Exception):
    """A number is infinite or NaN."""


def build_message(message: Message | Join, timestamp: str | None = None) -> str:
    """Build one text frame. ``timestamp`` (ISO-8601, UTC) is put where the message has the field and left it open.

    Raises:
        WireError: the message holds something that is not JSON, or a number that is not finite.
    """
    kind = getattr(message, "type", None)
    nulls = getattr(message, "nulls", ())
    fields: dict[str, Any] = {} if kind is None else {"type": kind}
    for name, value in vars(message).items():
        if value is None and name == "timestamp":
            value = timestamp
        if value is not None or name in nulls:
            fields[name] = value
    return encode(fields, kind)


def encode(message: object, kind: str | None = None) -> str:
    """Encode JSON with finite numbers only, in ASCII so that an unpaired surrogate cannot break the encoding.

    Raises:
        WireError: it cannot be written as such.
    """
    try:
        return _ENCODER.encode(message)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{kind or 'frame'} cannot be written as JSON: {error}", kind) from error


def parse_message(raw: str | bytes) -> Message:
    """Parse one frame after the join, of either direction.

    Raises:
        WireError: not a JSON object, a number that is not finite, or a known type with wrong fields.
    """
    content, finite = _parse_object(raw)
    kind = content.get("type")
    if not isinstance(kind, str):
        return Unknown(None if kind is None else repr(kind)[:MAX_NAME])
    if kind not in _FORMS:
        return Unknown(kind[:MAX_NAME])
    if not finite and kind != EmergencyStop.type:
        raise WireError(f"{kind} holds a number that is not finite; send finite numbers", kind)
    return _validate(kind, content, VideoError if kind == VideoError.type and "code" in content else _FORMS[kind])


def parse_join(raw: str | bytes) -> Join:
    """Parse the first frame of a client.

    Raises:
        WireError: not ``{"participant_id": ..., "role": "producer" | "consumer"}``.
    """
    content, _ = _parse_object(raw)
    return _validate("join", content, Join)


def decode(raw: str | bytes) -> Any:
    """Decode any JSON value. Callers must check for infinite and NaN numbers.

    Raises:
        WireError: too long, not UTF-8, not JSON, or nested too deep.
    """
    return _decode(raw, float)


def _parse_object(raw: str | bytes) -> tuple[Json, bool]:
    """Parse a JSON object; returns it, and whether all its numbers are finite (``1e999`` is not)."""
    is_finite = True
    try:
        content = _decode(raw, _parse_finite)
    except _NotFinite:
        content, is_finite = _decode(raw, float), False
    if not isinstance(content, dict):
        raise WireError(f"frame is a JSON {type(content).__name__}; an object was wanted")
    return content, is_finite


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFinite
    return value


def _decode(raw: str | bytes, number: Callable[[str], float]) -> Any:
    if len(raw) > MAX_FRAME_BYTES:
        raise WireError(f"{len(raw)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        return loads(raw, MAX_VALUES, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise WireError(f"not JSON: {type(error).__name__}", position=getattr(error, "pos", 0)) from error


_FORMS: dict[str, type] = {
    form.type: form for form in get_args(Message) if form not in (Unknown, JoinRefused, VideoError)
}


@cache
def _build_validator(form: type) -> Any:
    return TypeAdapter(form).validator


def build_validators() -> None:
    """Build the validators of all messages, which takes 20 ms; later messages do not wait for it."""
    for form in (*_FORMS.values(), VideoError, Join):
        _build_validator(form)


def _validate(kind: str, content: Json, form: type) -> Any:
    try:
        return _build_validator(form).validate_python(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if not problem["loc"]:  # half a surrogate pair in a key, which pydantic cannot look at though it is none of ours
        return _validate(kind, {key: value for key, value in content.items() if key.isascii()}, form)
    key = str(problem["loc"][0])
    have = type(content[key]).__name__ if key in content else "nothing"
    raise WireError(f"{kind}.{key}: found {have}: {problem['msg']}", kind)  # not from pydantic's: that holds the input


OUTPUT_SUFFIX = "-joint-output"


def rooms_of(session_id: str, cameras: Sequence[str], workspace_id: str | None) -> Rooms:
    """Return the rooms of one session, all in the given workspace or in a new one.

    Raises:
        InvalidRequest: a name cannot stand in a URL, or two rooms would get the same id.
    """
    workspace = str(uuid.uuid4()) if workspace_id is None else workspace_id
    named = (("session_id", session_id), ("workspace_id", workspace), *(("camera name", name) for name in cameras))
    bad = [f"{what} {name!r}" for what, name in named if not NAME.match(name)]
    if bad:
        raise InvalidRequest(
            f"{', '.join(bad)}: cannot name a room; use 1 to 64 letters, digits, '_', '.' or '-' (not only dots)"
        )
    rooms = Rooms(
        workspace_id=workspace,
        cameras={name: f"{session_id}-{name}" for name in cameras},
        joint_input=f"{session_id}-joint-input",
        joint_output=f"{session_id}{OUTPUT_SUFFIX}",
    )
    ids = [*rooms.cameras.values(), rooms.joint_input, rooms.joint_output]
    if len(rooms.cameras) != len(cameras) or len(set(ids)) != len(ids):
        raise InvalidRequest(
            f"camera names {list(cameras)} do not give every room its own id; "
            "use each name once, and not 'joint-input' or 'joint-output'"
        )
    return rooms


def session_of(room_id: str) -> str | None:
    """Return the session whose output room has this id; None when it is no session's output room."""
    return room_id.removesuffix(OUTPUT_SUFFIX) if room_id.endswith(OUTPUT_SUFFIX) else None


def create_participant_id(prefix: str, role: str) -> str:
    """Create a unique participant id.

    The reference server keys connections by participant id across all rooms, so a late-closing socket with the same id
    would evict the new one.
    """
    ending = f"-{role}-{secrets.token_hex(4)}"
    return prefix[: MAX_NAME - len(ending)] + ending
