"""Arrays of models as JSON or npz: limits, formats, and the choice by content type."""

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from tokenize import TokenError
from types import MappingProxyType
from typing import IO, Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from service.errors import InvalidRequest, TooLarge
from service.http.strict_json import decode_text, has_many_values, loads, loads_slowly

_NUMPY_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {name: np.dtype(name) for name in _NUMPY_DTYPES} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
)
MAX_RANK = 8
MAX_NAME = 128
_PLAIN = re.compile(r"[A-Za-z0-9_.]{1,128}")


@dataclass(frozen=True)
class ArrayLimits:
    """Limits on the arrays of one body: their bytes after unpacking, and their number."""

    bytes: int = 64 << 20
    arrays: int = 16


class Allowance:
    """Rest of the limits while the arrays of one body are read."""

    def __init__(self, limits: ArrayLimits):
        self._limits = limits
        self._bytes = limits.bytes
        self._names: set[str] = set()

    def take(self, name: str, shape: Sequence[int], dtype: np.dtype) -> int:
        """Count the next array before it is read, and return its size in bytes.

        Raises:
            InvalidRequest: the name is repeated, or the shape is invalid.
            TooLarge: the limits are exceeded.
        """
        if name in self._names:
            raise array_error(name, "is there twice; wanted each array once")
        self._names.add(name)
        if len(self._names) > self._limits.arrays:
            raise TooLarge(f"more than {self._limits.arrays} arrays; send only the inputs of the model")
        if len(shape) > MAX_RANK or any(size < 1 for size in shape):
            raise array_error(
                name, f"has shape {list(shape)[:MAX_RANK]}; wanted up to {MAX_RANK} axes, none of them empty"
            )
        size = math.prod(shape) * dtype.itemsize
        self._bytes -= size
        if self._bytes < 0:
            raise TooLarge(
                f"the arrays are more than {self._limits.bytes} bytes (max_forward_bytes); send a smaller batch"
            )
        return size


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise InvalidRequest(f"names of arrays are text of 1 to {MAX_NAME} characters", ("body", "inputs"))
    return name


def _read_dtype(name: str, value: object) -> np.dtype:
    if not isinstance(value, str) or value not in DTYPES:
        raise array_error(name, f"has a dtype that is not allowed; wanted one of {', '.join(DTYPES)}")
    return DTYPES[value]


def _check_finite(name: str, array: np.ndarray) -> np.ndarray:
    """Return the array, booleans as 0 or 1; raises InvalidRequest for NaN or infinity."""
    if array.dtype == bool:
        return array.view(np.uint8) != 0
    if array.dtype.kind not in "biu" and not np.isfinite(array).all():
        raise array_error(name, "holds NaN or infinity; wanted finite numbers")
    return array


def array_error(name: str, what: str) -> InvalidRequest:
    """Create an error about one array; the sent name is repeated only when it is plain."""
    called = name if _PLAIN.fullmatch(name) else "an array"
    return InvalidRequest(f"{called} {what}", ("body", "inputs", called))


# Values per call of Python's encoder or decoder, which holds Python's lock: about a millisecond.
_CHUNK_VALUES = 1024
_VALUES = 4096


def decode_json(body: bytes, limits: ArrayLimits, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Decode arrays by name from ``{"inputs": {name: array}}``.

    Args:
        dtypes: default dtypes by name, because JSON does not distinguish integers from floats.

    Raises:
        InvalidRequest: the body is not JSON, or not arrays of finite numbers.
        TooLarge: the limits are exceeded.
    """
    parsed = _parse_json(body)
    inputs = parsed.get("inputs") if isinstance(parsed, dict) else None
    if not isinstance(inputs, dict):
        raise InvalidRequest('wanted {"inputs": {name: array, ...}}', ("body", "inputs"))
    allowance = Allowance(limits)
    return {
        _check_name(name): _read_json_array(name, value, allowance, dtypes.get(name)) for name, value in inputs.items()
    }


def encode_json(outputs: Mapping[str, np.ndarray], timings: Mapping[str, float]) -> list[bytes]:
    """Encode arrays as ``{"outputs": {name: {"dtype", "shape", "data"}}, "timings_ms": {stage: number}}``.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    pieces: list[str] = ['{"outputs":{']
    for position, (name, array) in enumerate(outputs.items()):
        head = json.dumps({"dtype": array.dtype.name, "shape": list(array.shape)}, separators=(",", ":"))
        pieces += ["," if position else "", json.dumps(name), ":", head[:-1], ',"data":']
        _write_array(array, pieces)
        pieces.append("}")
    pieces.append('},"timings_ms":' + json.dumps(dict(timings), allow_nan=False) + "}")
    return ["".join(pieces).encode()]


def _write_array(array: np.ndarray, pieces: list[str]) -> None:
    if array.size <= _CHUNK_VALUES:
        pieces.append(json.dumps(array.tolist(), allow_nan=False, separators=(",", ":")))
        return
    pieces.append("[")
    parts = np.array_split(array, math.ceil(len(array) / _CHUNK_VALUES)) if array.ndim == 1 else array
    for position, part in enumerate(parts):
        if position:
            pieces.append(",")
        if array.ndim == 1:
            pieces.append(json.dumps(part.tolist(), allow_nan=False, separators=(",", ":"))[1:-1])
        else:
            _write_array(part, pieces)
    pieces.append("]")


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is no JSON")


def _parse_json(body: bytes) -> Any:
    try:
        text = decode_text(body)
        if has_many_values(text, _VALUES):
            return loads_slowly(text, parse_constant=_refuse_constant)
        return loads(text, _VALUES, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("JSON decode error; wanted JSON, whose numbers are finite", ("body",)) from error


def _read_json_array(name: str, value: object, allowance: Allowance, dtype_name: object) -> np.ndarray:
    about: dict[str, Any] = {}
    if isinstance(value, dict):
        about, value = value, value.get("data")
        if "shape" in about and not (isinstance(about["shape"], list) and all(type(n) is int for n in about["shape"])):
            raise array_error(name, "has no shape; wanted a list of integers")
    dtype_name = about.get("dtype", dtype_name)
    dtype = None if dtype_name is None else _read_dtype(name, dtype_name)
    array = _read_numbers(name, value)
    shape = about.get("shape", array.shape)
    allowance.take(name, shape, array.dtype)
    if math.prod(shape) != array.size:
        raise array_error(name, f"has shape {shape}, but {array.size} numbers")
    array = array.reshape(shape)
    return _check_finite(name, array if dtype is None else _cast_array(name, array, dtype))


def _read_numbers(name: str, value: object) -> np.ndarray:
    try:
        array = _to_array(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise array_error(name, "is no array; wanted a number, or nested lists of numbers of equal length") from error
    if array.dtype.kind not in "biuf":
        raise array_error(name, "is no array of numbers; wanted a number, or nested lists of numbers of equal length")
    return array


def _to_array(value: object, rank: int = MAX_RANK) -> np.ndarray:
    """Convert nested lists as ``np.array`` does, but let other threads run after each thousand numbers."""
    if not isinstance(value, list) or not value or not rank:
        return np.array(value)
    each, part = 1, value[0]
    for _ in range(rank):
        if not isinstance(part, list) or not part:
            break
        each, part = each * len(part), part[0]
    if each * len(value) <= _CHUNK_VALUES:
        return np.array(value)
    if each > _CHUNK_VALUES:
        return np.stack([_to_array(part, rank - 1) for part in value])
    step, parts = max(_CHUNK_VALUES // each, 1), iter(value)
    return np.concatenate([np.array(few) for few in iter(lambda: list(islice(parts, step)), [])])


def _cast_array(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    is_whole = dtype.kind in "iu"
    if is_whole and array.dtype.kind == "f":
        raise array_error(name, f"holds fractions; wanted {dtype.name}")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if is_whole and not np.array_equal(cast, array):
        raise array_error(name, f"holds numbers that {dtype.name} has not")
    return cast


# Last record of a zip file: signature, disks and counts, size and offset of the directory.
_END = struct.Struct("<4s4H2LH")
# ValueError: names that are not UTF-8. OverflowError: offsets that no file has.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, OSError, ValueError, OverflowError)
_DIRECTORY_PER_ARRAY = 512
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_HEADER = 4096


def decode_npz(body: bytes, limits: ArrayLimits, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Decode arrays by name from an npz archive.

    Raises:
        InvalidRequest: the body is not an npz, or holds something else than arrays of finite numbers.
        TooLarge: the declared sizes exceed the limits; nothing is unpacked then.
    """
    _check_directory(body, limits)
    allowance = Allowance(limits)
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > limits.bytes + len(members) * _HEADER:
                raise TooLarge(f"the arrays are more than {limits.bytes} bytes (max_forward_bytes) when unpacked")
            return dict(_read_npz_array(archive, member, allowance) for member in members)
    except _ZIP_ERRORS as error:
        raise InvalidRequest("the npz is damaged or incomplete; write it with numpy.savez", ("body",)) from error


def encode_npz(outputs: Mapping[str, np.ndarray], timings: Mapping[str, float]) -> list[memoryview]:
    """Encode arrays as an npz archive, without the timings."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(outputs))
    return [buffer.getbuffer()]


def _check_directory(body: bytes, limits: ArrayLimits) -> None:
    """Check the size of the archive's directory before zipfile reads it whole."""
    if len(body) < _END.size:
        raise InvalidRequest("the npz is empty or cut off; write it with numpy.savez", ("body",))
    signature, _, _, _, count, size, offset, comment = _END.unpack(body[-_END.size :])
    # The sizes of a ZIP64 file are stored elsewhere.
    is_large = body[-_END.size - 20 : -_END.size - 16] == b"PK\x06\x07"
    if signature != b"PK\x05\x06" or comment or is_large:
        raise InvalidRequest("the body is no npz (no zip, or one with extras); write it with numpy.savez", ("body",))
    if count > limits.arrays or size > limits.arrays * _DIRECTORY_PER_ARRAY:
        raise TooLarge(f"more than {limits.arrays} arrays in the npz; send only the inputs of the model")
    # zipfile would shift all members by the difference.
    if offset + size != len(body) - _END.size:
        raise InvalidRequest("the npz is damaged or incomplete; write it with numpy.savez", ("body",))


def _read_npz_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, allowance: Allowance) -> tuple[str, np.ndarray]:
    name = _check_name(member.filename.removesuffix(".npy"))
    if not member.filename.endswith(".npy") or member.flag_bits & 1:
        raise array_error(name, "is no plain npy file; write the npz with numpy.savez")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise array_error(name, "is packed in a way that is not read; write the npz with numpy.savez")
    with archive.open(member) as file:
        shape, kind = _read_npz_header(name, file)
        dtype = _read_dtype(name, kind.name)
        if member.file_size - file.tell() != allowance.take(name, shape, dtype):
            raise array_error(name, f"says shape {list(shape)} of {dtype.name}, but has another number of bytes")
    with archive.open(member) as file:
        found = npy.read_array(file, allow_pickle=False, max_header_size=_HEADER)
        if file.read(1):  # zipfile compares the checksum at the end of the member
            raise array_error(name, "has data after its end")
    return name, _check_finite(name, np.ascontiguousarray(found, dtype).reshape(shape))


def _read_npz_header(name: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype, before memory is allocated for the numbers."""
    try:
        read = _HEADERS[npy.read_magic(file)]
        shape, _, kind = read(file, max_header_size=_HEADER)
    except (ValueError, SyntaxError, TokenError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise array_error(name, "is no npy file that can be read; write the npz with numpy.savez") from error
    if kind.kind not in "biuf" or kind.itemsize > 8:
        raise array_error(name, f"has a dtype that is not allowed; wanted one of {', '.join(DTYPES)}")
    return shape, kind


Decode = Callable[[bytes, ArrayLimits, Mapping[str, str]], dict[str, np.ndarray]]
Encode = Callable[[Mapping[str, np.ndarray], Mapping[str, float]], Sequence[bytes | memoryview]]


@dataclass(frozen=True)
class ArrayFormat:
    """One format of arrays in a body: its content type, decoder and encoder.

    Attributes:
        aliases: other accepted content types.
        decode: converts (body, limits, default dtypes by name) to arrays by name.
        encode: converts (arrays by name, milliseconds by stage) to pieces of a body.
        max_numbers: largest number of values in a response, or None.
        is_small: whether the body limit of ordinary requests applies.
    """

    content_type: str
    aliases: tuple[str, ...]
    decode: Decode
    encode: Encode
    max_numbers: int | None = None
    is_small: bool = False


ARRAY_FORMATS = (
    ArrayFormat("application/json", (), decode_json, encode_json, max_numbers=1 << 18, is_small=True),
    ArrayFormat("application/x-npz", ("application/npz",), decode_npz, encode_npz),
)
# By media type, for `service.http.bodies.find_form` and `choose_form`.
ARRAY_FORMS = {kind: form for form in ARRAY_FORMATS for kind in (form.content_type, *form.aliases)}
