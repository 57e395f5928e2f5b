"""What a session's policy is told, how its chunks are joined and when it asks for them, while its robot moves."""

from sanic import HTTPResponse

from service.auth.roles import Role
from service.errors import InvalidRequest
from service.routes.answers import answer
from service.routes.body import read_body, refused
from service.routes.context import Request
from service.routes.ownership import session_of
from service.routes.route import Route
from service.schemas import AdjustRequest


async def adjust_session(request: Request, session_id: str) -> HTTPResponse:
    """Tell the policy something else, join chunks in another way or ask for them at other moments: from the next chunk
    on, and no tick is missed.

    What is left out stays as it is, null goes back to the default. It is kept as what the session was made with is.
    """
    sessions = request.app.ctx.sessions
    session = session_of(request, session_id)
    body = read_body(request, AdjustRequest)
    try:
        adjusted = await sessions.adjust(session.id, {name: getattr(body, name) for name in body.model_fields_set})
    except InvalidRequest as error:
        raise refused(error, body) from error
    return answer(
        {
            "message": f"Session {session.id} adjusted",
            "session_id": session.id,
            **adjusted.joining(),
            "language_instruction": adjusted.new.language_instruction,
            **sessions.caveat(),
        }
    )


ROUTES = (
    Route(
        "PATCH",
        "/sessions/{session_id}",
        adjust_session,
        "Control",
        body=AdjustRequest,
        errors=(404, 409),
        role=Role.OPERATOR,
    ),
)
