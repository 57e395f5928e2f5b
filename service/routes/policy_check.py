"""Whether a policy would fit, answered before anything is loaded."""

from dataclasses import asdict

from sanic import HTTPResponse

from jaxmodels import Requirements
from service.auth.roles import Role
from service.errors import InvalidRequest, PolicyError
from service.routes.answers import answer
from service.routes.body import InvalidBody, read_body, without
from service.routes.context import Request
from service.routes.route import Route
from service.schemas import PolicyCheck, PolicyCheckRequest
from service.sessions.fit import fit, misfits
from service.sessions.request import NewSession, SessionSettings


async def check_policy(request: Request) -> HTTPResponse:
    """What a policy needs, and what of a request would not fit it, from its small files; nothing is loaded.

    A policy that fits may still fail to load; one that does not would be refused by `POST /sessions` with the same
    words.
    """
    body = read_body(request, PolicyCheckRequest)
    try:
        requirements = await request.app.ctx.policy_reader.read(body.policy_path, body.revision)
    except PolicyError as error:
        entry = {"loc": ["body", "policy_path"], "msg": without(str(error), body), "type": error.code}
        raise InvalidBody([entry]) from error
    return answer(_checked(requirements, body, request.app.ctx.sessions.settings))


def _checked(requirements: Requirements, body: PolicyCheckRequest, settings: SessionSettings) -> dict[str, object]:
    cameras = sorted(requirements.cameras)
    new = NewSession(
        session_id="check",
        policy_path=body.policy_path,
        transport_server_url="http://localhost",
        camera_names=tuple(cameras if body.camera_names is None else body.camera_names),
        policy_type=body.policy_type or requirements.policy_type,
        joint_names=None if body.joint_names is None else tuple(body.joint_names),
        rate=body.rate,
        # Whether there will be one is not asked here; a blank one is compared.
        language_instruction="do it" if body.language_instruction is None else body.language_instruction,
    )
    wrong, joints, rate = misfits(requirements, new), None, None
    try:
        settings.check(new)
        if not wrong:
            table, pace = fit(requirements, new, settings)
            joints, rate = list(table.names), pace.rate
    except (InvalidRequest, PolicyError) as error:
        wrong.append(str(error))
    found = PolicyCheck(
        fits=not wrong,
        misfits=[without(text, body) for text in wrong],
        policy_type=requirements.policy_type,
        camera_names=cameras,
        camera_sizes={camera: list(size) for camera, size in requirements.cameras.items()},
        joint_names=joints,
        rate=rate,
        requirements=asdict(requirements),
    )
    return found.model_dump(mode="json")


ROUTES = (
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
