"""A session's robot is started and stopped."""

import logging

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.routes.answers import answer
from service.routes.context import Request
from service.routes.ownership import session_of
from service.routes.reason import REASON, reason_of
from service.routes.route import Route
from service.sessions import Listed

log = logging.getLogger(__name__)


async def start_inference(request: Request, session_id: str) -> HTTPResponse:
    """Let the policy move the robot, as soon as every camera and every joint is fresh."""
    return _moved("Inference started", await request.app.ctx.sessions.start(session_of(request, session_id).id))


async def stop_inference(request: Request, session_id: str) -> HTTPResponse:
    """Hold the robot where it is."""
    return _moved("Inference stopped", await request.app.ctx.sessions.stop(session_of(request, session_id).id))


async def restart_inference(request: Request, session_id: str) -> HTTPResponse:
    """Stop and start in one: plans and failures of before are forgotten."""
    return _moved("Inference restarted", await request.app.ctx.sessions.restart(session_of(request, session_id).id))


async def emergency_stop_session(request: Request, session_id: str) -> HTTPResponse:
    """Stop this robot now and latch it: it needs a reset and a start before it moves again.

    The body may give a reason, ``{"reason": "..."}``. Whatever else is sent, whatever the key's role, and whosever
    the session is, the stop happens.
    """
    await request.app.ctx.sessions.emergency_stop(reason_of(request.body), session_id)
    log.warning("emergency stop of session %s by %s", session_id, caller_of(request).name)
    return answer({"message": f"Emergency stop of session {session_id}", "stopped": [session_id]})


def _moved(what: str, session: Listed) -> HTTPResponse:
    return answer(
        {"message": f"{what} for session {session.id}", "session_id": session.id, "status": str(session.stage)}
    )


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
        for move, handler in (("start", start_inference), ("stop", stop_inference), ("restart", restart_inference))
    ),
    Route(
        "POST",
        "/sessions/{session_id}/emergency_stop",
        emergency_stop_session,
        "Control",
        optional_body=REASON,
        errors=(404,),
        role=Role.VIEWER,
    ),
)
