"""Messages of the RobotHub wire: parsing and building.

The first frame of a socket is ``Join``; later frames are a ``Message``, in both directions. A frame is one JSON object
with finite numbers. Fields that are None are omitted, except for the fields in ``nulls``. Pydantic checks fields but
does not parse JSON, because its parser refuses unpaired surrogates, which an emergency stop may contain.
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

MAX_JOINTS = 256  # Joints of one frame; the REST command allows 20.
MAX_NAME = 100


def is_finite(value: object) -> bool:
    """Whether this is a finite number that fits a double; booleans do not count as numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # The integer is larger than any double.
        return False


def _check_name(value: Any) -> str:
    # Checked here, because pydantic's limits refuse unpaired surrogates.
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise ValueError(f"expected a string of 1 to {MAX_NAME} characters")
    return value


def _check_description(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value.get("sdp"), str):
        raise ValueError("expected an object with a string 'sdp'")
    return value


def _check_finite(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not all(is_finite(entry) for entry in value.values()):
        raise ValueError("expected an object of finite numbers")
    return value


def _check_joints(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_JOINTS:
        raise ValueError(f"expected a list of at most {MAX_JOINTS} joints")
    for joint in value:
        if not isinstance(joint, dict) or not is_finite(joint.get("value")):
            raise ValueError("expected joints like {'name': 'Jaw', 'value': 12.5} with finite values")
        _check_name(joint.get("name"))
    return tuple(value)


# An object as received: joints are relayed with the order of their keys, which a pydantic model would not keep.
Json = Annotated[Mapping[str, Any], GetPydanticSchema(lambda source, handler: core_schema.is_instance_schema(dict))]
Name = Annotated[str, PlainValidator(_check_name)]
SessionDescription = Annotated[Json, AfterValidator(_check_description)]
Joints = Annotated[tuple[Json, ...], PlainValidator(_check_joints)]
StreamConfig = Annotated[Json, BeforeValidator(lambda value: {} if value is None else value)]
# An emergency stop with an invalid text is still a stop, so the text is dropped and the stop is kept.
LenientText = Annotated[str | None, PlainValidator(lambda value: value if isinstance(value, str) else None)]


class ParticipantRole(StrEnum):
    """Role of a participant in a room, for the life of its socket."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True)
class Join:
    """The first frame of a client."""

    participant_id: Name
    role: ParticipantRole


@dataclass(frozen=True)
class Joined:
    """The join was accepted; the video service leaves ``workspace_id`` out."""

    type: ClassVar[str] = "joined"
    room_id: str
    role: ParticipantRole
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
    """Request for a `HeartbeatAck`."""

    type: ClassVar[str] = "heartbeat"


@dataclass(frozen=True)
class HeartbeatAck:
    """The answer to a heartbeat."""

    type: ClassVar[str] = "heartbeat_ack"
    timestamp: str | None = None


@dataclass(frozen=True)
class EmergencyStopMessage:
    """Emergency stop by any participant, sent to all in the room and its sender. The room does not latch it."""

    type: ClassVar[str] = "emergency_stop"
    reason: LenientText = None
    source: LenientText = None
    timestamp: LenientText = None


@dataclass(frozen=True)
class Error:
    """A refusal."""

    type: ClassVar[str] = "error"
    message: str
    timestamp: str | None = None


@dataclass(frozen=True)
class JoinRefusal:
    """Refused join of the robotics service: an `Error` without a timestamp."""

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
    role: ParticipantRole
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
    """A stream uses its recovery policy now."""

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
    """A JSON object of an unknown type; ``type`` is None if it has no type."""

    type: str | None


Message = (
    Joined
    | StateSync
    | JointUpdate
    | Heartbeat
    | HeartbeatAck
    | EmergencyStopMessage
    | Error
    | JoinRefusal
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


MAX_FRAME_BYTES = 1 << 18  # The largest useful frame (1024 joints) has 128 KiB.
MAX_VALUES = 4096  # Values of one frame; parsing 4096 values takes 5 ms.


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


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def build_message(message: Message | Join, timestamp: str | None = None) -> str:
    """Build one text frame, and fill in an empty ``timestamp`` (ISO-8601, UTC).

    Raises:
        WireError: the message has a value that is not JSON, or a number that is not finite.
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
    """Encode finite JSON in ASCII, which also encodes unpaired surrogates.

    Raises:
        WireError: the message is not JSON, or has a number that is not finite.
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
    content, has_finite_numbers = _parse_object(raw)
    kind = content.get("type")
    if not isinstance(kind, str):
        return Unknown(None if kind is None else repr(kind)[:MAX_NAME])
    if kind not in _FORMS:
        return Unknown(kind[:MAX_NAME])
    if not has_finite_numbers and kind != EmergencyStopMessage.type:
        raise WireError(f"{kind} holds a number that is not finite; send finite numbers", kind)
    return _validate(kind, content, VideoError if kind == VideoError.type and "code" in content else _FORMS[kind])


def parse_join(raw: str | bytes) -> Join:
    """Parse the first frame of a client.

    Raises:
        WireError: not ``{"participant_id": ..., "role": "producer" | "consumer"}``.
    """
    content, _ = _parse_object(raw)
    return _validate("join", content, Join)


def decode(raw: str | bytes, parse_number: Callable[[str], float] = float) -> Any:
    """Decode any JSON value. Callers must check for infinite and NaN numbers.

    Args:
        parse_number: converts a number with a fraction or an exponent, NaN and Infinity.

    Raises:
        WireError: too long, not UTF-8, not JSON, or nested too deep.
    """
    if len(raw) > MAX_FRAME_BYTES:
        raise WireError(f"{len(raw)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        return loads(raw, MAX_VALUES, parse_float=parse_number, parse_constant=parse_number)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError.
        raise WireError(f"not JSON: {type(error).__name__}", position=getattr(error, "pos", 0)) from error


def _parse_object(raw: str | bytes) -> tuple[Json, bool]:
    """Parse a JSON object; returns it, and whether all its numbers are finite (``1e999`` is not)."""
    numbers: list[float] = []

    def parse_number(text: str) -> float:
        numbers.append(float(text))
        return numbers[-1]

    content = decode(raw, parse_number)
    if not isinstance(content, dict):
        raise WireError(f"expected a JSON object, got a {type(content).__name__}")
    return content, all(map(math.isfinite, numbers))


_FORMS: dict[str, type] = {
    form.type: form for form in get_args(Message) if form not in (Unknown, JoinRefusal, VideoError)
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
    if not problem["loc"]:  # Pydantic cannot read an unknown key with an unpaired surrogate.
        return _validate(kind, {key: value for key, value in content.items() if key.isascii()}, form)
    key = str(problem["loc"][0])
    have = type(content[key]).__name__ if key in content else "nothing"
    # Raised without pydantic's error as the cause, because that error contains the input.
    raise WireError(f"{kind}.{key}: found {have}: {problem['msg']}", kind)


OUTPUT_SUFFIX = "-joint-output"


def rooms_of(session_id: str, cameras: Sequence[str], workspace_id: str | None) -> Rooms:
    """Return the rooms of one session, all in the given workspace or in a new one.

    Raises:
        InvalidRequest: a name cannot be part of a URL, or two rooms would get the same id.
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
    """Return the session of an output room; None for the id of any other room."""
    return room_id.removesuffix(OUTPUT_SUFFIX) if room_id.endswith(OUTPUT_SUFFIX) else None


def create_participant_id(prefix: str, role: str) -> str:
    """Create a unique participant id, because the reference server allows each id once in all its rooms."""
    ending = f"-{role}-{secrets.token_hex(4)}"
    return prefix[: MAX_NAME - len(ending)] + ending
