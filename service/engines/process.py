"""Process of one engine on this machine: answers the calls of the server that started it, and ends with it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

import uvloop

from service.engines.connection import Connection
from service.engines.host import EngineHost
from service.engines.messages import make_codec
from service.engines.shared_memory import SharedMemory
from service.processes import exit_with_parent

METHODS = frozenset({"load", "stage", "compile", "profile", "act", "try_out", "prepare_task", "facts"})
MAX_LOG_LINE = 8192  # characters


class _LogToServer(logging.Handler):
    """Sends log records to the server, which has the log file and the newest lines."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop):
        super().__init__()
        self._connection, self._loop = connection, loop

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)[:MAX_LOG_LINE]
        self._loop.call_soon_threadsafe(self._connection.send_event, "log", record.name, record.levelno, text)


async def serve(descriptor: int, calls: SharedMemory, answers: SharedMemory) -> None:
    """Answer calls until the server closes the connection.

    Args:
        descriptor: of a connected Unix socket.
        calls, answers: memory with the arrays of the calls, and for those of the answers.
    """
    closed = asyncio.Event()
    host: EngineHost | None = None

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        nonlocal host
        if method == "begin":
            host = EngineHost(*arguments)
            return await host.begin()
        if host is None or method not in METHODS:
            raise ValueError(f"no method {method!r}")
        return await getattr(host, method)(*arguments)

    codec = make_codec(answers, calls, copies=False)
    connection = Connection(codec, answer=answer, on_lost=closed.set)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: connection, sock=socket.socket(fileno=descriptor))
    logging.basicConfig(level=logging.INFO, handlers=[_LogToServer(connection, loop)], format="%(message)s")
    await closed.wait()


def main() -> None:
    """Serve one engine; the arguments are descriptors, the bytes of the memory, and the parent."""
    descriptor, calls, answers, size, parent = map(int, sys.argv[1:6])
    exit_with_parent(parent, signal.SIGKILL)
    os.dup2(2, 1)  # the server's standard output is for its own lines
    uvloop.run(serve(descriptor, SharedMemory(calls, size), SharedMemory(answers, size)))
    os._exit(0)  # a thread inside of JAX would abort an ordinary end


if __name__ == "__main__":
    main()
