"""The messages of the RobotHub wire as frozen dataclasses: their fields carry the wire's own names, order and checks.

A joined socket speaks ``Message`` in both directions; the one frame before that is ``Join``. ``timestamp`` is
ISO-8601 in UTC and written by servers. None is left out on the wire, but for the fields in a class's ``nulls``. What
is read is checked as the fields say, what is made here is not. ``service.transport.wire`` turns messages into bytes
and back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, GetPydanticSchema, PlainValidator
from pydantic_core import core_schema

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


def _name(value: Any) -> str:
    # By Python and not by pydantic's limits, which do not take half a surrogate pair.
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise ValueError(f"a string of 1 to {MAX_NAME} characters was wanted")
    return value


def _described(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value.get("sdp"), str):
        raise ValueError("an object with a string 'sdp' was wanted")
    return value


def _finite(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not all(is_finite(entry) for entry in value.values()):
        raise ValueError("an object of finite numbers was wanted")
    return value


def _joints(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_JOINTS:
        raise ValueError(f"a list of at most {MAX_JOINTS} joints was wanted")
    for joint in value:
        if not isinstance(joint, dict) or not is_finite(joint.get("value")):
            raise ValueError("joints like {'name': 'Jaw', 'value': 12.5} with finite values were wanted")
        _name(joint.get("name"))
    return tuple(value)


# An object as it came: joints are relayed with the order of their keys, which a model of pydantic's would not keep.
Json = Annotated[Mapping[str, Any], GetPydanticSchema(lambda source, handler: core_schema.is_instance_schema(dict))]
Name = Annotated[str, PlainValidator(_name)]
Description = Annotated[Json, AfterValidator(_described)]
Joints = Annotated[tuple[Json, ...], PlainValidator(_joints)]
Settings = Annotated[Json, BeforeValidator(lambda value: {} if value is None else value)]
# Never refused: a stop that is badly worded is still a stop.
Wording = Annotated[str | None, PlainValidator(lambda value: value if isinstance(value, str) else None)]


class Role(StrEnum):
    """What a participant does in a room, for the life of its socket."""

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
    """Every joint the room has seen, sent once to a robotics consumer before ``Joined``."""

    type: ClassVar[str] = "state_sync"
    data: Annotated[Json, AfterValidator(_finite)]
    timestamp: str | None = None


@dataclass(frozen=True)
class JointUpdate:
    """Joints as sent: each an object with ``name`` and ``value``, other keys pass through untouched.

    From a server it holds only joints that changed, with ``timestamp`` and ``source`` (a participant id or ``api``).
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
    """Stop everything: from anybody, to everybody in the room, its sender included. The room does not latch it."""

    type: ClassVar[str] = "emergency_stop"
    reason: Wording = None
    source: Wording = None
    timestamp: Wording = None


@dataclass(frozen=True)
class Error:
    """A refusal. A refused join of the robotics service has no timestamp."""

    type: ClassVar[str] = "error"
    message: str
    timestamp: str | None = None


@dataclass(frozen=True)
class JoinRefused:
    """How the robotics service refuses a join: an error that never gets a timestamp (read back as ``Error``)."""

    type: ClassVar[str] = "error"
    message: str = "Cannot join room"


@dataclass(frozen=True)
class VideoError:
    """A refusal by the video service, whose ``code`` is always on the wire and so far always null.

    The robotics service uses this form, with a code, for what the room of a session does not take.
    """

    type: ClassVar[str] = "error"
    nulls: ClassVar[frozenset[str]] = frozenset({"code"})
    message: str
    code: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class _Presence:
    room_id: str
    participant_id: str
    role: Role
    timestamp: str | None = None


@dataclass(frozen=True)
class ParticipantJoined(_Presence):
    """Somebody else joined this video room."""

    type: ClassVar[str] = "participant_joined"


@dataclass(frozen=True)
class ParticipantLeft(_Presence):
    """Somebody else left this video room."""

    type: ClassVar[str] = "participant_left"


@dataclass(frozen=True)
class StreamStarted:
    """A producer's camera runs."""

    type: ClassVar[str] = "stream_started"
    config: Settings = field(default_factory=dict)
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
    config: Settings = field(default_factory=dict)
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
    offer: Description
    from_producer: str
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcAnswer:
    """A consumer's session description, relayed to the producer: ``{"type": "answer", "sdp": ...}``."""

    type: ClassVar[str] = "webrtc_answer"
    answer: Description
    from_consumer: str
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcIce:
    """A candidate of the peer; exactly one of the two ids is set and the other is null on the wire.

    The candidate string may be empty (end of candidates) and its address may be an mDNS ``.local`` name.
    """

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
