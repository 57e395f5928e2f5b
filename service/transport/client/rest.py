"""REST calls to a transport server."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import aiohttp
from pydantic import BeforeValidator, TypeAdapter

from service.errors import TransportError
from service.http.strict_json import loads
from service.transport.address import Address, Kind
from service.transport.protocol import MAX_VALUES, is_finite

MAX_RESPONSE_BYTES = 1 << 20


def _keep_text(content: Any) -> Any:
    return [entry for entry in content if isinstance(entry, str)] if isinstance(content, list) else content


@dataclass(frozen=True)
class Presence:
    """Present participants of a room by id (``room.participants`` of an answer)."""

    producer: str | None
    consumers: Annotated[frozenset[str], BeforeValidator(_keep_text)]

    def __contains__(self, participant_id: object) -> bool:
        return participant_id == self.producer or participant_id in self.consumers


_PRESENCE = TypeAdapter(Presence)


class RedirectRefused(TransportError):
    """The server answered with a redirect, which is not followed."""


async def refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Raise RedirectRefused for a redirect (aiohttp middleware), because only checked servers may be called."""
    response = await handler(request)
    if response.status in (301, 302, 303, 307, 308):
        response.close()
        raise RedirectRefused(
            f"{request.method} {request.url} answered {response.status}, a redirect, which is not followed; "
            "use the final address as transport_server_url"
        )
    return response


@asynccontextmanager
async def http_session(
    connector: aiohttp.BaseConnector | None = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open an aiohttp session for one server and its ``headers``, without proxies, cookies or redirects."""
    async with aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        middlewares=(refuse_redirects,),
    ) as session:
        yield session


_STATUS_HINTS = {
    401: "it needs a key: a robot gives its own, a server has transport_key_file for other servers",
    403: "the role of the key is too low, or this page may not call; see the log of the rooms' server",
    409: "the room has another owner; use another session_id or workspace_id",
    429: "it has the largest number of rooms, or gets too many requests; try again later",
}


def to_transport_error(error: Exception, what: str, base: str) -> TransportError:
    """Convert a network failure to an error that names the request, the problem and a remedy."""
    if isinstance(error, TransportError):
        return error
    if isinstance(error, TimeoutError):
        return TransportError(f"{what}: no answer in time; check that {base} is reachable and not overloaded")
    if isinstance(error, aiohttp.ClientSSLError):
        return TransportError(f"{what}: TLS failed ({error}); check the certificate, or use http:// for a local server")
    if isinstance(error, aiohttp.ClientConnectorError):
        return TransportError(
            f"{what}: cannot connect ({error.strerror or error}); is a transport server running at {base}? "
            "Start one with 'robojax transport', or correct transport_server_url"
        )
    if isinstance(error, aiohttp.WSServerHandshakeError) and error.status in _STATUS_HINTS:
        return TransportError(f"{what}: answered {error.status}; {_STATUS_HINTS[error.status]}")
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return TransportError(
            f"{what}: answered {error.status} instead of a WebSocket; "
            f"check the base path of {base} (the public images have the API under /api)"
        )
    return TransportError(f"{what}: {type(error).__name__} {error}".rstrip() + f"; check that {base} is healthy")


@dataclass(frozen=True)
class TransportTimeouts:
    """Timeouts and intervals of a link, in seconds.

    Attributes:
        join: from opening a socket to ``joined``.
        heartbeat: between heartbeats, and between checks of a room's participants.
        missed: number of unanswered heartbeats after which the link is lost.
        retry_first, retry_longest: wait before joining again, doubled each time, with full jitter.
        leave: for the closing handshake, and again for removing the rooms.
        greet: from a producer's join to its offers to earlier consumers.
        connect, silence: without a connected peer, and without a picture from it, before a new offer is requested.
        ask_first, ask_longest: between such requests, doubled each time until a picture arrives.
    """

    join: float = 5.0
    request: float = 5.0
    heartbeat: float = 5.0
    missed: int = 2
    retry_first: float = 0.25
    retry_longest: float = 10.0
    leave: float = 1.0
    greet: float = 0.1
    answer: float = 10.0
    connect: float = 15.0
    silence: float = 10.0
    ask_first: float = 5.0
    ask_longest: float = 60.0


class RoomsApi:
    """REST calls of one transport server, and the timeouts of links to it; every failure is a ``TransportError``."""

    def __init__(self, session: aiohttp.ClientSession, address: Address, timeouts: TransportTimeouts | None = None):
        self.session = session
        self.address = address
        self.timeouts = timeouts or TransportTimeouts()

    async def create_room(self, kind: Kind, workspace: str, room: str) -> None:
        """Create a room. The server replaces an existing room with this id, so check its presence first."""
        await self.request_json("POST", self.address.rooms_url(kind, workspace), {"room_id": room})

    async def get_presence(self, kind: Kind, workspace: str, room: str) -> Presence | None:
        """Return the participants of a room; None if the server does not know the room."""
        url = self.address.room_url(kind, workspace, room)
        answer = await self.request_json("GET", url, missing_is_none=True)
        if answer is None:
            return None
        try:
            return _PRESENCE.validate_python(answer["room"]["participants"])
        except (LookupError, TypeError, ValueError):
            raise TransportError(f"GET {url}: no usable room.participants; is this a RobotHub server?") from None

    async def get_joints(self, workspace: str, room: str) -> dict[str, float]:
        """Return the last value of every joint of a robotics room; values that are not finite are omitted."""
        url = f"{self.address.room_url(Kind.ROBOTICS, workspace, room)}/state"
        answer = await self.request_json("GET", url)
        try:
            joints = dict(answer["state"]["joints"])
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(f"GET {url}: no state.joints; is this a RobotHub server?") from error
        return {str(name): float(value) for name, value in joints.items() if is_finite(value)}

    async def delete_room(self, kind: Kind, workspace: str, room: str) -> bool:
        """Remove a room; False if the server does not know it."""
        url = self.address.room_url(kind, workspace, room)
        return await self.request_json("DELETE", url, missing_is_none=True) is not None

    async def post_signal(self, workspace: str, room: str, sender: str, message: Mapping[str, object]) -> None:
        """Post one WebRTC signal (offer, answer or ice) for the server to relay."""
        url = f"{self.address.room_url(Kind.VIDEO, workspace, room)}/webrtc/signal"
        await self.request_json("POST", url, {"client_id": sender, "message": message})

    async def request_json(
        self, method: str, url: str, body: object = None, missing_is_none: bool = False, expected_type: type = dict
    ) -> Any:
        """Send a request to this server or to the session's server, and return the JSON answer.

        Args:
            missing_is_none: return None if the server does not know the room.
            expected_type: ``list`` for a JSON array.
        """
        what = f"{method} {url}"
        try:
            async with asyncio.timeout(self.timeouts.request), self.session.request(method, url, json=body) as response:
                text = bytearray()
                async for piece in response.content.iter_chunked(1 << 16):
                    text += piece
                    if len(text) > MAX_RESPONSE_BYTES:
                        raise TransportError(
                            f"{what}: the answer is over {MAX_RESPONSE_BYTES} bytes; is this a RobotHub server?"
                        )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise to_transport_error(error, what, self.address.base) from error
        if response.status == 404 and missing_is_none and b"Room not found" in text:
            return None
        if response.status >= 400:
            hint = (
                f"no RobotHub API under {self.address.base}; is its base path right (often /api)?"
                if response.status in (404, 405)
                else _STATUS_HINTS.get(response.status, f"see the log of the server at {self.address.base}")
            )
            raise TransportError(f"{what}: answered {response.status}; {hint}")
        try:
            answer = loads(bytes(text), MAX_VALUES)
        except (ValueError, RecursionError) as error:
            raise TransportError(
                f"{what}: expected JSON, got {response.content_type}; "
                f"{self.address.base} is probably a web page, its API is often under /api"
            ) from error
        if not isinstance(answer, expected_type):
            expected = "an object" if expected_type is dict else "an array"
            raise TransportError(f"{what}: expected {expected}, got a JSON {type(answer).__name__}")
        return answer
