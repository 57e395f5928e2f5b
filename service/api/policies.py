"""Policy routes: check, deploy, roll back, quarantine."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel
from sanic import HTTPResponse

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from jaxmodels.types import rename_cameras
from service.api.context import Query, Request, Route, get_visible_session, list_visible_sessions, read_limit
from service.api.schemas import Deployment, PolicyCheck, PolicyCheckRequest, PolicyRequest, Quarantined
from service.auth.caller import Role, caller_of
from service.errors import Forbidden, InvalidRequest, PolicyError, UnknownDeployment
from service.http.bodies import InvalidBody, json_response, read_body, read_empty_body, show_to_sender
from service.rollout.records import Record
from service.sessions.compatibility import configure_control, find_mismatches, make_limits
from service.sessions.request import NewSession, SessionSettings
from service.setting_types import NAME

MAX_LIMIT = 500
MAX_SEARCHED = 10_000


async def list_deployments(request: Request) -> HTTPResponse:
    """Policy updates, newest first: what set each off, its commit, its stages with their times, what became of it."""
    asked = request.get_args(keep_blank_values=True)
    limit, session_id = read_limit(str(asked.get("limit", "50")), MAX_LIMIT), asked.get("session_id")
    of = None if session_id is None else str(session_id)
    if caller_of(request).sees_all:
        return json_response([record.as_json() for record in request.app.ctx.updates.list(limit, of)])
    found = (_select_visible(request, record) for record in request.app.ctx.updates.list(MAX_SEARCHED, of))
    return json_response([update for update in found if update is not None][:limit])


async def get_deployment(request: Request, deployment_id: str) -> HTTPResponse:
    """One policy update."""
    update = _select_visible(request, request.app.ctx.updates.get(deployment_id))
    if update is None:
        raise UnknownDeployment(f"deployment {deployment_id[:80]!r} not found; GET /deployments lists them")
    return json_response(update)


async def set_session_policy(request: Request, session_id: str) -> HTTPResponse:
    """Bring a revision of its policy to a session: fetched by commit, verified, compiled and judged beside the running
    one, which it replaces at a chunk boundary without a missed tick.

    Without a revision: the one that is staged, else the newest of the branch or tag the session was made with. An older
    commit is taken too. The answer comes when the session runs it, or when it was refused; `result` says which. The
    probation that follows is seen in `GET /deployments/{deployment_id}`.
    """
    get_visible_session(request, session_id)
    body = read_body(request, PolicyRequest) if request.body else PolicyRequest()
    request.app.ctx.source_rules.check_revision(body.revision)
    if body.force and caller_of(request).role < Role.ADMIN:
        raise Forbidden("force takes a commit out of the quarantine, which wants the role admin; leave it out")
    record = await request.app.ctx.updates.deploy(session_id, body.revision, force=body.force)
    return json_response(record.as_json())


async def rollback_session_policy(request: Request, session_id: str) -> HTTPResponse:
    """Bring back the policy that the session ran before the last update; it is in memory still."""
    get_visible_session(request, session_id)
    read_empty_body(request)
    return json_response((await request.app.ctx.updates.rollback(session_id)).as_json())


async def list_quarantine(request: Request) -> HTTPResponse:
    """Commits that were refused or taken back; they are not deployed again by themselves."""
    return json_response([one.as_json() for one in request.app.ctx.updates.quarantine.list()])


async def release_from_quarantine(request: Request, commit: str) -> HTTPResponse:
    """Let a commit out of the quarantine."""
    if not await request.app.ctx.updates.quarantine.release(commit):
        raise UnknownDeployment(f"commit {commit[:80]!r} is not in quarantine; GET /quarantine lists those that are")
    return json_response({"message": f"Commit {commit} released"})


def _select_visible(request: Request, record: Record) -> Mapping[str, Any] | None:
    """Return a deployment without the sessions of others, and of earlier sessions with the same id; None if none
    remain.
    """
    update = record.as_json()
    if caller_of(request).sees_all:
        return update
    now, age = time.monotonic(), time.time() - update["at"]
    own = {session.id for session in list_visible_sessions(request) if age <= now - session.created_at + 1}
    own.intersection_update(update["sessions"])
    if not own:
        return None
    figures = {name: found for name, found in update["figures"].items() if name in own}
    return {**update, "sessions": [name for name in update["sessions"] if name in own], "figures": figures}


def _list_of(model: type[BaseModel]) -> dict[str, object]:
    return {"type": "array", "items": {"$ref": f"#/components/schemas/{model.__name__}"}}


DEPLOYMENT_ROUTES = (
    Route(
        "GET",
        "/deployments",
        list_deployments,
        "Policies",
        _list_of(Deployment),
        query=(
            Query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": 50}, "How many."),
            Query("session_id", {"type": "string"}, "Only those of this session."),
        ),
        role=Role.VIEWER,
    ),
    Route(
        "GET", "/deployments/{deployment_id}", get_deployment, "Policies", Deployment, errors=(404,), role=Role.VIEWER
    ),
    Route(
        "POST",
        "/sessions/{session_id}/policy",
        set_session_policy,
        "Policies",
        Deployment,
        optional_body={"$ref": f"#/components/schemas/{PolicyRequest.__name__}"},
        errors=(404, 409, 502),
        is_patient=True,
        role=Role.OPERATOR,
    ),
    Route(
        "POST",
        "/sessions/{session_id}/rollback",
        rollback_session_policy,
        "Policies",
        Deployment,
        errors=(404, 409),
        is_patient=True,
        role=Role.OPERATOR,
    ),
    Route("GET", "/quarantine", list_quarantine, "Policies", _list_of(Quarantined), role=Role.OPERATOR),
    Route("DELETE", "/quarantine/{commit}", release_from_quarantine, "Policies", errors=(404,)),
)


async def check_policy(request: Request) -> HTTPResponse:
    """What a policy needs, and what of a request would not fit it, from its small files; nothing is loaded.

    A policy that fits may still fail to load; one that does not would be refused by `POST /sessions` with the same
    words.
    """
    body = read_body(request, PolicyCheckRequest)
    fields: dict[str, Any] = dict(body)
    try:
        requirements = await request.app.ctx.policy_reader.read(fields["policy_path"], fields["revision"])
    except PolicyError as error:
        entry = {"loc": ["body", "policy_path"], "msg": show_to_sender(str(error), body), "type": error.code}
        raise InvalidBody([entry]) from error
    try:
        requirements = rename_cameras(requirements, fields["rename"] or {})
    except JaxModelsError as error:
        entry = {"loc": ["body", "rename"], "msg": show_to_sender(str(error), body), "type": PolicyError.code}
        raise InvalidBody([entry]) from error
    return json_response(_check_request(requirements, body, request.app.ctx.sessions.settings))


def _check_request(
    requirements: Requirements, body: PolicyCheckRequest, settings: SessionSettings
) -> dict[str, object]:
    cameras = sorted(requirements.cameras)
    fields: dict[str, Any] = dict(body)
    if body.camera_names is None:
        fields["camera_names"] = tuple(filter(NAME.match, cameras))  # The others have to be renamed.
    if body.policy_type is None:
        fields["policy_type"] = requirements.policy_type
    if fields["language_instruction"] is None:
        fields["language_instruction"] = "do it"  # A missing instruction is no mismatch here; a blank one is.
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


CHECK_ROUTES = (
    Route(
        "POST",
        "/policies/check",
        check_policy,
        "Policies",
        PolicyCheck,
        body=PolicyCheckRequest,
        errors=(502,),
        is_patient=True,
        role=Role.OPERATOR,
    ),
)
