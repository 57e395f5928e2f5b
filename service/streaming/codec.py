"""Stream messages as msgpack or JSON.

An array is a map, ours ``{"dtype": "uint8", "shape", "data"}`` or openpi's ``{b"__ndarray__": True, b"dtype": "|u1",
b"shape", b"data"}``. Dtypes are looked up in a list; no bytes ever say how they are to be read otherwise.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import msgpack
import numpy as np

from service.errors import InvalidRequest, TooLarge
from service.http.array_limits import DTYPES, MAX_RANK
from service.http.msgpack_arrays import MsgpackReader
from service.http.strict_json import RepeatedName, decode_text, has_many_values, loads, reject_repeated_names
from service.threads import call_in_thread

# Pictures in base64 are only taken apart, not parsed; but a megabyte of small values would keep the loop for 40 ms.
MAX_JSON = 4 << 20
_MAX_JSON_VALUES = 4096
# Characters that are read on the loop; more are read in a thread, which keeps Python's lock for 5 ms at a time.
_MAX_ON_LOOP = 1 << 17
# Backslashes (base64 needs none, but some write \\/ for /) and characters outside of strings: a long text of either
# takes five times as long to read.
_MAX_ESCAPES = 1 << 17
_MAX_BARE = 1 << 17
# An observation has fewer than a hundred values; so many take half a millisecond to read.
_MAX_VALUES = 512
_MAX_NUMBERS = 1 << 32  # numbers of an array, those of empty axes not counted
_BY_NAME: Mapping[object, np.dtype] = {name: kind for name, kind in DTYPES.items() if name != "bfloat16"}
# Dtypes as `dtype.str` of numpy writes them, in both byte orders.
_BY_CODE: Mapping[object, np.dtype] = {
    code: np.dtype(code)
    for kind in _BY_NAME.values()
    for code in ({kind.str} if kind.itemsize == 1 else {f"<{kind.str[1:]}", f">{kind.str[1:]}"})
}
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=np.ndarray.tolist)
_ARRAY_KEYS = {"dtype", "shape", "data"}
_OPENPI_ARRAY_KEYS = {b"__ndarray__", b"data", b"dtype", b"shape"}
_OPENPI_SCALAR_KEYS = {b"__npgeneric__", b"data", b"dtype"}


def unpack(body: bytes | memoryview) -> Any:
    """Unpack msgpack; arrays are read-only views of ``body`` in this machine's byte order.

    Raises:
        InvalidRequest: it is malformed, or an array of it is.
        TooLarge: it has too many values.
    """
    reader = MsgpackReader(body, convert_map=_convert_map, max_values=_MAX_VALUES)
    found = reader.read_value()
    if not reader.is_at_end:
        raise InvalidRequest("the msgpack goes on after its end", ("body",))
    return found


def unpack_json(text: str | bytes) -> Any:
    """Unpack JSON.

    Raises:
        InvalidRequest: it is malformed, holds NaN or Infinity, or a name twice in one object.
        TooLarge: it is too long.
    """
    if len(text) > MAX_JSON:
        raise TooLarge(f"JSON of more than {MAX_JSON} bytes; send msgpack")
    try:
        text = decode_text(text)
        # Base64 has none of the characters that separate values.
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
    """Unpack JSON without blocking the loop: a text of pictures is read in a thread."""
    if len(text) <= _MAX_ON_LOOP:
        return unpack_json(text)
    return await call_in_thread(partial(unpack_json, text), "json")


def _check_cost(text: str) -> None:
    """Check that a long text is one of pictures.

    Raises:
        TooLarge: it would take too long to read.
    """
    if text.count("\\") > _MAX_ESCAPES:
        raise TooLarge(f"JSON with more than {_MAX_ESCAPES} backslashes; send pictures in base64, or msgpack")
    # Two quotes of each string are left; there are no more strings than values and names.
    plain = text.replace("\\\\", "").replace('\\"', "")
    if plain.count('"') > 4 * _MAX_JSON_VALUES + 4 or sum(map(len, plain.split('"')[::2])) > _MAX_BARE:
        raise TooLarge(
            f"JSON with more than {_MAX_BARE} characters beside its strings; send shorter numbers, or msgpack"
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
        ValueError: a number is NaN or infinite, which JSON does not have.
    """
    return _ENCODER.encode(message)


def _convert_map(key: object, found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return _read_array(key, found, _OPENPI_ARRAY_KEYS, _BY_CODE, lambda name: found[name.encode()])
    if b"__npgeneric__" in found:
        return _read_scalar(key, found)
    # Only whole arrays: a map that has one of these names may be something else.
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
        little_endian = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return {"dtype": value.dtype.name, "shape": list(value.shape), "data": little_endian.tobytes()}
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
