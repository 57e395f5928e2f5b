"""Requests about sessions of other fronts: passed on to those, so that a client may ask any of them."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import aiohttp
from sanic import HTTPResponse
from yarl import URL

from service.auth.caller import caller_of
from service.cluster.directory import Entry
from service.cluster.front import FrontLost, FrontOfCluster, status_of
from service.cluster.knock import NAME
from service.edge.origins import Origins
from service.errors import MoveRefused, UnknownSession
from service.routes.answers import answer, request_id
from service.routes.context import App, Request
from service.routes.pieces import read_pieces

log = logging.getLogger(__name__)

# Who passed a request on: it is not passed on again.
PASSED = "x-robojax-front"
# Seconds for which it is remembered where a session is; that connecting may take; that the other may take to stop.
REMEMBERED = 0.5
CONNECT = 2.0
STOPPING = 2.0
# Bytes of a body that is passed on, and of an answer that goes on in one piece.
LARGEST = 64 << 20
_AT_ONCE = 1 << 18
# Of one connection, not of what it says (RFC 9110, 7.6.1); the length is told anew. Where a page is of was looked at
# here: it is the other front's no less, which has another name.
_HOPPING = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "host", "expect", "origin", "referer", "cookie"),
    }
)
# Of the answer, besides: this front says these itself, and its client has undone the encoding.
_OWN = frozenset({"content-encoding", "content-type", "x-request-id", NAME})


class Forwarding:
    """Looks at each request after the guard has let it in; the front that it goes to looks at its key again.

    Args:
        origins: pages whose requests are passed on.

    Attributes:
        front: this server among the others; None until it is there.
    """

    def __init__(self, origins: Origins) -> None:
        self.front: FrontOfCluster | None = None
        self._origins = origins
        self._stops: set[asyncio.Task[dict[str, Any]]] = set()
        self._client: aiohttp.ClientSession | None = None
        self._places: dict[str, tuple[float, tuple[Entry, str | None] | None]] = {}

    async def answer(self, request: Request) -> HTTPResponse | None:
        """The other front's answer, or None: it is this one's to answer."""
        route: Any = request.route
        if route is None or self.front is None or PASSED in request.headers or getattr(route.ctx, "is_own", False):
            return None
        session_id = request.match_info.get("session_id")
        if session_id is None or request.method == "OPTIONS":
            return None
        # The routes say so, later, in their own words.
        if self._origins.refusal(request) is not None:
            return None
        if any(session.id == session_id for session in request.app.ctx.sessions.list()):
            return None
        found = await self._find(session_id)
        if found is None:
            return None
        entry, url = found
        if url is None and getattr(route.ctx, "is_stop", False):
            # Silent in the cluster is not dead: a stop is tried all the same.
            url = next((front.url for front in self._here.silent if front.name == entry.front), None)
        if url is None:
            return await self._of_the_dead(request, entry)
        if getattr(route.ctx, "is_handed_over", False):
            # A socket is not passed on: its client follows, and is one hop nearer to the robot.
            if not caller_of(request).sees(entry.owner):
                raise UnknownSession(f"Session {session_id} not found")
            return HTTPResponse(status=307, headers={"location": f"{url}{request.path}{_query(request)}"})
        return await self._pass_on(request, url, entry.front)

    async def _find(self, session_id: str) -> tuple[Entry, str | None] | None:
        now = time.monotonic()
        kept = self._places.get(session_id)
        if kept is None or now - kept[0] > REMEMBERED:
            self._places = {id: place for id, place in self._places.items() if now - place[0] <= REMEMBERED}
            kept = self._places[session_id] = now, await self._here.find(session_id)
        return kept[1]

    async def _of_the_dead(self, request: Request, entry: Entry) -> HTTPResponse:
        """What can be said and done of a session whose front died."""
        if not caller_of(request).sees(entry.owner):
            raise UnknownSession(f"Session {entry.id} not found")
        last = request.path.rstrip("/").rsplit("/", 1)[-1]
        if not entry.status and request.method != "DELETE":
            raise UnknownSession(f"Session {entry.id} not found")  # its id was taken, and nothing came of it
        if request.method in ("GET", "HEAD") and last == entry.id:
            return answer(status_of(entry))
        if request.method == "DELETE" and last == entry.id:
            await self._here.forget(entry.id)
            return answer({"message": f"Session {entry.id} deleted; its front {entry.front} had died"})
        raise MoveRefused(
            f"session {entry.id!r} is interrupted: its front {entry.front} has died. "
            f"POST /sessions/{entry.id}/adopt takes it over here"
        )

    async def _pass_on(self, request: Request, url: str, name: str) -> HTTPResponse:
        body = request.body
        if not body and request.stream is not None and request.stream.request_body:
            # Of a route that reads its body itself; Sanic holds it to no limit.
            body = b"".join(await read_pieces(request, LARGEST, "of a request to another front"))
        headers = self._headers(request)
        route: Any = request.route
        is_patient = getattr(route.ctx, "is_patient", False)
        limit = aiohttp.ClientTimeout(
            total=None if is_patient else request.app.ctx.settings.answer_deadline, sock_connect=CONNECT
        )
        try:
            async with self._http().request(
                request.method,
                URL(f"{url}{request.path}{_query(request)}", encoded=True),
                data=body or None,
                headers=headers,
                allow_redirects=False,
                timeout=limit,
            ) as found:
                kept = {key: value for key, value in found.headers.items() if key.lower() not in _HOPPING | _OWN} | {
                    PASSED: name
                }
                kind = found.headers.get("content-type")
                if found.content_length is not None and found.content_length <= _AT_ONCE:
                    return HTTPResponse(await found.read(), found.status, kept, content_type=kind)
                return await _stream(request, HTTPResponse(None, found.status, kept, content_type=kind), found)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FrontLost(
                f"the front {name}, on which this session is, does not answer ({type(error).__name__}); try again"
            ) from error

    async def stop_all(self, request: Request, reason: str) -> dict[str, Any]:
        """Stop the robots of all other fronts, too: how many, and which fronts did not answer.

        Those too that are not heard of in the cluster: what they move, they may move still.
        """
        if PASSED in request.headers or self.front is None:
            return {}
        headers = self._headers(request) | {"content-type": "application/json"}
        # It goes on when whoever asked for it does not wait.
        task = asyncio.create_task(self._stop_others(headers, reason), name="stop others")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        return await asyncio.shield(task)

    async def _stop_others(self, headers: Mapping[str, str], reason: str) -> dict[str, Any]:
        others = [*self._here.others, *self._here.silent]
        # Connections of its own: those of requests that are passed on may all be waiting for something.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            answers = await asyncio.gather(
                *(_stop(client, front.url, headers, reason) for front in others), return_exceptions=True
            )
        told = [found for found in answers if not isinstance(found, BaseException)]
        failed = {
            front.name: str(found) or type(found).__name__
            for front, found in zip(others, answers, strict=True)
            if isinstance(found, BaseException)
        }
        for name, why in failed.items():
            log.error("the robots of the front %s are not known to be stopped: %s", name, why)
        return {
            "stopped": [one for stopped, _ in told for one in stopped],
            "count": sum(count for _, count in told),
            "fronts_not_reached": failed,
        }

    def _headers(self, request: Request) -> dict[str, str]:
        kept = {key: value for key, value in request.headers.items() if key.lower() not in _HOPPING}
        return kept | {PASSED: self._here.name, "x-request-id": request_id(request)}

    @property
    def _here(self) -> FrontOfCluster:
        assert self.front is not None, "asked only once it is there"
        return self.front

    def _http(self) -> aiohttp.ClientSession:
        if self._client is None:
            # No limit: one front that does not answer must not keep requests to others waiting.
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._client

    async def close(self) -> None:
        """Let go of connections."""
        await asyncio.gather(*self._stops, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def watch(self, app: App) -> None:
        """From now on requests of this app are passed on."""

        @app.on_request
        async def pass_on(request: Request) -> HTTPResponse | None:
            return await self.answer(request)

        @app.on_response
        async def name(request: Request, response: HTTPResponse) -> None:
            if self.front is not None:
                response.headers[NAME] = self.front.name


async def _stream(request: Request, answered: HTTPResponse, found: aiohttp.ClientResponse) -> HTTPResponse:
    """Pass on an answer that is long, or without end, piece by piece."""
    if found.content_length is not None:
        answered.headers["content-length"] = str(found.content_length)
    await request.respond(answered)
    try:
        async for piece in found.content.iter_any():
            await answered.send(piece, end_stream=False)
    except (aiohttp.ClientError, TimeoutError):
        # Its client must not take what it has for all there is.
        log.warning("%s %s: the other front's answer broke off", request.method, request.path)
        cast(asyncio.Transport, request.transport).abort()
    return answered


async def _stop(
    client: aiohttp.ClientSession, url: str, headers: Mapping[str, str], reason: str
) -> tuple[list[str], int]:
    async with client.post(
        f"{url}/debug/emergency_stop",
        json={"reason": reason},
        headers=headers,
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=STOPPING),
    ) as found:
        told = await found.json()
        if found.status != 200:
            raise FrontLost(f"{found.status}: {told.get('detail')}")
        return list(told["stopped"]), int(told["count"])


def _query(request: Request) -> str:
    return f"?{request.query_string}" if request.query_string else ""
