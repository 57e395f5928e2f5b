"""A session's robot is started and stopped."""

from sanic import HTTPResponse

from service.routes.answers import answer
from service.routes.context import Request
from service.routes.route import Route
from service.sessions import Session


async def start_inference(request: Request, session_id: str) -> HTTPResponse:
    """Let the policy move the robot, as soon as every camera and every joint is fresh."""
    return _moved("Inference started", await request.app.ctx.sessions.start(session_id))


async def stop_inference(request: Request, session_id: str) -> HTTPResponse:
    """Hold the robot where it is."""
    return _moved("Inference stopped", await request.app.ctx.sessions.stop(session_id))


async def restart_inference(request: Request, session_id: str) -> HTTPResponse:
    """Stop and start in one: plans and failures of before are forgotten."""
    return _moved("Inference restarted", await request.app.ctx.sessions.restart(session_id))


def _moved(what: str, session: Session) -> HTTPResponse:
    return answer(
        {"message": f"{what} for session {session.id}", "session_id": session.id, "status": str(session.stage)}
    )


ROUTES = tuple(
    Route("POST", f"/sessions/{{session_id}}/{move}", handler, "Control", is_specified=True, errors=(404, 409))
    for move, handler in (("start", start_inference), ("stop", stop_inference), ("restart", restart_inference))
)
