"""Request and response models, field for field."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

NAME_PATTERN = r"^(?!\.+$)[A-Za-z0-9_.-]{1,64}$"
_NAME = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z")  # `$` alone would let a last newline pass
_SCHEMES = ("http", "https", "ws", "wss")


class CreateSessionRequest(BaseModel):
    session_id: str
    policy_path: str
    transport_server_url: str
    camera_names: list[str] = ["front"]
    workspace_id: str | None = None
    policy_type: str = "act"
    language_instruction: str | None = None


class CreateSessionResponse(BaseModel):
    workspace_id: str
    camera_room_ids: dict[str, str]
    joint_input_room_id: str
    joint_output_room_id: str


class SessionStatusResponse(BaseModel):
    session_id: str
    status: str
    policy_path: str
    policy_type: str
    camera_names: list[str]
    workspace_id: str
    rooms: dict[str, Any]
    stats: dict[str, Any]
    inference_stats: dict[str, Any] | None = None
    error_message: str | None = None


class AdoptRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    force: bool = Field(default=False, strict=True, description="Somebody has seen that the session's front is off.")


class ValidationError(BaseModel):
    loc: list[str | int] = Field(title="Location")
    msg: str = Field(title="Message")
    type: str = Field(title="Error Type")


class HTTPValidationError(BaseModel):
    detail: list[ValidationError] = Field(default_factory=list)


# What is checked of a request beyond its types. None of these messages repeats what was sent.


def _name(value: str) -> str:
    if not _NAME.match(value):
        raise PydanticCustomError(
            "string_pattern_mismatch", "String should be 1 to 64 of A-Z a-z 0-9 '_' '.' '-', and not only dots"
        )
    return value


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise PydanticCustomError("unique_items", "List should name each camera once")
    return names


def _url(value: str) -> str:
    if value == "direct":
        return value
    wanted = PydanticCustomError(
        "url_scheme", "URL should have a host and the scheme 'http', 'https', 'ws' or 'wss'; or be 'direct': no rooms"
    )
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise wanted from None
    if parts.scheme not in _SCHEMES or not parts.hostname or port == 0:
        raise wanted
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError("url_credentials", "URL should not have a user name or password")
    return value


def _some_text(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise PydanticCustomError("string_too_short", "String should have at least 1 visible character and no NUL")
    return value


Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"pattern": NAME_PATTERN})]
Text = Annotated[str, Field(max_length=4096)]
Step = Annotated[float, Field(gt=0)]
Coefficient = Annotated[float, Field(ge=-10, le=10)] | None
AskAhead = Annotated[float, Field(ge=0, le=10)] | None
ActionSteps = Annotated[int, Field(ge=1, le=10_000)] | None
COEFFICIENT = "Of ensemble only: above 0 older predictions weigh more. Null: the checkpoint's, else 0.01."
ASK_AHEAD = (
    "Seconds before it is needed that the next chunk is asked for. Null: as long as answers are measured to take."
)
ACTION_STEPS = "Actions of a chunk to do before the next one takes over. Null: the policy's own; 1 with ensemble."
INSTRUCTION = (
    "What the robot is to do, in words. Policies that read language want one (their requirements say language); of "
    "other policies only recordings keep it."
)
# As service.control.aggregation knows them.
Overlap = Literal[
    "replace", "weighted_average", "latest_only", "average", "conservative", "ensemble", "crossfade", "rtc"
]
OVERLAP = (
    "How a new chunk joins what is left of the plan: replace (latest_only); LeRobot's weighted_average (0.3 old, 0.7 "
    "new), average, conservative (0.7 old); ensemble (ACT's, over time); crossfade; rtc, for policies that continue a "
    "plan. Null: ensemble where the checkpoint says so, else the default."
)


class NewSessionRequest(CreateSessionRequest):
    """What POST /sessions takes: CreateSessionRequest, three optional fields more, and the limits of each field.

    Other fields are ignored, as clients of the reference expect.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    session_id: Name = Field(description="Names the session and its rooms.")
    policy_path: Annotated[Text, AfterValidator(_some_text)] = Field(
        min_length=1,
        json_schema_extra={"pattern": r"\S"},
        description="A folder on the server's machine, or a Hub repo id (owner/name).",
    )
    transport_server_url: Annotated[Text, AfterValidator(_url)] = Field(
        json_schema_extra={"pattern": "^(direct$|(https?|wss?)://[A-Za-z0-9])"},
        description="http(s) or ws(s) URL of the transport server; this server's own address works. `direct`: no "
        "rooms, the robot's client comes to this server (docs/direct.md).",
    )
    camera_names: Annotated[list[Name], AfterValidator(_each_once)] = Field(
        default=["front"],
        max_length=64,
        json_schema_extra={"uniqueItems": True},
        description="The policy's cameras; one video room each.",
    )
    workspace_id: Name | None = Field(default=None, description="All rooms go into it; a new one when null.")
    policy_type: Annotated[str, Field(max_length=64)] = "act"
    language_instruction: Text | None = Field(default=None, description=INSTRUCTION)
    rate: float | None = Field(
        default=None,
        ge=0.1,
        le=1000,
        description="Control ticks per second; default: the policy's own, else the server's, which also has a limit.",
    )
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of a policy from the Hub."
    )
    auto_update: Literal["off", "stage", "swap"] = Field(
        default="off",
        description="What a push to the revision (a branch or tag) or a change of the folder does: nothing; the new "
        "policy is checked and waits for POST /sessions/{session_id}/policy; or it takes over by itself.",
    )
    joint_names: list[Annotated[str, Field(min_length=1, max_length=50)]] | None = Field(
        default=None, max_length=256, description="Names of the policy's joints in order, when its checkpoint has none."
    )
    dry_run: bool = Field(default=False, description="Do everything but send commands to the robot.")
    shadow_policy_path: Annotated[Text, AfterValidator(_some_text)] | None = Field(
        default=None,
        min_length=1,
        description="A second policy that computes beside the first and moves nothing; stats show how they differ.",
    )
    shadow_revision: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of the shadow policy from the Hub."
    )
    max_relative_target: Step | dict[Annotated[str, Field(min_length=1, max_length=50)], Step] | None = Field(
        default=None,
        description="Largest step of a joint from one tick to the next, in its unit: one for all, or by name.",
    )
    overlap: Overlap | None = Field(default=None, description=OVERLAP)
    temporal_ensemble_coeff: Coefficient = Field(default=None, description=COEFFICIENT)
    ask_ahead: AskAhead = Field(default=None, description=ASK_AHEAD)
    action_steps: ActionSteps = Field(default=None, description=ACTION_STEPS)
    degrade: bool = Field(
        default=False,
        description="Be inferred for less often where the device has no time for more, instead of a refusal (409); "
        "stats say how often: inferences_per_second.",
    )
    record: bool = Field(default=False, description="Record every tick from the first start on.")


class AdjustRequest(BaseModel):
    """What PATCH /sessions/{session_id} takes: at least one of these."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    overlap: Overlap | None = Field(default=None, description=OVERLAP)
    temporal_ensemble_coeff: Coefficient = Field(default=None, description=COEFFICIENT)
    ask_ahead: AskAhead = Field(default=None, description=ASK_AHEAD)
    action_steps: ActionSteps = Field(default=None, description=ACTION_STEPS)
    language_instruction: Text | None = Field(default=None, description=INSTRUCTION)

    @model_validator(mode="after")
    def _something(self) -> "AdjustRequest":
        if not self.model_fields_set:
            raise PydanticCustomError(
                "missing", "At least one of overlap, ask_ahead, action_steps, language_instruction should be there"
            )
        return self


class PolicyRequest(BaseModel):
    """What POST /sessions/{session_id}/policy takes."""

    model_config = ConfigDict(strict=True, extra="forbid")

    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="Branch, tag or commit; null for the one that is staged, else the newest that the session follows.",
    )
    force: bool = Field(default=False, description="Take a commit out of the quarantine for it.")


class PolicyCheckRequest(BaseModel):
    """What POST /policies/check takes: what POST /sessions would, but nothing has to be there except the policy."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    policy_path: Annotated[Text, AfterValidator(_some_text)] = Field(
        min_length=1,
        json_schema_extra={"pattern": r"\S"},
        description="A folder on the server's machine, or a Hub repo id (owner/name).",
    )
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of a policy from the Hub."
    )
    policy_type: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="Compared with the policy's own, unless null."
    )
    camera_names: Annotated[list[Name], AfterValidator(_each_once)] | None = Field(
        default=None,
        max_length=64,
        json_schema_extra={"uniqueItems": True},
        description="Compared with the policy's own, unless null.",
    )
    joint_names: list[Annotated[str, Field(min_length=1, max_length=50)]] | None = Field(
        default=None, max_length=256, description="Compared with the policy's own, unless null."
    )
    rate: float | None = Field(default=None, ge=0.1, le=1000, description="Control ticks per second to be asked for.")
    language_instruction: Text | None = Field(
        default=None, description="Whether one is wanted say the requirements (language); not compared when null."
    )


class PolicyCheck(BaseModel):
    """What a policy needs, and whether a session of it would fit; nothing was loaded."""

    fits: bool
    misfits: list[str] = Field(description="Everything that POST /sessions would refuse, one text each.")
    policy_type: str
    camera_names: list[str]
    camera_sizes: dict[str, list[int]] = Field(description="Height and width; frames of other sizes are resized.")
    joint_names: list[str] | None = Field(description="In the order of the actions; null when they do not fit.")
    rate: float | None = Field(description="Ticks per second the session would have; null when it does not fit.")
    requirements: dict[str, Any]


class ScoreRequest(BaseModel):
    """What POST /sessions/{session_id}/score takes."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tried: int = Field(ge=0, le=10**9, description="Episodes that are over.")
    succeeded: int = Field(ge=0, le=10**9, description="How many of them did what was wanted.")
    note: Annotated[str, Field(max_length=200)] = Field(default="", description="What was tried, for people.")

    @model_validator(mode="after")
    def _no_more_than_tried(self) -> "ScoreRequest":
        if self.succeeded > self.tried:
            raise PydanticCustomError("greater_than", "No more can succeed than were tried")
        return self


class RecordRequest(BaseModel):
    """What POST /sessions/{session_id}/record takes."""

    model_config = ConfigDict(strict=True, extra="forbid")

    on: bool = Field(description="Whether the session is recorded from now on, or from its next start.")


class Recording(BaseModel):
    """A recording of a session."""

    name: str
    session_id: str | None = Field(description="null when the file cannot be read.")
    at: float | None = Field(description="When it began; seconds since 1970.")
    seconds: float | None = Field(description="From its first tick to its last; null when its server was killed.")
    bytes: int
    episodes: int | None = Field(description="How often the robot was started.")
    state: str = Field(
        description="on, or how it ended: off (as asked), disk_full, limit, failed, interrupted (its server was "
        "killed; it can be read up to the last second), unreadable."
    )
    dataset: str = Field(description="The LeRobotDataset made of it: none, waiting, making, ready or failed.")


class DeploymentStage(BaseModel):
    """One step of a policy update."""

    name: str
    at: float = Field(description="Seconds since 1970.")
    seconds: float | None = Field(default=None, description="How long it took; null while it goes on.")


class Deployment(BaseModel):
    """One policy update: what set it off, which commit, what was done when, what became of it."""

    id: str
    at: float = Field(description="Seconds since 1970.")
    repo: str
    ref: str | None
    sha: str | None
    trigger: str = Field(description="webhook, poll, request or folder.")
    webhook_id: str | None
    delivery_ids: list[str] = Field(description="Webhook-Id of each delivery that told of it, of the newest 100.")
    sessions: list[str] = Field(description="Those it was for; the first went ahead of the others.")
    stages: list[DeploymentStage]
    result: str | None = Field(
        description="swapped, staged, rejected, rolled_back, superseded, failed, noop or alert; null while it goes on."
    )
    reason: str | None = Field(description="Stable code of why it was refused or taken back.")
    text: str
    figures: dict[str, Any] = Field(description="What became of it in each session, and what was measured there.")


class Quarantined(BaseModel):
    """A commit that is not deployed by itself any more."""

    repo: str
    sha: str
    at: float = Field(description="Seconds since 1970.")
    reason: str = Field(description="Stable code.")
    text: str
    deployment: str | None = Field(description="The update in which it was refused or taken back.")


class ErrorResponse(BaseModel):
    """Every answer that is neither 200 nor 422."""

    detail: str = Field(description="What was found, what was wanted, what to do.")
    code: str = Field(description="Stable name of the error, for programs.")


class FastApiSchema(GenerateJsonSchema):
    """Schemas as FastAPI prints them: a default of null is left out, and free-form objects say so."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """The schema of a field with a default."""
        found = super().default_schema(schema)
        if found.get("default", 0) is None:
            del found["default"]
        return found
