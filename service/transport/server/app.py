"""Transport server as Sanic routes, in another app or standalone."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from urllib.parse import unquote

from sanic import Blueprint, HTTPResponse, Request, Sanic
from sanic.exceptions import SanicException
from sanic.helpers import STATUS_CODES
from sanic.server.websockets.impl import WebsocketImplProtocol

from service.auth.caller import Role as KeyRole
from service.auth.guard import AccessGuard
from service.auth.tokens import LIFETIME
from service.http.bodies import json_response
from service.http.limits import Connections
from service.http.origins import Origins, add_security_headers
from service.http.server import run
from service.transport.address import Kind
from service.transport.protocol import MAX_FRAME_BYTES
from service.transport.server.rest import ROOM, RoomEndpoints, create_route_handler
from service.transport.server.rooms import Authority, Cleanup, RoomLimits, RoomPath, RoomTable
from service.transport.server.websocket import OutboxLimits, WriteQueue, serve_participant

log = logging.getLogger(__name__)

REQUEST_DEADLINE = 10  # Seconds from a request's first byte to its last.


@dataclass(frozen=True)
class RoomsSettings:
    """Settings of an embedded transport server; times in seconds.

    Attributes:
        origins: exact origins of web pages that may call the server, or ``*``; pages of this machine always may.
        join_timeout: time from opening a socket to its join.
        ping_interval, ping_timeout: WebSocket pings, which remove participants after a network failure.
        idle, cleanup_interval: age at which empty rooms are removed, and time between checks.
    """

    origins: Sequence[str] = ()
    limits: RoomLimits = field(default_factory=RoomLimits)
    outbox: OutboxLimits = field(default_factory=OutboxLimits)
    join_timeout: float = 30.0
    ping_interval: float = 10.0
    ping_timeout: float = 10.0
    idle: float = 3600.0
    cleanup_interval: float = 900.0

    def table(self, authority: Authority = lambda path, owner: None) -> RoomTable:
        """Create an empty room table with these limits and the ``authority`` of `RoomTable`."""
        return RoomTable(self.limits, authority)


def add_transport(app: Sanic, table: RoomTable, settings: RoomsSettings) -> None:
    """Mount ``/robotics`` and ``/video`` at the root and under ``/api``, and set the app's WebSocket limits.

    The app must have a ``service.auth.guard.AccessGuard``. The clean-up of idle rooms starts and ends with the app.
    """
    app.config.WEBSOCKET_MAX_SIZE = MAX_FRAME_BYTES
    app.config.WEBSOCKET_PING_INTERVAL = settings.ping_interval
    app.config.WEBSOCKET_PING_TIMEOUT = settings.ping_timeout
    cleanup = Cleanup(table, settings.idle, settings.cleanup_interval)
    _start_cleanup(app, cleanup)
    origins, queue = Origins(settings.origins), WriteQueue()
    for prefix, kind in product(("", "/api"), Kind):
        name = "-".join(["transport", kind, *prefix.strip("/").split("/")]).strip("-")
        blueprint = Blueprint(name, url_prefix=f"{prefix}/{kind}")
        methods: dict[str, list[str]] = {}
        for method, path, handler, role in RoomEndpoints(kind, table, cleanup).routes():
            blueprint.add_route(
                create_route_handler(handler, queue),
                path,
                methods=[method],
                name=handler.__name__,
                error_format="json",
                ctx_role=role,
                ctx_is_room=True,
            )
            methods.setdefault(path, []).append(method)
        socket_route = blueprint.websocket(
            f"{ROOM}/ws", name="socket", error_format="json", ctx_role=KeyRole.VIEWER, ctx_is_room=True
        )
        socket_route(_create_socket_handler(kind, table, settings, queue))
        origins.install_cors(blueprint, {path: sorted(allowed) for path, allowed in methods.items()})
        app.blueprint(blueprint)


def create_transport_app(settings: RoomsSettings | None = None, guard: AccessGuard | None = None) -> Sanic:
    """Create a standalone transport server (at ``/`` and ``/api``); without ``guard`` it accepts every caller."""
    settings = settings or RoomsSettings()
    guard = guard or AccessGuard(origins=Origins(settings.origins))
    # Sanic registers apps by name, and refuses a name twice.
    app = Sanic(f"transport-{secrets.token_hex(4)}", configure_logging=False)
    app.config.REQUEST_MAX_SIZE = MAX_FRAME_BYTES
    app.config.TOUCHUP = False  # It rewrites Sanic's classes, so a second app of the process would not start.
    app.config.REQUEST_DEADLINE = REQUEST_DEADLINE
    app.config.REQUEST_TIMEOUT = REQUEST_DEADLINE
    app.config.KEEP_ALIVE_TIMEOUT = 15
    app.config.CONNECTIONS = Connections()
    table = settings.table()
    guard.install(app)
    app.on_response(_harden_response)
    add_transport(app, table, settings)
    app.add_route(_answer_health, "/health", name="health", error_format="json", ctx_role=None)
    app.add_route(_answer_health, "/api/health", name="api_health", error_format="json", ctx_role=None)
    tickets = _create_ticket_handler(guard, Origins(settings.origins))
    app.add_route(tickets, "/tickets", methods=["POST"], name="tickets", error_format="json", ctx_role=KeyRole.VIEWER)
    app.exception(SanicException)(_answer_http_error)
    app.exception(Exception)(_answer_unexpected_error)
    return app


def run_transport(
    listener: socket.socket,
    settings: RoomsSettings | None = None,
    started: Callable[[str], None] = lambda url: log.info("rooms at %s", url),
    guard: AccessGuard | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, for ``robojax transport``; ``started`` gets the URL."""
    run(create_transport_app(settings, guard), listener, started)


def _start_cleanup(app: Sanic, cleanup: Cleanup) -> None:
    """Run the clean-up from the start of the app to its end."""
    tasks: list[asyncio.Task[None]] = []

    async def start(app: Sanic) -> None:
        tasks.append(asyncio.get_running_loop().create_task(cleanup.run()))

    async def stop(app: Sanic) -> None:
        # Sanic does not cancel background tasks.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()

    app.after_server_start(start)
    app.before_server_stop(stop)


def _create_socket_handler(kind: Kind, table: RoomTable, settings: RoomsSettings, queue: WriteQueue):
    async def serve(request: Request, websocket: WebsocketImplProtocol, workspace: str, room: str) -> None:
        path = RoomPath(kind, unquote(workspace), unquote(room))
        await serve_participant(request, websocket, path, table, settings.outbox, queue, settings.join_timeout)

    return serve


def _create_ticket_handler(guard: AccessGuard, origins: Origins):
    async def make_ticket(request: Request) -> HTTPResponse:
        refused = origins.refuse_request(request)
        if refused is not None:
            return refused
        made = guard.admissions.issue_ticket(request.ctx.admission)
        return json_response({"ticket": made, "expires_in": int(LIFETIME)})

    return make_ticket


async def _harden_response(request: Request, response: HTTPResponse) -> None:
    add_security_headers(response)


async def _answer_health(request: Request) -> HTTPResponse:
    return json_response({"status": "healthy", "server_running": True})


async def _answer_http_error(request: Request, error: SanicException) -> HTTPResponse:
    status = error.status_code or 500
    return json_response({"detail": STATUS_CODES[status].decode()}, status)


async def _answer_unexpected_error(request: Request, error: Exception) -> HTTPResponse:
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return json_response({"detail": "Internal Server Error"}, 500)
