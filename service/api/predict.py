"""Routes that run a policy or model once."""

from collections.abc import Mapping
from contextlib import ExitStack

from sanic import HTTPResponse

from service.api.context import Request, Route, get_visible_session
from service.auth.caller import Role, caller_of
from service.errors import InvalidRequest, ServiceError
from service.http.array_formats import ARRAY_FORMATS, choose_answer_format, find_body_format
from service.http.bodies import choose_form, discard_body, find_form, json_response, read_streamed_body, send_response
from service.inference.model_server import ForwardRequest
from service.streaming import codec, direct_inference


async def list_models(request: Request) -> HTTPResponse:
    """All models: what each is, which inputs it takes, and how it fared."""
    return json_response([served.describe() for served in request.app.ctx.models.list()])


async def get_model(request: Request, name: str) -> HTTPResponse:
    """One model."""
    return json_response(request.app.ctx.models.get(name).describe())


async def run_model(request: Request, name: str) -> HTTPResponse | None:
    """One forward pass over the arrays of the body; the answer has the body's form, or the one that Accept names.

    Forms: `application/x-npz` (numpy.savez; arrays by name) and `application/json`
    (`{"inputs": {name: {"dtype", "shape", "data"}}}` with nested lists as data; a plain number or list is accepted
    too). A JSON answer has `outputs` in the same form and `timings_ms`. An npz has the outputs alone. The header
    Server-Timing has the timings in both forms. New shapes are compiled first, which the timings show separately.
    Robots have priority: a pass begins when no session waits for an inference.
    """
    models, settings = request.app.ctx.models, request.app.ctx.settings
    with ExitStack() as slot:
        try:
            served = models.get(name)
            form = find_body_format(request.headers.get("content-type"))
            answer_form = choose_answer_format(request.headers.get("accept"), form)
            slot.enter_context(models.forwards.reserve_slot())
            if form.is_small:
                body = await read_streamed_body(request, settings.limits.max_body, "max_body; an npz may have more")
            else:
                body = await read_streamed_body(request, settings.models.max_forward_bytes, "max_forward_bytes")
        except ServiceError:
            slot.close()
            await discard_body(request, 2 * settings.models.max_forward_bytes)
            raise
        result = await models.forwards.forward(served, ForwardRequest(body, form, answer_form), slot)
        timing = ", ".join(f"{stage};dur={spent:g}" for stage, spent in result.timings.items())
        return await send_response(
            request,
            result.pieces,
            answer_form.content_type,
            {"server-timing": timing},
            timeout=settings.limits.answer_deadline,
        )


_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 8}
_ARRAY = {
    "type": "object",
    "properties": {"dtype": {"type": "string"}, "shape": _SHAPE, "data": {"description": "nested lists of numbers"}},
}
_TIMINGS = {"type": "object", "additionalProperties": {"type": "number"}, "description": "milliseconds by stage"}
_BINARY = {"type": "string", "format": "binary"}
_INPUTS = {
    "type": "object",
    "properties": {
        "inputs": {
            "type": "object",
            "additionalProperties": {"anyOf": [_ARRAY, {"type": "number"}, {"type": "array"}]},
        }
    },
    "required": ["inputs"],
}
_OUTPUTS = {
    "type": "object",
    "properties": {"outputs": {"type": "object", "additionalProperties": _ARRAY}, "timings_ms": _TIMINGS},
    "required": ["outputs", "timings_ms"],
}
_MODEL = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "source": {"type": "string"},
        "class": {"type": "string"},
        "kind": {"type": "string", "enum": ["continuous", "discrete", "patches"]},
        "config": {"type": "object"},
        "parameters": {"type": "integer"},
        "bytes": {"type": "integer"},
        "dtype": {"type": "string"},
        "device": {"type": "string"},
        "inputs": {"type": "array", "items": {"type": "object"}},
        "outputs": {"type": "array", "items": {"type": "object"}},
        "stats": {"type": "object"},
    },
    "required": ["name", "class", "kind", "config", "inputs", "outputs", "stats"],
}
_JSON = ARRAY_FORMATS[0].content_type
MODEL_ROUTES = (
    Route("GET", "/models", list_models, "Models", {"type": "array", "items": _MODEL}, role=Role.VIEWER),
    Route("GET", "/models/{name}", get_model, "Models", _MODEL, errors=(404,), role=Role.VIEWER),
    Route(
        "POST",
        "/models/{name}/forward",
        run_model,
        "Models",
        _OUTPUTS,
        forms={form.content_type: _INPUTS if form.content_type == _JSON else _BINARY for form in ARRAY_FORMATS},
        answer_forms={form.content_type: _BINARY for form in ARRAY_FORMATS if form.content_type != _JSON},
        errors=(404, 406, 415),
        is_patient=True,
        is_streamed=True,
        role=Role.OPERATOR,
    ),
)


JSON, MSGPACK = "application/json", "application/msgpack"
_KNOWN_FORMS = f"{JSON}, {MSGPACK}"
_FORMS = {JSON: JSON, MSGPACK: MSGPACK, "application/x-msgpack": MSGPACK, "application/vnd.msgpack": MSGPACK}


async def act(request: Request, session_id: str) -> HTTPResponse:
    """What the policy would do about this observation, for a session that was made with `transport_server_url` direct.

    Nothing is sent to any robot: the client runs its own control loop. The chunk has passed the same checks as one that
    the session would do itself. docs/direct.md says what an observation is, as JSON and as msgpack.
    """
    doors = request.app.ctx.stream_clients
    try:
        session = get_visible_session(request, session_id)
        form = find_form(request.headers.get("content-type"), _FORMS, _KNOWN_FORMS)
        answer_type = choose_form(request.headers.get("accept"), form, _FORMS, _KNOWN_FORMS)
        inference = doors.get_inference(session, caller_of(request))
        inference.check_available()
        max_bytes = codec.MAX_JSON if form == JSON else doors.settings.socket.bytes
        body = b"".join(
            await read_streamed_body(request, max_bytes, "msgpack may have more" if form == JSON else "of one act")
        )
    except ServiceError:
        await discard_body(request, 2 * doors.settings.socket.bytes)
        raise
    message = await codec.read_json(body) if form == JSON else codec.unpack(body)
    if not isinstance(message, Mapping):
        raise InvalidRequest("wanted a map with images and state", ("body",))
    answer = await direct_inference.answer_act(inference, message)
    if answer_type == JSON:
        return HTTPResponse(codec.pack_json(answer), content_type=JSON)
    return HTTPResponse(codec.pack(answer), content_type=MSGPACK)


_NUMBERS = {"type": "array", "items": {"type": "number"}}
_JOINTS = {"type": "object", "additionalProperties": {"type": "number"}}
_PICTURE = {"type": "string", "description": "a JPEG or PNG file in base64"}
_OBSERVATION = {
    "type": "object",
    "properties": {
        "images": {
            "type": "object",
            "additionalProperties": {"anyOf": [_PICTURE, {"type": "array", "items": _PICTURE}]},
        },
        "state": {"anyOf": [_NUMBERS, _JOINTS, {"type": "array", "items": {"anyOf": [_NUMBERS, _JOINTS]}}]},
        "prompt": {"type": "string", "maxLength": 2048},
        "language_instruction": {"type": "string", "maxLength": 2048, "description": "another name of prompt"},
        "task": {"type": "string", "maxLength": 2048, "description": "another name of prompt"},
        "extra": {
            "type": "string",
            "enum": ["refuse", "ignore"],
            "default": "refuse",
            "description": "what is done with names in state that are no joints, e.g. shoulder_pan.vel",
        },
        "number": {"type": "integer"},
        "want": {"type": "string", "enum": ["chunk", "action"]},
        "executed": {"type": "integer", "minimum": 0},
        "reset": {"type": "boolean"},
        "timestamp": {"type": "number", "description": "seconds by the client's clock at which it was observed"},
    },
    "required": ["state"],
    "additionalProperties": False,
}
_ACT_ANSWER = {
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
ACT_ROUTES = (
    Route(
        "POST",
        "/sessions/{session_id}/act",
        act,
        "Control",
        _ACT_ANSWER,
        forms={JSON: _OBSERVATION, MSGPACK: _BINARY},
        answer_forms={MSGPACK: _BINARY},
        errors=(404, 406, 409, 415, 429, 500, 503),
        is_patient=True,
        is_streamed=True,
        role=Role.OPERATOR,
    ),
)
