"""Looking inside a running server, and the emergency stop."""

import logging
import os
import platform
import threading
import time
from typing import Any

import psutil
from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.errors import InvalidRequest, UnknownSession
from service.routes.answers import answer
from service.routes.context import Request
from service.routes.ownership import session_of, sessions_of
from service.routes.reason import REASON, reason_in
from service.routes.route import Query, Route
from service.stage import Stage
from service.transport.address import Kind

log = logging.getLogger(__name__)

FOLDERS = {
    "keys_file",
    "jwt_secret_file",
    "transport_key_file",
    "database",
    "compile_cache",
    "policy_cache",
    "policy_roots",
    "limits",
    "log_file",
    "models",
    "state",
    "recordings",
    "webhook_secret_file",
    "registry_token_file",
    "registry_watch",
    "registry_jobs",
}
LEVELS = ("debug", "info", "warning", "error")


async def emergency_stop(request: Request) -> HTTPResponse:
    """Stop every robot now and latch it: each session needs a reset and a start before it moves again.

    The body may give a reason, ``{"reason": "..."}``. Whatever else is sent, and whatever the key's role, the stop
    happens, for the sessions of others too; `stopped` names those that the caller may see. Where servers
    share a database, the robots of all are stopped; `fronts_not_reached` names those of which that is not known.
    """
    sessions = request.app.ctx.sessions
    reason = await reason_in(request)
    stopped = await sessions.emergency_stop(reason)
    own = {session.id for session in sessions_of(request)}
    log.warning("emergency stop of %d sessions by %s", len(stopped), caller_of(request).name)
    seen = [one for one in stopped if one in own]
    elsewhere: dict[str, Any] = {}
    if request.app.ctx.others is not None:
        elsewhere = await request.app.ctx.others.stop_all(request, reason)
        seen += elsewhere.pop("stopped", [])
    count = len(stopped) + elsewhere.pop("count", 0)
    told = {"message": f"Emergency stop of {count} sessions", "count": count}
    return answer({**told, "stopped": seen, **elsewhere, **sessions.caveat()})


async def debug_reset_session(request: Request, session_id: str) -> HTTPResponse:
    """Take the latch of an emergency stop off; nothing moves by it."""
    sessions = request.app.ctx.sessions
    try:
        session = await sessions.reset(session_of(request, session_id).id)
    except UnknownSession:
        # A latch stays with the id of a session that was deleted, and keeps the next one from starting.
        caller, front = caller_of(request), request.app.ctx.front
        is_reset = await sessions.forget_latch(session_id, caller.sees)
        if front is not None:
            is_reset = await front.forget_latch(session_id, caller) or is_reset
        if not is_reset:
            raise
        told = {"message": f"Session {session_id} reset", "session_id": session_id, "status": str(Stage.DELETED)}
        return answer({**told, **sessions.caveat()})
    message = f"Session {session.id} reset"
    return answer({"message": message, "session_id": session.id, "status": str(session.stage), **sessions.caveat()})


async def get_session_queue_info(request: Request, session_id: str) -> HTTPResponse:
    """What a session is about to do: its actions with their due times, rates, and the age of what it sees."""
    return answer(dict(session_of(request, session_id).queue()))


async def get_system_info(request: Request) -> HTTPResponse:
    """The process and the machine."""
    context = request.app.ctx
    rooms = None
    if context.table is not None:
        rooms = {str(kind): sum(place.kind is kind for place in context.table.rooms) for kind in Kind}
    return answer(
        {
            "versions": dict(context.versions),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "pid": os.getpid(),
            "threads": threading.active_count(),
            "memory_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
            "uptime": round(time.monotonic() - context.started_at, 3),
            "sessions": {session.id: str(session.stage) for session in context.sessions.list()},
            "engine": context.sessions.engine.facts(),
            "embedded_rooms": rooms,
            # Folders are this machine's own business.
            "settings": context.settings.model_dump(mode="json", exclude=FOLDERS),
            "models": [served.name for served in context.models.list()],
        }
    )


async def get_recent_logs(request: Request) -> HTTPResponse:
    """The newest lines of the log, oldest first, without secrets and folders of the machine."""
    asked = request.get_args(keep_blank_values=True)
    limit = _limit(str(asked.get("limit", "100")))
    level = str(asked.get("level", "debug"))
    if level not in LEVELS:
        raise InvalidRequest(f"level should be one of {', '.join(LEVELS)}", ("query", "level"))
    number = logging.getLevelNamesMapping()[level.upper()]
    return answer({"logs": [dict(line) for line in request.app.ctx.logs.newest(limit, number)]})


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 100_000):
        raise InvalidRequest("limit should be a whole number from 1 to 100000", ("query", "limit"))
    return int(text)


ROUTES = (
    Route(
        "POST",
        "/debug/emergency_stop",
        emergency_stop,
        "Debug",
        optional_body=REASON,
        is_stop=True,
        is_streamed=True,
        role=Role.VIEWER,
    ),
    Route("GET", "/debug/system", get_system_info, "Debug"),
    Route(
        "GET",
        "/debug/logs",
        get_recent_logs,
        "Debug",
        query=(
            Query("limit", {"type": "integer", "minimum": 1, "maximum": 100_000, "default": 100}, "How many lines."),
            Query("level", {"type": "string", "enum": list(LEVELS), "default": "debug"}, "The least severe to show."),
        ),
    ),
    Route(
        "POST",
        "/debug/sessions/{session_id}/reset",
        debug_reset_session,
        "Debug",
        errors=(404, 409),
        role=Role.OPERATOR,
    ),
    Route("GET", "/debug/sessions/{session_id}/queue", get_session_queue_info, "Debug", errors=(404,)),
)
