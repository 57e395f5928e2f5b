"""msgpack read value by value, with a limit on everything; long data is not copied but shown where it lies.

The msgpack package would copy all of it and build whatever is nested in it while all other threads wait.
"""

import struct
from collections.abc import Callable
from typing import Any

from service.errors import InvalidRequest, TooLarge

_HEAD = 4096  # bytes of a text
_DEPTH = 8
_NUMBERS: dict[int, struct.Struct] = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# First byte to how the length is written.
_SIZES = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXT = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


class Reader:
    """A body read value by value.

    Args:
        made: what becomes of a map that was read (arrays are written as maps), with the key that it stands under.
        wanted: the error for what is cut off or malformed.
        most: values altogether, so that none are built for long.
    """

    def __init__(
        self,
        body: bytes | memoryview,
        *,
        made: Callable[[object, dict[Any, Any]], Any] = lambda key, found: found,
        wanted: Callable[[], InvalidRequest] = lambda: InvalidRequest("the body is cut off or no msgpack"),
        most: int = 4096,
    ):
        self._body = memoryview(body)
        self._at = 0
        self._made = made
        self._wanted = wanted
        self._left = most

    @property
    def is_at_end(self) -> bool:
        """Whether all was read."""
        return self._at == len(self._body)

    @property
    def is_map(self) -> bool:
        """Whether a map begins here."""
        first = self._body[self._at] if not self.is_at_end else 0
        return 0x80 <= first <= 0x8F or first in _MAPS

    def count(self) -> int:
        """Entries of the map that begins here.

        Raises:
            InvalidRequest: none does.
        """
        if not self.is_map:
            raise self._wanted()
        first = self._body[self._at]
        self._at += 1
        return first & 0x0F if first <= 0x8F else self._size(_MAPS[first])

    def data(self) -> memoryview:
        """Bytes, where they lie.

        Raises:
            InvalidRequest: here are none, or not all of them.
        """
        size = _BINARY.get(self._body[self._at]) if not self.is_at_end else None
        if size is None:
            raise self._wanted()
        self._at += 1
        length = self._size(size)
        if length > len(self._body) - self._at:
            raise InvalidRequest("the msgpack is cut off", ("body",))
        return self._take(length)

    def value(self, key: object = None, depth: int = 0) -> Any:
        """Whatever comes next: text, a number, data, a list or a map of them.

        Raises:
            InvalidRequest: it is malformed, an extension, or nested deeply.
            TooLarge: it is too many values.
        """
        self._left -= 1
        if self._left < 0:
            raise TooLarge("the msgpack has too many values; send arrays as arrays")
        if self.is_at_end:
            raise self._wanted()
        first = self._body[self._at]
        if first in _BINARY:
            return self.data()
        is_map, is_list = 0x80 <= first <= 0x8F or first in _MAPS, 0x90 <= first <= 0x9F or first in _LISTS
        if (is_map or is_list) and depth >= _DEPTH:
            raise self._wanted()
        if is_map:
            return self._map(key, depth)
        self._at += 1
        if first <= 0x7F:
            return first
        if first >= 0xE0:
            return first - 0x100
        if 0xA0 <= first <= 0xBF:
            return self._text(first & 0x1F)
        if first in _TEXT:
            return self._text(self._size(_TEXT[first]))
        if is_list:
            count = first & 0x0F if first <= 0x9F else self._size(_LISTS[first])
            return [self.value(key, depth + 1) for _ in range(min(count, self._left + 1))]
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        number = _NUMBERS.get(first)
        if number is None:
            raise self._wanted()
        return number.unpack(self._take(number.size))[0]

    def _map(self, key: object, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for _ in range(min(self.count(), self._left + 1)):
            name = self.value(depth=_DEPTH)
            if isinstance(name, memoryview) and len(name) <= 64:
                name = bytes(name)
            if not isinstance(name, str | bytes) or name in found:
                raise self._wanted()
            found[name] = self.value(name, depth + 1)
        return self._made(key, found)

    def _text(self, length: int) -> str:
        if length > _HEAD:
            raise self._wanted()
        try:
            return bytes(self._take(length)).decode()
        except UnicodeDecodeError:
            raise self._wanted() from None

    def _size(self, size: int) -> int:
        return _SIZES[size].unpack(self._take(size))[0]

    def _take(self, length: int) -> memoryview:
        start, self._at = self._at, self._at + length
        if self._at > len(self._body):
            raise self._wanted()
        return self._body[start : self._at]
