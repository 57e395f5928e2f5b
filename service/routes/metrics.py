"""GET /metrics."""

from sanic import HTTPResponse

from service.metrics import CONTENT_TYPE
from service.routes.context import Request
from service.routes.route import Route


async def get_metrics(request: Request) -> HTTPResponse:
    """Figures in Prometheus's text format: requests, and every session's counters and latencies."""
    return HTTPResponse(request.app.ctx.metrics.text(), content_type=CONTENT_TYPE)


ROUTES = (Route("GET", "/metrics", get_metrics, "Debug", {"type": "string"}, content_type="text/plain"),)
