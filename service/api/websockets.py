"""WebSocket routes of streams and openpi."""

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from sanic import Blueprint, HTTPResponse, Sanic
from sanic.response import text
from sanic.server.websockets.impl import WebsocketImplProtocol

from service.api.blueprint import build_config, install_middleware
from service.api.context import App, Request, get_visible_session
from service.auth.caller import Role, caller_of
from service.errors import SessionLoading, TooManyRequests
from service.http.bodies import install_errors
from service.http.origins import Origins
from service.sessions.store import AnySession
from service.streaming.direct_inference import DirectInference
from service.streaming.openpi import OpenpiProtocol
from service.streaming.stream import ClientStream
from service.streaming.websocket import SocketClosed, StreamSocket


def build_streams_blueprint(origins: Origins) -> Blueprint:
    """Build the routes ``/sessions/{id}/stream`` and ``/sessions/{id}/openpi``, which the access guard protects."""
    blueprint = Blueprint("streams")

    async def stream(request: Request, websocket: WebsocketImplProtocol, session_id: str) -> None:
        settings = request.app.ctx.stream_clients.settings
        create = partial(
            ClientStream,
            caller=caller_of(request),
            silence_timeout=settings.silence,
            max_bytes=settings.socket.bytes,
            is_still_authorized=request.ctx.is_still_authorized,
            stop=_bind_stop(request),
        )
        await _serve_client(request, websocket, "stream", create)

    async def openpi(request: Request, websocket: WebsocketImplProtocol, session_id: str) -> None:
        await _serve_openpi(request, websocket)

    for handler, role in ((stream, Role.VIEWER), (openpi, Role.OPERATOR)):
        name = handler.__name__
        path = f"/sessions/<session_id:str>/{name}"
        blueprint.add_websocket_route(
            handler, path, name=name, error_format="json", ctx_role=role, ctx_is_handed_over=True
        )

    origins.install(blueprint)

    @blueprint.on_request
    async def find(request: Request) -> None:
        _prepare(request, get_visible_session(request, str(request.match_info["session_id"])))

    return blueprint


def create_openpi_app(app: App) -> App:
    """Create a second app for its own port with the first app's sessions, keys and limits: ``/`` and ``/healthz``."""
    settings = app.ctx.settings
    origins, session_id = Origins(settings.server.origins), settings.server.openpi_session
    second: App = Sanic(
        f"openpi-{secrets.token_hex(4)}", config=build_config(settings.limits), ctx=app.ctx, configure_logging=False
    )
    second.config.CONNECTIONS = app.config.CONNECTIONS
    install_middleware(second)
    app.ctx.guard.install(second)
    install_errors(second)

    async def openpi(request: Request, websocket: WebsocketImplProtocol) -> None:
        await _serve_openpi(request, websocket)

    async def healthz(request: Request) -> HTTPResponse:
        return text("OK\n")

    second.add_websocket_route(
        openpi, "/", name="openpi", error_format="json", ctx_role=Role.OPERATOR, ctx_is_handed_over=True
    )
    second.add_route(healthz, "/healthz", methods=["GET", "HEAD"], name="healthz", error_format="json", ctx_role=None)
    origins.install(second)

    # This app ends first and waits for its clients, so it also holds the robots.
    @second.before_server_stop
    async def hold(app: App) -> None:
        app.ctx.sessions.begin_close()

    @second.on_request
    async def find(request: Request) -> None:
        if request.route is not None and request.route.name.endswith(".openpi"):
            clients = request.app.ctx.stream_clients
            session = get_visible_session(request, session_id) if session_id else None
            _prepare(request, session or clients.find_only_session(caller_of(request)))

    return second


def _prepare(request: Request, session: AnySession) -> None:
    """Set the session before the upgrade, so that refusals are HTTP responses. A loading session is no refusal."""
    with suppress(SessionLoading):
        request.app.ctx.stream_clients.create_inference(session, "stream").get_link()
    request.ctx.session = session


def _bind_stop(request: Request) -> Callable[[str], Awaitable[list[str]]]:
    """Return a function that makes an emergency stop of the request's session for a reason."""
    return partial(request.app.ctx.sessions.emergency_stop, session_id=request.ctx.session.id)


async def _serve_openpi(request: Request, websocket: WebsocketImplProtocol) -> None:
    is_still_authorized, stop = request.ctx.is_still_authorized, _bind_stop(request)
    create = partial(OpenpiProtocol, is_still_authorized=is_still_authorized, stop=stop)
    await _serve_client(request, websocket, "openpi", create)


async def _serve_client(
    request: Request,
    websocket: WebsocketImplProtocol,
    protocol: str,
    create: Callable[[StreamSocket, DirectInference], ClientStream | OpenpiProtocol],
) -> None:
    """Take the connection over from Sanic and serve it, unless the caller has too many sockets."""
    clients, leave = request.app.ctx.stream_clients, None
    try:
        socket = StreamSocket.take_over(websocket, clients.settings.socket)
    except SocketClosed:
        return
    try:
        leave = clients.count_socket(caller_of(request))
        await create(socket, clients.create_inference(request.ctx.session, protocol)).serve()
        socket.close()
        await socket.wait_lost()
    except TooManyRequests as error:
        socket.close(1013, str(error))
        await socket.wait_lost()
    finally:
        if leave is not None:
            leave()
        socket.abort()
