"""Health, readiness, metrics, debug, tickets, emergency stop, cluster."""

import asyncio
import logging
import os
import platform
import threading
import time
from typing import Any

from sanic import HTTPResponse

from service.api.context import Query, Request, Routes, get_visible_session, list_visible_sessions, session_response
from service.api.lists import Rows, answer_page, page_query, take_page
from service.api.metrics import CONTENT_TYPE
from service.api.schemas import AdoptRequest
from service.auth.caller import STRANGER, Role, caller_of
from service.auth.tokens import LIFETIME
from service.errors import InvalidRequest, MoveRefused, UnknownSession
from service.http.bodies import REASON, json_response, read_body, read_empty_body, read_reason
from service.sessions.base_session import describe_progress
from service.stage import Stage
from service.transport.address import Kind

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")
HEALTH_ROUTES = Routes("Health")
CLUSTER_ROUTES = Routes("Cluster")
DEBUG_ROUTES = Routes("Debug")
METRICS_ROUTES = Routes("Debug")
TICKET_ROUTES = Routes("Access")


@DEBUG_ROUTES.add(
    "POST", "/debug/emergency_stop", optional_body=REASON, is_stop=True, is_streamed=True, role=Role.VIEWER
)
async def emergency_stop(request: Request) -> HTTPResponse:
    """Stop every robot now and latch it: each session needs a reset and a start before it moves again.

    The body may give a reason, ``{"reason": "..."}``. No other content and no role of the key prevents the stop, which
    includes sessions of other owners; `stopped` lists the sessions that the caller may see. If servers share a
    database, the robots of all servers are stopped; `fronts_not_reached` lists the servers that did not confirm it.
    """
    sessions = request.app.ctx.sessions
    reason = await read_reason(request)
    stop_elsewhere = request.app.ctx.stop_elsewhere
    # Other servers stop at once, without waiting for the disk and the database of this server.
    elsewhere_stop = None if stop_elsewhere is None else stop_elsewhere(request, reason)
    stopped = await sessions.emergency_stop(reason)
    own = {session.id for session in list_visible_sessions(request)}
    log.warning("emergency stop of %d sessions by %s", len(stopped), caller_of(request).name)
    seen = [one for one in stopped if one in own]
    elsewhere: dict[str, Any] = {} if elsewhere_stop is None else await asyncio.shield(elsewhere_stop)
    seen += elsewhere.pop("stopped", [])
    count = len(stopped) + elsewhere.pop("count", 0)
    about = {"message": f"Emergency stop of {count} sessions", "count": count}
    return json_response({**about, "stopped": seen, **elsewhere, **sessions.get_warning()})


@DEBUG_ROUTES.add("GET", "/debug/system")
async def get_system_info(request: Request) -> HTTPResponse:
    """The process and the machine."""
    import psutil

    context = request.app.ctx
    rooms = None
    if context.room_table is not None:
        rooms = {str(kind): sum(place.kind is kind for place in context.room_table.rooms) for kind in Kind}
    return json_response(
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
            "engine": context.sessions.engine.get_stats(),
            "embedded_rooms": rooms,
            "settings": context.settings.public_values(),
            "models": [served.name for served in context.models.list()],
        }
    )


@DEBUG_ROUTES.add(
    "GET",
    "/debug/logs",
    query=(
        *page_query("number"),
        Query("level", {"type": "string", "enum": list(LEVELS), "default": "debug"}, "The least severe to show."),
    ),
)
async def get_recent_logs(request: Request) -> HTTPResponse:
    """The newest lines of the log, oldest first, without secrets and folders of the machine."""
    level = str(request.get_args(keep_blank_values=True).get("level", "debug"))
    if level not in LEVELS:
        raise InvalidRequest(f"level should be {', '.join(LEVELS[:-1])} or {LEVELS[-1]}", ("query", "level"))
    logs, severity = request.app.ctx.logs, logging.getLevelNamesMapping()[level.upper()]

    def build(limit: int, before: str | None) -> tuple[Rows, str | None]:
        if before is not None and not (before.isascii() and before.isdigit()):
            raise InvalidRequest(f"before is {before[:20]!r}; wanted the number of a line", ("query", "before"))
        lines = logs.newest(severity, None if before is None else int(before[:18]))
        page, following = take_page(lines, lambda line: str(line["number"]), limit, None)
        return page[::-1], following

    return await answer_page(request, request.app.ctx.list_worker, build, "logs")


@DEBUG_ROUTES.add("POST", "/debug/sessions/{session_id}/reset", errors=(404, 409), role=Role.OPERATOR)
async def debug_reset_session(request: Request, session_id: str) -> HTTPResponse:
    """Reset the latch of an emergency stop; nothing moves."""
    sessions = request.app.ctx.sessions
    try:
        session = get_visible_session(request, session_id)
        read_empty_body(request)
        session = await sessions.reset(session.id)
    except UnknownSession:
        # The id of a deleted session keeps its latch, which stops the next session with this id.
        caller, peer_sessions = caller_of(request), request.app.ctx.peer_sessions
        is_reset = await sessions.clear_latch(session_id, caller.sees)
        if peer_sessions is not None:
            is_reset = await peer_sessions.forget_latch(session_id, caller) or is_reset
        if not is_reset:
            raise
        about = {"message": f"Session {session_id} reset", "session_id": session_id, "status": str(Stage.DELETED)}
        return json_response({**about, **sessions.get_warning()})
    return session_response(request, f"Session {session.id} reset", session)


@DEBUG_ROUTES.add("GET", "/debug/sessions/{session_id}/queue", errors=(404,))
async def get_session_queue_info(request: Request, session_id: str) -> HTTPResponse:
    """Queued actions of a session with their due times, rates, and the ages of its inputs."""
    return json_response(dict(get_visible_session(request, session_id).queue()))


@HEALTH_ROUTES.add("GET", "/", is_specified=True, role=None)
async def root(request: Request) -> HTTPResponse:
    """Whether the server answers."""
    return json_response({"message": "robojax inference server is running", "status": "healthy"})


@HEALTH_ROUTES.add("GET", "/health", is_specified=True, role=None)
async def health_check(request: Request) -> HTTPResponse:
    """What runs here: sessions, device, versions, seconds since the start."""
    context = request.app.ctx
    # If keys are required, a caller without a key sees only that the server runs.
    if caller_of(request) is STRANGER:
        active = sum(session.stage is not Stage.INTERRUPTED for session in context.sessions.list())
        return json_response(
            {"status": "healthy", "server_running": True, "active_sessions": active, "session_ids": []}
        )
    sessions = list_visible_sessions(request)
    interrupted = sum(session.stage is Stage.INTERRUPTED for session in sessions)
    facts = context.sessions.engine.get_stats()
    models = context.models.list()
    device = facts["device"] or next((served.description["device"] for served in models), None)
    return json_response(
        {
            "status": "healthy",
            "server_running": True,  # clients of the transport server read this field
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


@HEALTH_ROUTES.add("GET", "/ready", errors=(503,), role=None)
async def readiness(request: Request) -> HTTPResponse:
    """Whether a new session can be created now (200), or why not (503).

    `loading` lists the policies that are downloaded, read or compiled now, one at a time, with the estimated remaining
    seconds, or null if this server has no estimate.
    """
    context = request.app.ctx
    waiting_for = []
    if context.engines is not None and not context.engines.members:
        waiting_for.append(context.engines.read_trouble() or "an engine is being started")
    if context.sessions.is_closing:
        waiting_for.append("the server is shutting down")
    facts: Any = context.sessions.engine.get_stats()
    failed = [device["failed"] for device in facts["devices"]]
    if failed and all(failed):
        waiting_for.append(f"no device works: {failed[0]}")
    loading = [
        describe_progress(session.progress)
        for session in context.sessions.list()
        if session.stage is Stage.INITIALIZING
    ]
    found = {"ready": not waiting_for, "waiting_for": waiting_for, "loading": loading}
    if not waiting_for:
        return json_response(found)
    return json_response({"detail": "; ".join(waiting_for), "code": "not_ready"} | found, 503, {"retry-after": "1"})


@CLUSTER_ROUTES.add("GET", "/cluster", role=Role.VIEWER)
async def cluster(request: Request) -> HTTPResponse:
    """Engines with their load, other servers, and what is wrong; null where there are none."""
    context = request.app.ctx
    return json_response(
        {
            "engines": None if context.engines is None else context.engines.get_stats(),
            "front": None if context.peer_sessions is None else context.peer_sessions.facts(),
        }
    )


@CLUSTER_ROUTES.add(
    "POST",
    "/sessions/{session_id}/adopt",
    optional_body=AdoptRequest.model_json_schema(),
    is_own=True,
    errors=(404, 409, 503),
    role=Role.OPERATOR,
)
async def adopt_session(request: Request, session_id: str) -> HTTPResponse:
    """Take over a session of a server that died. It is `interrupted` here until it is restarted, and moves nothing.

    A server without a heartbeat may still move its robots, so the request is refused if that server may still run. The
    body `{"force": true}` confirms that a person has checked that the server is off.
    """
    peer_sessions = request.app.ctx.peer_sessions
    if peer_sessions is None:
        get_visible_session(request, session_id)  # raises UnknownSession for sessions of other owners
        raise MoveRefused("this server shares its sessions with no other server; --database names a shared database")
    body = read_body(request, AdoptRequest) if request.body else AdoptRequest()
    session = await peer_sessions.adopt(session_id, caller_of(request), force=body.force)
    return json_response(
        {"message": f"Session {session_id} adopted", "session_id": session_id, "status": str(session.stage)}
    )


_TICKET = {
    "type": "object",
    "properties": {"ticket": {"type": "string"}, "expires_in": {"type": "integer", "description": "seconds"}},
    "required": ["ticket", "expires_in"],
}


@TICKET_ROUTES.add("POST", "/tickets", answer=_TICKET, role=Role.VIEWER)
async def make_ticket(request: Request) -> HTTPResponse:
    """A ticket admits one GET or WebSocket request with `?ticket=...` within 30 s, as the caller who received it.

    A ticket is part of a URL, which proxies log, so it is valid once and only for requests that change nothing.
    """
    read_empty_body(request)
    ticket = request.app.ctx.guard.admissions.issue_ticket(request.ctx.admission)
    return json_response({"ticket": ticket, "expires_in": int(LIFETIME)})


@METRICS_ROUTES.add("GET", "/metrics", answer={"type": "string"}, content_type="text/plain", role=Role.VIEWER)
async def get_metrics(request: Request) -> HTTPResponse:
    """Figures in Prometheus's text format: requests, and counters and latencies of the caller's sessions."""
    own = None if caller_of(request).sees_all else {session.id for session in list_visible_sessions(request)}
    return HTTPResponse(await request.app.ctx.metrics.text(own), content_type=CONTENT_TYPE)
