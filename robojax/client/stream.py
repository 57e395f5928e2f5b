"""Synchronous and asynchronous stream of a session: observations up, commands down."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from robojax.client.answers import Action, Chunk, read_action, read_chunk
from robojax.client.blocking import Blocking, Suspending, finish, run_blocking, shared_call
from robojax.client.codec import Image, State, pack_observation
from robojax.client.errors import ProtocolError, RequestRefused, RobojaxError, ServerUnreachable, StreamClosed
from robojax.client.fields import ActFields, StreamedFields
from robojax.client.http import build_refusal


@dataclass(frozen=True)
class Welcome:
    """First message of a stream: what the session's policy takes and returns.

    Attributes:
        cameras: name to (height, width) that the policy was trained with.
        joint_ranges: name to (low, high); None where the range is unknown.
        rate: rate of the session's control loop in Hz.
        silence_s: seconds without a message after which the server treats the client as gone.
        max_bytes: the largest message that the server accepts.
        observation_steps: observations that the policy reads together; the server keeps the earlier ones.
        instance: identifies the session; a session that is created later with the same id has another value.

    Example:
        >>> with Client() as client, client.create("arm", "robojax/sim/policy").stream() as stream:
        ...     welcome = stream.welcome
        >>> welcome.cameras, welcome.joint_names[-1], welcome.rate
        ({'front': (96, 96)}, 'Jaw', 25.0)
    """

    session_id: str
    status: str
    cameras: Mapping[str, tuple[int, int]]
    joint_names: tuple[str, ...]
    joint_ranges: Mapping[str, tuple[float, float] | None]
    rate: float | None
    silence_s: float
    max_bytes: int | None
    reads_prompt: bool
    observation_steps: int = 1
    instance: str | None = None


@dataclass(frozen=True)
class Command:
    """Message with the joints' current targets.

    Attributes:
        joints: wire name to target.
        observation: number of the newest numbered observation.
        age_ms: milliseconds since the server received that observation.

    Example:
        >>> command = Command({"Rotation": 1.5, "Jaw": 10.0}, number=3)
        >>> [f"{name} to {target}" for name, target in command.joints.items()]
        ['Rotation to 1.5', 'Jaw to 10.0']
    """

    joints: Mapping[str, float]
    number: int | None = None
    observation: int | None = None
    age_ms: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class StatusMessage:
    """Message about a change of the session's status, the reason of its hold, or its latch.

    Before the welcome, it says that the policy is being loaded.

    Attributes:
        latch: reason of an emergency stop that was not reset yet; None without an emergency stop.

    Example:
        >>> StatusMessage("running", hold="no new picture for 0.5 s").hold
        'no new picture for 0.5 s'
    """

    status: str
    reason: str | None = None
    hold: str | None = None
    hold_code: str | None = None
    latch: str | None = None


@dataclass(frozen=True)
class StopMessage:
    """Message of an emergency stop by any client.

    Example:
        >>> StopMessage("a person entered the cell").reason
        'a person entered the cell'
    """

    reason: str


@dataclass(frozen=True)
class Pong:
    """Answer to a ping: its number and time, and the server's monotonic clock.

    Example:
        >>> with Client() as client, client.create("arm", "robojax/sim/policy").stream() as stream:
        ...     stream.ping(7)
        ...     while not isinstance(message := stream.next(), Pong):
        ...         pass
        >>> message.number
        7
    """

    number: int | None
    time: float | None
    server_time: float | None


@dataclass(frozen=True)
class MessageRefused:
    """Message about an error: the server cannot use a message of this client.

    Example:
        >>> MessageRefused("invalid", "state: 5 values; the policy takes 6", number=12).code
        'invalid'
    """

    code: str
    detail: str
    number: int | None = None


Message = Welcome | Command | StatusMessage | StopMessage | Pong | MessageRefused | Chunk | Action
"""A message of the server.

Example:
    >>> def describe(message: Message) -> str:
    ...     match message:
    ...         case Command(joints=joints):
    ...             return f"move {', '.join(joints)}"
    ...         case StopMessage(reason=reason):
    ...             return f"stop: {reason}"
    ...     return type(message).__name__
    >>> describe(Command({"Jaw": 10.0})), describe(Pong(7, None, None))
    ('move Jaw', 'Pong')
"""


def decode_message(data: bytes | str) -> Message | None:
    """Decode a message of the server; None for an unknown kind; raises ProtocolError if it is unreadable."""
    fields = _decode_map(data)
    kind = fields.get("kind")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    try:
        return None if reader is None else reader(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the server's message of kind {kind!r} is incomplete: {error!r}") from error


def encode_message(kind: str, fields: Mapping[str, object]) -> bytes:
    """Encode a message to the server."""
    import msgpack

    data = msgpack.packb({"kind": kind, **fields})
    assert data is not None, "packb gives bytes"
    return data


def _decode_map(data: bytes | str) -> dict[str, Any]:
    import msgpack

    try:
        if isinstance(data, str):
            import json

            fields = json.loads(data)
        else:
            fields = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError("the server sent a message that cannot be read") from error
    if not isinstance(fields, dict):
        raise ProtocolError("the server sent a message that is not a map")
    return fields


def _welcome(fields: dict[str, Any]) -> Welcome:
    ranges = fields.get("joint_ranges") or {}
    return Welcome(
        session_id=str(fields["session_id"]),
        status=str(fields["status"]),
        cameras={name: (int(size[0]), int(size[1])) for name, size in fields["cameras"].items()},
        joint_names=tuple(fields["joint_names"]),
        joint_ranges={name: None if pair is None else (pair[0], pair[1]) for name, pair in ranges.items()},
        rate=fields.get("rate"),
        silence_s=float(fields.get("silence_s") or 2.0),
        max_bytes=fields.get("max_bytes"),
        reads_prompt=bool(fields.get("reads_prompt")),
        observation_steps=int(fields.get("observation_steps") or 1),
        instance=fields.get("instance"),
    )


def _command(fields: dict[str, Any]) -> Command:
    import math

    joints = {str(name): float(value) for name, value in fields["joints"].items()}
    if not all(map(math.isfinite, joints.values())):
        raise ProtocolError("the server sent a command that is not finite; do not execute it")
    return Command(joints, fields.get("number"), fields.get("observation"), fields.get("age_ms"), fields.get("time"))


READERS = {
    "welcome": _welcome,
    "command": _command,
    "chunk": read_chunk,
    "action": read_action,
    "status": lambda fields: StatusMessage(
        str(fields["status"]), fields.get("reason"), fields.get("hold"), fields.get("hold_code"), fields.get("latch")
    ),
    "stopped": lambda fields: StopMessage(str(fields.get("reason") or "no reason given")),
    "pong": lambda fields: Pong(fields.get("number"), fields.get("time"), fields.get("server_time")),
    "error": lambda fields: MessageRefused(
        str(fields.get("code") or ""), str(fields.get("detail") or ""), fields.get("number")
    ),
}


MAX_MESSAGE_BYTES = 64 << 20  # bytes of one message that a server may send
ACT_STATUS = 409  # HTTP status in ``RequestRefused`` for errors on the stream, whose messages have no status


class _StreamCalls:
    """Calls of a stream, for both kinds of programs."""

    # Sends a message and returns the next action or chunk; a coroutine function if the stream is asynchronous.
    _exchange: Callable[[bytes], Any]

    def __init__(self, socket: Any, welcome: Welcome, timeout: float):
        self._socket, self.welcome, self._timeout = socket, welcome, timeout
        self._pending: deque[Message] = deque()

    @shared_call
    async def observe(
        self, images: Mapping[str, Image] | None = None, state: "State | None" = None, **fields: Unpack[StreamedFields]
    ) -> None:
        """Send an observation for the session's control loop; joints and cameras that are left out keep their values.

        Args:
            images: camera name to picture, as for ``act``.
            state: joint positions, as for ``act``.

        Raises:
            InvalidArgument: the observation cannot be sent.
            StreamClosed: the stream is closed.
        """
        await self._send(encode_message("observation", pack_observation(images, state, **fields)))

    @shared_call
    async def act(
        self,
        images: Mapping[str, Image] | None = None,
        state: "State | None" = None,
        *,
        want: Literal["chunk", "action"] | None = None,
        **fields: Unpack[ActFields],
    ) -> Chunk | Action:
        """Send an observation and wait for its chunk, or for the next action; other messages are kept for ``next``.

        Args:
            images: camera name to uint8 (h, w, 3) in RGB, or to the bytes of a JPEG or PNG file.
            state: joint positions, in the order of ``welcome.joint_names`` or by name.
            want: what the server answers. Defaults to a chunk.

        Raises:
            RequestRefused: the server refuses the observation.
            StreamClosed: the stream is closed.
        """
        message = encode_message("act", pack_observation(images, state, want=want, **fields))
        return await finish(self._exchange(message))

    def _take_action(self, message: Message | None) -> Chunk | Action | None:
        """Return an action or chunk; keep other messages for ``next``; raise ``RequestRefused`` for an error."""
        if isinstance(message, MessageRefused):
            raise _build_refusal(message)
        if message is None or isinstance(message, Chunk | Action):
            return message
        self._pending.append(message)
        return None

    @shared_call
    async def emergency_stop(self, reason: str) -> None:
        """Stop and latch the session."""
        await self._send(encode_message("stop", {"reason": reason}))

    @shared_call
    async def report_latch(self, reason: str | None) -> None:
        """Report that this program holds its robot after an emergency stop, or (None) that it obeys commands again.

        The session shows this as ``robot_latched``, and until the release it does not count the robot as moving.
        """
        await self._send(encode_message("latch", {"reason": reason}))

    @shared_call
    async def ping(self, number: int = 0) -> None:
        """Send a ping, which shows that the client is alive; the server answers with a Pong."""
        await self._send(encode_message("ping", {"number": number, "time": time.monotonic()}))

    @shared_call
    async def send(self, data: bytes) -> None:
        """Send a message that ``encode_message`` made, perhaps in another thread."""
        await self._send(data)

    async def _send(self, data: bytes) -> None:
        with convert_close_errors():
            await finish(self._socket.send(data))

    @shared_call
    async def close(self) -> None:
        """Close the stream."""
        await finish(self._socket.close())


class AsyncStream(_StreamCalls, Suspending):
    """Asynchronous stream of a session; ``AsyncSession.stream`` opens one. One task may receive while others send.

    Attributes:
        welcome: what the policy needs, and the joints in order.

    Example:
        >>> frame, joints = np.zeros((96, 96, 3), np.uint8), [0.0, -90.0, 90.0, 0.0, 0.0, 10.0]
        >>> async def get_action() -> Chunk | Action:
        ...     async with AsyncClient() as client:
        ...         session = await client.create("arm", "robojax/sim/policy")
        ...         async with session.stream() as stream:
        ...             return await stream.act({"front": frame}, joints, want="action")
        >>> asyncio.run(get_action()).action.shape
        (6,)
    """

    async def next(self) -> Message:
        """Receive the next message.

        Raises:
            StreamClosed: the stream is closed.
        """
        if self._pending:
            return self._pending.popleft()
        while (message := await self._next()) is None:
            pass
        return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages until the stream is closed."""
        while True:
            try:
                message = await self.next()
            except StreamClosed:
                return
            yield message

    async def _exchange(self, message: bytes) -> Chunk | Action:
        with convert_timeouts():
            async with asyncio.timeout(self._timeout):
                await self._send(message)
                while (action := self._take_action(await self._next())) is None:
                    pass
                return action

    async def _next(self) -> Message | None:
        with convert_close_errors():
            return decode_message(await self._socket.recv())


class Stream(_StreamCalls, Blocking):
    """Stream of a session; ``Session.stream`` opens one. One thread may send while another receives.

    Attributes:
        welcome: what the policy needs, and the joints in order.

    Example:
        >>> random, joints = np.random.default_rng(), [0.0, -90.0, 90.0, 0.0, 0.0, 10.0]
        >>> with Client() as client, client.create("arm", "robojax/sim/policy") as session, session.stream() as stream:
        ...     session.start()
        ...     while not isinstance(message := stream.next(timeout=0.05), Command):
        ...         frame = random.integers(0, 256, (96, 96, 3), np.uint8)  # Equal frames would hold the robot.
        ...         stream.observe({"front": frame}, joints)
        >>> sorted(message.joints)
        ['Elbow', 'Jaw', 'Pitch', 'Rotation', 'Wrist_Pitch', 'Wrist_Roll']
    """

    def __init__(self, socket: Any, welcome: Welcome, timeout: float):
        super().__init__(socket, welcome, timeout)
        self._reading = threading.Lock()

    def next(self, timeout: float | None = None) -> Message | None:
        """Receive the next message; None if none arrives within ``timeout`` seconds.

        Raises:
            StreamClosed: the stream is closed.
        """
        with self._reading:
            until = None if timeout is None else time.monotonic() + timeout
            while not self._pending:
                try:
                    message = self._next(None if until is None else max(0.0, until - time.monotonic()))
                except TimeoutError:
                    return None
                if message is not None:
                    return message
            return self._pending.popleft()

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the stream is closed."""
        while True:
            try:
                message = self.next()
            except StreamClosed:
                return
            if message is not None:
                yield message

    def _exchange(self, message: bytes) -> Chunk | Action:
        with self._reading, convert_timeouts():
            run_blocking(self._send(message))
            until = time.monotonic() + self._timeout
            while (action := self._take_action(self._next(until - time.monotonic()))) is None:
                pass
            return action

    def _next(self, timeout: float | None) -> Message | None:
        with convert_close_errors():
            return decode_message(self._socket.recv(timeout))


@contextmanager
def open_stream(url: str, headers: Mapping[str, str], timeout: float) -> Iterator[Stream]:
    """Open a stream, as a context manager."""
    from websockets.sync.client import connect

    with ExitStack() as stack:
        with convert_open_errors(url):
            socket = stack.enter_context(connect(url, **_options(headers, timeout)))
        with convert_close_errors(), convert_timeouts():
            until = time.monotonic() + timeout
            first = decode_message(socket.recv(timeout))
            while isinstance(first, StatusMessage):  # The policy is still being loaded.
                first = decode_message(socket.recv(max(until - time.monotonic(), 0.0)))
        yield Stream(socket, _read_welcome(first), timeout)


@asynccontextmanager
async def open_async_stream(url: str, headers: Mapping[str, str], timeout: float) -> AsyncIterator[AsyncStream]:
    """Open an asynchronous stream, as a context manager."""
    from websockets.asyncio.client import connect

    class Direct(connect):
        """Connection without redirects, because a robot obeys only the named server, as over HTTP."""

        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc

    async with AsyncExitStack() as stack:
        with convert_open_errors(url):
            socket = await stack.enter_async_context(Direct(url, **_options(headers, timeout)))
        with convert_close_errors(), convert_timeouts():
            async with asyncio.timeout(timeout):
                first = decode_message(await socket.recv())
                while isinstance(first, StatusMessage):  # The policy is still being loaded.
                    first = decode_message(await socket.recv())
        yield AsyncStream(socket, _read_welcome(first), timeout)


def _options(headers: Mapping[str, str], timeout: float) -> dict[str, Any]:
    # Compression is off, because pictures are compressed already or sent raw for speed. Proxies are off, as over HTTP.
    return {
        "additional_headers": dict(headers),
        "compression": None,
        "proxy": None,
        "open_timeout": timeout,
        "close_timeout": 1,
        "max_size": MAX_MESSAGE_BYTES,
    }


@contextmanager
def convert_open_errors(url: str) -> Iterator[None]:
    """Convert failures to open a socket to the client's exceptions, as a context manager."""
    from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

    try:
        yield
    except InvalidStatus as error:
        answer = error.response
        raise build_refusal(answer.status_code, answer.headers, bytes(answer.body or b"")) from error
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        address = url.split("?")[0]
        why = str(error) or type(error).__name__
        raise ServerUnreachable(f"{address} cannot be opened: {why}", why, may_have_arrived=False) from error


@contextmanager
def convert_close_errors() -> Iterator[None]:
    """Convert errors of a closed socket to ``StreamClosed``, as a context manager."""
    from websockets.exceptions import ConnectionClosed

    try:
        yield
    except ConnectionClosed as error:
        frame = error.rcvd
        raise StreamClosed(frame.code if frame else 1006, frame.reason if frame else "") from error


@contextmanager
def convert_timeouts() -> Iterator[None]:
    """Convert a timeout to ``ServerUnreachable``, as a context manager."""
    try:
        yield
    except TimeoutError as error:
        why = "no response in time"
        raise ServerUnreachable(f"the stream: {why}", why, may_have_arrived=True) from error


def _read_welcome(first: Message | None) -> Welcome:
    if isinstance(first, MessageRefused):
        raise _build_refusal(first)
    if not isinstance(first, Welcome):
        raise ProtocolError("the stream did not begin with a welcome; is this a robojax server?")
    return first


def _build_refusal(message: MessageRefused) -> RobojaxError:
    return RequestRefused(ACT_STATUS, message.code, message.detail)
