"""Models that were loaded when the server started are listed, and run forward over arrays."""

from contextlib import ExitStack

from sanic import HTTPResponse

from service.arrays.forms import FORMS, form_of_answer, form_of_body
from service.auth.roles import Role
from service.errors import ServiceError
from service.models.forwards import Ask
from service.routes.answers import answer
from service.routes.context import Request
from service.routes.pieces import discard, read_pieces, send_pieces
from service.routes.route import Route


async def list_models(request: Request) -> HTTPResponse:
    """All models: what each is, which inputs it takes, and how it fared."""
    return answer([served.facts() for served in request.app.ctx.models.list()])


async def get_model(request: Request, name: str) -> HTTPResponse:
    """One model."""
    return answer(request.app.ctx.models.get(name).facts())


async def run_model(request: Request, name: str) -> HTTPResponse | None:
    """One forward pass over the arrays of the body; the answer has the body's form, or the one that Accept names.

    Forms: `application/x-npz` (numpy.savez; arrays by name), `application/msgpack` and `application/json` (both
    `{"inputs": {name: {"dtype", "shape", "data"}}}`, data as little-endian bytes in msgpack, as nested lists in JSON,
    where a plain number or list will do too). The answer has `outputs` likewise and `timings_ms`; an npz has the
    outputs alone, and the timings are in the header Server-Timing, which every form has. New shapes compile first,
    which the timings tell by themselves. Robots come first: a pass begins when no session waits for an inference.
    """
    models, settings = request.app.ctx.models, request.app.ctx.settings
    with ExitStack() as held:
        try:
            served = models.get(name)
            form = form_of_body(request.headers.get("content-type"))
            wanted = form_of_answer(request.headers.get("accept"), form)
            held.enter_context(models.forwards.place())
            if form.is_small:
                body = await read_pieces(request, settings.max_body, "max_body; npz and msgpack may have more")
            else:
                body = await read_pieces(request, settings.max_forward_bytes, "max_forward_bytes")
        except ServiceError:
            held.close()
            await discard(request, 2 * settings.max_forward_bytes)
            raise
        forwarded = await models.forwards.forward(served, Ask(body, form, wanted), held)
        timing = ", ".join(f"{stage};dur={spent:g}" for stage, spent in forwarded.timings.items())
        return await send_pieces(
            request, forwarded.pieces, wanted.content_type, {"server-timing": timing}, within=settings.answer_deadline
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
_JSON = FORMS[0].content_type
ROUTES = (
    Route("GET", "/models", list_models, "Models", {"type": "array", "items": _MODEL}, role=Role.VIEWER),
    Route("GET", "/models/{name}", get_model, "Models", _MODEL, errors=(404,), role=Role.VIEWER),
    Route(
        "POST",
        "/models/{name}/forward",
        run_model,
        "Models",
        _OUTPUTS,
        forms={form.content_type: _INPUTS if form.content_type == _JSON else _BINARY for form in FORMS},
        answer_forms={form.content_type: _BINARY for form in FORMS if form.content_type != _JSON},
        errors=(404, 406, 415),
        is_patient=True,
        is_streamed=True,
        role=Role.OPERATOR,
    ),
)
