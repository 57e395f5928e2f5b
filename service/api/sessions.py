"""Session routes: create, control, adjust, record."""

import logging
from collections.abc import Mapping

from sanic import HTTPResponse

from service.api.context import Request, Route, get_visible_session, list_visible_sessions
from service.api.lists import Rows, answer_page, page_query, take_page
from service.api.schemas import (
    AdjustRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    NewSessionRequest,
    Recording,
    RecordRequest,
    SessionStatusResponse,
)
from service.auth.caller import ANYBODY, Caller, Role, caller_of
from service.errors import InvalidRequest, ServiceError, SessionExists, UnknownSession
from service.http.bodies import REASON, json_response, read_body, read_empty_body, read_reason, to_invalid_body
from service.sessions.request import NewSession
from service.sessions.store import AnySession, Sessions


async def list_sessions(request: Request) -> HTTPResponse:
    """All sessions, oldest first; those that failed stay listed for a while.

    In a cluster those of the other fronts come after, each with its `front` in `stats`, as they stood a moment ago.
    """
    # Not dataclasses.asdict, which copies every figure of every session while robots wait for their ticks.
    listed = [vars(session.status()) for session in list_visible_sessions(request)]
    front = request.app.ctx.peer_sessions
    if front is None:
        return json_response(listed)
    try:
        return json_response([*listed, *await front.list(caller_of(request))])
    except ServiceError as error:
        # Other servers may be unreachable: list the sessions known here, and say that the list is incomplete.
        return json_response(listed, headers={"x-robojax-incomplete": str(error)})


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
    rooms = session.rooms
    assert rooms is not None, "a session that is ready has rooms"
    return json_response(
        {
            "workspace_id": rooms.workspace_id,
            "camera_room_ids": dict(rooms.cameras),
            "joint_input_room_id": rooms.joint_input,
            "joint_output_room_id": rooms.joint_output,
        }
    )


async def get_session_status(request: Request, session_id: str) -> HTTPResponse:
    """One session."""
    return json_response(vars(get_visible_session(request, session_id).status()))


async def delete_session(request: Request, session_id: str) -> HTTPResponse:
    """Stop the robot, leave the rooms, remove those that the session made."""
    sessions = request.app.ctx.sessions
    await sessions.delete(get_visible_session(request, session_id).id)
    return json_response({"message": f"Session {session_id} deleted", **sessions.get_warning()})


def _check_id(request: Request, caller: Caller, session_id: str) -> None:
    """Refuse an id of somebody else's session, whatever became of it; nothing more is told of it."""
    try:
        session = request.app.ctx.sessions.get(session_id)
    except UnknownSession:
        return
    if not caller.sees(session.new.owner):
        raise SessionExists(f"the session id {session_id!r} is taken; choose another")


SESSION_LIST = {
    "items": {"$ref": "#/components/schemas/SessionStatusResponse"},
    "type": "array",
    "title": "Response List Sessions Sessions Get",
}
SESSION_ROUTES = (
    Route("GET", "/sessions", list_sessions, "Sessions", SESSION_LIST, is_specified=True, role=Role.VIEWER),
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


log = logging.getLogger(__name__)


async def start_inference(request: Request, session_id: str) -> HTTPResponse:
    """Let the policy move the robot, as soon as every camera and every joint is fresh."""
    sessions, session = request.app.ctx.sessions, get_visible_session(request, session_id)
    read_empty_body(request)
    return _move_response(sessions, "Inference started", await sessions.start(session.id))


async def stop_inference(request: Request, session_id: str) -> HTTPResponse:
    """Hold the robot where it is."""
    sessions = request.app.ctx.sessions
    return _move_response(
        sessions, "Inference stopped", await sessions.stop(get_visible_session(request, session_id).id)
    )


async def restart_inference(request: Request, session_id: str) -> HTTPResponse:
    """Stop and start in one: plans and failures of before are forgotten.

    One that is interrupted, because its server ended, loads its policy and joins its rooms anew; it is `ready` then and
    waits for its start.
    """
    sessions, session = request.app.ctx.sessions, get_visible_session(request, session_id)
    read_empty_body(request)
    return _move_response(sessions, "Inference restarted", await sessions.restart(session.id))


async def emergency_stop_session(request: Request, session_id: str) -> HTTPResponse:
    """Stop this robot now and latch it: it needs a reset and a start before it moves again.

    The body may give a reason, ``{"reason": "..."}``. Whatever else is sent, whatever the key's role, and whosever
    the session is, the stop happens.
    """
    sessions = request.app.ctx.sessions
    await sessions.emergency_stop(await read_reason(request), session_id)
    log.warning("emergency stop of session %s by %s", session_id, caller_of(request).name)
    return json_response(
        {"message": f"Emergency stop of session {session_id}", "stopped": [session_id], **sessions.get_warning()}
    )


def _move_response(sessions: Sessions, what: str, session: AnySession) -> HTTPResponse:
    message = f"{what} for session {session.id}"
    return json_response(
        {"message": message, "session_id": session.id, "status": str(session.stage), **sessions.get_warning()}
    )


CONTROL_ROUTES = (
    *(
        Route(
            "POST",
            f"/sessions/{{session_id}}/{move}",
            handler,
            "Control",
            is_specified=True,
            errors=(404, 409),
            is_stop=move == "stop",
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


async def record_session(request: Request, session_id: str) -> HTTPResponse:
    """Record every tick of a session from now on (from its next start when it does not move), or no more.

    The answer is what the session's `stats.recording` says from now on. A recording that ended becomes a dataset.
    """
    body = read_body(request, RecordRequest)
    figures = request.app.ctx.recordings.set_recording(get_visible_session(request, session_id), body.on)
    return json_response({"session_id": session_id, "recording": dict(figures)})


async def list_recordings(request: Request) -> HTTPResponse:
    """Recordings of the caller's sessions, newest first."""
    recordings = request.app.ctx.recordings

    def build(limit: int, before: str | None) -> tuple[Rows, str | None]:
        entries, following = take_page(recordings.list_entries(sees), lambda entry: entry.name, limit, before)
        return [describe(entry) for entry in entries], following

    sees, describe = caller_of(request).sees, recordings.prepare_description()
    return await answer_page(request, recordings.list_worker, build)


async def delete_recording(request: Request, name: str) -> HTTPResponse:
    """Remove a recording, and the dataset that was made of it. None is ever removed by itself."""
    await request.app.ctx.recordings.remove(name, caller_of(request).sees)
    return json_response({"message": f"Recording {name} deleted"})


RECORDING_LIST = {"type": "array", "items": {"$ref": f"#/components/schemas/{Recording.__name__}"}}
RECORDING_ROUTES = (
    Route(
        "POST",
        "/sessions/{session_id}/record",
        record_session,
        "Recordings",
        body=RecordRequest,
        errors=(404, 409),
        role=Role.OPERATOR,
    ),
    Route(
        "GET",
        "/recordings",
        list_recordings,
        "Recordings",
        RECORDING_LIST,
        query=page_query("name"),
        role=Role.VIEWER,
    ),
    Route("DELETE", "/recordings/{name}", delete_recording, "Recordings", errors=(404, 409), role=Role.OPERATOR),
)


async def adjust_session(request: Request, session_id: str) -> HTTPResponse:
    """Tell the policy something else, join chunks in another way or ask for them at other moments: from the next chunk
    on, and no tick is missed.

    What is left out stays as it is, null goes back to the default. It is kept as what the session was made with is.
    """
    sessions = request.app.ctx.sessions
    session = get_visible_session(request, session_id)
    body = read_body(request, AdjustRequest)
    try:
        adjusted = await sessions.adjust(session.id, {name: getattr(body, name) for name in body.model_fields_set})
    except InvalidRequest as error:
        raise to_invalid_body(error, body) from error
    warnings = adjusted.status().stats["warnings"]
    assert isinstance(warnings, Mapping)
    return json_response(
        {
            "message": f"Session {session.id} adjusted",
            "session_id": session.id,
            **adjusted.describe_overlap(),
            "language_instruction": adjusted.new.language_instruction,
            "accept_units": adjusted.new.accept_units,
            "warnings": warnings,
            **sessions.get_warning(),
        }
    )


ADJUST_ROUTES = (
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
