"""Requests about sessions of other fronts: passed on to those, so that a client may ask any of them."""

import asyncio
import logging
import time
from typing import Any

import aiohttp
from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.cluster.directory import Entry
from service.cluster.front import FrontLost, FrontOfCluster, status_of
from service.errors import MoveRefused, UnknownSession
from service.routes.answers import answer
from service.routes.context import App, Request

log = logging.getLogger(__name__)

# Who passed a request on: it is not passed on again.
PASSED = "x-robojax-front"
# The name of the front that answers, so that one that has its address now is not taken for one that ended.
NAME = "x-robojax-front-name"
# Seconds for which it is remembered where a session is; that connecting may take; that the other may take to stop.
REMEMBERED = 0.5
CONNECT = 2.0
STOPPING = 2.0
# Of one connection, not of what it says (RFC 9110, 7.6.1); the length is told anew.
_HOPPING = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "host"),
    }
)


class Forwarding:
    """Looks at each request after the guard has let it in; the front that it goes to looks at its key again.

    Attributes:
        front: this server among the others; None until it is there.
    """

    def __init__(self) -> None:
        self.front: FrontOfCluster | None = None
        self._client: aiohttp.ClientSession | None = None
        self._places: dict[str, tuple[float, tuple[Entry, str | None] | None]] = {}

    async def answer(self, request: Request) -> HTTPResponse | None:
        """The other front's answer, or None: it is this one's to answer."""
        route: Any = request.route
        if route is None or self.front is None or PASSED in request.headers or getattr(route.ctx, "is_own", False):
            return None
        session_id = request.match_info.get("session_id")
        if session_id is None:
            return None
        if any(session.id == session_id for session in request.app.ctx.sessions.list()):
            return None
        found = await self._find(session_id)
        if found is None:
            return None
        entry, url = found
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
        await request.receive_body()
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOPPING}
        headers[PASSED] = self._here.name
        route: Any = request.route
        is_patient = getattr(route.ctx, "is_patient", False)
        limit = aiohttp.ClientTimeout(
            total=None if is_patient else request.app.ctx.settings.answer_deadline, sock_connect=CONNECT
        )
        try:
            async with self._http().request(
                request.method,
                f"{url}{request.path}{_query(request)}",
                data=request.body or None,
                headers=headers,
                allow_redirects=False,
                timeout=limit,
            ) as found:
                kept = {key: value for key, value in found.headers.items() if key.lower() not in _HOPPING}
                kept.pop("Content-Encoding", None)  # undone by the client
                kept[PASSED] = name
                if found.content_length is not None:
                    body = await found.read()
                    return HTTPResponse(body, found.status, kept, content_type=kept.pop("Content-Type", None))
                stream: Any = await request.respond(
                    status=found.status, headers=kept, content_type=kept.pop("Content-Type", None)
                )
                async for piece in found.content.iter_any():
                    await stream.send(piece)
                await stream.eof()
                return stream
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FrontLost(
                f"the front {name}, on which this session is, does not answer ({type(error).__name__}); try again"
            ) from error

    async def stop_all(self, request: Request, reason: str) -> dict[str, Any]:
        """Stop the robots of all other fronts, too: how many, and which fronts did not answer."""
        if PASSED in request.headers or self.front is None:
            return {}
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOPPING}
        headers |= {PASSED: self._here.name, "content-type": "application/json"}

        async def stop(url: str) -> tuple[list[str], int]:
            async with self._http().post(
                f"{url}/debug/emergency_stop",
                json={"reason": reason},
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=STOPPING),
            ) as found:
                told = await found.json()
                if found.status != 200:
                    raise FrontLost(f"{found.status}: {told.get('detail')}")
                return list(told["stopped"]), int(told["count"])

        others = self._here.others
        answers = await asyncio.gather(*(stop(front.url) for front in others), return_exceptions=True)
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

    @property
    def _here(self) -> FrontOfCluster:
        assert self.front is not None, "asked only once it is there"
        return self.front

    def _http(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(auto_decompress=True)
        return self._client

    async def close(self) -> None:
        """Let go of connections."""
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


def _query(request: Request) -> str:
    return f"?{request.query_string}" if request.query_string else ""
