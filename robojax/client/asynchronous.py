"""A server's sessions, from a program with an event loop: the same names, awaited."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from robojax.client import calls
from robojax.client.address import credentials, server_url, session_path, socket_url
from robojax.client.answers import Action, Chunk, SessionStatus
from robojax.client.client import DIRECT, GONE, REASON, T
from robojax.client.errors import ClientError, Refused
from robojax.client.http import PATIENCE, AsyncHttp
from robojax.client.observation import Image, observation
from robojax.client.stream import AsyncStream, open_async_stream

if TYPE_CHECKING:
    from service.transport.robot import Robot


class AsyncClient:
    """A server; see ``Client``."""

    def __init__(self, url: str | None = None, *, key: str | None = None, timeout: float = PATIENCE):
        self.url = server_url(url)
        self._key = key
        self._headers = credentials(key)
        self._timeout = timeout
        self._http = AsyncHttp(self.url, self._headers, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._http.close()

    async def sessions(self) -> list[SessionStatus]:
        """All sessions that this key may see, oldest first."""
        return await self._http.do(calls.sessions())

    def session(self, session_id: str) -> "AsyncSession":
        """A session that is there; nothing is asked yet."""
        return AsyncSession(self, session_id)

    async def create(
        self, session_id: str, policy_path: str, *, transport_server_url: str = DIRECT, **fields: Any
    ) -> "AsyncSession":
        """A new session, when its policy is loaded, compiled and warm; see ``Client.create``."""
        await self._http.do(calls.create(session_id, policy_path, transport_server_url, fields))
        return AsyncSession(self, session_id)

    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch every robot of the server."""
        await self._http.do(calls.emergency_stop(None, reason))

    async def ticket(self) -> str:
        """A ticket that opens one WebSocket within 30 seconds, for whoever cannot send a key."""
        return (await self.request("POST", "/tickets"))["ticket"]

    async def request(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        """Any call of the API that has JSON in and out."""
        return await self._http.do(calls.plain(method, path, body, timeout))


class AsyncSession:
    """One session; see ``Session``."""

    def __init__(self, client: AsyncClient, session_id: str):
        self.client, self.id = client, session_id
        self._do = client._http.do
        # The next act is the first of a program that takes the robot up, also when it was stopped before.
        self._is_new = False

    async def __aenter__(self) -> Self:
        self._is_new = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Also when this task is being cancelled: nobody else would stop the robot.
            await asyncio.shield(self.stop())
        except Refused as refused:
            if refused.status not in GONE:
                raise
        except ClientError as lost:
            if error is None:
                raise
            error.add_note(f"session {self.id} could not be stopped: {lost}")

    async def status(self) -> SessionStatus:
        """How it is."""
        return await self._do(calls.status(self.id))

    async def start(self) -> None:
        """Let the policy move the robot."""
        await self._do(calls.move(self.id, "start"))

    async def stop(self) -> None:
        """Hold the robot where it is."""
        await self._do(calls.move(self.id, "stop"))

    async def restart(self) -> None:
        """Stop and start, plans forgotten; load it again when it was interrupted."""
        await self._do(calls.move(self.id, "restart"))

    async def delete(self) -> None:
        """Stop it and remove it with its rooms."""
        await self._do(calls.delete(self.id))

    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch it: it needs a reset and a start before it moves again."""
        await self._do(calls.emergency_stop(self.id, reason))

    async def reset(self) -> None:
        """Take the latch off; nothing moves by it."""
        await self._do(calls.reset(self.id))
        self._is_new = True

    async def patch(self, **changes: Any) -> Any:
        """Change it while it is there: ``overlap``, ``ask_ahead``, ``action_steps``, ..."""
        return await self._do(calls.patch(self.id, changes))

    async def act(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Chunk:
        """Future actions for what the robot sees now; see ``Session.act``."""
        return await self._act(calls.act, images, state, more)

    async def next_action(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Action:
        """The next action for what the robot sees now; the server keeps the rest of the chunk."""
        return await self._act(calls.next_action, images, state, more)

    async def _act(self, call: Callable[..., calls.Call[T]], images: Any, state: Any, more: dict[str, Any]) -> T:
        if self._is_new:
            more = {"reset": True} | more
        told = await self._do(call(self.id, observation(images, state, **more)))
        self._is_new = False
        return told

    @asynccontextmanager
    async def stream(self, *, ticket: str | None = None) -> AsyncIterator[AsyncStream]:
        """Its stream, as a context manager; see ``Session.stream``."""
        headers = {}
        if ticket is None:
            headers = self.client._headers
            await self.status()  # on which server it is
        url = socket_url(self.client._http.servers.of(self.id), session_path(self.id, "/stream"), ticket)
        async with open_async_stream(url, headers, self.client._timeout) as opened:
            yield opened

    async def robot(self, transport_server_url: str, **more: Any) -> "AbstractAsyncContextManager[Robot]":
        """Its rooms joined as its robot: ``async with await session.robot(url, on_command=...) as robot``.

        Args:
            more: as ``service.transport.robot.connect_robot`` takes it.

        Raises:
            TransportError: (inside) the rooms cannot be joined.
        """
        import os

        # WebRTC is a lot to import, and only rooms need it.
        from service.transport.base import Rooms
        from service.transport.robot import connect_robot

        rooms = (await self.status()).rooms
        theirs = Rooms(rooms.workspace_id, rooms.cameras, rooms.joint_input, rooms.joint_output)
        key = self._client_key() or os.environ.get("ROBOJAX_KEY") or None
        more = {"sessions": self.client.url} | more
        return connect_robot(transport_server_url, theirs, key=key, **more)

    def _client_key(self) -> str | None:
        return self.client._key
