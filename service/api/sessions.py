"""Session routes: create, control, adjust, record."""

import logging

from sanic import HTTPResponse

from service.api.context import Request, Routes, get_visible_session, list_visible_sessions, session_response
from service.api.lists import Rows, answer_page, page_query, take_page
from service.api.schemas import (
    AdjustRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    NewSessionRequest,
    Recording,
    RecordRequest,
    list_schema,
)
from service.auth.caller import ANYBODY, Caller, Role, caller_of
from service.errors import InvalidRequest, ServiceError, SessionExists, UnknownSession
from service.http.bodies import REASON, json_response, read_body, read_empty_body, read_reason, to_invalid_body
from service.sessions.base_session import SessionStatusResponse, describe_overlap
from service.sessions.request import NewSession

_SESSION_LIST = {
    "items": {"$ref": "#/components/schemas/SessionStatusResponse"},
    "type": "array",
    "title": "Response List Sessions Sessions Get",
}
SESSION_ROUTES = Routes("Sessions")
CONTROL_ROUTES = Routes("Control")
RECORDING_ROUTES = Routes("Recordings")
ADJUST_ROUTES = Routes("Control")


@SESSION_ROUTES.add("GET", "/sessions", answer=_SESSION_LIST, is_specified=True, role=Role.VIEWER)
async def list_sessions(request: Request) -> HTTPResponse:
    """All sessions, oldest first; failed sessions stay listed for a while.

    In a cluster, the sessions of other servers follow, each with its `front` in `stats` and its state of a moment ago.
    """
    listed = [vars(session.status()) for session in list_visible_sessions(request)]
    peer_sessions = request.app.ctx.peer_sessions
    if peer_sessions is None:
        return json_response(listed)
    try:
        return json_response([*listed, *await peer_sessions.list(caller_of(request))])
    except ServiceError as error:
        # Other servers may be unreachable: list the sessions known here, and say that the list is incomplete.
        return json_response(listed, headers={"x-robojax-incomplete": str(error)})


@SESSION_ROUTES.add(
    "POST",
    "/sessions",
    answer=CreateSessionResponse,
    is_specified=True,
    body=NewSessionRequest,
    specified_body=CreateSessionRequest,
    errors=(409, 429, 500, 502, 503),
    is_patient=True,
    role=Role.OPERATOR,
)
async def create_session(request: Request) -> HTTPResponse:
    """Make a session: its rooms, and its policy loaded, compiled and warm. The answer comes when it is ready or failed.

    With a workspace_id all of its rooms (cameras and joints) are made in that workspace, otherwise in a new one.
    A client that gives up waiting finds the session in the list.
    """
    body = read_body(request, NewSessionRequest)
    caller = caller_of(request)
    request.app.ctx.create_limiter.take(None if caller is ANYBODY else caller.name, request.ip)
    new = NewSession(**dict(body), owner=caller.owner)
    _check_id(request, caller, new.session_id)
    try:
        request.app.ctx.recordings.check_request(new)
        session = await request.app.ctx.sessions.create(new)
    except ServiceError as error:
        if error.status != 422:
            raise
        raise to_invalid_body(error, body) from error
    assert session.rooms is not None, "a session that is ready has rooms"
    return json_response(session.describe_rooms())


@SESSION_ROUTES.add("GET", "/sessions/{session_id}", answer=SessionStatusResponse, errors=(404,), role=Role.VIEWER)
async def get_session_status(request: Request, session_id: str) -> HTTPResponse:
    """One session."""
    return json_response(vars(get_visible_session(request, session_id).status()))


@SESSION_ROUTES.add("DELETE", "/sessions/{session_id}", is_specified=True, errors=(404, 409), role=Role.OPERATOR)
async def delete_session(request: Request, session_id: str) -> HTTPResponse:
    """Stop the robot, leave the rooms, and remove the rooms that the session made."""
    sessions = request.app.ctx.sessions
    await sessions.delete(get_visible_session(request, session_id).id)
    return json_response({"message": f"Session {session_id} deleted", **sessions.get_warning()})


def _check_id(request: Request, caller: Caller, session_id: str) -> None:
    """Refuse the id of a session of another owner, without any details of that session."""
    try:
        session = request.app.ctx.sessions.get(session_id)
    except UnknownSession:
        return
    if not caller.sees(session.new.owner):
        raise SessionExists(f"the session id {session_id!r} is taken; choose another")


log = logging.getLogger(__name__)


@CONTROL_ROUTES.add("POST", "/sessions/{session_id}/start", is_specified=True, errors=(404, 409), role=Role.OPERATOR)
async def start_inference(request: Request, session_id: str) -> HTTPResponse:
    """Let the policy move the robot, as soon as every camera and every joint is fresh."""
    session = get_visible_session(request, session_id)
    read_empty_body(request)
    session = await request.app.ctx.sessions.start(session.id)
    return session_response(request, f"Inference started for session {session_id}", session)


@CONTROL_ROUTES.add(
    "POST", "/sessions/{session_id}/stop", is_specified=True, errors=(404, 409), is_stop=True, role=Role.OPERATOR
)
async def stop_inference(request: Request, session_id: str) -> HTTPResponse:
    """Hold the robot where it is."""
    session = await request.app.ctx.sessions.stop(get_visible_session(request, session_id).id)
    return session_response(request, f"Inference stopped for session {session_id}", session)


@CONTROL_ROUTES.add(
    "POST",
    "/sessions/{session_id}/restart",
    is_specified=True,
    errors=(404, 409, 429, 500, 502),
    is_patient=True,
    role=Role.OPERATOR,
)
async def restart_inference(request: Request, session_id: str) -> HTTPResponse:
    """Stop and start a session in one call, without its earlier plans and failures.

    A session that was interrupted by the end of its server loads its policy and joins its rooms again; then it is
    `ready` and waits for its start.
    """
    session = get_visible_session(request, session_id)
    read_empty_body(request)
    session = await request.app.ctx.sessions.restart(session.id)
    return session_response(request, f"Inference restarted for session {session_id}", session)


@CONTROL_ROUTES.add(
    "POST",
    "/sessions/{session_id}/emergency_stop",
    optional_body=REASON,
    errors=(404,),
    is_stop=True,
    is_streamed=True,
    role=Role.VIEWER,
)
async def emergency_stop_session(request: Request, session_id: str) -> HTTPResponse:
    """Stop this robot now and latch it: it needs a reset and a start before it moves again.

    The body may give a reason, ``{"reason": "..."}``. No other content, no role of the key and no owner of the session
    prevents the stop.
    """
    sessions = request.app.ctx.sessions
    await sessions.emergency_stop(await read_reason(request), session_id)
    log.warning("emergency stop of session %s by %s", session_id, caller_of(request).name)
    return json_response(
        {"message": f"Emergency stop of session {session_id}", "stopped": [session_id], **sessions.get_warning()}
    )


@RECORDING_ROUTES.add(
    "POST", "/sessions/{session_id}/record", body=RecordRequest, errors=(404, 409), role=Role.OPERATOR
)
async def record_session(request: Request, session_id: str) -> HTTPResponse:
    """Record every tick of a session from now on (from its next start if it does not move), or stop recording.

    Inferences of a client that runs the control loop are recorded, too. The response is the new `stats.recording` of
    the session. A recording that ended becomes a dataset if the server sent its commands.
    """
    body = read_body(request, RecordRequest)
    figures = request.app.ctx.recordings.set_recording(get_visible_session(request, session_id), body.on)
    return json_response({"session_id": session_id, "recording": dict(figures)})


@RECORDING_ROUTES.add("GET", "/recordings", answer=list_schema(Recording), query=page_query("name"), role=Role.VIEWER)
async def list_recordings(request: Request) -> HTTPResponse:
    """Recordings of the caller's sessions, newest first."""
    recordings = request.app.ctx.recordings

    def build(limit: int, before: str | None) -> tuple[Rows, str | None]:
        entries, following = take_page(recordings.list_entries(sees), lambda entry: entry.name, limit, before)
        return [describe(entry) for entry in entries], following

    sees, describe = caller_of(request).sees, recordings.prepare_description()
    return await answer_page(request, recordings.list_worker, build)


@RECORDING_ROUTES.add("DELETE", "/recordings/{name}", errors=(404, 409), role=Role.OPERATOR)
async def delete_recording(request: Request, name: str) -> HTTPResponse:
    """Remove a recording and its dataset. The server never removes a recording by itself."""
    await request.app.ctx.recordings.remove(name, caller_of(request).sees)
    return json_response({"message": f"Recording {name} deleted"})


@ADJUST_ROUTES.add(
    "PATCH", "/sessions/{session_id}", body=AdjustRequest, errors=(404, 409, 500, 503), role=Role.OPERATOR
)
async def adjust_session(request: Request, session_id: str) -> HTTPResponse:
    """Change the instruction, the overlap of chunks or the times of inferences from the next chunk on.

    No tick is missed. A change to real-time chunking waits until the policy is compiled for it. Omitted fields stay as
    they are, and null restores the default. The session keeps the new values.
    """
    sessions = request.app.ctx.sessions
    session = get_visible_session(request, session_id)
    body = read_body(request, AdjustRequest)
    try:
        adjusted = await sessions.adjust(session.id, {name: getattr(body, name) for name in body.model_fields_set})
    except InvalidRequest as error:
        raise to_invalid_body(error, body) from error
    warnings = adjusted.status().stats["warnings"]
    return json_response(
        {
            "message": f"Session {session.id} adjusted",
            "session_id": session.id,
            **describe_overlap(adjusted.require_robot_io()),
            "language_instruction": adjusted.new.language_instruction,
            "accept_units": adjusted.new.accept_units,
            "warnings": warnings,
            **sessions.get_warning(),
        }
    )
