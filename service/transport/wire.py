"""Bytes to the messages of the RobotHub wire and back, for both ends; no sockets, no clocks.

One WebSocket text frame is one JSON object. Its numbers are finite or the frame is refused: Python's JSON
would let NaN through, and a browser cannot read it. A ``WireError`` carries the message type where there was
one, since a server's answer depends on it (a broken joint_update gets an error back, broken JSON nothing).

A discriminated union of pydantic 2.14 reads an update of six joints in 0.45 of the time (3.4 us; 7.5 here) and makes
and writes it in 0.8 (4.5 us; 5.8). It is not used because joints are relayed as they came, which its models do not:
they order what they know before what they do not. And its parser refuses half a surrogate pair, with it an emergency
stop that has one in its reason, and takes 1e999 for infinity in what is passed on unread.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from service.edge.bounded_json import loads
from service.errors import TransportError
from service.transport import messages
from service.transport.messages import Join, Json, Message, Role, Unknown

# The longest that has a meaning, the values of 1024 joints, has 128 KiB. A MiB of text took 2 ms to read, 4 ms to write
# and one more for each of those it is for.
MAX_FRAME_BYTES = 1 << 18
MAX_VALUES = 4096  # in a frame; as many take 5 ms
MAX_JOINTS = 256  # per frame; the REST command allows 20, a WebSocket frame had no limit in the reference
MAX_NAME = 100


class WireError(TransportError):
    """A frame that is not a message of this wire.

    Attributes:
        type: the message's ``type`` when it could be read, else None.
        position: where in the text JSON ended to be JSON, when that is what is wrong.
    """

    def __init__(self, text: str, type: str | None = None, position: int = 0):
        super().__init__(text)
        self.type = type
        self.position = position


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # ``json.dumps`` would make one of each frame


class _NotFinite(Exception):
    """A number is infinite or NaN."""


# Fields that stand on the wire as null; every other None is left out.
_NULLS: dict[str, frozenset[str]] = {
    "error": frozenset({"code"}),
    "recovery_triggered": frozenset({"policy"}),
    "status_update": frozenset({"data"}),
    "stream_stopped": frozenset({"reason"}),
    "webrtc_ice": frozenset({"from_producer", "from_consumer"}),
}


def build(message: Message | Join, timestamp: str | None = None) -> str:
    """One text frame. ``timestamp`` (ISO-8601, UTC) is put where the message has the field and left it open.

    Raises:
        WireError: the message holds something that is not JSON, or a number that is not finite.
    """
    kind = getattr(message, "type", None)
    nulls = _NULLS.get(kind or "", frozenset())
    found: dict[str, Any] = {} if kind is None else {"type": kind}
    for field in fields(message):
        value = getattr(message, field.name)
        if value is None and field.name == "timestamp":
            value = timestamp
        if value is not None or field.name in nulls:
            found[field.name] = value
    return encode(found, kind)


def encode(found: object, kind: str | None = None) -> str:
    """JSON with finite numbers only, in ASCII so that an unpaired surrogate cannot break the encoding.

    Raises:
        WireError: it cannot be written as such.
    """
    try:
        return _ENCODER.encode(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{kind or 'frame'} cannot be written as JSON: {error}", kind) from error


def parse(raw: str | bytes) -> Message:
    """One frame after the join, of either direction.

    Raises:
        WireError: not a JSON object, a number that is not finite, or a known type with wrong fields.
    """
    found, finite = _object(raw)
    kind = found.get("type")
    if not isinstance(kind, str):
        return Unknown(None if kind is None else repr(kind)[:MAX_NAME])
    if kind == "emergency_stop":
        return _emergency_stop(found)
    if kind not in _FORMS:
        return Unknown(kind[:MAX_NAME])
    if not finite:
        raise WireError(f"{kind} holds a number that is not finite; send finite numbers", kind)
    if kind == "error" and "code" in found:
        return messages.VideoError(**_read("error", found, _VIDEO_ERROR))
    make, form = _FORMS[kind]
    return make(**_read(kind, found, form))


def parse_join(raw: str | bytes) -> Join:
    """The first frame of a client.

    Raises:
        WireError: not ``{"participant_id": ..., "role": "producer" | "consumer"}``.
    """
    found, _ = _object(raw)
    return Join(**_read("join", found, {"participant_id": _name, "role": _role}))


def is_finite(value: object) -> bool:
    """Whether this is a number that a double can hold; booleans are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the doubles
        return False


def decode(raw: str | bytes) -> Any:
    """Any JSON value. Numbers may be infinite or NaN: whoever uses them checks.

    Raises:
        WireError: too long, not UTF-8, not JSON, or nested too deep.
    """
    return _decode(raw, float)


def _object(raw: str | bytes) -> tuple[Json, bool]:
    """The JSON object, and whether all its numbers are finite (``1e999`` is not)."""
    is_finite = True
    try:
        found = _decode(raw, _finite)
    except _NotFinite:
        found, is_finite = _decode(raw, float), False
    if not isinstance(found, dict):
        raise WireError(f"frame is a JSON {type(found).__name__}; an object was wanted")
    return found, is_finite


def _finite(text: str) -> float:
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


# A check takes one field's value (None when it is missing) and returns it, or raises ValueError("what was wanted").
Check = Callable[[Any], Any]


def _read(kind: str, found: Json, form: Mapping[str, Check]) -> dict[str, Any]:
    read = {}
    for key, check in form.items():
        try:
            read[key] = check(found.get(key))
        except ValueError as wanted:
            have = type(found[key]).__name__ if key in found else "nothing"
            raise WireError(f"{kind}.{key}: found {have}, wanted {wanted}", kind) from wanted
    return read


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise ValueError(f"a string of 1 to {MAX_NAME} characters")
    return value


def _role(value: Any) -> Role:
    if not isinstance(value, str) or value not in tuple(Role):
        raise ValueError("'producer' or 'consumer'")
    return Role(value)


def _mapping(value: Any) -> Json:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


def _description(value: Any) -> Json:
    if not isinstance(value, dict) or not isinstance(value.get("sdp"), str):
        raise ValueError("an object with a string 'sdp'")
    return value


def _state(value: Any) -> Mapping[str, float]:
    if not isinstance(value, dict) or not all(is_finite(entry) for entry in value.values()):
        raise ValueError("an object of finite numbers")
    return value


def _joints(value: Any) -> tuple[Json, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_JOINTS:
        raise ValueError(f"a list of at most {MAX_JOINTS} joints")
    for joint in value:
        if not isinstance(joint, dict) or not is_finite(joint.get("value")):
            raise ValueError("joints like {'name': 'Jaw', 'value': 12.5} with finite values")
        _name(joint.get("name"))
    return tuple(value)


def _any(value: Any) -> Any:
    return value


def _or_empty(value: Any) -> Json:
    return {} if value is None else _mapping(value)


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _emergency_stop(found: Json) -> messages.EmergencyStop:
    """Never refused for its fields: a stop that is badly worded is still a stop."""
    kept = {key: found[key] for key in ("reason", "source", "timestamp") if isinstance(found.get(key), str)}
    return messages.EmergencyStop(**kept)


_STAMP = {"timestamp": _or_none(_text)}
_PRESENCE = {"room_id": _text, "participant_id": _text, "role": _role, **_STAMP}
_VIDEO_ERROR = {"message": _text, "code": _or_none(_text), **_STAMP}
_FORMS: dict[str, tuple[Callable[..., Message], Mapping[str, Check]]] = {
    "joined": (
        messages.Joined,
        {"room_id": _text, "role": _role, "workspace_id": _or_none(_text), **_STAMP},
    ),
    "state_sync": (messages.StateSync, {"data": _state, **_STAMP}),
    "joint_update": (messages.JointUpdate, {"data": _joints, "source": _or_none(_text), **_STAMP}),
    "heartbeat": (messages.Heartbeat, {}),
    "heartbeat_ack": (messages.HeartbeatAck, _STAMP),
    "error": (messages.Error, {"message": _text, **_STAMP}),
    "participant_joined": (messages.ParticipantJoined, _PRESENCE),
    "participant_left": (messages.ParticipantLeft, _PRESENCE),
    "stream_started": (
        messages.StreamStarted,
        {"config": _or_empty, "participant_id": _or_none(_text), **_STAMP},
    ),
    "stream_stopped": (
        messages.StreamStopped,
        {"participant_id": _or_none(_text), "reason": _or_none(_text), **_STAMP},
    ),
    "video_config_update": (
        messages.VideoConfigUpdate,
        {"config": _or_empty, "source": _or_none(_text), **_STAMP},
    ),
    "status_update": (messages.StatusUpdate, {"status": _any, "data": _any, **_STAMP}),
    "stream_stats": (messages.StreamStats, {"stats": _any, **_STAMP}),
    "recovery_triggered": (
        messages.RecoveryTriggered,
        {"policy": _or_none(_text), "reason": _or_none(_text), **_STAMP},
    ),
    "webrtc_offer": (messages.WebrtcOffer, {"offer": _description, "from_producer": _text, **_STAMP}),
    "webrtc_answer": (messages.WebrtcAnswer, {"answer": _description, "from_consumer": _text, **_STAMP}),
    "webrtc_ice": (
        messages.WebrtcIce,
        {"candidate": _mapping, "from_producer": _or_none(_text), "from_consumer": _or_none(_text), **_STAMP},
    ),
}
