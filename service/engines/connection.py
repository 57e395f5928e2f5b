"""Connection between a server and the process of an engine: calls with answers, and events, over a Unix socket."""

import asyncio
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np

from service.engines.codec import MAX_MESSAGE, Block, Copy, MessageCodec, MessageError
from service.threads import WorkerThread

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<I")
# Messages: [CALL, number, method, arguments], [ANSWER, number, value], [FAULT, number, text],
# [EVENT, name, arguments] and [RELEASE, number], which says that the shared arrays of an answer were read.
_CALL, _ANSWER, _FAULT, _EVENT, _RELEASE = range(5)
_COPIERS = WorkerThread("frames", 2)


class ConnectionLost(Exception):
    """The other process has ended, or closed the connection."""


class EngineFault(Exception):
    """The engine's process failed in a way that it does not expect; the text is for clients."""


class Connection(asyncio.Protocol):
    """One end of a connection; all methods run on its event loop.

    Args:
        codec: of this end.
        answer: returns the answer to a call (method, arguments); an unexpected error of it is logged here, and raised
            as `EngineFault` at the other end.
        answer_now: returns the answer to a call that arrived alone, or None if it needs time; then `answer` is called.
        on_event: called with name and arguments of each event.
        on_lost: called once when the connection ends.
    """

    def __init__(
        self,
        codec: MessageCodec,
        *,
        answer: Callable[[str, tuple[Any, ...]], Awaitable[Any]] | None = None,
        answer_now: Callable[[str, tuple[Any, ...]], Any] = lambda method, arguments: None,
        on_event: Callable[[str, tuple[Any, ...]], None] = lambda name, arguments: None,
        on_lost: Callable[[], None] = lambda: None,
    ):
        self._codec, self._answer, self._answer_now = codec, answer, answer_now
        self._on_event, self._on_lost = on_event, on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[asyncio.Future[Any], list[Block]]] = {}
        self._answered: dict[int, list[Block]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the other end.

        Returns:
            The future of its answer. It raises `EngineFault` or `ConnectionLost`.

        Raises:
            MessageError: the arguments cannot be sent.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self.is_open:
            answer.set_exception(ConnectionLost("the engine's process has ended"))
            return answer
        number = next(self._numbers)
        data, blocks, copies = self._codec.encode([_CALL, number, method, list(arguments)])
        self._calls[number] = answer, blocks
        self._write_later(data, copies)
        return answer

    def send_event(self, name: str, *arguments: Any) -> None:
        """Send an event, which has no answer; it is dropped when the connection has ended."""
        if self.is_open:
            data, blocks, _ = self._codec.encode([_EVENT, name, list(arguments)])
            assert not blocks, "events have no large arrays"
            self._write(data)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._received, start)
            if size > MAX_MESSAGE:
                logger.error("a message of %d bytes; the connection is closed", size)
                self.close()
                return
            end = start + _HEADER.size + size
            if len(self._received) < end:
                break
            message = bytes(memoryview(self._received)[start + _HEADER.size : end])
            is_alone, start = start == 0 and end == len(self._received), end
            try:
                content, has_shared = self._codec.decode(message)
                self._take(has_shared, is_alone, *content)
            except (MessageError, TypeError, LookupError):
                logger.exception("the connection is closed")
                self.close()
                return
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        for answer, _ in self._calls.values():
            if not answer.done():
                answer.set_exception(ConnectionLost("the engine's process has ended"))
                answer.exception()  # The caller may have left.
        self._calls.clear()
        for task in self._tasks:
            task.cancel()
        self._on_lost()

    def _write_later(self, data: bytes, copies: Sequence[Copy]) -> None:
        """Send a message once its arrays are in the shared memory."""
        if not copies:
            self._write(data)
            return
        copied = _COPIERS.submit(lambda: [np.copyto(*copy) for copy in copies])
        copied.add_done_callback(lambda _: self._write(data) if self.is_open else None)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(_HEADER.pack(len(data)) + data)

    def _take(self, has_shared: bool, is_alone: bool, kind: int, *content: Any) -> None:
        if kind == _CALL:
            number, method, arguments = content
            if is_alone and self._answer_at_once(number, method, tuple(arguments)):
                return
            task = asyncio.get_running_loop().create_task(self._run(number, method, tuple(arguments)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif kind == _EVENT:
            self._on_event(content[0], tuple(content[1]))
        elif kind == _RELEASE:
            self._codec.free(self._answered.pop(content[0]))
        else:
            self._take_answer(kind, has_shared, *content)

    def _take_answer(self, kind: int, has_shared: bool, number: int, value: Any) -> None:
        answer, blocks = self._calls.pop(number)
        self._codec.free(blocks)
        if has_shared:  # The arrays were copied.
            self._write(self._codec.encode([_RELEASE, number])[0])
        if answer.done():  # The caller has left.
            return
        if kind == _ANSWER:
            answer.set_result(value)
        else:
            answer.set_exception(EngineFault(value))

    def _answer_at_once(self, number: int, method: str, arguments: tuple[Any, ...]) -> bool:
        try:
            if (value := self._answer_now(method, arguments)) is None:
                return False
            self._send_answer(number, value)
        except Exception:  # `answer` raises it again.
            return False
        return True

    async def _run(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        assert self._answer is not None, "this end takes no calls"
        try:
            self._send_answer(number, await self._answer(method, arguments))
        except Exception as error:
            logger.exception("%s failed", method)
            text = f"{method} raised {type(error).__name__}; the server's log says more"
            if self.is_open:
                self._write(self._codec.encode([_FAULT, number, text])[0])

    def _send_answer(self, number: int, value: Any) -> None:
        data, blocks, copies = self._codec.encode([_ANSWER, number, value])
        if blocks:
            self._answered[number] = blocks
        if self.is_open:
            self._write_later(data, copies)
