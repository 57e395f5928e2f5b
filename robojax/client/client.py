"""Client and AsyncClient: sessions of a server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from robojax.client import http
from robojax.client.answers import Action, Chunk, SessionStatus
from robojax.client.codec import Image, observation
from robojax.client.errors import ClientError, Refused
from robojax.client.http import PATIENCE, AsyncHttp, Http, credentials, server_url, session_path, socket_url
from robojax.client.stream import AsyncStream, Stream, open_async_stream, open_stream

if TYPE_CHECKING:
    from service.transport.client.robot import Robot

T = TypeVar("T")

DIRECT = "direct"
REASON = "asked for by robojax.client"


class Client:
    """A server.

    Args:
        url: of the server; one on this machine when None.
        key: a key or token; the environment's ROBOJAX_KEY when None.
        timeout: seconds for an answer. Creating and restarting sessions take as long as they take.

    Raises (every method):
        Refused: the server said no; carries its status, code and text.
        Unreachable: no answer came. Only what tells something or stops a robot was tried again.
        Garbled: what answered is no robojax server.
    """

    def __init__(self, url: str | None = None, *, key: str | None = None, timeout: float = PATIENCE):
        self.url = server_url(url)
        self._headers = credentials(key)
        self._timeout = timeout
        self._http = Http(self.url, self._headers, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def sessions(self) -> list[SessionStatus]:
        """All sessions that this key may see, oldest first."""
        return self._http.do(http.sessions())

    def session(self, session_id: str) -> "Session":
        """A session that is there; nothing is asked yet."""
        return Session(self, session_id)

    def create(
        self, session_id: str, policy_path: str, *, transport_server_url: str = DIRECT, **fields: Any
    ) -> "Session":
        """A new session, when its policy is loaded, compiled and warm.

        Args:
            policy_path: a folder on the server's machine, or a repo id of the Hub.
            transport_server_url: "direct" for a session without rooms, else the URL of the rooms' server.
            fields: the others of POST /sessions: ``camera_names``, ``language_instruction``, ``rate``, ``overlap``, ...
        """
        self._http.do(http.create(session_id, policy_path, transport_server_url, fields))
        return Session(self, session_id)

    def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch every robot of the server."""
        self._http.do(http.emergency_stop(None, reason))

    def ticket(self) -> str:
        """A ticket that opens one WebSocket within 30 seconds, for whoever cannot send a key."""
        return self.request("POST", "/tickets")["ticket"]

    def request(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        """Any call of the API that has JSON in and out."""
        return self._http.do(http.plain(method, path, body, timeout))


class Session:
    """One session. As a context manager it stops its robot at the end, whatever happens inside."""

    def __init__(self, client: Client, session_id: str):
        self.client, self.id = client, session_id
        self._do = client._http.do
        # The next act is the first of a program that takes the robot up, also when it was stopped before.
        self._is_new = False

    def __enter__(self) -> Self:
        self._is_new = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except Refused as refused:
            if refused.status not in GONE:
                raise
        except ClientError as lost:
            if error is None:
                raise
            # What happened inside is what matters; that the robot was perhaps not stopped stands with it.
            error.add_note(f"session {self.id} could not be stopped: {lost}")

    def status(self) -> SessionStatus:
        """How it is."""
        return self._do(http.status(self.id))

    def start(self) -> None:
        """Let the policy move the robot."""
        self._do(http.move(self.id, "start"))

    def stop(self) -> None:
        """Hold the robot where it is."""
        self._do(http.move(self.id, "stop"))

    def restart(self) -> None:
        """Stop and start, plans forgotten; load it again when it was interrupted."""
        self._do(http.move(self.id, "restart"))

    def delete(self) -> None:
        """Stop it and remove it with its rooms."""
        self._do(http.delete(self.id))

    def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch it: it needs a reset and a start before it moves again."""
        self._do(http.emergency_stop(self.id, reason))

    def reset(self) -> None:
        """Take the latch off; nothing moves by it."""
        self._do(http.reset(self.id))
        self._is_new = True

    def patch(self, **changes: Any) -> Any:
        """Change it while it is there: ``language_instruction``, ``overlap``, ``ask_ahead``, ``action_steps``, ..."""
        return self._do(http.patch(self.id, changes))

    def act(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Chunk:
        """Future actions for what the robot sees now; see ``observation``. Not while its own loop drives.

        After a stop, ``reset=True`` takes the robot up again; so does entering the session anew.

        Raises:
            Unusable: the observation cannot be sent.
            Refused: with code "compiling" the policy is made ready for pictures of a new size; try again after
                ``retry_after``.
        """
        return self._act(http.act, images, state, more)

    def next_action(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Action:
        """The next action for what the robot sees now; the server keeps the rest of the chunk."""
        return self._act(http.next_action, images, state, more)

    def _act(self, call: Callable[..., http.Call[T]], images: Any, state: Any, more: dict[str, Any]) -> T:
        if self._is_new:
            more = {"reset": True} | more
        told = self._do(call(self.id, observation(images, state, **more)))
        self._is_new = False
        return told

    @contextmanager
    def stream(self, *, ticket: str | None = None) -> Iterator[Stream]:
        """Its stream, as a context manager.

        Args:
            ticket: instead of the key, of the server that the session is on.
        """
        headers = {}
        if ticket is None:
            headers = self.client._headers
            self.status()  # on which server it is
        url = socket_url(self.client._http.servers.of(self.id), session_path(self.id, "/stream"), ticket)
        with open_stream(url, headers, self.client._timeout) as opened:
            yield opened


# Statuses that say there is nothing to stop: it is not moving, or it is not there.
GONE = (404, 409)


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
        return await self._http.do(http.sessions())

    def session(self, session_id: str) -> "AsyncSession":
        """A session that is there; nothing is asked yet."""
        return AsyncSession(self, session_id)

    async def create(
        self, session_id: str, policy_path: str, *, transport_server_url: str = DIRECT, **fields: Any
    ) -> "AsyncSession":
        """A new session, when its policy is loaded, compiled and warm; see ``Client.create``."""
        await self._http.do(http.create(session_id, policy_path, transport_server_url, fields))
        return AsyncSession(self, session_id)

    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch every robot of the server."""
        await self._http.do(http.emergency_stop(None, reason))

    async def ticket(self) -> str:
        """A ticket that opens one WebSocket within 30 seconds, for whoever cannot send a key."""
        return (await self.request("POST", "/tickets"))["ticket"]

    async def request(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        """Any call of the API that has JSON in and out."""
        return await self._http.do(http.plain(method, path, body, timeout))


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
        return await self._do(http.status(self.id))

    async def start(self) -> None:
        """Let the policy move the robot."""
        await self._do(http.move(self.id, "start"))

    async def stop(self) -> None:
        """Hold the robot where it is."""
        await self._do(http.move(self.id, "stop"))

    async def restart(self) -> None:
        """Stop and start, plans forgotten; load it again when it was interrupted."""
        await self._do(http.move(self.id, "restart"))

    async def delete(self) -> None:
        """Stop it and remove it with its rooms."""
        await self._do(http.delete(self.id))

    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch it: it needs a reset and a start before it moves again."""
        await self._do(http.emergency_stop(self.id, reason))

    async def reset(self) -> None:
        """Take the latch off; nothing moves by it."""
        await self._do(http.reset(self.id))
        self._is_new = True

    async def patch(self, **changes: Any) -> Any:
        """Change it while it is there: ``overlap``, ``ask_ahead``, ``action_steps``, ..."""
        return await self._do(http.patch(self.id, changes))

    async def act(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Chunk:
        """Future actions for what the robot sees now; see ``Session.act``."""
        return await self._act(http.act, images, state, more)

    async def next_action(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Action:
        """The next action for what the robot sees now; the server keeps the rest of the chunk."""
        return await self._act(http.next_action, images, state, more)

    async def _act(self, call: Callable[..., http.Call[T]], images: Any, state: Any, more: dict[str, Any]) -> T:
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
            more: as ``service.transport.client.robot.connect_robot`` takes it.

        Raises:
            TransportError: (inside) the rooms cannot be joined.
        """
        import os

        from service.transport.client.robot import connect_robot

        # WebRTC is a lot to import, and only rooms need it.
        from service.transport.link import Rooms

        rooms = (await self.status()).rooms
        theirs = Rooms(rooms.workspace_id, rooms.cameras, rooms.joint_input, rooms.joint_output)
        key = self._client_key() or os.environ.get("ROBOJAX_KEY") or None
        more = {"sessions": self.client.url} | more
        return connect_robot(transport_server_url, theirs, key=key, **more)

    def _client_key(self) -> str | None:
        return self.client._key
