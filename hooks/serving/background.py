"""An app on an event loop of its own, in a thread of its own."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from sanic import Sanic

from hooks.serving.prompt import PromptProtocol

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds in which answers under way may end
# Connections that wait to be accepted; of a burst above it each tries again a second later (Sanic's own is 100).
BACKLOG = 1024
STOPPING = 15.0  # and for everything: handlers, tunnel, database

Beside = Callable[[], AbstractAsyncContextManager[object]]


class Background:
    """A running app. Making one starts it; when that returns, it answers.

    Raises:
        Exception: whatever kept the app from starting.
    """

    def __init__(self, app: Sanic[Any, Any], listener: socket.socket, beside: Beside = contextlib.nullcontext):
        """Start.

        Args:
            listener: a bound socket, which this takes over.
            beside: what is open for as long as the app answers.
        """
        self._app = app
        self._listener = listener
        self._beside = beside
        self._has_begun = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        # A daemon: a script that started a server beside its own work ends when that is done.
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._thread.start()
        try:
            self._has_begun.wait()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            self._thread.join(STOPPING)
            raise self._error

    @property
    def is_running(self) -> bool:
        """Whether it still answers."""
        return self._thread.is_alive()

    def stop(self) -> bool:
        """End it and wait for that; whether it ended in time. From its own thread it is only asked to."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            # When it has ended already its loop is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(STOPPING)
        if self._thread.is_alive():
            logger.warning("the webhooks server did not end within %g s and is left behind", STOPPING)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._has_begun.is_set():
                logger.exception("the webhooks server ended by an error")
            self._error = error
        finally:
            self._has_begun.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self._app, self._listener), self._beside():
            self._has_begun.set()
            await self._stop.wait()


@asynccontextmanager
async def serving(app: Sanic[Any, Any], listener: socket.socket) -> AsyncIterator[None]:
    """The app on the running loop, answering while this is open. Takes the socket over."""
    with listener:
        # Sanic would listen before its router is ready.
        server = await app.create_server(
            sock=listener,
            protocol=PromptProtocol,
            backlog=BACKLOG,
            return_asyncio_server=True,
            access_log=False,
            asyncio_server_kwargs={"start_serving": False},
        )
        assert server is not None
        assert server.server is not None
        try:
            await server.startup()
            try:
                await server.before_start()
                app.ctx.loop = asyncio.get_running_loop()
                await server.server.start_serving()
                await server.after_start()
                yield
            finally:
                app.ctx.loop = None
                await server.before_stop()
                server.server.close()
                await _part(server.connections)
                await server.after_stop()
        finally:
            server.server.close()


async def _part(connections: set[Any]) -> None:
    """Let answers under way end, for a while."""
    until = asyncio.get_running_loop().time() + PATIENCE
    while connections and asyncio.get_running_loop().time() < until:
        for connection in list(connections):
            connection.close_if_idle()
        await asyncio.sleep(0.01)
    for connection in list(connections):
        connection.abort()
