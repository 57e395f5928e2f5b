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
MAX_BYTES = 32 << 20  # Of an envelope, which also limits one tensor.
_MAX_DECODED = 64 << 20  # Bytes of all tensors and pictures of an envelope.
_MAX_SIDE = 16384  # Of a tensor.
_MAX_RANK = 8
_MAX_PIXELS = 4096 * 4096
_MAX_ID = 128
# LeRobot reads 32768 values; its messages have at most a thousand, and 8192 are read in 40 ms.
_LIMITS = MsgpackLimits(values=8192, depth=16, items=4096, text=16384, all_text=1 << 20, is_finite=True)
_TYPES = {"message_type": str, "body": dict, "instance_id": str, "session_id": str, "generation": int}
_TYPES |= {"request_id": str}
_RECORD = "__lerobot_type__"
_DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_DTYPES += ("float16", "float32", "float64")
# Accepted texts of a record, which has a shape and data, too.
_TENSOR = {_RECORD: ("tensor",), "dtype": _DTYPES, "endianness": ("little", "big")}
_PICTURE = {_RECORD: ("rgb",), "dtype": ("uint8",), "encoding": ("raw", "jpeg"), "channel_order": ("RGB",)}


class EnvelopeError(ServiceError, status=422, code="malformed"):
    """An envelope cannot be read or answered; LeRobot's error has ``wire_code`` and ``details``."""

    def __init__(self, message: str, wire_code: str = "malformed", details: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.wire_code, self.details = wire_code, details or {}


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
    reader = MsgpackReader(payload, _LIMITS, _RecordReader().convert)
    try:
        values = reader.read_value()
    except (InvalidRequest, TooLarge) as error:
        raise EnvelopeError(str(error)) from None
    if not isinstance(values, dict) or not reader.is_at_end:
        raise EnvelopeError("the envelope is not one MessagePack map with nothing after it")
    version = values.get("version")
    if type(version) is not int or version != VERSION:
        raise EnvelopeError(f"version is {version!r:.40}; this server supports {VERSION}", "unsupported")
    for name, kind in _TYPES.items():
        value = values.get(name)
        if type(value) is not kind or (isinstance(value, str) and len(value) > _MAX_ID):
            raise EnvelopeError(f"{name} is {value!r:.40}; wanted {kind.__name__}, ids of at most {_MAX_ID} characters")
    envelope = Envelope(**{name: values[name] for name in _TYPES})
    if not 0 <= envelope.generation < 1 << 63:
        raise EnvelopeError(f"generation is {envelope.generation}; wanted 0 to 2^63 - 1")
    if not envelope.request_id:
        raise EnvelopeError("request_id is empty; wanted a new id for each request")
    return envelope


def _write_tensor(value: object) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    head = {"dtype": value.dtype.name, "shape": list(value.shape), "endianness": "little"}
    return {_RECORD: "tensor", **head, "data": data}


class _RecordReader:
    """Converts the maps of one envelope that are tensors or pictures to arrays, and counts their bytes."""

    def __init__(self) -> None:
        self._bytes_left = _MAX_DECODED

    def convert(self, key: object, found: dict[Any, Any]) -> Any:
        if any(type(name) is not str for name in found):
            raise EnvelopeError("a map has keys that are not text")
        if _RECORD not in found:
            return found
        is_picture = found[_RECORD] == "rgb"
        accepted: Mapping[str, tuple[str, ...]] = _PICTURE if is_picture else _TENSOR
        for name in accepted.keys() | found.keys() - {"shape", "data"}:
            value = found.get(name)
            if not isinstance(value, str) or value not in accepted.get(name, ()):
                raise EnvelopeError(
                    f"{name} of {key!r:.80} is {value!r:.40}; wanted {accepted.get(name, 'no such field')}"
                )
        shape: Any = found.get("shape")
        data = found.get("data")
        if not isinstance(shape, list) or len(shape) > _MAX_RANK or not isinstance(data, memoryview):
            raise EnvelopeError(f"{key!r:.80} needs data, and a shape of at most {_MAX_RANK} sides")
        if not all(type(side) is int and 1 <= side <= _MAX_SIDE for side in shape):
            raise EnvelopeError(f"{key!r:.80} has shape {shape!r:.80}; wanted sides from 1 to {_MAX_SIDE}")
        if is_picture and (len(shape) != 3 or shape[2] != 3 or shape[0] * shape[1] > _MAX_PIXELS):
            raise EnvelopeError(
                f"{key!r:.80} has shape {shape}; wanted [height, width, 3], at most {_MAX_PIXELS} pixels"
            )
        dtype = np.dtype(found["dtype"]).newbyteorder(">" if found.get("endianness") == "big" else "<")
        size = math.prod(shape) * dtype.itemsize
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise EnvelopeError(f"tensors and pictures have more than {_MAX_DECODED} bytes")
        if found.get("encoding") == "jpeg":
            return _read_jpeg(str(key), data, shape)
        if len(data) != size:
            raise EnvelopeError(f"{key!r:.80} has {len(data)} bytes; wanted {size} for {shape} of {dtype.name}")
        array = np.frombuffer(data, dtype).reshape(shape)
        if dtype.kind == "b" and np.frombuffer(data, np.uint8).max() > 1:
            raise EnvelopeError(f"{key!r:.80} is bool, but has bytes other than 0 and 1")
        if dtype.kind == "f" and not np.isfinite(array).all():
            raise EnvelopeError(f"{key!r:.80} has NaN or infinity")
        return array.astype(dtype.newbyteorder("="), copy=False)


def _read_jpeg(name: str, file: memoryview, shape: list[int]) -> np.ndarray:
    # A file with more pixels than declared is not decoded.
    picture = decode_image(name, file, shape[0] * shape[1]) if file[:2] == b"\xff\xd8" else None
    if picture is None or list(picture.shape) != shape:
        raise EnvelopeError(f"{name!r:.80} is not a JPEG file of shape {shape}")
    return picture
