"""Arrays in msgpack: ``{"inputs": {name: {"dtype", "shape", "data"}}}`` with raw little-endian numbers as data.

Data is neither copied on the way in nor on the way out: the msgpack package would, and keep all other threads waiting.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from service.arrays.limits import Allowance, ArrayLimits, check_finite, check_name, read_dtype, read_shape, refusal
from service.arrays.reader import Reader
from service.errors import InvalidRequest

_BINARY_32 = struct.Struct(">BI")
_KEYS = ("dtype", "shape", "data")


def decode(body: bytes, limits: ArrayLimits, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Arrays by name; a plain number will do for one that is a single number.

    Args:
        dtypes: by name, for plain numbers.

    Raises:
        InvalidRequest: it is not msgpack of this form, or holds something else than arrays of finite numbers.
        TooLarge: it holds more than is allowed.
    """
    reader, allowance = Reader(body, wanted=_wanted), Allowance(limits)
    if reader.count() != 1 or reader.value() != "inputs":
        raise _wanted()
    found = {}
    for _ in range(min(reader.count(), limits.arrays + 1)):
        name = check_name(reader.value())
        array = _read(reader, name, allowance) if reader.is_map else _number(reader, name, allowance, dtypes.get(name))
        found[name] = check_finite(name, array)
    if not reader.is_at_end:
        raise InvalidRequest("the msgpack goes on after its end", ("body",))
    return found


def encode(outputs: Mapping[str, np.ndarray], timings: Mapping[str, float]) -> list[bytes | memoryview]:
    """``{"outputs": {name: {"dtype", "shape", "data"}}, "timings_ms": {stage: number}}`` in pieces."""
    packer = msgpack.Packer()
    head = [packer.pack_map_header(2), packer.pack("outputs"), packer.pack_map_header(len(outputs))]
    pieces: list[bytes | memoryview] = []
    for name, array in outputs.items():
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        head += [packer.pack(name), packer.pack_map_header(3)]
        head += [packer.pack("dtype"), packer.pack(array.dtype.name)]
        head += [packer.pack("shape"), packer.pack(list(array.shape))]
        head += [packer.pack("data"), _BINARY_32.pack(0xC6, data.nbytes)]
        pieces += [b"".join(head), data.reshape(-1).view(np.uint8).data]
        head = []
    pieces.append(b"".join([*head, packer.pack("timings_ms"), packer.pack(dict(timings))]))
    return pieces


def _read(reader: Reader, name: str, allowance: Allowance) -> np.ndarray:
    parts: dict[str, Any] = {}
    for _ in range(min(reader.count(), len(_KEYS) + 1)):
        key = reader.value()
        if key not in _KEYS or key in parts:
            raise refusal(name, "is no array; wanted dtype, shape and data, each once")
        parts[key] = reader.data() if key == "data" else reader.value()
    dtype, shape = read_dtype(name, parts.get("dtype")), read_shape(name, parts.get("shape"))
    size = allowance.take(name, shape, dtype)
    data = parts.get("data", b"")
    if len(data) != size:
        raise refusal(name, f"has shape {list(shape)} of {dtype.name}, {size} bytes, but {len(data)} bytes of data")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def _number(reader: Reader, name: str, allowance: Allowance, usual: str | None) -> np.ndarray:
    value = reader.value()
    if not isinstance(value, int | float) or not math.isfinite(value) or abs(value) >= 2**63:
        raise refusal(name, "is no array; wanted a number, or a map of dtype, shape and data")
    is_float = isinstance(value, float) or (usual or "").startswith("float")
    array = np.asarray(value, np.float64 if is_float else None)
    allowance.take(name, array.shape, array.dtype)
    return array


def _wanted() -> InvalidRequest:
    form = '{"inputs": {name: {"dtype", "shape", "data": binary}}}'
    return InvalidRequest(f"the body is cut off or of another form; wanted msgpack of {form}", ("body", "inputs"))
