"""Request and response models, field for field."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from service.rollout.records import DeploymentStage
from service.sessions.request import (
    ADJUSTABLE,
    CameraNames,
    PolicyType,
    Revision,
    SessionRequest,
)

# Fields of a session's request in the specification, which gives only their types and defaults.
SPECIFIED = (
    "session_id",
    "policy_path",
    "transport_server_url",
    "camera_names",
    "workspace_id",
    "policy_type",
    "language_instruction",
)


def _model_of(names: Iterable[str], *, is_bare: bool = False, **defaults: object) -> type[BaseModel]:
    """Return a model of a session request's fields and ``defaults``; ``is_bare`` omits bounds and descriptions."""
    hints = get_type_hints(SessionRequest, include_extras=not is_bare)
    usual = {one.name: ... if one.default is MISSING else one.default for one in fields(SessionRequest)}
    found: dict[str, Any] = {name: (hints[name], (usual | defaults)[name]) for name in names}
    return create_model("Fields", **found)


# A docstring would change the specified document.
class CreateSessionRequest(_model_of(SPECIFIED, is_bare=True)):
    pass


class CreateSessionResponse(BaseModel):
    workspace_id: str
    camera_room_ids: dict[str, str]
    joint_input_room_id: str
    joint_output_room_id: str


class AdoptRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    force: bool = Field(default=False, strict=True, description="A person has checked that its server is off.")


class ValidationError(BaseModel):
    loc: list[str | int] = Field(title="Location")
    msg: str = Field(title="Message")
    type: str = Field(title="Error Type")


class HTTPValidationError(BaseModel):
    detail: list[ValidationError] = Field(default_factory=list)


class NewSessionRequest(_model_of(one.name for one in fields(SessionRequest))):
    """Body of POST /sessions: CreateSessionRequest, more optional fields, and the limits of each field.

    Other fields are refused: a misspelt ``dry_run`` or ``max_relative_target`` would protect nothing.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class AdjustRequest(_model_of(ADJUSTABLE)):
    """Body of PATCH /sessions/{session_id}: at least one field."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    @model_validator(mode="after")
    def _something(self) -> "AdjustRequest":
        if not self.model_fields_set:
            raise PydanticCustomError(
                "missing",
                "At least one of overlap, ask_ahead, action_steps, language_instruction, accept_units should be there",
            )
        return self


class PolicyRequest(BaseModel):
    """Body of POST /sessions/{session_id}/policy."""

    model_config = ConfigDict(strict=True, extra="forbid")

    revision: Revision | None = Field(
        default=None,
        description="Branch, tag or commit; null for the staged commit, else the newest of the session's revision.",
    )
    force: bool = Field(default=False, description="Take a commit out of the quarantine for it.")


class PolicyCheckRequest(
    _model_of(
        (one.name for one in fields(SessionRequest)),
        session_id="check",
        transport_server_url="http://localhost",
    )
):
    """Body of POST /policies/check: the fields of POST /sessions, of which only the policy is required.

    Cameras, policy type and instruction are not compared with the policy when they are left out.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    camera_names: CameraNames | None = Field(
        default=None,
        json_schema_extra={"uniqueItems": True},
        description="Compared with the policy's own, unless null.",
    )
    policy_type: PolicyType | None = Field(default=None, description="Compared with the policy's own, unless null.")


class PolicyCheck(BaseModel):
    """Requirements of a policy, and whether a session fits them; nothing was loaded."""

    fits: bool
    misfits: list[str] = Field(description="Everything that POST /sessions would refuse, one text each.")
    policy_type: str
    camera_names: list[str]
    camera_sizes: dict[str, list[int]] = Field(description="Height and width; frames of other sizes are resized.")
    joint_names: list[str] | None = Field(
        description="Joints in the order of the actions; null if it does not fit, or the session needs joint_names."
    )
    rate: float | None = Field(description="Ticks per second the session would have; null when it does not fit.")
    requirements: dict[str, Any]


class RecordRequest(BaseModel):
    """Body of POST /sessions/{session_id}/record."""

    model_config = ConfigDict(strict=True, extra="forbid")

    on: bool = Field(description="Whether the session is recorded from now on, or from its next start.")


class Recording(BaseModel):
    """A recording of a session."""

    name: str
    session_id: str | None = Field(description="null when the file cannot be read.")
    at: float | None = Field(description="Begin of the recording, in seconds since 1970.")
    seconds: float | None = Field(description="Time from its first tick to its last; null if its server was killed.")
    bytes: int
    episodes: int | None = Field(description="Number of starts of the robot.")
    state: str = Field(
        description="on, or how it ended: off (as asked), disk_full, limit, failed, interrupted (its server was "
        "killed; it can be read up to the last second), unreadable."
    )
    dataset: str = Field(description="State of its LeRobotDataset: none, waiting, making, ready or failed.")


class Deployment(BaseModel):
    """One policy update: its trigger, commit, stages with times, and result."""

    id: str
    at: float = Field(description="Begin of the update, in seconds since 1970.")
    repo: str
    ref: str | None
    sha: str | None
    trigger: str = Field(description="webhook, poll, request or folder.")
    webhook_id: str | None
    delivery_ids: list[str] = Field(description="Webhook-Id of each delivery of this update, of the newest 100.")
    sessions: list[str] = Field(description="Sessions of the update; the first is updated before the others.")
    stages: list[DeploymentStage]
    result: str | None = Field(
        description="swapped, staged, rejected, rolled_back, superseded, failed, noop or alert; null while it runs."
    )
    reason: str | None = Field(description="Stable code of the reason for a refusal or rollback.")
    text: str
    figures: dict[str, Any] = Field(description="Result and measurements of each session.")


class ErrorResponse(BaseModel):
    """Every answer that is neither 200 nor 422."""

    detail: str = Field(description="The value found, the accepted values, and what to do.")
    code: str = Field(description="Stable name of the error, for programs.")


class FastApiSchema(GenerateJsonSchema):
    """Schemas as FastAPI prints them: a default of null is left out, and free-form objects say so."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """The schema of a field with a default."""
        found = super().default_schema(schema)
        if found.get("default", 0) is None:
            del found["default"]
        return found


def list_schema(model: type[BaseModel]) -> dict[str, object]:
    """Return the JSON schema of a list of a model of the documents."""
    return {"type": "array", "items": {"$ref": f"#/components/schemas/{model.__name__}"}}
