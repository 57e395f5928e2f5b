"""GET /metrics."""

import asyncio
import re

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.metrics import CONTENT_TYPE
from service.routes.context import Request
from service.routes.ownership import sessions_of
from service.routes.route import Route

_SESSION = re.compile(rb'[{,]session="([^"]*)"')


async def get_metrics(request: Request) -> HTTPResponse:
    """Figures in Prometheus's text format: requests, and counters and latencies of every session of the caller's."""
    own = None if caller_of(request).sees_all else {session.id.encode() for session in sessions_of(request)}
    metrics = request.app.ctx.metrics

    def written() -> bytes:
        text = metrics.text()
        return text if own is None else b"".join(line for line in text.splitlines(keepends=True) if _is_of(line, own))

    # Away from the event loop: no tick waits for a look at figures. A thread that is there: beginning one takes time.
    return HTTPResponse(await asyncio.to_thread(written), content_type=CONTENT_TYPE)


def _is_of(line: bytes, own: set[bytes]) -> bool:
    found = _SESSION.search(line)
    return found is None or found[1] in own


ROUTES = (
    Route("GET", "/metrics", get_metrics, "Debug", {"type": "string"}, content_type="text/plain", role=Role.VIEWER),
)
