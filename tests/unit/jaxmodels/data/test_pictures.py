"""Pictures: colours are decoded exactly, and files other than colour pictures are refused."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from jaxmodels.data.pictures import decode_picture
from jaxmodels.errors import PictureError

# The height differs from the width, so that a rotation is visible.
RAMP = np.linspace(0, 255, 16 * 24).reshape(16, 24).astype(np.uint8)
COLOUR = np.stack((RAMP, RAMP[::-1], RAMP[:, ::-1]), axis=-1)


def decode(file):
    return decode_picture(file, lambda height, width: None)


def save(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def with_alpha(alpha):
    return np.dstack((COLOUR, np.full_like(RAMP, alpha)))


def build_png(samples, colour_type, *chunks):
    """Build a PNG of 16 bits per sample, which Pillow does not write for all colour types."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = samples.shape[:2]
    rows = samples.astype(">u2").reshape(height, -1)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    parts = (chunk(b"IHDR", head), *(chunk(*each) for each in chunks), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


DEEP = RAMP.astype(np.uint16) * 257
DEPTH = np.linspace(300, 4000, RAMP.size).reshape(RAMP.shape).astype(np.uint16)  # Millimetres.
GRAY = np.repeat(RAMP[..., None], 3, -1)
BLACK_AND_WHITE = np.where(GRAY > 127, 255, 0).astype(np.uint8)
PALETTE = Image.fromarray(COLOUR).quantize(8)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (save(Image.fromarray(COLOUR)), COLOUR),
        (save(Image.fromarray(RAMP)), GRAY),
        (save(Image.fromarray(RAMP), "JPEG", quality=100), GRAY),
        (save(Image.fromarray(RAMP > 127)), BLACK_AND_WHITE),
        (save(PALETTE), np.asarray(PALETTE.convert("RGB"))),
        (save(Image.fromarray(with_alpha(255))), COLOUR),
        (save(Image.fromarray(np.dstack((RAMP, np.full_like(RAMP, 255))))), GRAY),
        (build_png(COLOUR.astype(np.uint16) * 257, 2), COLOUR),
        (build_png(with_alpha(255).astype(np.uint16) * 257, 6), COLOUR),
    ],
    ids=["RGB", "gray", "gray JPEG", "1 bit", "palette", "opaque RGBA", "opaque LA", "16-bit RGB", "16-bit RGBA"],
)
def test_colour_and_gray_are_decoded_exactly(file, expected):
    found = decode(file)
    assert (found.dtype, found.shape) == (np.uint8, expected.shape)
    assert np.abs(found.astype(int) - expected).max() <= (1 if file[:2] == b"\xff\xd8" else 0)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (save(Image.fromarray(DEEP)), "a 16-bit gray picture"),
        (save(Image.fromarray(DEPTH)), "a 16-bit gray picture"),
        (build_png(np.dstack((DEPTH, np.full_like(DEPTH, 65535))), 4), "a 16-bit gray picture"),
        (build_png(DEPTH, 0, (b"tRNS", b"\0\0")), "a 16-bit gray picture"),
        (save(Image.fromarray(with_alpha(254))), "transparent pixels"),
        (save(Image.fromarray(np.dstack((RAMP, RAMP)))), "transparent pixels"),
        (save(PALETTE, transparency=0), "transparent pixels"),
        (save(Image.fromarray(RAMP), transparency=0), "transparent pixels"),
        (save(Image.fromarray(COLOUR), transparency=tuple(COLOUR[0, 0].tolist())), "transparent pixels"),
        (save(Image.fromarray(COLOUR).convert("CMYK"), "JPEG"), "a CMYK picture"),
        *((save(Image.fromarray(COLOUR), form), f"a {form} file") for form in ("GIF", "TIFF", "BMP")),
        (save(Image.fromarray(COLOUR), "WEBP"), "a WebP file"),
        (b"", "an empty file"),
        (b"hello", "neither a PNG nor a JPEG file"),
        *((save(Image.fromarray(COLOUR))[:size], "a damaged or incomplete PNG file") for size in (9, 60)),
        *((save(Image.fromarray(COLOUR), "JPEG")[:size], "a damaged or incomplete JPEG file") for size in (3, 640)),
    ],
)
def test_file_that_is_not_a_colour_picture_is_refused(file, message):
    with pytest.raises(PictureError, match=message) as error:
        decode(file)
    assert "wanted 8-bit RGB or gray, PNG or JPEG" in str(error.value)


def rotated(orientation, form):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(Image.fromarray(COLOUR), form, exif=exif, **({"quality": 100} if form == "JPEG" else {}))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(10))
def test_picture_is_rotated_by_its_orientation(orientation, form):
    file = rotated(orientation, form)
    with Image.open(io.BytesIO(file)) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    assert expected.shape == ((24, 16, 3) if 5 <= orientation <= 8 else (16, 24, 3))
    np.testing.assert_array_equal(decode(file), expected)


def test_orientation_after_the_pixels_is_applied():
    file = rotated(6, "PNG")
    start = file.index(b"eXIf") - 4
    size = 12 + struct.unpack(">I", file[start : start + 4])[0]
    end = file.index(b"IEND") - 4
    moved = file[:start] + file[start + size : end] + file[start : start + size] + file[end:]
    np.testing.assert_array_equal(decode(moved), np.rot90(COLOUR, -1))


@pytest.mark.filterwarnings("ignore:.*EXIF")  # Pillow reads the resolution there.
def test_malformed_exif_data_are_ignored_and_large_ones_refused():
    for exif in (b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"):
        assert decode(save(Image.fromarray(COLOUR), "JPEG", exif=exif)).shape == COLOUR.shape
    with pytest.raises(PictureError, match="more than 65536 bytes of EXIF"):
        decode(save(Image.fromarray(COLOUR), "PNG", exif=b"Exif\0\0II*\0" + bytes(70_000)))


def test_size_is_checked_before_decoding():
    def refuse(height, width):
        raise OverflowError(f"{height} x {width}")

    with pytest.raises(OverflowError, match="16 x 24"):
        decode_picture(save(Image.fromarray(COLOUR))[:60], refuse)


@pytest.mark.parametrize(
    "options", [{"subsampling": 0}, {"subsampling": 2}, {"progressive": True}, {"icc_profile": b"x" * 70_000}]
)
def test_jpeg_files_have_the_pixels_of_pillow(options) -> None:
    file = save(Image.fromarray(COLOUR), "JPEG", **options)
    assert np.array_equal(decode(file), np.asarray(Image.open(io.BytesIO(file))))


def test_a_jpeg_file_of_many_segments_is_decoded() -> None:
    file = save(Image.fromarray(COLOUR), "JPEG")
    comments = b"\xff\xfe\0\3a" * 100
    assert np.array_equal(decode(file[:2] + comments + file[2:]), decode(file))
