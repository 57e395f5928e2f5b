"""Envelopes of LeRobot's remote inference over Zenoh: bounded MessagePack with tensors and pictures.

Source: huggingface/lerobot, src/lerobot/transport/wire and src/lerobot/remote_inference, dialect v2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np

from service.errors import InvalidRequest, ServiceError, TooLarge
from service.streaming.codec import MsgpackLimits, MsgpackReader
from service.streaming.observation import decode_image

VERSION = 1
MAX_BYTES = 32 << 20  # Of an envelope, and of one tensor.
MAX_DECODED = 64 << 20  # Bytes of all tensors and pictures of an envelope.
MAX_SIDE = 16384  # Of a tensor.
MAX_RANK = 8
MAX_PIXELS = 4096 * 4096
MAX_ID = 128
# LeRobot reads 32768 values; its messages have at most a thousand, and 8192 are read in 40 ms.
LIMITS = MsgpackLimits(values=8192, depth=16, items=4096, text=16384, all_text=1 << 20, is_finite=True)
REQUESTS = frozenset({"observation", "language_request", "control"})  # Of a session.
MESSAGE_TYPES = REQUESTS | {"action", "language_result", "ack", "describe", "descriptor", "open", "accepted", "error"}
DTYPES = ("bool", *(f"{kind}int{bits}" for bits in (8, 16, 32, 64) for kind in ("u", "")))
DTYPES += ("float16", "float32", "float64")
_RECORD = "__lerobot_type__"
_TENSOR_FIELDS = {_RECORD, "dtype", "shape", "endianness", "data"}
_PICTURE_FIELDS = {_RECORD, "encoding", "shape", "dtype", "channel_order", "data"}


class EnvelopeError(ServiceError, status=422, code="malformed"):
    """An envelope cannot be read or answered; LeRobot's error has ``wire_code`` and ``details``."""

    def __init__(self, message: str, wire_code: str = "malformed", details: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.wire_code, self.details = wire_code, details


@dataclass(frozen=True)
class Envelope:
    """One message of the protocol.

    Example:
        >>> read_envelope(write_envelope(Envelope("describe", request_id="a"))).request_id
        'a'
    """

    message_type: str
    body: Mapping[str, Any] = field(default_factory=dict)
    instance_id: str = ""
    session_id: str = ""
    generation: int = 0
    request_id: str = ""

    def reply(self, message_type: str, body: Mapping[str, Any], **ids: str) -> "Envelope":
        """Return a reply with the ids of this envelope, except ``ids``."""
        return replace(self, message_type=message_type, body=body, **ids)


def write_envelope(envelope: Envelope) -> bytes:
    """Pack an envelope; arrays become tensors."""
    return bytes(msgpack.packb({"version": VERSION, **vars(envelope)}, default=_write_tensor) or b"")


def read_envelope(payload: bytes | memoryview) -> Envelope:
    """Read an envelope; tensors and pictures become arrays, of which most are views of the payload.

    Raises:
        EnvelopeError: the payload is not an envelope of this version, or exceeds a limit.
    """
    if len(payload) > MAX_BYTES:
        raise EnvelopeError(f"the envelope has {len(payload)} bytes; at most {MAX_BYTES} are read")
    reader = MsgpackReader(payload, LIMITS, _Records().convert)
    try:
        values = reader.read_value()
    except (InvalidRequest, TooLarge) as error:
        raise EnvelopeError(str(error)) from None
    if not isinstance(values, dict) or not reader.is_at_end:
        raise EnvelopeError("the envelope is not one MessagePack map with nothing after it")
    version = values.get("version")
    if type(version) is not int or version != VERSION:
        raise EnvelopeError(f"version is {version!r:.40}; this server supports {VERSION}", "unsupported")
    types = {"message_type": str, "body": dict, "instance_id": str, "session_id": str, "generation": int}
    types["request_id"] = str
    for name, kind in types.items():
        value = values.get(name)
        is_long = kind is str and isinstance(value, str) and len(value) > MAX_ID
        if type(value) is not kind or is_long:
            raise EnvelopeError(f"{name} is {value!r:.40}; wanted {kind.__name__}, ids of at most {MAX_ID} characters")
    envelope = Envelope(**{name: values[name] for name in types})
    if envelope.message_type not in MESSAGE_TYPES or not 0 <= envelope.generation < 1 << 63:
        raise EnvelopeError("message_type or generation is unknown")
    if envelope.message_type in REQUESTS and not (envelope.instance_id and envelope.session_id and envelope.request_id):
        raise EnvelopeError(f"{envelope.message_type} needs instance_id, session_id and request_id")
    return envelope


def _write_tensor(value: object) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    head = {"dtype": value.dtype.name, "shape": list(value.shape), "endianness": "little"}
    return {_RECORD: "tensor", **head, "data": data}


class _Records:
    """Converts the maps of one envelope that are tensors or pictures, and counts their bytes."""

    def __init__(self) -> None:
        self._left = MAX_DECODED

    def convert(self, key: object, found: dict[Any, Any]) -> Any:
        for name in found:
            if type(name) is not str:
                raise EnvelopeError("a map has keys that are not text")
        if _RECORD not in found:
            return found
        shape, data, kind = found.get("shape"), found.get("data"), found[_RECORD]
        is_named = all(isinstance(value, str) for name, value in found.items() if name not in ("shape", "data"))
        if not is_named or not isinstance(shape, list) or len(shape) > MAX_RANK or not isinstance(data, memoryview):
            raise EnvelopeError(f"a record needs a shape of at most {MAX_RANK} sides, data, and texts otherwise")
        if not all(type(side) is int and 1 <= side <= MAX_SIDE for side in shape):
            raise EnvelopeError(f"shape is {shape}; wanted sides from 1 to {MAX_SIDE}")
        if kind == "tensor" and found.keys() == _TENSOR_FIELDS:
            return self._read_tensor(found, shape, data)
        if kind == "rgb" and found.keys() == _PICTURE_FIELDS:
            return self._read_picture(str(key), found, shape, data)
        raise EnvelopeError(f"a record of type {kind!r:.40} has other fields than tensor or rgb")

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise EnvelopeError(f"tensors and pictures have more than {MAX_DECODED} bytes")

    def _read_tensor(self, found: Mapping[str, Any], shape: list[int], data: memoryview) -> np.ndarray:
        if found["dtype"] not in DTYPES or found["endianness"] not in ("little", "big"):
            raise EnvelopeError(
                f"dtype or endianness of a tensor is unknown; wanted {', '.join(DTYPES)}, little or big"
            )
        dtype = np.dtype(found["dtype"]).newbyteorder(">" if found["endianness"] == "big" else "<")
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise EnvelopeError(f"a tensor has {len(data)} bytes; wanted shape {shape} of {found['dtype']}")
        self._take(len(data))
        if dtype.kind == "b" and np.frombuffer(data, np.uint8).max() > 1:
            raise EnvelopeError("a bool tensor has bytes other than 0 and 1")
        array = np.frombuffer(data, dtype).reshape(shape)
        if dtype.kind == "f" and not np.isfinite(array).all():
            raise EnvelopeError("a tensor has NaN or infinity")
        return array.astype(dtype.newbyteorder("="), copy=False)

    def _read_picture(self, name: str, found: Mapping[str, Any], shape: list[int], data: memoryview) -> np.ndarray:
        encoding, pixels = found["encoding"], math.prod(shape[:2])
        if len(shape) != 3 or shape[2] != 3 or found["dtype"] != "uint8" or found["channel_order"] != "RGB":
            raise EnvelopeError(f"a picture has shape {shape}; wanted [height, width, 3] uint8 RGB")
        if pixels > MAX_PIXELS or encoding not in ("raw", "jpeg"):
            raise EnvelopeError(f"a picture needs the encoding raw or jpeg and at most {MAX_PIXELS} pixels")
        self._take(3 * pixels)
        if encoding == "raw":
            if len(data) != 3 * pixels:
                raise EnvelopeError(f"a picture has {len(data)} bytes; wanted {3 * pixels}")
            return np.frombuffer(data, np.uint8).reshape(shape)
        # A file with more pixels than declared is not decoded.
        picture = decode_image(name, data, pixels) if data[:2] == b"\xff\xd8" else None
        if picture is None or list(picture.shape) != shape:
            raise EnvelopeError(f"a picture is not a JPEG file of shape {shape}")
        return picture
