"""Messages out of the bytes that come: large ones lie, from the first byte on, in memory that nobody else writes to."""

from collections import deque
from collections.abc import Callable

import numpy as np

from service.doors.frames import TEXT, BadFrame, Head, read_head, unmask

_SCRATCH = 2048  # bytes that heads and short messages are read into
_PARTS = 64  # that a message may come in


class Incoming:
    """Frames put together; it knows neither clock nor connection.

    Attributes:
        messages: those that nobody took yet.
        begun_at: time at which the message that is coming began.
        is_over: nothing that still comes is looked at: it is the end, or cannot be understood any more.
    """

    def __init__(self, most: int, most_text: int, control: Callable[[int, bytes], None]):
        """It begins with a head.

        Args:
            most: bytes of a message.
            most_text: likewise, of one that is text.
            control: hears of every ping, pong and close, with its data.
        """
        self.messages: deque[memoryview | str] = deque()
        self.begun_at = 0.0
        self.is_over = False
        self._most = most
        self._most_text = most_text
        self._control = control
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._start = self._end = 0
        self._head: Head | None = None
        self._data = np.empty(0, np.uint8)
        self._target = memoryview(b"")
        self._filled = 0
        self._parts: list[np.ndarray] = []
        self._kind = 0
        self._is_refusing = False

    @property
    def is_in_frame(self) -> bool:
        """Whether the rest of a frame is missing, which has a place of its own."""
        return self._head is not None

    @property
    def is_in_message(self) -> bool:
        """Whether the rest of a message is missing."""
        return bool(self._parts) or self._head is not None

    def place(self) -> memoryview:
        """Where the next bytes go: what is missing of a frame, else a place for heads."""
        if self._head is not None and len(self._target) > self._filled:
            return self._target[self._filled :]
        return self._scratch[self._end :]

    @property
    def is_empty(self) -> bool:
        """Whether nothing that came waits to be read."""
        return self._start == self._end

    def fill(self, count: int) -> bool:
        """So many came, if they do not complete the frame that is coming; else nothing is done, and it is False."""
        if self._head is None or self._filled + count >= len(self._target):
            return False
        self._filled += count
        return True

    def put(self, count: int) -> bool:
        """So many came; False as long as a frame that was begun is not whole.

        Raises:
            BadFrame: it makes no sense; ``end`` it.
        """
        if self._head is not None and len(self._target) > self._filled:
            self._filled += count
            if self._filled < len(self._target):
                return False
            self._finish_frame()
        else:
            self._end += count
        return True

    def next_frame(self, now: float) -> bool:
        """Begin the next one; False when not even its head is there.

        Raises:
            BadFrame: it makes no sense; ``end`` it.
        """
        head = read_head(self._scratch[self._start : self._end])
        if head is not None:
            self._begin_frame(head, now)
        return head is not None

    def tidy(self) -> None:
        """What is left of the scratch moves to its beginning, so that there is room behind it."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)

    def refuse(self) -> None:
        """Nobody takes messages any more: they are read and thrown away."""
        self._is_refusing = True
        self.messages.clear()

    def end(self) -> None:
        """Nothing more is looked at; whole messages can still be taken."""
        self.is_over = True
        self._start = self._end = self._kind = 0
        self._head, self._target, self._data = None, memoryview(b""), np.empty(0, np.uint8)
        self._parts.clear()

    def _begin_frame(self, head: Head, now: float) -> None:
        if not head.is_control:
            if not self._kind:
                self.begun_at = now
            if (head.opcode == 0) != bool(self._kind):
                raise BadFrame(1002, "a part of a message out of turn")
            held = sum(len(part) for part in self._parts)
            most = self._most_text if TEXT in (self._kind, head.opcode) else self._most
            if head.length + held > most:
                raise BadFrame(1009, f"a message of more than {most} bytes")
        self._head = head
        self._data = np.empty(head.length, np.uint8)
        self._target = self._data.data
        self._start += head.size
        there = min(self._end - self._start, head.length)
        self._target[:there] = self._scratch[self._start : self._start + there]
        self._start += there
        self._filled = there
        if there == head.length:
            self._finish_frame()

    def _finish_frame(self) -> None:
        head, data = self._head, self._data
        assert head is not None
        self._head, self._target, self._data = None, memoryview(b""), np.empty(0, np.uint8)
        unmask(data, head.mask)
        if head.is_control:
            self._control(head.opcode, data.tobytes())
            return
        self._kind = self._kind or head.opcode
        self._parts.append(data)
        if len(self._parts) > _PARTS:
            raise BadFrame(1009, f"a message in more than {_PARTS} parts")
        if head.is_final:
            kind, parts = self._kind, self._parts
            self._kind, self._parts = 0, []
            if not self._is_refusing:
                self._finish_message(kind, parts)

    def _finish_message(self, kind: int, parts: list[np.ndarray]) -> None:
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if kind != TEXT:
            self.messages.append(whole.data)
            return
        try:
            self.messages.append(whole.tobytes().decode())
        except UnicodeDecodeError:
            raise BadFrame(1007, "text is not UTF-8") from None
