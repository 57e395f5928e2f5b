"""An observation in, a chunk or the next action out: for clients that control their robot themselves."""

from collections.abc import Mapping

from sanic import HTTPResponse

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.doors import acts, packing
from service.errors import InvalidRequest, NotAcceptable, ServiceError, UnknownForm
from service.routes.context import Request
from service.routes.ownership import session_of
from service.routes.pieces import discard, read_pieces
from service.routes.route import Route

JSON, MSGPACK = "application/json", "application/msgpack"
_FORMS = {JSON: JSON, MSGPACK: MSGPACK, "application/x-msgpack": MSGPACK, "application/vnd.msgpack": MSGPACK}


async def act(request: Request, session_id: str) -> HTTPResponse:
    """What the policy would do about this observation, for a session that was made with `transport_server_url` direct.

    Nothing is sent to any robot: the client runs its own control loop. The chunk has passed the same checks as one that
    the session would do itself. docs/direct.md says what an observation is, as JSON and as msgpack.
    """
    doors = request.app.ctx.doors
    try:
        session = session_of(request, session_id)
        form = _form(request.headers.get("content-type"))
        wanted = _wanted(request.headers.get("accept"), form)
        consultation = doors.acting(session, caller_of(request))
        consultation.open()
        most = packing.LARGEST_JSON if form == JSON else doors.settings.socket.bytes
        body = b"".join(await read_pieces(request, most, "msgpack may have more" if form == JSON else "of one act"))
    except ServiceError:
        await discard(request, 2 * doors.settings.socket.bytes)
        raise
    message = await packing.read_json(body) if form == JSON else packing.unpack(body)
    if not isinstance(message, Mapping):
        raise InvalidRequest("wanted a map with images and state", ("body",))
    told = await acts.act(consultation, message)
    if wanted == JSON:
        return HTTPResponse(packing.pack_json(told), content_type=JSON)
    return HTTPResponse(packing.pack(told), content_type=MSGPACK)


def _form(content_type: str | None) -> str:
    form = _FORMS.get((content_type or "").partition(";")[0].strip().lower())
    if form is None:
        raise UnknownForm(f"Content-Type should be {JSON} or {MSGPACK}")
    return form


def _wanted(accept: str | None, usual: str) -> str:
    kinds = [part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")]
    for kind in kinds:
        if kind in ("*/*", "application/*", ""):
            return usual
        if kind in _FORMS:
            return _FORMS[kind]
    raise NotAcceptable(f"Accept should allow {JSON} or {MSGPACK}")


_NUMBERS = {"type": "array", "items": {"type": "number"}}
_OBSERVATION = {
    "type": "object",
    "properties": {
        "images": {
            "type": "object",
            "additionalProperties": {"type": "string", "description": "a JPEG or PNG file in base64"},
        },
        "state": {"anyOf": [_NUMBERS, {"type": "object", "additionalProperties": {"type": "number"}}]},
        "prompt": {"type": "string", "maxLength": 2048},
        "number": {"type": "integer"},
        "want": {"type": "string", "enum": ["chunk", "action"]},
        "executed": {"type": "integer", "minimum": 0},
        "reset": {"type": "boolean"},
    },
    "required": ["state"],
}
_TOLD = {
    "type": "object",
    "properties": {
        "number": {"type": "integer"},
        "actions": {"type": "array", "items": _NUMBERS},
        "action": _NUMBERS,
        "left": {"type": "integer"},
        "joint_names": {"type": "array", "items": {"type": "string"}},
        "action_rate": {"type": "number"},
        "action_steps": {"type": "integer"},
        "clamped": {"type": "array", "items": {"type": "string"}},
        "warnings": {"type": "array", "items": {"type": "string"}},
        "timings_ms": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["joint_names", "action_rate", "action_steps"],
}
_BINARY = {"type": "string", "format": "binary"}
ROUTES = (
    Route(
        "POST",
        "/sessions/{session_id}/act",
        act,
        "Control",
        _TOLD,
        forms={JSON: _OBSERVATION, MSGPACK: _BINARY},
        answer_forms={MSGPACK: _BINARY},
        errors=(404, 406, 409, 415, 429, 500, 503),
        is_patient=True,
        is_streamed=True,
        role=Role.OPERATOR,
    ),
)
