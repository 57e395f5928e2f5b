"""The messages of the RobotHub wire as frozen dataclasses; their fields carry the wire's own names.

A joined socket speaks ``Message`` in both directions; the one frame before that is ``Join``. ``timestamp`` is
ISO-8601 in UTC and written by servers. ``service.transport.wire`` turns messages into bytes and back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

Json = Mapping[str, Any]


class Role(StrEnum):
    """What a participant does in a room, for the life of its socket."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True)
class Join:
    """The first frame of a client."""

    participant_id: str
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
    data: Mapping[str, float]
    timestamp: str | None = None


@dataclass(frozen=True)
class JointUpdate:
    """Joints as sent: each an object with ``name`` and ``value``, other keys pass through untouched.

    From a server it holds only joints that changed, with ``timestamp`` and ``source`` (a participant id or ``api``).
    """

    type: ClassVar[str] = "joint_update"
    data: tuple[Json, ...]
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
    reason: str | None = None
    source: str | None = None
    timestamp: str | None = None


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
    message: str
    code: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class ParticipantJoined:
    """Somebody else joined this video room."""

    type: ClassVar[str] = "participant_joined"
    room_id: str
    participant_id: str
    role: Role
    timestamp: str | None = None


@dataclass(frozen=True)
class ParticipantLeft:
    """Somebody else left this video room."""

    type: ClassVar[str] = "participant_left"
    room_id: str
    participant_id: str
    role: Role
    timestamp: str | None = None


@dataclass(frozen=True)
class StreamStarted:
    """A producer's camera runs."""

    type: ClassVar[str] = "stream_started"
    config: Json
    participant_id: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class StreamStopped:
    """A producer's camera stopped."""

    type: ClassVar[str] = "stream_stopped"
    participant_id: str | None = None
    reason: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class VideoConfigUpdate:
    """New video settings; the room keeps them when they come from its producer."""

    type: ClassVar[str] = "video_config_update"
    config: Json
    source: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class StatusUpdate:
    """Free-form status of a video participant."""

    type: ClassVar[str] = "status_update"
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
    policy: str | None = None
    reason: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcOffer:
    """The producer's session description, relayed to one consumer: ``{"type": "offer", "sdp": ...}``."""

    type: ClassVar[str] = "webrtc_offer"
    offer: Json
    from_producer: str
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcAnswer:
    """A consumer's session description, relayed to the producer: ``{"type": "answer", "sdp": ...}``."""

    type: ClassVar[str] = "webrtc_answer"
    answer: Json
    from_consumer: str
    timestamp: str | None = None


@dataclass(frozen=True)
class WebrtcIce:
    """A candidate of the peer; exactly one of the two ids is set and the other is null on the wire.

    The candidate string may be empty (end of candidates) and its address may be an mDNS ``.local`` name.
    """

    type: ClassVar[str] = "webrtc_ice"
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
