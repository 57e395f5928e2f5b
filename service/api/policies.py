"""Routes of policies and models: check, deploy, roll back, quarantine, and single inferences."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from sanic import HTTPResponse

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from jaxmodels.types import rename_cameras
from service.api.context import Query, Request, Routes, get_visible_session, list_visible_sessions
from service.api.lists import Rows, answer_page, page_query, take_page
from service.api.schemas import Deployment, PolicyCheck, PolicyCheckRequest, PolicyRequest, list_schema
from service.auth.caller import Role, caller_of
from service.engines.model_server import ForwardRequest
from service.errors import Forbidden, InvalidRequest, PolicyError, ServiceError, UnknownDeployment
from service.http.array_formats import ARRAY_FORMATS, ARRAY_FORMS
from service.http.bodies import (
    choose_form,
    discard_body,
    find_form,
    json_response,
    read_body,
    read_empty_body,
    read_streamed_body,
    send_response,
    show_to_sender,
    to_invalid_body,
)
from service.rollout.records import Quarantined, Record
from service.sessions.compatibility import configure_control, find_mismatches, make_limits
from service.sessions.policy_slots import RenameRefused
from service.sessions.request import NewSession, SessionSettings
from service.setting_types import NAME
from service.streaming import acts, codec

DEPLOYMENT_ROUTES = Routes("Policies")
CHECK_ROUTES = Routes("Policies")
MODEL_ROUTES = Routes("Models")
ACT_ROUTES = Routes("Control")


@DEPLOYMENT_ROUTES.add(
    "GET",
    "/deployments",
    answer=list_schema(Deployment),
    query=(*page_query("id"), Query("session_id", {"type": "string"}, "Only deployments of this session.")),
    role=Role.VIEWER,
)
async def list_deployments(request: Request) -> HTTPResponse:
    """Policy updates, newest first, each with its trigger, commit, stages with times, and result."""
    session_id = request.get_args(keep_blank_values=True).get("session_id")
    updates, select = request.app.ctx.updates, _make_filter(request)

    def build(limit: int, before: str | None) -> tuple[Rows, str | None]:
        rows = (row for record in updates.list(session_id) if (row := select(record)) is not None)
        return take_page(rows, lambda row: row["id"], limit, before)

    return await answer_page(request, request.app.ctx.list_worker, build)


@DEPLOYMENT_ROUTES.add("GET", "/deployments/{deployment_id}", answer=Deployment, errors=(404,), role=Role.VIEWER)
async def get_deployment(request: Request, deployment_id: str) -> HTTPResponse:
    """One policy update."""
    update = _make_filter(request)(request.app.ctx.updates.get(deployment_id))
    if update is None:
        raise UnknownDeployment(f"deployment {deployment_id[:80]!r} not found; GET /deployments lists them")
    return json_response(update)


@DEPLOYMENT_ROUTES.add(
    "POST",
    "/sessions/{session_id}/policy",
    answer=Deployment,
    optional_body={"$ref": f"#/components/schemas/{PolicyRequest.__name__}"},
    errors=(404, 409, 502),
    is_patient=True,
    role=Role.OPERATOR,
)
async def set_session_policy(request: Request, session_id: str) -> HTTPResponse:
    """Deploy a revision of its policy to a session.

    The server fetches it by commit, verifies, compiles and tests it in parallel to the running policy, and replaces
    that at a chunk boundary without a missed tick.

    The default revision is the staged one, else the newest of the session's branch or tag. Older commits are allowed.
    The response comes when the session runs the policy or refused it, as `result` says. `GET
    /deployments/{deployment_id}` shows the probation that follows.
    """
    get_visible_session(request, session_id)
    body = read_body(request, PolicyRequest) if request.body else PolicyRequest()
    request.app.ctx.source_rules.check_revision(body.revision)
    if body.force and caller_of(request).role < Role.ADMIN:
        raise Forbidden("force releases a commit from the quarantine, which needs the role admin; leave it out")
    record = await request.app.ctx.updates.deploy(session_id, body.revision, force=body.force)
    return json_response(record.as_json())


@DEPLOYMENT_ROUTES.add(
    "POST", "/sessions/{session_id}/rollback", answer=Deployment, errors=(404, 409), is_patient=True, role=Role.OPERATOR
)
async def rollback_session_policy(request: Request, session_id: str) -> HTTPResponse:
    """Restore the policy that the session ran before the last update; it is still in memory."""
    get_visible_session(request, session_id)
    read_empty_body(request)
    return json_response((await request.app.ctx.updates.rollback(session_id)).as_json())


@DEPLOYMENT_ROUTES.add("GET", "/quarantine", answer=list_schema(Quarantined), role=Role.OPERATOR)
async def list_quarantine(request: Request) -> HTTPResponse:
    """Commits that were refused or rolled back. The server does not deploy them again by itself."""
    return json_response([vars(one) for one in request.app.ctx.updates.quarantine.list()])


@DEPLOYMENT_ROUTES.add("DELETE", "/quarantine/{commit}", errors=(404,))
async def release_from_quarantine(request: Request, commit: str) -> HTTPResponse:
    """Let a commit out of the quarantine."""
    if not await request.app.ctx.updates.quarantine.release(commit):
        raise UnknownDeployment(f"commit {commit[:80]!r} is not in quarantine; GET /quarantine lists all")
    return json_response({"message": f"Commit {commit} released"})


def _make_filter(request: Request) -> Callable[[Record], Mapping[str, Any] | None]:
    """Return a function that serializes a deployment with only the caller's present sessions, or None without any."""
    if caller_of(request).sees_all:
        return Record.as_json
    own = {session.id: session.created_at for session in list_visible_sessions(request)}

    def select(record: Record) -> Mapping[str, Any] | None:
        update = record.as_json()
        oldest = time.monotonic() - (time.time() - update["at"]) + 1
        names = [name for name in update["sessions"] if name in own and own[name] <= oldest]
        figures = {name: found for name, found in update["figures"].items() if name in names}
        return {**update, "sessions": names, "figures": figures} if names else None

    return select


@CHECK_ROUTES.add(
    "POST",
    "/policies/check",
    answer=PolicyCheck,
    body=PolicyCheckRequest,
    errors=(502,),
    is_patient=True,
    role=Role.OPERATOR,
)
async def check_policy(request: Request) -> HTTPResponse:
    """Requirements of a policy, and the fields of a request that do not fit it, from its small files.

    Nothing is loaded, so a policy that fits may still fail to load. `POST /sessions` refuses with the same text.
    """
    body = read_body(request, PolicyCheckRequest)
    fields: dict[str, Any] = dict(body)
    try:
        requirements = await request.app.ctx.policy_reader.read(fields["policy_path"], fields["revision"])
    except PolicyError as error:
        raise to_invalid_body(error, body) from error
    try:
        requirements = rename_cameras(requirements, fields["rename"] or {})
    except JaxModelsError as error:
        raise to_invalid_body(RenameRefused(str(error)), body) from error
    return json_response(_check_request(requirements, body, request.app.ctx.sessions.settings))


def _check_request(
    requirements: Requirements, body: PolicyCheckRequest, settings: SessionSettings
) -> dict[str, object]:
    cameras = sorted(requirements.cameras)
    fields: dict[str, Any] = dict(body)
    if body.camera_names is None:
        fields["camera_names"] = tuple(filter(NAME.match, cameras))  # other names require `rename`
    if body.policy_type is None:
        fields["policy_type"] = requirements.policy_type
    if fields["language_instruction"] is None:
        fields["language_instruction"] = "do it"  # a missing instruction is not a mismatch here
    new = NewSession(**fields)
    mismatches, joints, rate = find_mismatches(requirements, new), None, None
    try:
        settings.check(new)
        if not mismatches:
            table, config = configure_control(requirements, new, settings)
            make_limits(table, requirements, new, settings)
            joints, rate = list(table.names), config.rate
    except (InvalidRequest, PolicyError) as error:
        mismatches.append(str(error))
    found = PolicyCheck(
        fits=not mismatches,
        misfits=[show_to_sender(text, body) for text in mismatches],
        policy_type=requirements.policy_type,
        camera_names=cameras,
        camera_sizes={camera: list(size) for camera, size in requirements.cameras.items()},
        joint_names=joints,
        rate=rate,
        requirements=asdict(requirements),
    )
    return found.model_dump(mode="json")


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


@MODEL_ROUTES.add("GET", "/models", answer={"type": "array", "items": _MODEL}, role=Role.VIEWER)
async def list_models(request: Request) -> HTTPResponse:
    """All models with their inputs, outputs and statistics."""
    return json_response([served.describe() for served in request.app.ctx.models.list()])


@MODEL_ROUTES.add("GET", "/models/{name}", answer=_MODEL, errors=(404,), role=Role.VIEWER)
async def get_model(request: Request, name: str) -> HTTPResponse:
    """One model."""
    return json_response(request.app.ctx.models.get(name).describe())


@MODEL_ROUTES.add(
    "POST",
    "/models/{name}/forward",
    answer=_OUTPUTS,
    forms={form.content_type: _INPUTS if form.content_type == _JSON else _BINARY for form in ARRAY_FORMATS},
    answer_forms={form.content_type: _BINARY for form in ARRAY_FORMATS if form.content_type != _JSON},
    errors=(404, 406, 415),
    is_patient=True,
    is_streamed=True,
    role=Role.OPERATOR,
)
async def run_model(request: Request, name: str) -> HTTPResponse | None:
    """One forward pass over the arrays of the body; the response has the content type of Accept, else of the body.

    Content types: `application/x-npz` (numpy.savez; arrays by name) and `application/json`
    (`{"inputs": {name: {"dtype", "shape", "data"}}}` with nested lists as data; a plain number or list is accepted
    too). A JSON answer has `outputs` in the same form and `timings_ms`. An npz has the outputs alone. The header
    Server-Timing has the timings in both forms. New shapes are compiled first, which the timings show separately.
    Models run in a process with a lower priority than the engines of robots.
    """
    models, settings = request.app.ctx.models, request.app.ctx.settings
    with ExitStack() as slot:
        try:
            served = models.get(name)
            form = find_form(request.headers.get("content-type"), ARRAY_FORMS)
            answer_form = choose_form(request.headers.get("accept"), form, ARRAY_FORMS)
            slot.enter_context(models.reserve_slot())
            if form.is_small:
                body = await read_streamed_body(request, settings.limits.max_body, "max_body; an npz may have more")
            else:
                body = await read_streamed_body(request, settings.models.max_forward_bytes, "max_forward_bytes")
        except ServiceError:
            slot.close()
            await discard_body(request, 2 * settings.models.max_forward_bytes)
            raise
        result = await models.forward(served, ForwardRequest(body, form, answer_form), slot)
        timing = ", ".join(f"{stage};dur={spent:g}" for stage, spent in result.timings.items())
        return await send_response(
            request,
            result.pieces,
            answer_form.content_type,
            {"server-timing": timing},
            timeout=settings.limits.answer_deadline,
        )


JSON, MSGPACK = "application/json", "application/msgpack"
_FORMS = {JSON: JSON, MSGPACK: MSGPACK, "application/x-msgpack": MSGPACK, "application/vnd.msgpack": MSGPACK}


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


@ACT_ROUTES.add(
    "POST",
    "/sessions/{session_id}/act",
    answer=_ACT_ANSWER,
    forms={JSON: _OBSERVATION, MSGPACK: _BINARY},
    answer_forms={MSGPACK: _BINARY},
    errors=(404, 406, 409, 415, 429, 500, 503),
    is_patient=True,
    is_streamed=True,
    role=Role.OPERATOR,
)
async def act(request: Request, session_id: str) -> HTTPResponse:
    """Actions of the policy for an observation, in a session that was created with `transport_server_url` direct.

    Nothing is sent to a robot, because the client runs its own control loop. The chunk has passed the checks of all
    sessions. docs/robots/direct.md describes an observation as JSON and as msgpack.
    """
    clients = request.app.ctx.stream_clients
    try:
        session = get_visible_session(request, session_id)
        form = find_form(request.headers.get("content-type"), _FORMS)
        answer_type = choose_form(request.headers.get("accept"), form, _FORMS)
        inference = clients.get_inference(session, caller_of(request))
        inference.check_available()
        max_bytes, setting = clients.settings.socket.bytes, "of one act"
        if form == JSON:
            max_bytes, setting = codec.MAX_JSON, "msgpack may have more"
        body = b"".join(await read_streamed_body(request, max_bytes, setting))
    except ServiceError:
        await discard_body(request, 2 * clients.settings.socket.bytes)
        raise
    message = await codec.read_json(body) if form == JSON else codec.unpack(body)
    if not isinstance(message, Mapping):
        raise InvalidRequest("wanted a map with images and state", ("body",))
    answer = await acts.answer_act(inference, message)
    if answer_type == JSON:
        return HTTPResponse(codec.pack_json(answer), content_type=JSON)
    return HTTPResponse(codec.pack(answer), content_type=MSGPACK)
