"""Decoder of PNG and JPEG colour pictures to RGB."""

import io
import re
import struct
from collections.abc import Callable, Mapping

import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageFile

from jaxmodels.errors import PictureError

_FORMATS = ("PNG", "JPEG")
# Modes of Pillow with an exact conversion to 8-bit RGB: black and white, gray, palette and colour.
_OPAQUE_MODES = ("1", "L", "P", "RGB")
_ALPHA_MODES = ("LA", "PA", "RGBA")
_SEGMENT = struct.Struct(">BBH")  # 0xFF, kind, and size without these two bytes.
_MAX_SEGMENTS = 64
_MAX_EXIF = 1 << 16  # Bytes; the maximum of a JPEG.
_MODE_NAMES = {"CMYK": "a CMYK picture"}
_ACCEPTED = "wanted 8-bit RGB or gray, PNG or JPEG"
# First bytes of a file to its name in errors.
_SIGNATURES = (
    (re.compile(rb"\x89PNG"), "a damaged or incomplete PNG file"),
    (re.compile(rb"\xff\xd8"), "a damaged or incomplete JPEG file"),
    (re.compile(rb"GIF8"), "a GIF file"),
    (re.compile(rb"BM"), "a BMP file"),
    (re.compile(rb"II\*\0|MM\0\*"), "a TIFF file"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "a WebP file"),
)
# EXIF orientation to the transposition.
_TURNS: Mapping[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_picture(file: bytes | memoryview, check_size: Callable[[int, int], None]) -> UInt8[np.ndarray, "h w 3"]:
    """Decode a PNG or JPEG file to RGB, turned upright as its EXIF orientation says.

    Of 16-bit colour the upper 8 bits are used.

    Args:
        file: bytes of the file.
        check_size: called with height and width, as stored, before anything is decoded; may raise.

    Raises:
        PictureError: another format, a damaged file, 16-bit gray, which is usually depth, transparent pixels, or other
            colours than RGB and gray.

    Example:
        >>> file = io.BytesIO()
        >>> Image.new("L", (3, 2), 7).save(file, "PNG")
        >>> decode_picture(file.getvalue(), lambda height, width: None).shape
        (2, 3, 3)
    """
    if (plain := _decode_plain_jpeg(file, check_size)) is not None:
        return plain
    with _open(file) as opened:
        check_size(opened.height, opened.width)
        # Pillow converts 16-bit gray by clipping at 255, and with an alpha channel by taking the upper bits.
        if opened.mode.startswith("I") or "LA;16B" in (tile.args for tile in opened.tile):
            raise PictureError(
                f"a 16-bit gray picture (a depth picture?), which is not a colour picture; {_ACCEPTED}: scale its "
                "values to 0...255 first"
            )
        if opened.mode not in (*_OPAQUE_MODES, *_ALPHA_MODES):
            raise PictureError(f"{_MODE_NAMES.get(opened.mode, f'a picture of mode {opened.mode}')}; {_ACCEPTED}")
        try:
            opened.load()  # A PNG may have its EXIF data after the pixels.
        except Exception as error:  # Pillow may raise anything for a damaged file.
            raise PictureError(f"a damaged or incomplete {opened.format} file; {_ACCEPTED}") from error
        picture = opened
        if opened.mode in _ALPHA_MODES or "transparency" in opened.info:
            picture = opened.convert("RGBA")
            if picture.getchannel("A").getextrema() != (255, 255):
                raise PictureError(f"a picture with transparent pixels, whose colour is undefined; {_ACCEPTED}")
        turn = _find_turn(opened) if "exif" in opened.info else None
        if turn is not None:
            picture = picture.transpose(turn)
        return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))


def _decode_plain_jpeg(file: bytes | memoryview, check_size: Callable[[int, int], None]) -> np.ndarray | None:
    """Decode a JPEG file of the usual colours without EXIF data; None for any other or damaged file.

    The pixels equal Pillow's. Pillow holds Python's lock for a third of the time, and takes half as long again.
    """
    if file[:2] != b"\xff\xd8" or _may_have_exif(file):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(file)
    except ValueError:
        return None
    height, width = int(height), int(width)
    if colours != "YCbCr" or height * width > (Image.MAX_IMAGE_PIXELS or 0):
        return None
    check_size(height, width)
    try:
        return simplejpeg.decode_jpeg(file)
    except ValueError:
        return None


def _may_have_exif(file: bytes | memoryview) -> bool:
    """Whether a JPEG file has a segment of the kind of EXIF data before its pixels, or an unusual structure."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if len(file) < at + _SEGMENT.size:
            break
        start, kind, size = _SEGMENT.unpack_from(file, at)
        if start != 0xFF or kind in (0xE1, 0xFF):
            break
        if kind == 0xDA:  # The first scan.
            return False
        at += 2 + size
    return True


def _open(file: bytes | memoryview) -> ImageFile.ImageFile:
    """Open a PNG or JPEG file without decoding it; raises PictureError, which names the format that was found."""
    try:
        return Image.open(io.BytesIO(file), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise PictureError(f"a picture of too many pixels; {_ACCEPTED}") from error
    except Exception as error:  # Pillow may raise anything for a damaged file.
        start = bytes(file[:12])
        found = next((kind for pattern, kind in _SIGNATURES if pattern.match(start)), None)
        if found is None:
            found = "neither a PNG nor a JPEG file" if start else "an empty file"
        raise PictureError(f"{found}; {_ACCEPTED}") from error


def _find_turn(picture: Image.Image) -> Image.Transpose | None:
    """Return how the EXIF data say that a picture is turned; None for upright, and for malformed data."""
    if len(picture.info["exif"]) > _MAX_EXIF:
        raise PictureError(f"a picture with more than {_MAX_EXIF} bytes of EXIF data; {_ACCEPTED}")
    try:
        return _TURNS.get(picture.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # The parser may raise any exception; like viewers, ignore malformed EXIF data.
        return None
