"""Jitter buffer: video packets to whole pictures, and the picture sizes that H.264 and VP8 declare."""

import re
import time
from collections.abc import Callable, Iterator
from itertools import islice

from aiortc.jitterbuffer import JitterBuffer, JitterFrame
from aiortc.rtcrtpreceiver import NackGenerator
from aiortc.rtp import RTP_HISTORY_SIZE, RtpPacket
from aiortc.utils import uint16_add

# Profiles whose parameter sets contain chroma and scaling lists.
_PROFILES_WITH_CHROMA = {44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244}
_MAX_LEADING_ZEROS = 32  # Largest number of zeros before a number in H.264.
UNREADABLE_SIZE = 1 << 62  # Pixels of an invalid parameter set, so that its picture is not decoded.
# Limits of one picture; usual pictures have 200 slices and one parameter set, each of which takes up to 1 ms.
MAX_UNITS = 1024
MAX_DESCRIPTIONS = 2
_START_CODE = b"\0\0\1"


def _unit_pattern(kind: int) -> re.Pattern[bytes]:
    """Return a pattern of a start code and the first byte of a unit of this kind."""
    return re.compile(_START_CODE + b"[" + b"".join(b"\\x%02x" % (high << 5 | kind) for high in range(8)) + b"]")


_SLICE, _DESCRIPTION = _unit_pattern(5), _unit_pattern(7)


def h264_pixels(data: bytes) -> int:
    """Return the largest picture size in an access unit's parameter sets, found as FFmpeg does; 0 without any."""
    if data.count(_START_CODE) > MAX_UNITS:
        return UNREADABLE_SIZE
    starts = [match.end() for match in islice(_DESCRIPTION.finditer(data), MAX_DESCRIPTIONS + 1)]
    if len(starts) > MAX_DESCRIPTIONS:
        return UNREADABLE_SIZE
    return max((_parse_pixels(data[at : at + 1023].split(_START_CODE, 1)[0]) for at in starts), default=0)


def has_idr_slice(data: bytes) -> bool:
    """Whether an access unit has an IDR slice, so that a decoder can start with it."""
    return data.startswith((b"\0\0\0\1", _START_CODE)) and _SLICE.search(data) is not None


def _parse_pixels(description: bytes) -> int:
    bits = _BitReader(description.replace(b"\0\0\3", b"\0\0"))
    try:
        return _read_pixels(bits)
    except ValueError:
        return UNREADABLE_SIZE


def _read_pixels(bits: "_BitReader") -> int:
    profile = bits.read_bits(8)
    bits.read_bits(16)  # Constraints and level.
    bits.read_golomb()
    if profile in _PROFILES_WITH_CHROMA:
        chroma = bits.read_golomb()
        if chroma == 3:
            bits.read_bits(1)
        bits.read_golomb()
        bits.read_golomb()
        bits.read_bits(1)
        if bits.read_bits(1):
            for index in range(12 if chroma == 3 else 8):
                if bits.read_bits(1):
                    _skip_scaling_list(bits, 16 if index < 6 else 64)
    bits.read_golomb()
    order = bits.read_golomb()
    if order == 0:
        bits.read_golomb()
    elif order == 1:
        bits.read_bits(1)
        bits.read_golomb()
        bits.read_golomb()
        for _ in range(min(bits.read_golomb(), 256)):
            bits.read_golomb()
    bits.read_golomb()
    bits.read_bits(1)
    width, height = bits.read_golomb() + 1, bits.read_golomb() + 1
    return width * height * (1 if bits.read_bits(1) else 2) * 256  # Macroblocks of 16x16 of a frame or a field.


def _skip_scaling_list(bits: "_BitReader", size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            number = bits.read_golomb()
            following = (last + (-(number // 2) if number % 2 == 0 else number // 2 + 1)) % 256
        last = following or last


class _BitReader:
    """Reader of numbers from a bit string."""

    def __init__(self, data: bytes):
        self._bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}" if data else ""
        self._at = 0

    def read_bits(self, count: int) -> int:
        """Return the next bits as a number; raises ValueError at the end of the data."""
        self._at += count
        if self._at > len(self._bits):
            raise ValueError("the description ends")
        return int(self._bits[self._at - count : self._at], 2)

    def read_golomb(self) -> int:
        """Read an unsigned Exp-Golomb number; a signed one has the same length."""
        zeros = self._bits.find("1", self._at, self._at + _MAX_LEADING_ZEROS + 1) - self._at
        if zeros < 0:
            raise ValueError("no number")
        self._at += zeros
        return self.read_bits(zeros + 1) - 1


LOSS_TIMEOUT = 0.2  # Seconds to wait for a missing packet; a retransmission on a local network takes a few ms.
MAX_FRAMES_PER_PACKET = 12  # Pictures delivered per packet (LOSS_TIMEOUT at 60 fps), each of which takes up to 1 ms.
NACK_INTERVAL = 0.005  # Seconds between reports of missing packets.
VP8_START = b"\x9d\x01\x2a"  # Bytes 3 to 5 of a keyframe.
KEYFRAME_REQUEST_INTERVAL = 0.3  # Seconds between requests for a keyframe.


class EagerJitterBuffer(JitterBuffer):
    """Jitter buffer that delivers a picture at its marker bit (RFC 7741, RFC 6184), not with the next picture.

    After a loss, it skips to a requested keyframe, because a policy must not get smeared pictures.

    Args:
        on_extra_frame: takes every picture but the last, in order, if one packet completes several pictures.
        max_pixels: larger VP8 keyframes are dropped, because decoders allocate the declared size.
        clock: returns monotonic seconds.

    Attributes:
        lost: number of losses.
        skipped: number of pictures dropped while waiting for a keyframe.
        oversize: number of keyframes dropped because of their declared size.
    """

    def __init__(
        self,
        on_extra_frame: Callable[[RtpPacket, JitterFrame], None],
        max_pixels: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(capacity=512, is_video=True)
        self.lost = 0
        self.skipped = 0
        self.oversize = 0
        self._contiguous = 0  # Checked packets at the beginning of the first picture.
        self._max_pixels = max_pixels
        self._on_extra_frame = on_extra_frame
        self._clock = clock
        self._needs_keyframe = True
        self._requested_at = float("-inf")
        self._gap_since: float | None = None
        self._highest: int | None = None

    def add(self, packet: RtpPacket) -> tuple[bool, JitterFrame | None]:
        """Take one packet; returns whether to request a keyframe, and the newest complete picture, if any."""
        now = self._clock()
        is_broken, _ = super().add(packet)
        if self._highest is None or is_broken or _ahead(packet.sequence_number, self._highest) > 0:
            self._highest = packet.sequence_number
        frames = [*islice(self._pop_complete(), MAX_FRAMES_PER_PACKET)]
        if len(frames) < MAX_FRAMES_PER_PACKET and self._skip_loss(now):
            is_broken = True
            frames += islice(self._pop_complete(), MAX_FRAMES_PER_PACKET - len(frames))
        if is_broken:
            self.lost += 1
            self._needs_keyframe = True
            self._requested_at = float("-inf")
        frames = [frame for frame in frames if self._is_decodable(frame)]
        for frame in frames[:-1]:
            self._on_extra_frame(packet, frame)
        asks = self._needs_keyframe and now >= self._requested_at + KEYFRAME_REQUEST_INTERVAL
        if asks:
            self._requested_at = now
        return asks, frames[-1] if frames else None

    def require_keyframe(self) -> None:
        """Deliver nothing before the next keyframe, which is requested, because a delivered picture was skipped."""
        self._needs_keyframe = True

    def remove(self, count: int) -> None:
        """Remove this number of slots at the beginning."""
        assert self._origin is not None
        self._contiguous = 0
        if count < self._capacity:
            super().remove(count)
        else:  # The sequence numbers jumped, and the base class would remove slot by slot.
            self._packets = [None] * self._capacity
            self._origin = uint16_add(self._origin, count)

    def smart_remove(self, count: int) -> bool:
        """Remove at least this number of slots, up to the end of a picture; returns whether all were removed."""
        self._contiguous = 0
        if count < self._capacity:
            return super().smart_remove(count)
        self._packets = [None] * self._capacity
        return True

    def _remove_frame(self, sequence_number: int) -> JitterFrame | None:
        return None  # The base class would return one picture; ``add`` delivers all complete pictures.

    def _slot(self, index: int) -> RtpPacket | None:
        assert self._origin is not None
        return self._packets[(self._origin + index) % self._capacity]

    def _pop_complete(self) -> Iterator[JitterFrame]:
        while (length := self._measure_first()) is not None:
            packets = [packet for index in range(length) if (packet := self._slot(index)) is not None]
            self.remove(length)
            # Padding, with which senders probe the bandwidth, makes a picture without data.
            if data := b"".join(packet._data for packet in packets):  # type: ignore[attr-defined]
                yield JitterFrame(data=data, timestamp=packets[0].timestamp)

    def _measure_first(self) -> int | None:
        """Return the number of packets of the first picture, None while it is incomplete."""
        first = self._slot(0)
        for index in range(self._contiguous, self._capacity):
            packet = self._slot(index)
            if packet is None or first is None:
                # The next call skips these packets, because a picture may have 512.
                self._contiguous = index
                return None
            if packet.timestamp != first.timestamp:
                return index
            if packet.marker:
                return index + 1
        return None

    def _skip_loss(self, now: float) -> bool:
        """Skip a gap whose packets are missing for ``LOSS_TIMEOUT``; returns whether it was skipped."""
        assert self._origin is not None
        assert self._highest is not None
        held = _ahead(self._highest, self._origin) + 1
        missing = next((index for index in range(self._contiguous, max(held, 0)) if self._slot(index) is None), None)
        if missing is None:
            self._gap_since = None
            return False
        if self._gap_since is None:
            self._gap_since = now
        if now < self._gap_since + LOSS_TIMEOUT:
            return False
        after = next(index for index in range(missing, held) if self._slot(index) is not None)
        self.remove(after)
        self._gap_since = None
        return True

    def _is_decodable(self, frame: JitterFrame) -> bool:
        if vp8_pixels(frame.data) > self._max_pixels:
            self.oversize += 1
            self._needs_keyframe = True  # The next pictures depend on this picture.
            return False
        if self._needs_keyframe and not is_keyframe(frame.data):
            self.skipped += 1
            return False
        self._needs_keyframe = False
        return True


class BoundedNacks(NackGenerator):
    """Limited reports of the newest missing packets, in place of aiortc's unlimited reports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._reported_at = float("-inf")
        self._is_due = False
        self._count = 0

    def add(self, packet: RtpPacket) -> bool:
        """Note a packet; returns whether to report missing packets."""
        number = packet.sequence_number
        gap = 1 if self.max_seq is None else _ahead(number, self.max_seq)
        if gap <= 0:
            self.missing.discard(number)
        else:
            if gap > RTP_HISTORY_SIZE:
                self.missing.clear()
            self.missing.update((number - back) & 0xFFFF for back in range(1, min(gap, RTP_HISTORY_SIZE + 1)))
            self._is_due |= gap > 1
            self.max_seq = number
        self._count += 1
        if self._count % 32 == 0 and self.missing:
            self.truncate()
        now = self._clock()
        if not self._is_due or not self.missing or now < self._reported_at + NACK_INTERVAL:
            return False
        self._is_due, self._reported_at = False, now
        return True


def vp8_pixels(data: bytes) -> int:
    """Return the pixels that a VP8 keyframe declares (RFC 6386, 9.1), 0 for other data."""
    if len(data) < 10 or data[3:6] != VP8_START or data[0] & 1:
        return 0
    width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (6, 8))
    return width * height


def is_keyframe(data: bytes) -> bool:
    """Whether a decoder can start here: a VP8 keyframe (RFC 6386, 9.1) or an H.264 access unit with an IDR slice."""
    return (data[3:6] == VP8_START and not data[0] & 1) or has_idr_slice(data)


def _ahead(sequence_number: int, other: int) -> int:
    """Return the difference of two 16-bit sequence numbers, negative if the first is older."""
    difference = uint16_add(sequence_number, -other)
    return difference - 0x10000 if difference >= 0x8000 else difference
