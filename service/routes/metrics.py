"""GET /metrics."""

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.metrics import CONTENT_TYPE
from service.routes.context import Request
from service.routes.ownership import sessions_of
from service.routes.route import Route


async def get_metrics(request: Request) -> HTTPResponse:
    """Figures in Prometheus's text format: requests, and counters and latencies of every session of the caller's."""
    own = None if caller_of(request).sees_all else {session.id for session in sessions_of(request)}
    return HTTPResponse(await request.app.ctx.metrics.text(own), content_type=CONTENT_TYPE)


ROUTES = (
    Route("GET", "/metrics", get_metrics, "Debug", {"type": "string"}, content_type="text/plain", role=Role.VIEWER),
)
