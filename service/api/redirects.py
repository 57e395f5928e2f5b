"""Redirects (307) of requests about sessions of other servers; emergency stops are forwarded."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from sanic import HTTPResponse
from yarl import URL

from service.api.context import App, Request
from service.auth.caller import caller_of
from service.distributed import peers
from service.distributed.peers import FORWARDED_HEADER, SERVER_NAME_HEADER, PeerLost, PeerSessions, make_status
from service.distributed.session_table import Entry, Peer
from service.errors import MoveRefused, NoDatabase, UnknownSession
from service.http.bodies import discard_body, json_response, read_reason, request_id
from service.http.origins import Origins

# Code of the answer, for programs; its headers are for proxies that follow redirects themselves.
CODE = "on_another_server"
ADDRESS_HEADER = "x-robojax-front-address"
# Seconds for which the address of a session is cached.
CACHE_SECONDS = 0.5
# Seconds that the database may take to find the server of a session that is to be stopped.
STOP_LOOKUP_TIMEOUT = 0.1
# Bytes of a body that is read and thrown away: some clients read the answer only after they have sent it all.
MAX_DISCARDED_BODY = 64 << 20
# Credentials of a caller that are passed on; a ticket is valid only at the server that gave it.
_CREDENTIALS = ("authorization", "x-api-key")
Result = TypeVar("Result")


class Redirects:
    """Redirects requests after the access guard has admitted them; the target server checks their key again.

    Emergency stops are passed on with the caller's key instead, because a caller may not follow redirects.

    Args:
        origins: web pages whose stops are passed on.

    Attributes:
        peer_sessions: this server and its peers; None before the start.
    """

    def __init__(self, origins: Origins) -> None:
        self.peer_sessions: PeerSessions | None = None
        self._origins = origins
        self._stops: set[asyncio.Task[Any]] = set()
        self._cache: dict[str, tuple[float, tuple[Entry, Peer | None]]] = {}

    async def redirect(self, request: Request) -> HTTPResponse | None:
        """Return the answer to a request about a session of another server: a redirect, or the answer to a stop.

        Returns:
            None if this server answers the request itself.

        Raises:
            UnknownSession: the caller does not see the session.
            MoveRefused: the server of the session has died.
            NoDatabase: the database does not answer; for a stop, no server has stopped the session either.
            PeerLost: the server of a session that is to be stopped does not answer.
        """
        route: Any = request.route
        peer_sessions = self.peer_sessions
        if route is None or peer_sessions is None or getattr(route.ctx, "is_own", False):
            return None
        if FORWARDED_HEADER in request.headers:
            return None
        session_id = request.match_info.get("session_id")
        # A page of a foreign origin is refused later, by the route itself.
        if session_id is None or request.method == "OPTIONS" or self._origins.refuse_request(request) is not None:
            return None
        if any(session.id == session_id for session in request.app.ctx.sessions.list()):
            return None
        is_stop = getattr(route.ctx, "is_stop", False)
        try:
            async with asyncio.timeout(STOP_LOOKUP_TIMEOUT if is_stop else None):
                found = await self._find(peer_sessions, session_id)
        except (TimeoutError, NoDatabase) as error:
            if not is_stop:
                raise
            return await self._stop_anywhere(request, peer_sessions, session_id, error)
        if found is None:
            return None
        entry, owning = found
        is_alive = owning is not None and owning.is_alive
        # Emergency stops are forwarded, also to a server without a heartbeat, which may still be alive.
        if owning is not None and is_stop and _last_part(request) == "emergency_stop" and not owning.has_ended:
            _, status, body = await asyncio.shield(self._stop(request, owning, session_id, await read_reason(request)))
            return json_response(body, status, {FORWARDED_HEADER: owning.name})
        if not request.body and request.stream is not None and request.stream.request_body:
            await discard_body(request, MAX_DISCARDED_BODY)
        if not caller_of(request).sees(entry.owner):
            raise UnknownSession(f"Session {session_id} not found")
        if owning is None or not is_alive:
            return await self._answer_for_dead(request, peer_sessions, entry)
        location = f"{owning.url}{request.path}{f'?{request.query_string}' if request.query_string else ''}"
        return json_response(
            {"detail": f"session {session_id!r} is on the server {owning.name}: ask {owning.url}", "code": CODE},
            307,
            {"location": location, FORWARDED_HEADER: owning.name, ADDRESS_HEADER: _host_and_port(owning.url)},
        )

    async def _find(self, peer_sessions: PeerSessions, session_id: str) -> tuple[Entry, Peer | None] | None:
        now = time.monotonic()
        kept = self._cache.get(session_id)
        if kept is not None and now - kept[0] <= CACHE_SECONDS:
            return kept[1]
        self._cache = {id: place for id, place in self._cache.items() if now - place[0] <= CACHE_SECONDS}
        found = await peer_sessions.find(session_id)
        if found is not None:  # not cached when missing: the session may be created at any moment
            self._cache[session_id] = now, found
        return found

    async def _answer_for_dead(self, request: Request, peer_sessions: PeerSessions, entry: Entry) -> HTTPResponse:
        """Answer about a session whose server died."""
        last = _last_part(request)
        if not entry.status and request.method != "DELETE":
            raise UnknownSession(f"Session {entry.id} not found")  # the id was reserved, but not used
        if request.method in ("GET", "HEAD") and last == entry.id:
            return json_response(make_status(entry))
        if request.method == "DELETE" and last == entry.id:
            await peer_sessions.forget(entry.id)
            return json_response({"message": f"Session {entry.id} deleted; its server {entry.server} had died"})
        raise MoveRefused(
            f"session {entry.id!r} is interrupted: its server {entry.server} has died. "
            f"POST /sessions/{entry.id}/adopt takes it over here"
        )

    async def _stop_anywhere(
        self, request: Request, peer_sessions: PeerSessions, session_id: str, error: Exception
    ) -> HTTPResponse:
        """Ask all servers last known to stop a session while the database does not say which server has it.

        Raises:
            NoDatabase: no server has stopped the session.
        """
        reason, answers = await read_reason(request), list[str]()
        # No request is cancelled after the first success: an adopted session may also be on its former server.
        stops = [self._stop(request, peer, session_id, reason) for peer in peer_sessions.stoppable]
        for stop in asyncio.as_completed(stops):
            try:
                peer, status, body = await stop
            except PeerLost as lost:
                answers.append(str(lost))
                continue
            if status == 200:
                return json_response(body, status, {FORWARDED_HEADER: peer.name})
            answers.append(f"the server {peer.name} answers {status}")
        raise NoDatabase(
            f"{peers.NO_DATABASE}, and no other server has stopped session {session_id!r} "
            f"({'; '.join(answers) or 'there was no other server'}): its robot may still move; stop it at the robot"
        ) from error

    def _stop(self, request: Request, peer: Peer, session_id: str, reason: str) -> asyncio.Task[tuple[Peer, int, Any]]:
        """Begin to stop a session of another server; the task returns the server, and status and body of its answer."""
        headers, move = self._headers(request), _last_part(request)

        async def stop() -> tuple[Peer, int, Any]:
            return peer, *await peers.stop_session(peer, session_id, move, headers, reason)

        return self._start(stop())

    def stop_all(self, request: Request, reason: str) -> asyncio.Task[dict[str, Any]] | None:
        """Begin to stop the robots of all other servers, heartbeat or not.

        Returns:
            A task that returns the count and the servers not reached; None if another server forwarded the request.
        """
        if FORWARDED_HEADER in request.headers or self.peer_sessions is None:
            return None
        return self._start(peers.stop_all(self.peer_sessions.stoppable, self._headers(request), reason))

    def _start(self, stopping: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a stop that continues when the client disconnects."""
        task = asyncio.create_task(stopping, name="stop others")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        # The exception is retrieved here, because the client may be gone.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _headers(self, request: Request) -> dict[str, str]:
        assert self.peer_sessions is not None, "asked only once it is there"
        kept = {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}
        return kept | {FORWARDED_HEADER: self.peer_sessions.name, "x-request-id": request_id(request)}

    async def close(self) -> None:
        """Wait for stops that are under way."""
        await asyncio.gather(*self._stops, return_exceptions=True)

    def install(self, app: App) -> None:
        """Redirect requests of this app from now on."""

        @app.on_request
        async def send_on(request: Request) -> HTTPResponse | None:
            return await self.redirect(request)

        @app.on_response
        async def name(request: Request, response: HTTPResponse) -> None:
            if self.peer_sessions is not None:
                response.headers[SERVER_NAME_HEADER] = self.peer_sessions.name


def _last_part(request: Request) -> str:
    return request.path.rstrip("/").rsplit("/", 1)[-1]


def _host_and_port(url: str) -> str:
    address = URL(url)
    host = f"[{address.host}]" if address.host and ":" in address.host else address.host
    return f"{host}:{address.port}"
