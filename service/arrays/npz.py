"""Arrays in NumPy's npz: a zip of npy files, opened with nothing taken on trust."""

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from tokenize import TokenError  # of headers that Python 2 wrote
from typing import IO

import numpy as np
from numpy.lib import format as npy

from service.arrays.limits import DTYPES, Allowance, ArrayLimits, check_finite, check_name, read_dtype, refusal
from service.errors import InvalidRequest, TooLarge

_END = struct.Struct("<4s4H2LH")  # a zip's last record: signature, disks and counts, size and offset of the directory
_DIRECTORY_PER_ARRAY = 512
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_HEADER = 4096


def decode(body: bytes, limits: ArrayLimits, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Arrays by name.

    Raises:
        InvalidRequest: it is no npz, or holds something else than arrays of finite numbers.
        TooLarge: it holds more than is allowed; found from what it claims, before anything is unpacked.
    """
    _check_directory(body, limits)
    allowance = Allowance(limits)
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > limits.bytes + len(members) * _HEADER:
                raise TooLarge(f"the arrays are more than {limits.bytes} bytes (max_forward_bytes) when unpacked")
            return dict(_read(archive, member, allowance) for member in members)
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        OSError,
        ValueError,  # names that are no UTF-8
        OverflowError,  # places beyond what a file can have
    ) as error:
        raise InvalidRequest("the npz is damaged or incomplete; write it with numpy.savez", ("body",)) from error


def encode(outputs: Mapping[str, np.ndarray], timings: Mapping[str, float]) -> list[memoryview]:
    """An npz of the arrays; it has no place for timings, which are in a header of the answer."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(outputs))
    return [buffer.getbuffer()]


def _check_directory(body: bytes, limits: ArrayLimits) -> None:
    """The list of members is read whole by zipfile, so its size is looked at before."""
    if len(body) < _END.size:
        raise InvalidRequest("the npz is empty or cut off; write it with numpy.savez", ("body",))
    signature, _, _, _, count, size, offset, comment = _END.unpack(body[-_END.size :])
    # The large form of zip would name other sizes than these.
    is_large = body[-_END.size - 20 : -_END.size - 16] == b"PK\x06\x07"
    if signature != b"PK\x05\x06" or comment or is_large:
        raise InvalidRequest("the body is no npz (no zip, or one with extras); write it with numpy.savez", ("body",))
    if count > limits.arrays or size > limits.arrays * _DIRECTORY_PER_ARRAY:
        raise TooLarge(f"more than {limits.arrays} arrays in the npz; send those that the model takes")
    # zipfile takes a wrong offset for something in front of the zip, and moves all members by the difference.
    if offset + size != len(body) - _END.size:
        raise InvalidRequest("the npz is damaged or incomplete; write it with numpy.savez", ("body",))


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, allowance: Allowance) -> tuple[str, np.ndarray]:
    name = check_name(member.filename.removesuffix(".npy"))
    if not member.filename.endswith(".npy") or member.flag_bits & 1:
        raise refusal(name, "is no plain npy file; write the npz with numpy.savez")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise refusal(name, "is packed in a way that is not read; write the npz with numpy.savez")
    with archive.open(member) as file:
        shape, kind = _read_header(name, file)
        dtype = read_dtype(name, kind.name)
        if member.file_size - file.tell() != allowance.take(name, shape, dtype):
            raise refusal(name, f"says shape {list(shape)} of {dtype.name}, but has another number of bytes")
    with archive.open(member) as file:
        found = npy.read_array(file, allow_pickle=False, max_header_size=_HEADER)
        if file.read(1):  # also reads on to the end, where the checksum is compared
            raise refusal(name, "goes on after its end")
    return name, check_finite(name, np.ascontiguousarray(found, dtype).reshape(shape))


def _read_header(name: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype, before room is made for the numbers."""
    try:
        read = _HEADERS[npy.read_magic(file)]
        shape, _, kind = read(file, max_header_size=_HEADER)
    except (ValueError, SyntaxError, TokenError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise refusal(name, "is no npy file that can be read; write the npz with numpy.savez") from error
    if kind.kind not in "biuf" or kind.itemsize > 8:
        raise refusal(name, f"has a dtype that is not allowed; wanted one of {', '.join(DTYPES)}")
    return shape, kind
