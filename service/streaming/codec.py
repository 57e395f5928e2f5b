"""Stream messages as msgpack or JSON.

An array is a map, ours ``{"dtype": "uint8", "shape", "data"}`` or openpi's ``{b"__ndarray__": True, b"dtype": "|u1",
b"shape", b"data"}``. Only listed dtypes are accepted.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgpack
import numpy as np

from service.errors import InvalidRequest, TooLarge
from service.http.array_formats import DTYPES, MAX_RANK
from service.http.strict_json import RepeatedName, decode_text, has_many_values, loads, reject_repeated_names
from service.threads import call_in_thread

MAX_JSON = 4 << 20  # Bytes, mostly of pictures in base64.
_MAX_JSON_VALUES = 4096  # A megabyte of small values would block the event loop for 40 ms.
_MAX_ON_LOOP = 1 << 17  # Largest number of characters that are parsed on the event loop; more are parsed in a thread.
# Backslashes and characters outside of strings, which are slow to parse.
_MAX_ESCAPES = 1 << 17
_MAX_BARE = 1 << 17
_MAX_NUMBERS = 1 << 32  # Numbers of an array, without empty axes.
_BY_NAME: Mapping[object, np.dtype] = {name: kind for name, kind in DTYPES.items() if name != "bfloat16"}
_NAMES = {kind: name for name, kind in _BY_NAME.items()}  # `dtype.name` takes 5 us.
# Dtypes by numpy's `dtype.str`, in both byte orders.
_BY_CODE: Mapping[object, np.dtype] = {
    code: np.dtype(code)
    for kind in _BY_NAME.values()
    for code in ({kind.str} if kind.itemsize == 1 else {f"<{kind.str[1:]}", f">{kind.str[1:]}"})
}
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=np.ndarray.tolist)
_ARRAY_KEYS = {"dtype", "shape", "data"}
_OPENPI_ARRAY_KEYS = {b"__ndarray__", b"data", b"dtype", b"shape"}
_OPENPI_SCALAR_KEYS = {b"__npgeneric__", b"data", b"dtype"}


@dataclass(frozen=True)
class MsgpackLimits:
    """Largest numbers of values, levels, items of a list or map, and bytes of a text and of all; ``is_finite``: no NaN.

    A message of the stream has less than a hundred values; 512 are read in half a millisecond.
    """

    values: int = 512
    depth: int = 8
    items: int = 1 << 32
    text: int = 4096
    all_text: int = 1 << 21
    is_finite: bool = False


_NUMBERS: dict[int, struct.Struct] = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_B, _H, _I = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
# First byte to the kind of value, the format of its length, and its length if it has no such format.
_KINDS: dict[int, tuple[str, struct.Struct | None, int]] = {
    **{0x80 + count: ("map", None, count) for count in range(16)},
    **{0x90 + count: ("list", None, count) for count in range(16)},
    **{0xA0 + count: ("text", None, count) for count in range(32)},
    **{first: ("data", size, 0) for first, size in ((0xC4, _B), (0xC5, _H), (0xC6, _I))},
    **{first: ("text", size, 0) for first, size in ((0xD9, _B), (0xDA, _H), (0xDB, _I))},
    **{first: ("list", size, 0) for first, size in ((0xDC, _H), (0xDD, _I))},
    **{first: ("map", size, 0) for first, size in ((0xDE, _H), (0xDF, _I))},
}


class MsgpackReader:
    """Reads a msgpack body value by value, without copying data.

    The msgpack package copies all data; msgspec 0.22 has no limit of values (2 MB of empty maps take 240 ms).

    Args:
        convert: returns the value of a map, from its own name and its items.
    """

    def __init__(
        self,
        body: bytes | memoryview,
        limits: MsgpackLimits | None = None,
        convert: Callable[[object, dict[Any, Any]], Any] | None = None,
    ):
        self._body = memoryview(body)
        self._position, self._end = 0, len(self._body)
        self._limits = limits = limits or MsgpackLimits()
        self._convert = convert or _convert_map
        self._values_left, self._text_left = limits.values, limits.all_text

    @property
    def is_at_end(self) -> bool:
        """Whether the whole body was read."""
        return self._position == self._end

    def read_value(self, key: object = None, depth: int = 0) -> Any:
        """Read the next value: text, a number, data, or a list or map of them.

        Raises:
            InvalidRequest: the value is malformed, an extension, or nested too deep.
            TooLarge: the message has too many values.
        """
        self._values_left -= 1
        if self._values_left < 0:
            raise TooLarge("the msgpack has too many values; send arrays as arrays")
        first = self._take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            number = self._unpack(_NUMBERS[first])
            if self._limits.is_finite and not math.isfinite(number):
                raise InvalidRequest("the msgpack has NaN or infinity")
            return number
        if first not in _KINDS:
            raise _malformed_error()
        kind, packed, size = _KINDS[first]
        if packed is not None:
            size = self._unpack(packed)
        if kind == "data":
            return self._take(size)
        if kind == "text":
            return self._read_text(size)
        if depth >= self._limits.depth:
            raise _malformed_error()
        if size > self._limits.items:
            raise TooLarge(f"the msgpack has a list or map of {size} items; at most {self._limits.items} are read")
        # The limit keeps a large declared size from creating a large range.
        items = range(min(size, self._values_left + 1))
        return self._read_map(key, depth, items) if kind == "map" else [self.read_value(key, depth + 1) for _ in items]

    def _read_map(self, key: object, depth: int, items: range) -> Any:
        found: dict[Any, Any] = {}
        for _ in items:
            name = self.read_value(depth=self._limits.depth)
            if isinstance(name, memoryview) and len(name) <= 64:
                name = bytes(name)
            if not isinstance(name, str | bytes) or name in found:
                raise _malformed_error()
            found[name] = self.read_value(name, depth + 1)
        return self._convert(key, found)

    def _read_text(self, length: int) -> str:
        self._text_left -= length
        if length > self._limits.text or self._text_left < 0:
            raise _malformed_error()
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError:
            raise _malformed_error() from None

    def _unpack(self, packed: struct.Struct) -> Any:
        return packed.unpack(self._take(packed.size))[0]

    def _take(self, length: int) -> memoryview:
        start, end = self._position, self._position + length
        if end > self._end:
            raise _malformed_error()
        self._position = end
        return self._body[start:end]


def _malformed_error() -> InvalidRequest:
    return InvalidRequest("the body is cut off or is not msgpack")


def unpack(body: bytes | memoryview) -> Any:
    """Unpack msgpack; arrays are read-only views of ``body`` in this machine's byte order.

    Raises:
        InvalidRequest: the message or an array in it is malformed.
        TooLarge: the message has too many values.
    """
    reader = MsgpackReader(body)
    found = reader.read_value()
    if not reader.is_at_end:
        raise InvalidRequest("the msgpack has data after its end", ("body",))
    return found


def unpack_json(text: str | bytes) -> Any:
    """Unpack JSON.

    Raises:
        InvalidRequest: the text is malformed, has NaN or Infinity, or a name twice in one object.
        TooLarge: the text is too long, or has too many values.
    """
    if len(text) > MAX_JSON:
        raise TooLarge(f"JSON of more than {MAX_JSON} bytes; send msgpack")
    try:
        text = decode_text(text)
        if has_many_values(text, _MAX_JSON_VALUES):
            raise TooLarge("the JSON has too many values; send pictures as JPEG or PNG files, or msgpack")
        if len(text) > _MAX_ON_LOOP:
            _check_cost(text)
        return loads(text, _MAX_JSON_VALUES, parse_constant=_refuse_constant, object_pairs_hook=reject_repeated_names)
    except RepeatedName as error:
        raise InvalidRequest(f"{error} of the JSON", ("body",)) from None
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is no JSON, or holds NaN or Infinity", ("body",)) from None


async def read_json(text: str | bytes) -> Any:
    """Unpack JSON, in a thread if the text is long."""
    if len(text) <= _MAX_ON_LOOP:
        return unpack_json(text)
    return await call_in_thread(partial(unpack_json, text), "json")


def _check_cost(text: str) -> None:
    """Raise TooLarge if a long text is not mostly pictures, because it would take too long to parse."""
    if text.count("\\") > _MAX_ESCAPES:
        raise TooLarge(f"JSON with more than {_MAX_ESCAPES} backslashes; send pictures in base64, or msgpack")
    # Each string has two quotes, and the number of strings is limited by the number of values and names.
    plain = text.replace("\\\\", "").replace('\\"', "")
    if plain.count('"') > 4 * _MAX_JSON_VALUES + 4 or sum(map(len, plain.split('"')[::2])) > _MAX_BARE:
        raise TooLarge(
            f"JSON with more than {_MAX_BARE} characters outside of strings; send shorter numbers, or msgpack"
        )


def pack(message: Mapping[Any, Any]) -> bytes:
    """Pack a message as msgpack, arrays in our form."""
    return bytes(msgpack.packb(message, default=_encode_array) or b"")


def pack_openpi(message: Mapping[Any, Any]) -> bytes:
    """Pack a message as msgpack, arrays in openpi's form."""
    return bytes(msgpack.packb(message, default=_encode_openpi_array) or b"")


def pack_json(message: Mapping[Any, Any]) -> str:
    """Pack a message as JSON, arrays as nested lists.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return _ENCODER.encode(message)


def _convert_map(key: object, found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return _read_array(key, found, _OPENPI_ARRAY_KEYS, _BY_CODE, lambda name: found[name.encode()])
    if b"__npgeneric__" in found:
        return _read_scalar(key, found)
    # Other maps may have some of these names.
    return _read_array(key, found, _ARRAY_KEYS, _BY_NAME, found.__getitem__) if found.keys() == _ARRAY_KEYS else found


def _read_array(
    key: object,
    found: dict[Any, Any],
    keys: set[Any],
    dtypes: Mapping[object, np.dtype],
    get_part: Callable[[str], Any],
) -> np.ndarray:
    if found.keys() != keys:
        raise _array_error(key, "is no array; wanted dtype, shape and data, each once")
    dtype_name, shape, data = get_part("dtype"), get_part("shape"), get_part("data")
    dtype = dtypes.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise _array_error(key, "has a dtype that is not allowed; wanted plain numbers or bool")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or any(type(one) is not int or one < 0 for one in shape):
        raise _array_error(key, f"has no shape; wanted a list of at most {MAX_RANK} integers")
    size = math.prod(shape) * dtype.itemsize
    if math.prod(one or 1 for one in shape) > _MAX_NUMBERS:
        raise _array_error(key, "has a shape of too many numbers")
    if not isinstance(data, memoryview) or len(data) != size:
        there = len(data) if isinstance(data, memoryview) else "no"
        raise _array_error(key, f"has shape {shape} of {dtype.name}, {size} bytes, but {there} bytes of data")
    if dtype.kind == "b":
        return np.frombuffer(data, np.uint8).reshape(shape) != 0
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _read_scalar(key: object, found: dict[Any, Any]) -> Any:
    value, code = found.get(b"data"), found.get(b"dtype")
    is_known = isinstance(code, str) and code in _BY_CODE
    if found.keys() != _OPENPI_SCALAR_KEYS or not is_known or not isinstance(value, bool | int | float):
        raise _array_error(key, "is no number of an allowed dtype")
    return value


def _encode_array(value: object) -> Any:
    if isinstance(value, np.ndarray):
        little_endian = value.astype(value.dtype.newbyteorder("<"), copy=False)
        name = _NAMES.get(value.dtype) or value.dtype.name
        return {"dtype": name, "shape": list(value.shape), "data": little_endian.tobytes()}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _encode_openpi_array(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(literal)


def _array_error(key: object, what: str) -> InvalidRequest:
    called = key if isinstance(key, str) and key.isprintable() and len(key) <= 64 else "an array"
    return InvalidRequest(f"{called!r} {what}" if called is key else f"{called} {what}", ("body",))
