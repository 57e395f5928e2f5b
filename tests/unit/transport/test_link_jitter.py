"""Jitter buffer: packets become frames at once and in order, and no frame is built after a loss."""

from fractions import Fraction

import av
import pytest
from aiortc.jitterbuffer import JitterFrame
from aiortc.rtp import RtpPacket
from hypothesis import given
from hypothesis import strategies as st

from service.transport.webrtc.decoding import MAX_DECLARED
from service.transport.webrtc.jitter_buffer import (
    KEYFRAME_REQUEST_INTERVAL,
    LOSS_TIMEOUT,
    MAX_FRAMES_PER_PACKET,
    UNREADABLE_SIZE,
    EagerJitterBuffer,
    h264_pixels,
    is_keyframe,
)

KEY = b"\x10\x02\x00\x9d\x01\x2a\x0a\x00\x0a\x00"  # First bytes of a VP8 keyframe of 10x10.
INTER = b"\x11\x02\x00abc"


class Stream:
    """Packets of a sender, and the frames and requests of the buffer."""

    def __init__(self, start: int = 100):
        self.now = 0.0
        self.frames: list[bytes] = []
        self.requests = 0
        self.buffer = EagerJitterBuffer(
            lambda packet, frame: self.frames.append(frame.data), 1000, clock=lambda: self.now
        )
        self.number = start

    def packets(self, *parts: bytes, stamp: int, marker: bool = True) -> list[RtpPacket]:
        made = []
        for index, part in enumerate(parts):
            packet = RtpPacket(sequence_number=self.number % 65536, timestamp=stamp, payload=part)
            packet.marker = int(marker and index == len(parts) - 1)
            packet._data = part
            self.number += 1
            made.append(packet)
        return made

    def arrive(self, *packets: RtpPacket) -> None:
        for packet in packets:
            has_request, frame = self.buffer.add(packet)
            self.requests += has_request
            if isinstance(frame, JitterFrame):
                self.frames.append(frame.data)


def test_a_frame_is_returned_with_its_last_packet():
    stream = Stream()
    first, last = stream.packets(KEY, b"rest", stamp=1)
    stream.arrive(first)
    assert stream.frames == []
    stream.arrive(last)
    assert stream.frames == [KEY + b"rest"]


def sized(width: int, height: int) -> bytes:
    """Return the first bytes of a keyframe that declares this size."""
    return KEY[:6] + width.to_bytes(2, "little") + height.to_bytes(2, "little")


@pytest.mark.parametrize(
    ("packets", "frames", "oversize"),
    [
        ([(KEY, 1, False), (INTER, 2, False)], [KEY], 0),
        ([(KEY, 1, True), (b"", 1, False), (INTER, 2, True), (b"", 3, True)], [KEY, INTER], 0),
        ([(sized(16_383, 16_383), 1, True), (INTER, 2, True), (sized(10, 100), 3, True)], [sized(10, 100)], 1),
    ],
    ids=["no marker", "padding", "huge"],
)
def test_only_complete_frames_of_allowed_sizes_are_returned(packets, frames, oversize):
    stream = Stream()
    for payload, stamp, marker in packets:
        stream.arrive(*stream.packets(payload, stamp=stamp, marker=marker))
    assert (stream.frames, stream.buffer.oversize) == (frames, oversize)


def test_a_late_packet_releases_the_waiting_frames_in_order():
    stream = Stream()
    key, a, b, c = (stream.packets(data, stamp=i)[0] for i, data in enumerate([KEY, b"\x11a", b"\x11b", b"\x11c"]))
    stream.arrive(key, b, c)
    assert stream.frames == [KEY]
    stream.arrive(a)
    assert stream.frames == [KEY, b"\x11a", b"\x11b", b"\x11c"]


@pytest.mark.parametrize("is_lost", [False, True], ids=["late", "lost"])
def test_waiting_frames_are_released_a_few_per_packet(is_lost, monkeypatch):
    parsed: list[bytes] = []
    monkeypatch.setattr("service.transport.webrtc.jitter_buffer.vp8_pixels", lambda data: parsed.append(data) or 0)
    stream = Stream()
    key, late, *others = (stream.packets(KEY + bytes([n % 256]), stamp=n)[0] for n in range(600))
    stream.arrive(key, *others[:500])
    parsed.clear()
    if is_lost:
        stream.now += LOSS_TIMEOUT
    else:
        stream.arrive(late)
        assert len(parsed) <= MAX_FRAMES_PER_PACKET
    for packet in others[500:560]:
        before = len(parsed)
        stream.arrive(packet)
        assert len(parsed) <= before + MAX_FRAMES_PER_PACKET
    expected = [packet.payload for packet in (key, *([] if is_lost else [late]), *others[:560])]
    assert stream.frames == expected


def test_no_frame_is_returned_before_a_requested_keyframe():
    stream = Stream()
    stream.arrive(*stream.packets(INTER, stamp=1), *stream.packets(INTER, stamp=2))
    assert (stream.frames, stream.requests, stream.buffer.skipped) == ([], 1, 2)
    stream.now += KEYFRAME_REQUEST_INTERVAL
    stream.arrive(*stream.packets(INTER, stamp=3), *stream.packets(KEY, stamp=4), *stream.packets(INTER, stamp=5))
    assert (stream.frames, stream.requests) == ([KEY, INTER], 2)


def test_no_frame_is_returned_between_a_loss_and_a_keyframe():
    stream = Stream()
    stream.arrive(*stream.packets(KEY, stamp=1))
    requests = stream.requests
    lost, *_ = stream.packets(INTER, stamp=2)
    stream.arrive(*stream.packets(INTER, stamp=3))
    stream.now += LOSS_TIMEOUT / 2
    stream.arrive(*stream.packets(INTER, stamp=4))
    assert stream.requests == requests, "a retransmission may still arrive"
    stream.now += LOSS_TIMEOUT / 2
    stream.arrive(*stream.packets(INTER, stamp=5))
    assert (stream.frames, stream.requests, stream.buffer.lost) == ([KEY], requests + 1, 1)
    stream.arrive(lost, *stream.packets(INTER, stamp=6), *stream.packets(KEY, stamp=7), *stream.packets(INTER, stamp=8))
    assert stream.frames == [KEY, KEY, INTER]


def test_an_incomplete_frame_is_never_returned():
    stream = Stream()
    stream.arrive(*stream.packets(KEY, stamp=1))
    first, _, last = stream.packets(KEY, b"middle", b"end", stamp=2)
    stream.arrive(first, last)
    stream.now += LOSS_TIMEOUT
    stream.arrive(*stream.packets(INTER, stamp=3))
    stream.now += LOSS_TIMEOUT
    stream.arrive(*stream.packets(INTER, stamp=4))
    assert stream.frames == [KEY]


@pytest.mark.parametrize("start", [0, 65_530])
@given(data=st.data())
def test_reordered_packets_return_all_frames_once_in_order(start, data):
    stream = Stream(start)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=12))
    frames = [
        stream.packets(KEY if i == 0 else INTER, *(bytes([i, part]) for part in range(size - 1)), stamp=i)
        for i, size in enumerate(sizes)
    ]
    expected = [b"".join(packet._data for packet in frame_packets) for frame_packets in frames]
    # The first packet sets the origin, because the order of a real stream is disturbed only locally.
    first, *packets = [packet for frame_packets in frames for packet in frame_packets]
    order = data.draw(st.permutations(packets))
    stream.arrive(first, *order)
    assert stream.frames == expected


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 3), st.booleans(), st.binary(max_size=4)), max_size=80))
def test_no_sequence_of_packets_raises_an_error(packets):
    stream = Stream()
    for number, stamp, marker, data in packets:
        packet = RtpPacket(sequence_number=number, timestamp=stamp, marker=int(marker))
        packet._data = data
        stream.now += 0.05
        stream.arrive(packet)
    assert all(stream.frames)


@pytest.mark.parametrize(
    ("data", "is_key"),
    [
        (KEY, True),
        (INTER, False),
        (b"", False),
        (b"\x00\x00\x00\x01\x65abc", True),
        (b"\x00\x00\x00\x01\x67sps\x00\x00\x00\x01\x68pps\x00\x00\x00\x01\x65idr", True),
        (b"\x00\x00\x00\x01\x41abc", False),
        (b"\x00\x00\x00\x01", False),
    ],
)
def test_a_keyframe_is_recognized_by_its_bytes(data, is_key):
    assert is_keyframe(data) is is_key


# The size of a frame is read from its bytes before a decoder gets it. Tests of broken streams are in tests/hostile.


@pytest.mark.parametrize(("height", "width"), [(48, 64), (480, 640), (1080, 1920), (1200, 1920), (4096, 4096)])
def test_the_declared_size_of_h264_is_read(height, width):
    frame = av.VideoFrame(width, height, "yuv420p")
    for profile in ("baseline", "high"):
        codec = av.CodecContext.create("libx264", "w")
        codec.width, codec.height, codec.pix_fmt, codec.time_base = width, height, "yuv420p", Fraction(1, 30)
        codec.options = {"profile": profile, "preset": "ultrafast", "tune": "zerolatency"}
        data = b"".join(bytes(packet) for packet in codec.encode(frame))
        assert h264_pixels(data) == -(-height // 16) * 16 * -(-width // 16) * 16
    assert (h264_pixels(data) > MAX_DECLARED) == (height > 1080)


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (b"\0\0\1\x67", UNREADABLE_SIZE),
        (b"\0\0\1\x67" + b"\0" * 40, UNREADABLE_SIZE),
        (b"\0\0\1\x67\x42\0\x1f" + b"\0" * 9, UNREADABLE_SIZE),
        # A frame that has only parameter sets is not decoded.
        (b"\0\0\1\x67\x42\0\x1e\xda\x02\x80" * 17, UNREADABLE_SIZE),
        (b"\0\0\1\x09" * 1025, UNREADABLE_SIZE),
        # Data without a declared size has no pixels.
        (b"\0\0\1\x09" * 1024, 0),
        (b"", 0),
        (b"\x10\0\0\x9d\1\x2a", 0),
        (b"\0\0\1\x65abc", 0),
    ],
)
def test_an_unreadable_size_counts_as_too_large(data, pixels):
    assert h264_pixels(data) == pixels
