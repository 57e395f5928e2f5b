"""The picture size that H.264 declares before a decoder makes room for it (ITU-T H.264, 7.3.2.1.1)."""

import re
from itertools import islice

# Profiles whose description has chroma and scaling lists in it.
_HIGH = {44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244}
_LONGEST = 32  # zeros before a number; more are no H.264
UNREADABLE = 1 << 62  # pixels: whoever describes a picture that way is not decoded


# Of one picture. A slice for each packet makes 200, and one description is all that anybody sends; each is read in up
# to 1 ms, on the event loop.
MAX_UNITS = 1024
MAX_DESCRIPTIONS = 2
_START = b"\0\0\1"


def _unit(kind: int) -> re.Pattern[bytes]:
    """A start code with the first byte of such a unit, whatever its importance: found without a step for each unit."""
    return re.compile(_START + b"[" + b"".join(b"\\x%02x" % (high << 5 | kind) for high in range(8)) + b"]")


_SLICE, _DESCRIPTION = _unit(5), _unit(7)


def h264_pixels(data: bytes) -> int:
    """The largest picture that the sequence parameter sets of an access unit declare, 0 when it has none.

    They are found wherever FFmpeg would find them: what comes before the first start code is passed over.
    """
    if data.count(_START) > MAX_UNITS:
        return UNREADABLE
    found = [match.end() for match in islice(_DESCRIPTION.finditer(data), MAX_DESCRIPTIONS + 1)]
    if len(found) > MAX_DESCRIPTIONS:
        return UNREADABLE
    return max((_pixels(data[at : at + 1023].split(_START, 1)[0]) for at in found), default=0)


def starts_anew(data: bytes) -> bool:
    """Whether this is an access unit with an IDR slice: one that a decoder can begin with."""
    return data.startswith((b"\0\0\0\1", _START)) and _SLICE.search(data) is not None


def _pixels(description: bytes) -> int:
    # A size stands in the first bytes; scaling lists, which may come before it, have a few hundred.
    bits = _Bits(description.replace(b"\0\0\3", b"\0\0"))
    try:
        return _read(bits)
    except ValueError:
        return UNREADABLE


def _read(bits: "_Bits") -> int:
    profile = bits.take(8)
    bits.take(16)  # constraints, level
    bits.number()
    if profile in _HIGH:
        chroma = bits.number()
        if chroma == 3:
            bits.take(1)
        bits.number()
        bits.number()
        bits.take(1)
        if bits.take(1):
            for index in range(12 if chroma == 3 else 8):
                if bits.take(1):
                    _skip_scaling(bits, 16 if index < 6 else 64)
    bits.number()
    order = bits.number()
    if order == 0:
        bits.number()
    elif order == 1:
        bits.take(1)
        bits.number()
        bits.number()
        for _ in range(min(bits.number(), 256)):
            bits.number()
    bits.number()
    bits.take(1)
    width, height = bits.number() + 1, bits.number() + 1
    return width * height * (1 if bits.take(1) else 2) * 256  # in macroblocks of 16x16, of a frame or of a field


def _skip_scaling(bits: "_Bits", size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            number = bits.number()
            following = (last + (-(number // 2) if number % 2 == 0 else number // 2 + 1)) % 256
        last = following or last


class _Bits:
    """Numbers of a bit string, first bit first."""

    def __init__(self, data: bytes):
        self._bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}" if data else ""
        self._at = 0

    def take(self, count: int) -> int:
        """
        Raises:
            ValueError: there are not so many bits left.
        """
        self._at += count
        if self._at > len(self._bits):
            raise ValueError("the description ends")
        return int(self._bits[self._at - count : self._at], 2)

    def number(self) -> int:
        """An unsigned Exp-Golomb number; a signed one has the same length."""
        zeros = self._bits.find("1", self._at, self._at + _LONGEST + 1) - self._at
        if zeros < 0:
            raise ValueError("no number")
        self._at += zeros
        return self.take(zeros + 1) - 1
