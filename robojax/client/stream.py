"""Stream and AsyncStream: observations up, commands down."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from robojax.client.answers import Action, Chunk, read_action, read_chunk
from robojax.client.codec import Image, observation
from robojax.client.errors import ClientError, Garbled, Refused, StreamClosed, Unreachable
from robojax.client.http import refusal


@dataclass(frozen=True)
class Welcome:
    """The first message: what the session's policy wants and gives.

    Attributes:
        cameras: name to (height, width) that the policy was trained with.
        joint_ranges: name to (low, high); None where nobody knows.
        rate: of the session's control loop, per second.
        silence_s: a client that was not heard of for so long counts as gone.
        max_bytes: the largest message that is taken.
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


@dataclass(frozen=True)
class Command:
    """Where the joints should be now.

    Attributes:
        joints: wire name to target.
        observation: number of the newest observation that had one.
        age_ms: since that one came to the server.
    """

    joints: Mapping[str, float]
    number: int | None = None
    observation: int | None = None
    age_ms: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class Status:
    """The session's stage changed, or why it holds."""

    status: str
    reason: str | None = None
    hold: str | None = None
    hold_code: str | None = None


@dataclass(frozen=True)
class Stopped:
    """An emergency stop, whoever asked for it."""

    reason: str


@dataclass(frozen=True)
class Pong:
    """The answer to a ping: its number and time, and the server's monotonic clock."""

    number: int | None
    time: float | None
    server_time: float | None


@dataclass(frozen=True)
class Wrong:
    """A message of this client could not be used."""

    code: str
    detail: str
    number: int | None = None


Message = Welcome | Command | Status | Stopped | Pong | Wrong | Chunk | Action


def read(data: bytes | str) -> Message | None:
    """A message of the server's; None for a kind that this client does not know.

    Raises:
        Garbled: it cannot be read.
    """
    found = _map(data)
    kind = found.get("kind")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    try:
        return None if reader is None else reader(found)
    except (KeyError, TypeError, ValueError) as error:
        raise Garbled(f"the server's message of kind {kind!r} lacks something: {error!r}") from error


def write(kind: str, fields: Mapping[str, object]) -> bytes:
    """A message of ours."""
    import msgpack

    data = msgpack.packb({"kind": kind, **fields})
    assert data is not None, "packb gives bytes"
    return data


def _map(data: bytes | str) -> dict[str, Any]:
    import msgpack

    try:
        if isinstance(data, str):
            import json

            found = json.loads(data)
        else:
            found = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise Garbled("the server sent a message that cannot be read") from error
    if not isinstance(found, dict):
        raise Garbled("the server sent a message that is no map")
    return found


def _welcome(found: dict[str, Any]) -> Welcome:
    ranges = found.get("joint_ranges") or {}
    return Welcome(
        session_id=str(found["session_id"]),
        status=str(found["status"]),
        cameras={name: (int(size[0]), int(size[1])) for name, size in found["cameras"].items()},
        joint_names=tuple(found["joint_names"]),
        joint_ranges={name: None if pair is None else (pair[0], pair[1]) for name, pair in ranges.items()},
        rate=found.get("rate"),
        silence_s=float(found.get("silence_s") or 2.0),
        max_bytes=found.get("max_bytes"),
        reads_prompt=bool(found.get("reads_prompt")),
    )


def _command(found: dict[str, Any]) -> Command:
    import math

    joints = {str(name): float(value) for name, value in found["joints"].items()}
    if not all(map(math.isfinite, joints.values())):
        raise Garbled("the server sent a command that is not finite; it is not done")
    return Command(joints, found.get("number"), found.get("observation"), found.get("age_ms"), found.get("time"))


READERS = {
    "welcome": _welcome,
    "command": _command,
    "chunk": read_chunk,
    "action": read_action,
    "status": lambda found: Status(
        str(found["status"]), found.get("reason"), found.get("hold"), found.get("hold_code")
    ),
    "stopped": lambda found: Stopped(str(found.get("reason") or "no reason given")),
    "pong": lambda found: Pong(found.get("number"), found.get("time"), found.get("server_time")),
    "error": lambda found: Wrong(str(found.get("code") or ""), str(found.get("detail") or ""), found.get("number")),
}


LARGEST = 64 << 20  # bytes of one message that a server may send
ACT_STATUS = 409  # of a Refused that came over the stream, where there is no status


class Stream:
    """A stream; ``Session.stream`` opens one. One thread may send while another one reads.

    Attributes:
        welcome: what the policy wants, and the joints in order.
    """

    def __init__(self, socket: Any, patience: float):
        self._socket, self._patience = socket, patience
        self._kept: deque[Message] = deque()
        self._reading = threading.Lock()
        self.welcome: Welcome = _welcomed(self._next(patience))

    def observe(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> None:
        """Send what the robot sees and where it is, for the session's control loop; see ``observation``.

        Raises:
            Unusable: it cannot be sent.
            StreamClosed: the stream is over.
        """
        self._send(write("observation", observation(images, state, **more)))

    def act(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Chunk | Action:
        """An observation, and its chunk (or with ``want="action"`` the next action).

        What else comes meanwhile is kept for ``messages``.

        Raises:
            Refused: the server cannot, or does not want to.
            StreamClosed: the stream is over.
        """
        with self._reading, in_time():
            self._send(write("act", observation(images, state, **more)))
            until = time.monotonic() + self._patience
            while True:
                found = self._next(until - time.monotonic())
                if isinstance(found, Chunk | Action):
                    return found
                if isinstance(found, Wrong):
                    raise _refused(found)
                if found is not None:
                    self._kept.append(found)

    def emergency_stop(self, reason: str) -> None:
        """Latch the session."""
        self._send(write("stop", {"reason": reason}))

    def ping(self, number: int = 0) -> None:
        """Say that this client is there; a Pong answers."""
        self._send(write("ping", {"number": number, "time": time.monotonic()}))

    def next(self, timeout: float | None = None) -> Message | None:
        """The next message; None when none came in time.

        Raises:
            StreamClosed: the stream is over.
        """
        with self._reading:
            until = None if timeout is None else time.monotonic() + timeout
            while not self._kept:
                try:
                    found = self._next(None if until is None else max(0.0, until - time.monotonic()))
                except TimeoutError:
                    return None
                if found is not None:
                    return found
            return self._kept.popleft()

    def __iter__(self) -> Iterator[Message]:
        """Messages until the stream is over."""
        while True:
            try:
                found = self.next()
            except StreamClosed:
                return
            if found is not None:
                yield found

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _send(self, data: bytes) -> None:
        with closing():
            self._socket.send(data)

    def _next(self, timeout: float | None) -> Message | None:
        with closing():
            return read(self._socket.recv(timeout))


class AsyncStream:
    """The same on an event loop. One task may read while others send."""

    def __init__(self, socket: Any, welcome: Welcome, patience: float):
        self._socket, self.welcome, self._patience = socket, welcome, patience
        self._kept: deque[Message] = deque()

    async def observe(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> None:
        """Send what the robot sees and where it is; see ``Stream.observe``."""
        await self._send(write("observation", observation(images, state, **more)))

    async def act(self, images: Mapping[str, Image] | None = None, state: Any = None, **more: Any) -> Chunk | Action:
        """An observation, and its chunk or action; see ``Stream.act``."""
        with in_time():
            async with asyncio.timeout(self._patience):
                await self._send(write("act", observation(images, state, **more)))
                while True:
                    found = await self._next()
                    if isinstance(found, Chunk | Action):
                        return found
                    if isinstance(found, Wrong):
                        raise _refused(found)
                    if found is not None:
                        self._kept.append(found)

    async def emergency_stop(self, reason: str) -> None:
        """Latch the session."""
        await self._send(write("stop", {"reason": reason}))

    async def ping(self, number: int = 0) -> None:
        """Say that this client is there; a Pong answers."""
        await self._send(write("ping", {"number": number, "time": time.monotonic()}))

    async def send(self, data: bytes) -> None:
        """A message that was made by ``messages.write``, perhaps in another thread."""
        await self._send(data)

    async def next(self) -> Message:
        """The next message.

        Raises:
            StreamClosed: the stream is over.
        """
        if self._kept:
            return self._kept.popleft()
        while (found := await self._next()) is None:
            pass
        return found

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the stream is over."""
        while True:
            try:
                found = await self.next()
            except StreamClosed:
                return
            yield found

    async def close(self) -> None:
        """Close it."""
        await self._socket.close()

    async def _send(self, data: bytes) -> None:
        with closing():
            await self._socket.send(data)

    async def _next(self) -> Message | None:
        with closing():
            return read(await self._socket.recv())


@contextmanager
def open_stream(url: str, headers: Mapping[str, str], patience: float) -> Iterator[Stream]:
    """A stream until the context ends."""
    from websockets.sync.client import connect

    with ExitStack() as stack:
        with opening(url):
            socket = stack.enter_context(connect(url, **_options(headers, patience)))
        with in_time():
            stream = Stream(socket, patience)
        yield stream


@asynccontextmanager
async def open_async_stream(url: str, headers: Mapping[str, str], patience: float) -> AsyncIterator[AsyncStream]:
    """The same on an event loop."""
    from websockets.asyncio.client import connect

    class Direct(connect):
        """One that goes nowhere else: a robot obeys the server that was named, as over HTTP."""

        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc

    async with AsyncExitStack() as stack:
        with opening(url):
            socket = await stack.enter_async_context(Direct(url, **_options(headers, patience)))
        with closing(), in_time():
            async with asyncio.timeout(patience):
                first = read(await socket.recv())
        yield AsyncStream(socket, _welcomed(first), patience)


def _options(headers: Mapping[str, str], patience: float) -> dict[str, Any]:
    # Pictures are compressed already, or sent raw for speed; and no proxies, as over HTTP.
    return {
        "additional_headers": dict(headers),
        "compression": None,
        "proxy": None,
        "open_timeout": patience,
        "close_timeout": 1,
        "max_size": LARGEST,
    }


@contextmanager
def opening(url: str) -> Iterator[None]:
    """A failure to open, as one of ours."""
    from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

    try:
        yield
    except InvalidStatus as error:
        answer = error.response
        raise refusal(answer.status_code, answer.headers, bytes(answer.body or b"")) from error
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        place = url.split("?")[0]
        why = str(error) or type(error).__name__
        raise Unreachable(f"{place} cannot be opened: {why}", why, may_have_arrived=False) from error


@contextmanager
def closing() -> Iterator[None]:
    """A closed socket, as one of ours."""
    from websockets.exceptions import ConnectionClosed

    try:
        yield
    except ConnectionClosed as error:
        frame = error.rcvd
        raise StreamClosed(frame.code if frame else 1006, frame.reason if frame else "") from error


@contextmanager
def in_time() -> Iterator[None]:
    """An answer that does not come, as one of ours."""
    try:
        yield
    except TimeoutError as error:
        raise Unreachable("the stream: no answer in time", "no answer in time", may_have_arrived=True) from error


def _welcomed(first: Message | None) -> Welcome:
    if isinstance(first, Wrong):
        raise _refused(first)
    if not isinstance(first, Welcome):
        raise Garbled("the stream did not begin with a welcome; is this a robojax server?")
    return first


def _refused(wrong: Wrong) -> ClientError:
    return Refused(ACT_STATUS, wrong.code, wrong.detail)
