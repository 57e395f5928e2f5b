"""The engines and fronts that this server shares with others, and sessions whose front died."""

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.errors import MoveRefused
from service.routes.answers import answer
from service.routes.body import read_body
from service.routes.context import Request
from service.routes.ownership import session_of
from service.routes.route import Route
from service.schemas import AdoptRequest


async def cluster(request: Request) -> HTTPResponse:
    """Engines with their load, other fronts, and what is wrong; null where engines, or sessions, are its own."""
    context = request.app.ctx
    return answer(
        {
            "engines": None if context.engines is None else context.engines.facts(),
            "front": None if context.front is None else context.front.facts(),
        }
    )


async def adopt_session(request: Request, session_id: str) -> HTTPResponse:
    """Take over a session of a front that died. It is `interrupted` here until it is restarted, and moves nothing.

    A front without a heartbeat may still move its robots: where it is not sure that it ended, this is
    refused. The body `{"force": true}` says that somebody has seen that it is off.
    """
    front = request.app.ctx.front
    if front is None:
        session_of(request, session_id)  # what is not theirs is not there
        raise MoveRefused("this server shares its sessions with no other one; --database names one for all")
    body = read_body(request, AdoptRequest) if request.body else AdoptRequest()
    session = await front.adopt(session_id, caller_of(request), force=body.force)
    return answer({"message": f"Session {session_id} adopted", "session_id": session_id, "status": str(session.stage)})


ROUTES = (
    Route("GET", "/cluster", cluster, "Cluster", role=Role.VIEWER),
    Route(
        "POST",
        "/sessions/{session_id}/adopt",
        adopt_session,
        "Cluster",
        optional_body=AdoptRequest.model_json_schema(),
        is_own=True,
        errors=(404, 409, 503),
        role=Role.OPERATOR,
    ),
)
