"""The size of a picture is read from its bytes before a decoder gets it; tests/hostile has broken streams."""

from fractions import Fraction

import av
import pytest

from service.transport.webrtc.decoding import MAX_DECLARED
from service.transport.webrtc.jitter_buffer import UNREADABLE_SIZE, h264_pixels


@pytest.mark.parametrize(("height", "width"), [(48, 64), (480, 640), (1080, 1920), (1200, 1920), (4096, 4096)])
def test_the_size_that_h264_declares_is_read(height, width):
    frame = av.VideoFrame(width, height, "yuv420p")
    codec = av.CodecContext.create("libx264", "w")
    codec.width, codec.height, codec.pix_fmt, codec.time_base = width, height, "yuv420p", Fraction(1, 30)
    for profile in ("baseline", "high"):
        codec = av.CodecContext.create("libx264", "w")
        codec.width, codec.height, codec.pix_fmt, codec.time_base = width, height, "yuv420p", Fraction(1, 30)
        codec.options = {"profile": profile, "preset": "ultrafast", "tune": "zerolatency"}
        data = b"".join(bytes(packet) for packet in codec.encode(frame))
        assert h264_pixels(data) == -(-height // 16) * 16 * -(-width // 16) * 16
    assert (h264_pixels(data) > MAX_DECLARED) == (height > 1080)


@pytest.mark.parametrize("data", [b"\0\0\1\x67", b"\0\0\1\x67" + b"\0" * 40, b"\0\0\1\x67\x42\0\x1f" + b"\0" * 9])
def test_a_size_that_cannot_be_read_is_too_large(data):
    assert h264_pixels(data) == UNREADABLE_SIZE


def test_a_picture_of_descriptions_alone_is_not_decoded():
    assert h264_pixels(b"\0\0\1\x67\x42\0\x1e\xda\x02\x80" * 17) == UNREADABLE_SIZE
    assert h264_pixels(b"\0\0\1\x09" * 1025) == UNREADABLE_SIZE
    assert h264_pixels(b"\0\0\1\x09" * 1024) == 0


def test_what_declares_no_size_has_none():
    assert h264_pixels(b"") == h264_pixels(b"\x10\0\0\x9d\1\x2a") == h264_pixels(b"\0\0\1\x65abc") == 0
