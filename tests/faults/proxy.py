"""A link that fails: a TCP proxy on loopback whose connections are cut, refused, half open or corrupted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class FaultProxy:
    """TCP proxy that forwards bytes until a test breaks the link.

    Attributes:
        carries: clear it to keep connections open without reading from them.
        is_half_open: drop the bytes of both directions, keep connections open, and do not answer new ones.
        is_refusing: close new connections at once.
        corrupt: (old, new) of the same length, replaced in the server's bytes.
    """

    def __init__(self, target: str, chunk: int):
        self.chunk = chunk
        self.carries = asyncio.Event()
        self.carries.set()
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        self.is_half_open = False
        self.is_refusing = False
        self.corrupt: tuple[bytes, bytes] | None = None

    def cut(self) -> None:
        """Reset each connection."""
        for writer in self._writers:
            writer.transport.abort()

    def heal(self) -> None:
        """Restore the link. Swallowed bytes stay lost, so their connections are reset."""
        if self.is_half_open:
            self.cut()
        self.is_half_open = self.is_refusing = False
        self.corrupt = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            if self.is_refusing:
                return
            if self.is_half_open:
                while await reader.read(65536):
                    pass
                return
            back, there = await asyncio.open_connection(*self._target)
            self._writers.add(there)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, there, is_down=False))
                group.create_task(self._pass(back, writer, is_down=True))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    self._writers.discard(end)
                    end.close()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_down: bool) -> None:
        while data := await reader.read(self.chunk):
            await self.carries.wait()
            if self.is_half_open:
                continue
            if is_down and self.corrupt is not None:
                data = data.replace(*self.corrupt)
            writer.write(data)
            await writer.drain()
        if not self.is_half_open and writer.can_write_eof():
            writer.write_eof()


@asynccontextmanager
async def fault_proxy(target: str, chunk: int = 65536) -> AsyncIterator[FaultProxy]:
    """Yield a proxy in front of ``target`` on the running loop, which buffers little more than a chunk."""
    proxy = FaultProxy(target, chunk)
    listener = await asyncio.start_server(proxy._serve, "127.0.0.1", 0, limit=chunk)
    proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        listener.close()
        proxy.cut()
        for task in list(proxy._tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*proxy._tasks, return_exceptions=True)
