"""GET /metrics."""

import re

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.metrics import CONTENT_TYPE
from service.routes.context import Request
from service.routes.ownership import sessions_of
from service.routes.route import Route
from service.worker import call_in_thread

_SESSION = re.compile(rb'[{,]session="([^"]*)"')


async def get_metrics(request: Request) -> HTTPResponse:
    """Figures in Prometheus's text format: requests, and counters and latencies of every session of the caller's."""
    own = None if caller_of(request).sees_all else {session.id.encode() for session in sessions_of(request)}
    metrics = request.app.ctx.metrics

    def written() -> bytes:
        text = metrics.text()
        return text if own is None else b"".join(line for line in text.splitlines(keepends=True) if _is_of(line, own))

    # Below the event loop, and away from it: no tick waits for a look at figures.
    return HTTPResponse(await call_in_thread(written, "metrics", niceness=5), content_type=CONTENT_TYPE)


def _is_of(line: bytes, own: set[bytes]) -> bool:
    found = _SESSION.search(line)
    return found is None or found[1] in own


ROUTES = (
    Route("GET", "/metrics", get_metrics, "Debug", {"type": "string"}, content_type="text/plain", role=Role.VIEWER),
)
