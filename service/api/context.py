"""Route description, shared app context, and the sessions that a caller may see."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import sanic
from pydantic import BaseModel
from sanic import HTTPResponse
from sanic.config import Config

from service.api.metrics import Metrics
from service.auth.caller import Role, caller_of
from service.auth.guard import AccessGuard
from service.dashboard.live import Live
from service.engines.engine_set import EngineSet
from service.engines.model_server import ModelServer
from service.errors import UnknownSession
from service.http.bodies import json_response
from service.http.limits import CreateLimiter
from service.inference.policy_sources import PolicyReader, SourceRules
from service.logging import RecentLogs
from service.loop_watchdog import LoopWatchdog
from service.recording.recordings import Recordings
from service.rollout.deployments import Deployments
from service.sessions.store import AnySession, Sessions
from service.settings import Settings
from service.streaming.clients import StreamClients
from service.threads import WorkerThread
from service.transport.server.rooms import RoomTable

if TYPE_CHECKING:
    # These modules import the driver of PostgreSQL, which only some servers need.
    from service.distributed.peers import PeerSessions

Handler = Callable[..., Coroutine[Any, Any, HTTPResponse | None]]


@dataclass(frozen=True)
class Query:
    """Optional query parameter of a route."""

    name: str
    schema: Mapping[str, Any]
    description: str


@dataclass(frozen=True)
class Route:
    """Row of the route table.

    The handler's name gives the operation id and summary as FastAPI makes them, its docstring the description.

    Attributes:
        path: path with ``{session_id}`` parts, as in OpenAPI.
        tag: group in the documents.
        answer, content_type: JSON schema or model of the 200 response, and its content type.
        is_specified: whether the specified document has the route.
        body, specified_body: model of the request's body, and its replacement in the specified document.
        errors: statuses of its errors.
        optional_body: JSON schema of an optional body.
        forms, answer_forms: JSON schemas by content type, of the body and of other 200 responses.
        query: query parameters.
        is_patient: whether the response may take longer than others.
        is_streamed: whether the handler reads and limits the body itself.
        is_stop: whether it stops robots, so that every known caller is admitted.
        is_own: whether this server answers it for sessions of other servers, too.
        role: lowest role of a key that may call it, or None.
    """

    method: str
    path: str
    handler: Handler
    tag: str
    answer: Mapping[str, Any] | type[BaseModel] = field(default_factory=dict)
    content_type: str = "application/json"
    is_specified: bool = False
    body: type[BaseModel] | None = None
    specified_body: type[BaseModel] | None = None
    optional_body: Mapping[str, Any] | None = None
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    answer_forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    query: tuple[Query, ...] = ()
    errors: tuple[int, ...] = ()
    is_patient: bool = False
    is_streamed: bool = False
    is_stop: bool = False
    is_own: bool = False
    role: Role | None = Role.ADMIN

    @property
    def name(self) -> str:
        """Name of the handler function."""
        return getattr(self.handler, "__name__", type(self.handler).__name__)


class Routes(list[Route]):
    """Routes of one tag, in the order of the documents."""

    def __init__(self, tag: str):
        super().__init__()
        self._tag = tag

    def add(self, method: str, path: str, **options: Any) -> Callable[[Handler], Handler]:
        """Return a decorator that adds a handler; ``options`` are fields of `Route`."""

        def decorate(handler: Handler) -> Handler:
            self.append(Route(method, path, handler, self._tag, **options))
            return handler

        return decorate


@dataclass
class Context:
    """Objects that all requests share: the app's ``ctx``.

    Attributes:
        documents: content of the served documents by file name.
        page: the documentation's HTML and its Content-Security-Policy.
        versions: versions of this package and its dependencies by name.
        room_table: rooms of the embedded transport, or None.
        sessions, models, updates, recordings, list_worker, live, stream_clients: exist while the server runs;
            ``live`` are the viewers of the dashboard, ``stream_clients`` the clients without rooms.
        source_rules: allowed sources of policies.
        policy_reader: reads the requirements of policies before they are loaded.
        peer_sessions: this server and its peers with the same database; None without a database.
        stop_elsewhere: stops the robots of all other servers, see `Redirects.stop_all`; None without a database.
        engines: engines in other processes; None if policies run in this process.
        started_at: monotonic time.
    """

    settings: Settings
    documents: Mapping[str, bytes]
    page: tuple[bytes, str]
    versions: Mapping[str, str]
    metrics: Metrics
    logs: RecentLogs
    room_table: RoomTable | None
    guard: AccessGuard
    source_rules: SourceRules
    policy_reader: PolicyReader
    create_limiter: CreateLimiter
    loop_watchdog: LoopWatchdog
    started_at: float = field(default_factory=time.monotonic)
    engines: EngineSet | None = None
    peer_sessions: "PeerSessions | None" = None
    stop_elsewhere: "Callable[[Request, str], asyncio.Task[dict[str, Any]] | None] | None" = None
    sessions: Sessions = field(init=False)
    live: Live = field(init=False)
    stream_clients: StreamClients = field(init=False)
    models: ModelServer = field(init=False)
    updates: Deployments = field(init=False)
    recordings: Recordings = field(init=False)
    list_worker: WorkerThread = field(init=False)


App: TypeAlias = sanic.Sanic[Config, Context]
Request: TypeAlias = sanic.Request[App, SimpleNamespace]


def session_response(request: Request, message: str, session: AnySession) -> HTTPResponse:
    """Return the response to a request that changed a session, with the warning of records that are not written."""
    about = {"message": message, "session_id": session.id, "status": str(session.stage)}
    return json_response({**about, **request.app.ctx.sessions.get_warning()})


def list_visible_sessions(request: Request) -> list[AnySession]:
    """Return all sessions that this caller may see, oldest first."""
    caller = caller_of(request)
    return [session for session in request.app.ctx.sessions.list() if caller.sees(session.new.owner)]


def get_visible_session(request: Request, session_id: str) -> AnySession:
    """Return the session with this id; raises UnknownSession if it is unknown or belongs to another owner."""
    session = request.app.ctx.sessions.get(session_id)
    if not caller_of(request).sees(session.new.owner):
        raise UnknownSession(f"Session {session_id} not found")
    return session
