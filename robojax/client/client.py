"""Synchronous and asynchronous client of a server's sessions."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, Required, Self, TypedDict, TypeVar, Unpack

from robojax.client import http
from robojax.client.answers import Action, Chunk, SessionStatus, read_action, read_chunk, read_status, read_statuses
from robojax.client.blocking import Blocking, Suspending, shared_call
from robojax.client.codec import Image, State, pack_observation
from robojax.client.errors import RequestRefused, RobojaxError
from robojax.client.fields import ActFields, SessionChanges, SessionFields
from robojax.client.http import (
    DEFAULT_TIMEOUT,
    LOADED,
    Call,
    HttpConnections,
    build_call,
    credentials,
    server_url,
    session_path,
    socket_url,
)
from robojax.client.stream import AsyncStream, Stream, open_async_stream, open_stream

if TYPE_CHECKING:
    from service.transport.client.rest import TransportTimeouts
    from service.transport.client.robot import Robot
    from service.transport.link import EmergencyStop

T = TypeVar("T")
S = TypeVar("S", bound="_SessionCalls")

DIRECT = "direct"
REASON = "requested by robojax.client"


class RobotOptions(TypedDict, total=False):
    """Arguments of ``service.transport.client.robot.connect_robot``, which describes them."""

    on_command: Required[Callable[[Mapping[str, float], float], None]]
    on_emergency_stop: "Callable[[EmergencyStop], None] | None"
    name: str
    rate: float  # Hz
    pace: "TransportTimeouts | None"
    ice_servers: Sequence[str]
    sessions: str | None


class _SessionCalls:
    """Calls of a session, for both kinds of programs."""

    def __init__(self, client: "_ClientCalls[Any]", session_id: str):
        self.id = session_id
        self._do = client._http.send_call
        # The first action of a program resets the session, also if the session was stopped before.
        self._is_new = False

    @shared_call
    async def status(self) -> SessionStatus:
        """Get the session's status."""
        return await self._do(Call("GET", session_path(self.id), read_status, is_safe=True))

    @shared_call
    async def start(self) -> None:
        """Let the policy move the robot."""
        await self._do(build_call("POST", session_path(self.id, "/start")))

    @shared_call
    async def stop(self) -> None:
        """Hold the robot where it is."""
        await self._do(build_call("POST", session_path(self.id, "/stop")))

    @shared_call
    async def restart(self) -> None:
        """Stop and start the session with an empty queue of actions; an interrupted session is loaded again."""
        await self._do(build_call("POST", session_path(self.id, "/restart"), timeout=LOADED))

    @shared_call
    async def delete(self) -> None:
        """Stop the session and remove it with its rooms."""
        await self._do(build_call("DELETE", session_path(self.id)))

    @shared_call
    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch the session: it needs a reset and a start to move again."""
        await self._do(http.emergency_stop(session_path(self.id, "/emergency_stop"), reason))

    @shared_call
    async def reset(self) -> None:
        """Release the latch of an emergency stop; nothing moves yet."""
        await self._do(build_call("POST", session_path(self.id, "/reset", "/debug")))
        self._is_new = True

    @shared_call
    async def patch(self, **changes: Unpack[SessionChanges]) -> Any:
        """Change settings while the session runs; None restores a default.

        Raises:
            RequestRefused: a value or a name is not valid.
        """
        return await self._do(build_call("PATCH", session_path(self.id), changes))

    @shared_call
    async def act(
        self, images: Mapping[str, Image] | None = None, state: "State | None" = None, **fields: Unpack[ActFields]
    ) -> Chunk:
        """Get a chunk for an observation. Do not call it while the session's own control loop drives the robot.

        After a stop, ``reset=True`` lets the robot move again; so does entering the session again.

        Args:
            images: camera name to uint8 (h, w, 3) in RGB, or to the bytes of a JPEG or PNG file.
            state: joint positions, in the order of the session's joints or by name. For a policy that reads several
                observations, pictures and joints have a leading time axis, or are lists, oldest first.

        Raises:
            InvalidArgument: the observation cannot be sent.
            RequestRefused: with code "compiling" the policy is compiled for pictures of a new size; try again after
                ``retry_after``.
        """
        return await self._act("chunk", read_chunk, images, state, fields)

    @shared_call
    async def next_action(
        self, images: Mapping[str, Image] | None = None, state: "State | None" = None, **fields: Unpack[ActFields]
    ) -> Action:
        """Get the next action for an observation, as ``act``; the server keeps the rest of the chunk."""
        return await self._act("action", read_action, images, state, fields)

    async def _act(self, want: str, read: Callable[[Any], T], images: Any, state: Any, fields: ActFields) -> T:
        if self._is_new:
            fields.setdefault("reset", True)
        answer = await self._do(http.act(self.id, pack_observation(images, state, **fields), want, read))
        self._is_new = False
        return answer


class AsyncSession(_SessionCalls, Suspending):
    """Handle of one session, for programs with an event loop; as ``Session``, and its calls are coroutines.

    Example:
        >>> async def run() -> str:
        ...     async with AsyncClient() as client:
        ...         async with await client.create("arm", "robojax/sim/policy") as session:
        ...             await session.start()
        ...         return (await session.status()).status
        >>> asyncio.run(run())
        'stopped'
    """

    def __init__(self, client: "AsyncClient", session_id: str):
        super().__init__(client, session_id)
        self.client = client

    async def __aenter__(self) -> Self:
        self._is_new = True
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with _judge_stop(self.id, error):
            # Also when this task is being cancelled, because no other task would stop the robot.
            await asyncio.shield(self.stop())

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

    @asynccontextmanager
    async def robot(self, transport_server_url: str, **options: Unpack[RobotOptions]) -> AsyncIterator["Robot"]:
        """Join the session's rooms as its robot: ``async with session.robot(url, on_command=...) as robot``.

        Raises:
            TransportError: the rooms cannot be joined.
        """
        # Imported here, because WebRTC takes long to import and only rooms need it.
        from service.transport.client.robot import connect_robot
        from service.transport.link import Rooms

        rooms = (await self.status()).rooms
        robot_rooms = Rooms(rooms.workspace_id, rooms.cameras, rooms.joint_input, rooms.joint_output)
        key = self.client._key or os.environ.get("ROBOJAX_KEY") or None
        options.setdefault("sessions", self.client.url)
        async with connect_robot(transport_server_url, robot_rooms, key=key, **options) as joined:
            yield joined


class Session(_SessionCalls, Blocking):
    """Handle of one session, for programs without an event loop.

    As a context manager, it always stops the robot on exit, also after an error.

    Example:
        >>> with Client() as client, client.create("arm", "robojax/sim/policy", rate=30) as session:
        ...     session.start()
        ...     session.status().is_moving
        ...     answer = session.patch(overlap="crossfade")
        ...     session.stop()
        ...     session.delete()
        True
    """

    def __init__(self, client: "Client", session_id: str):
        super().__init__(client, session_id)
        self.client = client

    def __enter__(self) -> Self:
        self._is_new = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with _judge_stop(self.id, error):
            self.stop()

    @contextmanager
    def stream(self, *, ticket: str | None = None) -> Iterator[Stream]:
        """Open the session's stream, as a context manager.

        Args:
            ticket: ticket that replaces the key; it is valid on the server that the session is on.
        """
        if ticket is None:
            self.status()  # finds the server of the session
        with open_stream(*_stream_address(self, ticket)) as opened:
            yield opened


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


def _stream_address(session: Session | AsyncSession, ticket: str | None) -> tuple[str, Mapping[str, str], float]:
    """Return URL, headers and timeout (seconds) of a session's stream; a ticket replaces the key."""
    client = session.client
    url = socket_url(client._http.get_url(session.id), session_path(session.id, "/stream"), ticket)
    return url, client._headers if ticket is None else {}, client._timeout


class _ClientCalls(Generic[S]):
    """Calls of a client, for both kinds of programs."""

    is_async: bool
    _session_class: type[S]

    def __init__(self, url: str | None = None, *, key: str | None = None, timeout: float = DEFAULT_TIMEOUT):
        """Create a client; nothing is sent yet.

        Args:
            url: URL of the server. Defaults to ROBOJAX_SERVER, else to this machine at ROBOJAX_PORT or port 8001.
            key: a key or token. Defaults to ROBOJAX_KEY.
            timeout: seconds for a response. Creating and restarting sessions have a longer timeout.

        Raises:
            InvalidArgument: the URL or the key is not valid.
        """
        self.url = server_url(url)
        self._key = key
        self._headers = credentials(key)
        self._timeout = timeout
        self._http = HttpConnections(self.url, self._headers, timeout, is_async=self.is_async)

    def session(self, session_id: str) -> S:
        """Return a handle of an existing session; nothing is sent yet."""
        return self._session_class(self, session_id)

    @shared_call
    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    @shared_call
    async def sessions(self) -> list[SessionStatus]:
        """Return the statuses of all sessions that this key may see, oldest first."""
        return await self._http.send_call(Call("GET", "/sessions", read_statuses, is_safe=True))

    @shared_call
    async def create(
        self,
        session_id: str,
        policy_path: str,
        *,
        transport_server_url: str = DIRECT,
        **fields: Unpack[SessionFields],
    ) -> S:
        """Create a session; returns when its policy is loaded, compiled and warm.

        Args:
            policy_path: a folder on the server's machine, or a repo id of the Hub.
            transport_server_url: "direct" for a session without rooms, else the URL of the rooms' server.
            fields: the other fields of POST /sessions, which docs/reference/session_fields.md describes.

        Raises:
            InvalidArgument: sessions have no field of this name; nothing was sent.
        """
        await self._http.send_call(http.create(session_id, policy_path, transport_server_url, fields))
        return self.session(session_id)

    @shared_call
    async def emergency_stop(self, reason: str = REASON) -> None:
        """Stop and latch all robots of the server."""
        await self._http.send_call(http.emergency_stop("/debug/emergency_stop", reason))

    @shared_call
    async def ticket(self) -> str:
        """Get a ticket that lets a client without the key open one WebSocket within 30 seconds."""
        return (await self._http.send_call(build_call("POST", "/tickets")))["ticket"]

    @shared_call
    async def request(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        """Send any request of the API with a JSON body and return its JSON response."""
        return await self._http.send_call(build_call(method, path, body, timeout))


class AsyncClient(_ClientCalls[AsyncSession], Suspending):
    """Client of a server, for programs with an event loop; as ``Client``, and its calls are coroutines.

    Example:
        >>> import asyncio
        >>> from robojax.client import AsyncClient
        >>> async def count() -> int:
        ...     async with AsyncClient() as client:
        ...         return len(await client.sessions())
        >>> asyncio.run(count())
        0
    """

    _session_class = AsyncSession

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(_ClientCalls[Session], Blocking):
    """Client of a server, for programs without an event loop.

    Every call raises ``RequestRefused`` if the server answers with an error, ``ServerUnreachable`` if no response
    arrives, and ``ProtocolError`` if the response cannot be decoded. The client repeats only requests that read
    something or stop a robot.

    Example:
        >>> import numpy as np
        >>> from robojax.client import Client
        >>> frame, joints = np.zeros((96, 96, 3), np.uint8), [0.0, -90.0, 90.0, 0.0, 0.0, 10.0]
        >>> with Client() as client, client.create("arm", "robojax/sim/policy") as session:
        ...     chunk = session.act({"front": frame}, joints)
        >>> chunk.actions.shape
        (20, 6)
    """

    _session_class = Session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
