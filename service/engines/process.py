"""Process that hosts engines: answers the calls of the server that started it, and ends with it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import uvloop

from service.engines.connection import Connection
from service.engines.host import EngineHost, import_jax
from service.engines.messages import make_codec
from service.engines.shared_memory import SharedMemory
from service.processes import exit_with_parent
from service.threads import call_in_thread

METHODS = frozenset({"load", "compile", "act", "try_out", "prepare_task", "facts"})
MAX_LOG_LINE = 8192  # characters

# Sends an event to the server: (name, arguments); answers a call of the server: (method, arguments).
SendEvent = Callable[..., None]
Answer = Callable[[str, tuple[Any, ...]], Awaitable[Any]]
# Answers a call at once, or returns None; see `Connection`.
AnswerNow = Callable[[str, tuple[Any, ...]], Any]
OpenHost = Callable[[SendEvent], AbstractAsyncContextManager[tuple[Answer, AnswerNow]]]


class _LogToServer(logging.Handler):
    """Sends log records to the server, which has the log file and the newest lines."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop):
        super().__init__()
        self._connection, self._loop = connection, loop

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)[:MAX_LOG_LINE]
        self._loop.call_soon_threadsafe(self._connection.send_event, "log", record.name, record.levelno, text)


async def serve(open_host: OpenHost, descriptor: int, calls: SharedMemory, answers: SharedMemory) -> None:
    """Answer calls until the server closes the connection.

    Args:
        open_host: opens what answers the calls.
        descriptor: of a connected Unix socket.
        calls, answers: memory with the arrays of the calls, and memory for the arrays of the answers.
    """
    closed = asyncio.Event()
    codec = make_codec(answers, calls, copies=False)
    async with open_host(lambda name, *arguments: connection.send_event(name, *arguments)) as (answer, now):
        connection = Connection(codec, answer=answer, answer_now=now, on_lost=closed.set)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: connection, sock=socket.socket(fileno=descriptor))
        logging.basicConfig(level=logging.INFO, handlers=[_LogToServer(connection, loop)], format="%(message)s")
        await closed.wait()


@asynccontextmanager
async def open_engine(send_event: SendEvent) -> AsyncIterator[tuple[Answer, AnswerNow]]:
    """Open an engine on this machine, which begins with the first call."""
    host: EngineHost | None = None
    importing = call_in_thread(import_jax, "import-jax")  # The server may still be starting.

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        nonlocal host
        if method == "begin":
            host = EngineHost(*arguments)
            await importing
            return await host.begin()
        if host is None or method not in METHODS:
            raise ValueError(f"no method {method!r}")
        return await getattr(host, method)(*arguments)

    def answer_now(method: str, arguments: tuple[Any, ...]) -> Any:
        return host.act_now(*arguments) if method == "act" and host is not None else None

    yield answer, answer_now


def main(open_host: OpenHost) -> None:
    """Host engines; the arguments are descriptors, the bytes of the memory, the parent, and the niceness."""
    descriptor, calls, answers, size, parent, niceness = map(int, sys.argv[1:7])
    exit_with_parent(parent, signal.SIGKILL)
    os.nice(niceness)
    os.dup2(2, 1)  # the server's standard output is for its own lines
    uvloop.run(serve(open_host, descriptor, SharedMemory(calls, size), SharedMemory(answers, size)))
    os._exit(0)  # a thread inside of JAX would abort an ordinary end


if __name__ == "__main__":
    main(open_engine)
