"""Pictures as they come through a door: raw arrays where they lie, JPEG and PNG files decoded."""

import base64
import binascii
import io
import struct

import numpy as np
from PIL import Image

from service.errors import InvalidRequest, TooLarge

FORMATS = ("JPEG", "PNG")
_PARTS = 256  # segments, chunks or scans
_LEAST = 1024  # bytes of a PNG's chunk of data, on average; libpng writes 8192
_SHORT, _CHUNK = struct.Struct(">H"), struct.Struct(">I4s")
_AT_ONCE = 1 << 18  # characters of base64, a multiple of 4: Python's lock is kept for half a millisecond


def raw(camera: str, picture: np.ndarray, most: int) -> np.ndarray:
    """A picture (h, w, 3) uint8 that came as an array.

    Raises:
        InvalidRequest, TooLarge: it is none, or has more than ``most`` pixels.
    """
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or picture.size == 0:
        raise InvalidRequest(
            f"camera {camera!r}: the array is {picture.dtype} {list(picture.shape)}; wanted uint8 [height, width, 3]",
            ("body", "images", camera),
        )
    _check(camera, picture.shape[0], picture.shape[1], most)
    return picture


def decode(camera: str, file: bytes | memoryview | str, most: int) -> np.ndarray:
    """A JPEG or PNG file, or one in base64, to (h, w, 3) uint8 RGB; the lock is not held while it computes.

    Raises:
        InvalidRequest, TooLarge: it is none, or says to have more than ``most`` pixels (before any is decoded).
    """
    if isinstance(file, str):
        file = from_base64(camera, file)
    try:
        _check_parts(file)
        with Image.open(io.BytesIO(file), formats=FORMATS) as opened:
            _check(camera, opened.height, opened.width, most)
            return np.asarray(opened if opened.mode == "RGB" else opened.convert("RGB"))
    except TooLarge:
        raise
    except Exception as error:
        # Of a file from anywhere, its decoder may raise anything; its words are not for the wire.
        raise InvalidRequest(
            f"camera {camera!r}: the picture cannot be decoded ({type(error).__name__}); wanted a JPEG or PNG file, "
            "or an array",
            ("body", "images", camera),
        ) from None


def from_base64(camera: str, text: str) -> bytes:
    """The file that stands in JSON.

    Raises:
        InvalidRequest: it is no base64.
    """
    try:
        text = text.partition(",")[2] if text.startswith("data:") else text
        parts = [text[start : start + _AT_ONCE] for start in range(0, len(text), _AT_ONCE)]
        if any("=" in part for part in parts[:-1]):
            raise ValueError("it goes on after its end")
        return b"".join(base64.b64decode(part, validate=True) for part in parts)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"camera {camera!r}: no base64", ("body", "images", camera)) from None


def _check_parts(file: bytes | memoryview) -> None:
    """Whether a file is made of as few parts as cameras make it of.

    Pillow looks for them byte by byte in Python: 3 MB of markers take it 4 s. And each scan of a JPEG, of which 16 MB
    may have a million, is a walk over the whole picture.

    Raises:
        ValueError: it is not.
    """
    view = memoryview(file)
    if view[:2] == b"\xff\xd8":
        _walk_jpeg(view)
    elif view[:8] == b"\x89PNG\r\n\x1a\n":
        _walk_png(view)


def _walk_jpeg(view: memoryview) -> None:
    at = 2
    for _ in range(_PARTS):
        while view[at : at + 2] == b"\xff\xff" and at < 2 * _PARTS:
            at += 1  # padding
        if len(view) < at + 4 or view[at] != 0xFF:
            raise ValueError("no marker where one should be")
        if view[at + 1] == 0xDA:
            break
        at += 2 + _SHORT.unpack_from(view, at + 2)[0]
    else:
        raise ValueError("too many parts")
    # Before it there are no others; in it, a marker is no data.
    scans = 0
    for start in range(at, len(view), _AT_ONCE):
        scans += bytes(view[start : start + _AT_ONCE + 1]).count(b"\xff\xda")
        if scans > _PARTS:
            raise ValueError("too many scans")


def _walk_png(view: memoryview) -> None:
    at, parts, data = 8, 0, 0
    while at + 8 <= len(view):
        size, kind = _CHUNK.unpack_from(view, at)
        at += 12 + size
        parts, data = parts + (kind != b"IDAT"), data + 1
        if parts > _PARTS or data > _PARTS + len(view) // _LEAST:
            raise ValueError("too many parts")
        if kind == b"IEND":
            break


def _check(camera: str, height: int, width: int, most: int) -> None:
    if height * width > most:
        raise TooLarge(f"camera {camera!r}: {width} x {height} is more than {most} pixels; send smaller pictures")
