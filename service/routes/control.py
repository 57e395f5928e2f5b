"""A session's robot is started and stopped."""

import logging

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.routes.answers import answer
from service.routes.context import Request
from service.routes.ownership import session_of
from service.routes.reason import REASON, reason_in
from service.routes.route import Route
from service.sessions.sessions import Listed, Sessions

log = logging.getLogger(__name__)


async def start_inference(request: Request, session_id: str) -> HTTPResponse:
    """Let the policy move the robot, as soon as every camera and every joint is fresh."""
    sessions = request.app.ctx.sessions
    return _moved(sessions, "Inference started", await sessions.start(session_of(request, session_id).id))


async def stop_inference(request: Request, session_id: str) -> HTTPResponse:
    """Hold the robot where it is."""
    sessions = request.app.ctx.sessions
    return _moved(sessions, "Inference stopped", await sessions.stop(session_of(request, session_id).id))


async def restart_inference(request: Request, session_id: str) -> HTTPResponse:
    """Stop and start in one: plans and failures of before are forgotten.

    One that is interrupted, because its server ended, loads its policy and joins its rooms anew; it is `ready` then and
    waits for its start.
    """
    sessions = request.app.ctx.sessions
    return _moved(sessions, "Inference restarted", await sessions.restart(session_of(request, session_id).id))


async def emergency_stop_session(request: Request, session_id: str) -> HTTPResponse:
    """Stop this robot now and latch it: it needs a reset and a start before it moves again.

    The body may give a reason, ``{"reason": "..."}``. Whatever else is sent, whatever the key's role, and whosever
    the session is, the stop happens.
    """
    sessions = request.app.ctx.sessions
    await sessions.emergency_stop(await reason_in(request), session_id)
    log.warning("emergency stop of session %s by %s", session_id, caller_of(request).name)
    return answer({"message": f"Emergency stop of session {session_id}", "stopped": [session_id], **sessions.caveat()})


def _moved(sessions: Sessions, what: str, session: Listed) -> HTTPResponse:
    message = f"{what} for session {session.id}"
    return answer({"message": message, "session_id": session.id, "status": str(session.stage), **sessions.caveat()})


ROUTES = (
    *(
        Route(
            "POST",
            f"/sessions/{{session_id}}/{move}",
            handler,
            "Control",
            is_specified=True,
            errors=(404, 409),
            role=Role.OPERATOR,
        )
        for move, handler in (("start", start_inference), ("stop", stop_inference))
    ),
    Route(
        "POST",
        "/sessions/{session_id}/restart",
        restart_inference,
        "Control",
        is_specified=True,
        errors=(404, 409, 429, 500, 502),
        is_patient=True,
        role=Role.OPERATOR,
    ),
    Route(
        "POST",
        "/sessions/{session_id}/emergency_stop",
        emergency_stop_session,
        "Control",
        optional_body=REASON,
        errors=(404,),
        is_stop=True,
        is_streamed=True,
        role=Role.VIEWER,
    ),
)
