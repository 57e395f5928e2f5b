"""The picture size that H.264 declares before a decoder makes room for it (ITU-T H.264, 7.3.2.1.1)."""

# Profiles whose description has chroma and scaling lists in it.
_HIGH = {44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244}
_LONGEST = 32  # zeros before a number; more are no H.264
# Parts of an access unit, and descriptions among them. Encoders send one; a megabyte of them would take seconds.
_MOST_UNITS, _MOST = 1024, 16
UNREADABLE = 1 << 62  # pixels: whoever describes a picture that way is not decoded


def h264_pixels(data: bytes) -> int:
    """The largest picture that the sequence parameter sets of an access unit declare, 0 when it has none."""
    if not data.startswith((b"\0\0\0\1", b"\0\0\1")):
        return 0
    if data.count(b"\0\0\1") > _MOST_UNITS:
        return UNREADABLE
    units = [unit for unit in data.split(b"\0\0\1")[1:] if unit and unit[0] & 0x1F == 7]
    return UNREADABLE if len(units) > _MOST else max(map(_pixels, units), default=0)


def _pixels(unit: bytes) -> int:
    # A size stands in the first bytes; scaling lists, which may come before it, have a few hundred.
    bits = _Bits(unit[1:1024].replace(b"\0\0\3", b"\0\0"))
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
        self._value = int.from_bytes(data, "big")
        self._left = 8 * len(data)

    def take(self, count: int) -> int:
        """
        Raises:
            ValueError: there are not so many bits left.
        """
        if count > self._left:
            raise ValueError("the description ends")
        self._left -= count
        return self._value >> self._left & ((1 << count) - 1)

    def number(self) -> int:
        """An unsigned Exp-Golomb number; a signed one has the same length."""
        zeros = 0
        while not self.take(1):
            zeros += 1
            if zeros > _LONGEST:
                raise ValueError("no number")
        return (1 << zeros) - 1 + self.take(zeros)
