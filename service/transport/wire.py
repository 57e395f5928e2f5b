"""Bytes to the messages of the RobotHub wire and back, for both ends; no sockets, no clocks.

One WebSocket text frame is one JSON object. Its numbers are finite or the frame is refused: Python's JSON
would let NaN through, and a browser cannot read it. A ``WireError`` carries the message type where there was
one, since a server's answer depends on it (a broken joint_update gets an error back, broken JSON nothing).

JSON is read by ``service.edge.bounded_json`` and then checked by pydantic, as the type says, against that message's
dataclass. Against checks by hand in Python the whole takes 0.60 (a join) to 1.0 of the time (a heartbeat, 2 us) to
read, 0.94 to 0.98 for six joints (8 us), and 0.75 to 0.93 to write. Pydantic's own parser would halve the reading, but
it refuses half a surrogate pair, and with it an emergency stop that has one in its reason or anywhere else, stops at
200 levels, and takes 1e999 for infinity in what is passed on unread. Its writer refuses half a surrogate pair, too.
"""

import json
import math
from collections.abc import Callable
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from service.edge.bounded_json import loads
from service.errors import TransportError
from service.transport.messages import MAX_NAME, EmergencyStop, Join, JoinRefused, Json, Message, Unknown, VideoError

# The longest that has a meaning, the values of 1024 joints, has 128 KiB. A MiB of text took 2 ms to read, 4 ms to write
# and one more for each of those it is for.
MAX_FRAME_BYTES = 1 << 18
MAX_VALUES = 4096  # in a frame; as many take 5 ms


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


def build(message: Message | Join, timestamp: str | None = None) -> str:
    """One text frame. ``timestamp`` (ISO-8601, UTC) is put where the message has the field and left it open.

    Raises:
        WireError: the message holds something that is not JSON, or a number that is not finite.
    """
    kind = getattr(message, "type", None)
    nulls = getattr(message, "nulls", ())
    found: dict[str, Any] = {} if kind is None else {"type": kind}
    for name, value in vars(message).items():
        if value is None and name == "timestamp":
            value = timestamp
        if value is not None or name in nulls:
            found[name] = value
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
    if kind not in _FORMS:
        return Unknown(kind[:MAX_NAME])
    if not finite and kind != EmergencyStop.type:
        raise WireError(f"{kind} holds a number that is not finite; send finite numbers", kind)
    return _read(kind, found, _VIDEO_ERROR if kind == VideoError.type and "code" in found else _FORMS[kind])


def parse_join(raw: str | bytes) -> Join:
    """The first frame of a client.

    Raises:
        WireError: not ``{"participant_id": ..., "role": "producer" | "consumer"}``.
    """
    found, _ = _object(raw)
    return _read("join", found, _JOIN)


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


_FORMS: dict[str, TypeAdapter[Any]] = {
    form.type: TypeAdapter(form) for form in get_args(Message) if form not in (Unknown, JoinRefused, VideoError)
}
_VIDEO_ERROR, _JOIN = TypeAdapter(VideoError), TypeAdapter(Join)


def _read(kind: str, found: Json, form: TypeAdapter[Any]) -> Any:
    try:
        return form.validator.validate_python(found)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if not wrong["loc"]:  # half a surrogate pair in a key, which pydantic cannot look at though it is none of ours
        return _read(kind, {key: value for key, value in found.items() if key.isascii()}, form)
    key = str(wrong["loc"][0])
    have = type(found[key]).__name__ if key in found else "nothing"
    raise WireError(f"{kind}.{key}: found {have}: {wrong['msg']}", kind)  # not from pydantic's: that holds the input
