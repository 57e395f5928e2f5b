"""Sessions are made, listed and deleted."""

from sanic import HTTPResponse

from service.auth.caller import ANYBODY, Caller, caller_of
from service.auth.roles import Role
from service.errors import ServiceError, SessionExists, UnknownSession
from service.routes.answers import answer
from service.routes.body import read_body, refused
from service.routes.context import Request
from service.routes.ownership import session_of, sessions_of
from service.routes.route import Route
from service.schemas import CreateSessionRequest, CreateSessionResponse, NewSessionRequest, SessionStatusResponse
from service.sessions.request import NewSession


async def list_sessions(request: Request) -> HTTPResponse:
    """All sessions, oldest first; those that failed stay listed for a while.

    In a cluster those of the other fronts come after, each with its `front` in `stats`, as they stood a moment ago.
    """
    # Not asdict, which copies every figure of every session while robots wait for their ticks.
    listed = [vars(session.status()) for session in sessions_of(request)]
    front = request.app.ctx.front
    if front is None:
        return answer(listed)
    try:
        return answer([*listed, *await front.list(caller_of(request))])
    except ServiceError as error:
        # What is known here is not kept back; and whoever asks learns that it is not all.
        return answer(listed, headers={"x-robojax-incomplete": str(error)})


async def create_session(request: Request) -> HTTPResponse:
    """Make a session: its rooms, and its policy loaded, compiled and warm. The answer comes when it is ready or failed.

    With a workspace_id all of its rooms (cameras and joints) are made in that workspace, otherwise in a new one.
    A client that gives up waiting finds the session in the list.
    """
    body = read_body(request, NewSessionRequest)
    caller = caller_of(request)
    request.app.ctx.creates.take(None if caller is ANYBODY else caller.name, request.ip)
    new = NewSession(
        session_id=body.session_id,
        policy_path=body.policy_path,
        transport_server_url=body.transport_server_url,
        camera_names=tuple(body.camera_names),
        workspace_id=body.workspace_id,
        policy_type=body.policy_type,
        language_instruction=body.language_instruction,
        rate=body.rate,
        revision=body.revision,
        joint_names=None if body.joint_names is None else tuple(body.joint_names),
        auto_update=body.auto_update,
        dry_run=body.dry_run,
        shadow_policy_path=body.shadow_policy_path,
        shadow_revision=body.shadow_revision,
        max_relative_target=body.max_relative_target,
        overlap=body.overlap,
        temporal_ensemble_coeff=body.temporal_ensemble_coeff,
        ask_ahead=body.ask_ahead,
        action_steps=body.action_steps,
        degrade=body.degrade,
        record=body.record,
        owner=caller.owner,
    )
    _check_id(request, caller, new.session_id)
    try:
        request.app.ctx.recordings.check(new)
        session = await request.app.ctx.sessions.create(new)
    except ServiceError as error:
        if error.status != 422:
            raise
        raise refused(error, body) from error
    rooms = session.rooms
    assert rooms is not None, "a session that is ready has rooms"
    return answer(
        {
            "workspace_id": rooms.workspace_id,
            "camera_room_ids": dict(rooms.cameras),
            "joint_input_room_id": rooms.joint_input,
            "joint_output_room_id": rooms.joint_output,
        }
    )


async def get_session_status(request: Request, session_id: str) -> HTTPResponse:
    """One session."""
    return answer(vars(session_of(request, session_id).status()))


async def delete_session(request: Request, session_id: str) -> HTTPResponse:
    """Stop the robot, leave the rooms, remove those that the session made."""
    sessions = request.app.ctx.sessions
    await sessions.delete(session_of(request, session_id).id)
    return answer({"message": f"Session {session_id} deleted", **sessions.caveat()})


def _check_id(request: Request, caller: Caller, session_id: str) -> None:
    """An id of somebody else's is taken, whatever became of the session; nothing more is told of it."""
    try:
        session = request.app.ctx.sessions.get(session_id)
    except UnknownSession:
        return
    if not caller.sees(session.new.owner):
        raise SessionExists(f"the session id {session_id!r} is taken; choose another")


LIST = {
    "items": {"$ref": "#/components/schemas/SessionStatusResponse"},
    "type": "array",
    "title": "Response List Sessions Sessions Get",
}
ROUTES = (
    Route("GET", "/sessions", list_sessions, "Sessions", LIST, is_specified=True, role=Role.VIEWER),
    Route(
        "POST",
        "/sessions",
        create_session,
        "Sessions",
        CreateSessionResponse,
        is_specified=True,
        body=NewSessionRequest,
        specified_body=CreateSessionRequest,
        errors=(409, 429, 500, 502, 503),
        is_patient=True,
        role=Role.OPERATOR,
    ),
    Route(
        "GET",
        "/sessions/{session_id}",
        get_session_status,
        "Sessions",
        SessionStatusResponse,
        errors=(404,),
        role=Role.VIEWER,
    ),
    Route(
        "DELETE",
        "/sessions/{session_id}",
        delete_session,
        "Sessions",
        is_specified=True,
        errors=(404, 409),
        role=Role.OPERATOR,
    ),
)
