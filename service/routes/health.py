"""GET / and GET /health."""

import time

from sanic import HTTPResponse

from service.routes.answers import answer
from service.routes.context import Request
from service.routes.route import Route


async def root(request: Request) -> HTTPResponse:
    """Whether the server answers."""
    return answer({"message": "robojax inference server is running", "status": "healthy"})


async def health_check(request: Request) -> HTTPResponse:
    """What runs here: sessions, device, versions, seconds since the start."""
    context = request.app.ctx
    ids = [session.id for session in context.sessions.list()]
    facts = context.sessions.engine.facts()
    models = context.models.list()
    device = facts["device"] or next((served.model.description["device"] for served in models), None)
    return answer(
        {
            "status": "healthy",
            "server_running": True,  # what clients of the transport server's own health look for
            "active_sessions": len(ids),
            "session_ids": ids,
            "device": device or ("loading" if facts["policies_loading"] else None),
            "models": [served.name for served in models],
            "versions": dict(context.versions),
            "uptime": round(time.monotonic() - context.started_at, 3),
        }
    )


ROUTES = (
    Route("GET", "/", root, "Health", is_specified=True),
    Route("GET", "/health", health_check, "Health", is_specified=True),
)
