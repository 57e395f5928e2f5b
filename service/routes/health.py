"""GET /, GET /health and GET /ready."""

import time
from typing import Any

from sanic import HTTPResponse

from service.auth.caller import STRANGER, caller_of
from service.routes.answers import answer
from service.routes.context import Request
from service.routes.ownership import sessions_of
from service.routes.route import Route
from service.stage import Stage


async def root(request: Request) -> HTTPResponse:
    """Whether the server answers."""
    return answer({"message": "robojax inference server is running", "status": "healthy"})


async def health_check(request: Request) -> HTTPResponse:
    """What runs here: sessions, device, versions, seconds since the start."""
    context = request.app.ctx
    # Where keys are wanted, whoever has none is told no more than that it runs.
    if caller_of(request) is STRANGER:
        active = sum(session.stage is not Stage.INTERRUPTED for session in context.sessions.list())
        return answer({"status": "healthy", "server_running": True, "active_sessions": active, "session_ids": []})
    sessions = sessions_of(request)
    # Of a server that ended: they run no policy and have no rooms until somebody restarts them.
    interrupted = sum(session.stage is Stage.INTERRUPTED for session in sessions)
    facts = context.sessions.engine.facts()
    models = context.models.list()
    device = facts["device"] or next((served.model.description["device"] for served in models), None)
    return answer(
        {
            "status": "healthy",
            "server_running": True,  # what clients of the transport server's own health look for
            "active_sessions": len(sessions) - interrupted,
            "interrupted_sessions": interrupted,
            "session_ids": [session.id for session in sessions],
            "device": device or ("loading" if facts["policies_loading"] else None),
            "engine": {"devices": facts["devices"], "promised_load": facts["promised_load"]},
            "models": [served.name for served in models],
            "versions": dict(context.versions),
            "uptime": round(time.monotonic() - context.started_at, 3),
        }
    )


async def readiness(request: Request) -> HTTPResponse:
    """Whether a new session can be made now, and what that would wait for: 200 when it can, 503 when it cannot.

    `loading` lists what is downloaded, read or compiled at this moment (one thing at a time: a new policy waits for
    it), with the seconds it will probably still take, or null where nothing of the kind was ever measured here.
    """
    context = request.app.ctx
    waiting_for = []
    if context.importing is not None and not context.importing.done():
        waiting_for.append("JAX is being imported")
    elif context.importing is not None and context.importing.exception() is not None:
        waiting_for.append("JAX cannot be imported; the server's log says more")
    if context.sessions.is_closing:
        waiting_for.append("the server is shutting down")
    facts: Any = context.sessions.engine.facts()
    if facts["loads_refused"] is not None:
        waiting_for.append(facts["loads_refused"])
    failed = [device["failed"] for device in facts["devices"]]
    if failed and all(failed):
        waiting_for.append(f"no device works: {failed[0]}")
    loading = [
        {
            "progress": session.progress.word,
            "progress_s": round(session.progress.seconds(), 1),
            "progress_left_s": None if (left := session.progress.left()) is None else round(left, 1),
            "progress_percent": session.progress.percent(),
        }
        for session in context.sessions.list()
        if session.stage is Stage.INITIALIZING
    ]
    found = {"ready": not waiting_for, "waiting_for": waiting_for, "loading": loading}
    if not waiting_for:
        return answer(found)
    return answer({"detail": "; ".join(waiting_for), "code": "not_ready"} | found, 503, {"retry-after": "1"})


ROUTES = (
    Route("GET", "/", root, "Health", is_specified=True, role=None),
    Route("GET", "/health", health_check, "Health", is_specified=True, role=None),
    Route("GET", "/ready", readiness, "Health", errors=(503,), role=None),
)
