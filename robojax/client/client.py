"""Synchronous and asynchronous client of a server's sessions."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from robojax.client import http
from robojax.client.answers import Action, Chunk, SessionStatus, read_status, read_statuses
from robojax.client.codec import Image, pack_observation
from robojax.client.errors import RequestRefused, RobojaxError
from robojax.client.http import (
    DEFAULT_TIMEOUT,
    LOADED,
    Call,
    HttpConnections,
    blocking,
    build_call,
    credentials,
    run_blocking,
    server_url,
    session_path,
    socket_url,
)
from robojax.client.stream import AsyncStream, Stream, open_async_stream, open_stream

if TYPE_CHECKING:
    from service.transport.client.robot import Robot

T = TypeVar("T")

DIRECT = "direct"
REASON = "requested by robojax.client"


class _Connected:
    """Constructor of both clients."""

    _is_async = True

    def __init__(self, url: str | None = None, *, key: str | None = None, timeout: float = DEFAULT_TIMEOUT):
        self.url = server_url(url)
        self._key = key
        self._headers = credentials(key)
        self._timeout = timeout
        self._http = HttpConnections(self.url, self._headers, timeout, is_async=self._is_async)


class AsyncClient(_Connected):
    """Client of a server, for programs with an event loop.

    Args:
        url: URL of the server. When None: ROBOJAX_SERVER, else this machine at ROBOJAX_PORT, else at port 8001.
        key: a key or token; the environment's ROBOJAX_KEY when None.
        timeout: seconds for a response. Creating and restarting sessions have a longer timeout.

    Raises (every method):
        RequestRefused: the server answered with an error; carries its status, code and text.
        ServerUnreachable: no response arrived. Only requests that read something or stop a robot were repeated.
        ProtocolError: the response is not that of a robojax server.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def sessions(self) -> list[SessionStatus]:
        """Return the statuses of all sessions that this key may see, oldest first."""
        return await self._http.send_call(Call("GET", "/sessions", read_statuses, is_safe=True))

    def session(self, session_id: str) -> "AsyncSession":
        """Return a handle of an existing session; nothing is sent yet."""
        return AsyncSession(self, session_id)

    async def create(
        self, session_id: str, policy_path: str, *, transport_server_url: str = DIRECT, **fields: Any
    ) -> "AsyncSession":
        """Create a session; returns when its policy is loaded, compiled and warm.

        Args:
            policy_path: a folder on the server's machine, or a repo id of the Hub.
            transport_server_url: "direct" for a session without rooms, else the URL of the rooms' server.
            fields: the other fields of POST /sessions: ``camera_names``, ``language_instruction``, ``rate``, ... The
                page docs/reference/session_fields.md lists them.

        Raises:
            InvalidArgument: sessions have no field of this name; nothing was sent.
        """
        await self._http.send_call(http.create(session_id, policy_path, transport_server_url, fields))
        return AsyncSession(self, session_id)

    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch all robots of the server."""
        await self._http.send_call(http.emergency_stop("/debug/emergency_stop", reason))

    async def ticket(self) -> str:
        """Get a single-use ticket, with which someone without the key can open a WebSocket within 30 seconds."""
        return (await self.request("POST", "/tickets"))["ticket"]

    async def request(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        """Send any request of the API with a JSON body and return its JSON response."""
        return await self._http.send_call(build_call(method, path, body, timeout))


class AsyncSession:
    """Handle of one session; as a context manager it always stops the robot on exit, also after an error."""

    def __init__(self, client: AsyncClient, session_id: str):
        self.client, self.id = client, session_id
        self._do = client._http.send_call
        # The first action of a program resets the session, also if the session was stopped before.
        self._is_new = False

    async def __aenter__(self) -> Self:
        self._is_new = True
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with _judge_stop(self.id, error):
            # Also when this task is being cancelled, because no other task would stop the robot.
            await asyncio.shield(self.stop())

    async def status(self) -> SessionStatus:
        """Get the session's status."""
        return await self._do(Call("GET", session_path(self.id), read_status, is_safe=True))

    async def start(self) -> None:
        """Let the policy move the robot."""
        await self._do(build_call("POST", session_path(self.id, "/start")))

    async def stop(self) -> None:
        """Hold the robot where it is."""
        await self._do(build_call("POST", session_path(self.id, "/stop")))

    async def restart(self) -> None:
        """Stop and start the session with an empty queue of actions; an interrupted session is loaded again."""
        await self._do(build_call("POST", session_path(self.id, "/restart"), timeout=LOADED))

    async def delete(self) -> None:
        """Stop the session and remove it with its rooms."""
        await self._do(build_call("DELETE", session_path(self.id)))

    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch the session: it needs a reset and a start to move again."""
        await self._do(http.emergency_stop(session_path(self.id, "/emergency_stop"), reason))

    async def reset(self) -> None:
        """Release the latch of an emergency stop; nothing moves yet."""
        await self._do(build_call("POST", session_path(self.id, "/reset", "/debug")))
        self._is_new = True

    async def patch(self, **changes: Any) -> Any:
        """Change settings while it runs: ``language_instruction``, ``overlap``, ``ask_ahead``, ``action_steps``, ..."""
        return await self._do(build_call("PATCH", session_path(self.id), changes))

    async def act(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Chunk:
        """Get a chunk for an observation (see ``pack_observation``). Not while the session's own loop drives the robot.

        After a stop, ``reset=True`` lets the robot move again; so does entering the session again. With
        ``extra="ignore"`` a state may have names that are not joints (``shoulder_pan.vel``), as LeRobot's robots give.

        Raises:
            InvalidArgument: the observation cannot be sent.
            RequestRefused: with code "compiling" the policy is compiled for pictures of a new size; try again after
                ``retry_after``.
        """
        return await self._act(http.act, images, state, more)

    async def next_action(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Action:
        """Get the next action for an observation; the server keeps the rest of the chunk."""
        return await self._act(http.next_action, images, state, more)

    async def _act(self, call: Callable[..., Call[T]], images: Any, state: Any, more: dict[str, Any]) -> T:
        if self._is_new:
            more = {"reset": True} | more
        answer = await self._do(call(self.id, pack_observation(images, state, **more)))
        self._is_new = False
        return answer

    @asynccontextmanager
    async def stream(self, *, ticket: str | None = None) -> AsyncIterator[AsyncStream]:
        """Open the session's stream, as a context manager.

        Args:
            ticket: ticket that replaces the key; it is valid on the server that the session is on.
        """
        if ticket is None:
            await self.status()  # finds the server of the session
        async with open_async_stream(*_stream_address(self, ticket)) as opened:
            yield opened

    async def robot(self, transport_server_url: str, **more: Any) -> "AbstractAsyncContextManager[Robot]":
        """Join the session's rooms as its robot: ``async with await session.robot(url, on_command=...) as robot``.

        Args:
            more: arguments of ``service.transport.client.robot.connect_robot``.

        Raises:
            TransportError: (inside the context) the rooms cannot be joined.
        """
        import os

        # Imported here, because WebRTC takes long to import and only rooms need it.
        from service.transport.client.robot import connect_robot
        from service.transport.link import Rooms

        rooms = (await self.status()).rooms
        theirs = Rooms(rooms.workspace_id, rooms.cameras, rooms.joint_input, rooms.joint_output)
        key = self.client._key or os.environ.get("ROBOJAX_KEY") or None
        more = {"sessions": self.client.url} | more
        return connect_robot(transport_server_url, theirs, key=key, **more)


@contextmanager
def _judge_stop(session_id: str, error: BaseException | None) -> Iterator[None]:
    """Context of the stop at the end of a session's ``with`` block; ignores sessions that do not move or exist.

    An ``error`` inside the block is raised, with a note if the stop failed.
    """
    try:
        yield
    except RequestRefused as refused:
        if refused.status not in (404, 409):
            raise
    except RobojaxError as lost:
        if error is None:
            raise
        error.add_note(f"session {session_id} could not be stopped: {lost}")


def _stream_address(session: "Session | AsyncSession", ticket: str | None) -> tuple[str, Mapping[str, str], float]:
    """Return URL, headers and timeout (seconds) of a session's stream; a ticket replaces the key."""
    client = session.client
    url = socket_url(client._http.get_url(session.id), session_path(session.id, "/stream"), ticket)
    return url, client._headers if ticket is None else {}, client._timeout


class Client(_Connected):
    """Client of a server, for programs without an event loop; arguments, methods and errors as of ``AsyncClient``."""

    _is_async = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def session(self, session_id: str) -> "Session":
        """Return a handle of an existing session; nothing is sent yet."""
        return Session(self, session_id)

    def create(
        self, session_id: str, policy_path: str, *, transport_server_url: str = DIRECT, **fields: Any
    ) -> "Session":
        """Create a session; see ``AsyncClient.create``."""
        run_blocking(self._http.send_call(http.create(session_id, policy_path, transport_server_url, fields)))
        return Session(self, session_id)

    close = blocking(AsyncClient.close)
    sessions = blocking(AsyncClient.sessions)
    emergency_stop = blocking(AsyncClient.emergency_stop)
    ticket = blocking(AsyncClient.ticket)
    request = blocking(AsyncClient.request)


class Session:
    """Handle of one session, for programs without an event loop; methods and errors as of ``AsyncSession``."""

    def __init__(self, client: Client, session_id: str):
        self.client, self.id = client, session_id
        self._do = client._http.send_call
        self._is_new = False

    def __enter__(self) -> Self:
        self._is_new = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with _judge_stop(self.id, error):
            self.stop()

    status = blocking(AsyncSession.status)
    start = blocking(AsyncSession.start)
    stop = blocking(AsyncSession.stop)
    restart = blocking(AsyncSession.restart)
    delete = blocking(AsyncSession.delete)
    emergency_stop = blocking(AsyncSession.emergency_stop)
    reset = blocking(AsyncSession.reset)
    patch = blocking(AsyncSession.patch)
    act = blocking(AsyncSession.act)
    next_action = blocking(AsyncSession.next_action)
    _act = AsyncSession._act

    @contextmanager
    def stream(self, *, ticket: str | None = None) -> Iterator[Stream]:
        """Open the session's stream, as a context manager; see ``AsyncSession.stream``."""
        if ticket is None:
            self.status()  # finds the server of the session
        with open_stream(*_stream_address(self, ticket)) as opened:
            yield opened
