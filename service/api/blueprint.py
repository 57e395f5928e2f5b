"""Route table on a Sanic app: admission, ids, metrics."""

import logging
import math
import re
import time
from collections.abc import Sequence

from sanic import Blueprint, HTTPResponse
from sanic.config import Config

from service.api import operations, pages, policies, sessions
from service.api.context import App, Request, Route
from service.errors import InvalidRequest
from service.http.bodies import request_id
from service.http.config import LimitSettings
from service.http.limits import Connections
from service.http.origins import Origins, add_security_headers
from service.http.protocol import TOO_MANY_BODY, DeadlineProtocol
from service.logging import bind_log_context, sanitize_text

log = logging.getLogger(__name__)

SPARE_CONNECTIONS = 16  # connections kept for emergency stops
ROUTES: tuple[Route, ...] = (
    *operations.HEALTH_ROUTES,
    *sessions.SESSION_ROUTES,
    *sessions.CONTROL_ROUTES,
    *policies.ACT_ROUTES,
    *sessions.ADJUST_ROUTES,
    *policies.CHECK_ROUTES,
    *policies.DEPLOYMENT_ROUTES,
    *operations.CLUSTER_ROUTES,
    *policies.MODEL_ROUTES,
    *operations.DEBUG_ROUTES,
    *sessions.RECORDING_ROUTES,
    *operations.METRICS_ROUTES,
    *operations.TICKET_ROUTES,
    *pages.DOCUMENT_ROUTES,
    *pages.DASHBOARD_ROUTES,
)
# RobotHub's page and clients send these requests to ``/api``; emergency stops are included for every client.
API_ROUTES = tuple(
    route for route in ROUTES if route.is_specified or route.is_stop or route.handler is sessions.get_session_status
) + tuple(pages.DOCUMENT_ROUTES)


def build_config(limits: LimitSettings) -> Config:
    """Build Sanic's own settings."""
    config = Config(env_prefix="")  # Sanic reads nothing from the environment
    config.update(
        REQUEST_MAX_SIZE=limits.max_body,
        RESPONSE_TIMEOUT=limits.answer_deadline,
        REQUEST_TIMEOUT=limits.request_deadline,  # Sanic restarts it with every byte; see service.http.protocol
        REQUEST_DEADLINE=limits.request_deadline,
        CONNECTIONS=Connections(
            limits.max_connections, limits.max_all_connections, limits.limit_local, SPARE_CONNECTIONS
        ),
        KEEP_ALIVE_TIMEOUT=15,
        GRACEFUL_SHUTDOWN_TIMEOUT=3,
        FALLBACK_ERROR_FORMAT="json",
        AUTO_EXTEND=False,
        MOTD=False,
        TOUCHUP=False,  # it rewrites Sanic's classes, so that a second app of the process does not start
    )
    return config


def build_blueprint(prefix: str, routes: Sequence[Route], origins: Origins) -> Blueprint:
    """Build the blueprint of these routes under a prefix."""
    blueprint = Blueprint(f"api{prefix.replace('/', '-')}")
    methods: dict[str, list[str]] = {}
    for route in routes:
        answered = [route.method, "HEAD"] if route.method == "GET" else [route.method]
        path = prefix + re.sub(r"{(\w+)}", r"<\1:str>", route.path)
        blueprint.add_route(
            route.handler,
            path,
            methods=answered,
            name=route.name,
            unquote=True,
            error_format="json",
            stream=route.is_streamed,
            ctx_is_patient=route.is_patient,
            ctx_role=route.role,
            ctx_is_stop=route.is_stop,
            ctx_is_own=route.is_own,
        )
        methods.setdefault(path, []).extend(answered)
    origins.install_cors(blueprint, {path: [*allowed, "OPTIONS"] for path, allowed in methods.items()})
    return blueprint


def install_middleware(app: App) -> None:
    """Give every request an id and its own time limit, and count it."""

    @app.on_request
    async def begin(request: Request) -> HTTPResponse | None:
        bind_log_context(request=request_id(request), session=None)
        request.ctx.began = time.perf_counter()
        if request.route is not None and isinstance(request.protocol, DeadlineProtocol):
            is_patient = getattr(request.route.ctx, "is_patient", False)
            request.protocol.response_timeout = math.inf if is_patient else app.ctx.settings.limits.answer_deadline
            if request.protocol.is_spare and not getattr(request.route.ctx, "is_stop", False):
                request.protocol.answer_and_close()
                headers = {"retry-after": "5"}
                return HTTPResponse(TOO_MANY_BODY, status=429, headers=headers, content_type="application/json")
        return None

    @app.on_response
    async def end(request: Request, response: HTTPResponse) -> None:
        response.headers["x-request-id"] = request_id(request)
        add_security_headers(response)
        route = _path_template(request.route.path) if request.route else "unknown"
        seconds = time.perf_counter() - getattr(request.ctx, "began", time.perf_counter())
        app.ctx.metrics.count_answer(request.method if request.route else "any", route, response.status, seconds)
        level = logging.DEBUG if request.method in ("GET", "HEAD", "OPTIONS") else logging.INFO
        log.log(level, "%s %s: %d in %.1f ms", request.method, request.path, response.status, seconds * 1e3)


def install_path_check(app: App) -> None:
    """Answer 422 if a part of the path has a NUL character, which PostgreSQL cannot store."""

    @app.on_request
    async def check_path(request: Request) -> None:
        for name, value in request.match_info.items():
            if isinstance(value, str) and "\0" in value:
                found = sanitize_text(value.replace("\0", "\\0"))
                raise InvalidRequest(f"{name} is {found!r}; ids have no NUL character: remove it", ("path", name))


def _path_template(path: str) -> str:
    """Convert ``sessions/<session_id:str>`` to the documents' form."""
    return "/" + re.sub(r"<(\w+)[^>]*>", r"{\1}", path).strip("/")
