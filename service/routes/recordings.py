"""Sessions are recorded; recordings are listed and removed."""

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.routes.answers import answer
from service.routes.body import read_body
from service.routes.context import Request
from service.routes.ownership import session_of
from service.routes.route import Route
from service.schemas import Recording, RecordRequest


async def record_session(request: Request, session_id: str) -> HTTPResponse:
    """Record every tick of a session from now on (from its next start when it does not move), or no more.

    The answer is what the session's `stats.recording` says from now on. A recording that ended becomes a dataset.
    """
    body = read_body(request, RecordRequest)
    figures = request.app.ctx.recordings.switch(session_of(request, session_id), body.on)
    return answer({"session_id": session_id, "recording": dict(figures)})


async def list_recordings(request: Request) -> HTTPResponse:
    """Recordings of the caller's sessions, newest first."""
    return answer(await request.app.ctx.recordings.list(caller_of(request).sees))


async def delete_recording(request: Request, name: str) -> HTTPResponse:
    """Remove a recording, and the dataset that was made of it. None is ever removed by itself."""
    await request.app.ctx.recordings.remove(name, caller_of(request).sees)
    return answer({"message": f"Recording {name} deleted"})


LIST = {"type": "array", "items": {"$ref": f"#/components/schemas/{Recording.__name__}"}}
ROUTES = (
    Route(
        "POST",
        "/sessions/{session_id}/record",
        record_session,
        "Recordings",
        body=RecordRequest,
        errors=(404, 409),
        role=Role.OPERATOR,
    ),
    Route("GET", "/recordings", list_recordings, "Recordings", LIST, role=Role.VIEWER),
    Route("DELETE", "/recordings/{name}", delete_recording, "Recordings", errors=(404, 409), role=Role.OPERATOR),
)
