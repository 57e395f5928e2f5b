"""Request of a new session: each field of `POST /sessions`, declared once, and the checks of a request."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, GetPydanticSchema
from pydantic_core import PydanticCustomError, core_schema

from service.control.aggregation import AGGREGATIONS, AGGREGATIONS_TEXT, MAX_COEFFICIENT
from service.control.config import ControlSettings, SafetySettings
from service.control.limits import LimitsFile
from service.errors import InvalidRequest
from service.http.config import LimitSettings
from service.inference.policy_sources import SourceRules
from service.setting_types import CONTROL_CHARACTERS, NAME, NAME_PATTERN
from service.transport.address import Destinations
from service.transport.link import Rooms
from service.transport.protocol import rooms_of

# Seconds; no chunk covers more.
MAX_ASK_AHEAD = 10
# Replaces a transport server's URL: there are no rooms, and the robot's client connects to this server.
DIRECT = "direct"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SCHEMES = ("http", "https", "ws", "wss")


# Checks of a body beyond its types. The sent value is added to the message later.


def _validate_name(value: str) -> str:
    if not NAME.match(value):
        raise PydanticCustomError(
            "string_pattern_mismatch", "String should be 1 to 64 of A-Z a-z 0-9 '_' '.' '-', and not only dots"
        )
    return value


def _validate_unique(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise PydanticCustomError("unique_items", "List should name each camera once")
    return names


def _validate_url(value: str) -> str:
    if value == DIRECT:
        return value
    error = PydanticCustomError(
        "url_scheme", "URL should have a host and the scheme 'http', 'https', 'ws' or 'wss'; or be 'direct': no rooms"
    )
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise error from None
    if parts.scheme not in _SCHEMES or not parts.hostname or port == 0:
        raise error
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError("url_credentials", "URL should not have a user name or password")
    return value


def _validate_text(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise PydanticCustomError("string_too_short", "String should have at least 1 visible character and no NUL")
    return value


def _validate_instruction(value: str) -> str:
    if CONTROL_CHARACTERS.search(value):
        raise PydanticCustomError(
            "string_control_character", "String should have no control characters except newline and tab"
        )
    return value


# Validates a tuple as a list, because JSON and error messages have lists.
_LIST = GetPydanticSchema(lambda source, handler: handler.generate_schema(list[get_args(source)[0]]))
Text = Annotated[str, Field(max_length=4096)]
Step = Annotated[float, Field(gt=0)]
Name = Annotated[str, AfterValidator(_validate_name), Field(json_schema_extra={"pattern": NAME_PATTERN})]
JointName = Annotated[str, Field(min_length=1, max_length=50)]
PolicyPath = Annotated[Text, Field(min_length=1), AfterValidator(_validate_text)]
PolicyType = Annotated[str, Field(max_length=64)]
Revision = Annotated[str, Field(min_length=1, max_length=256)]
# Any name of a camera that a checkpoint may have ("Top Cam"), to the robot's name.
Rename = dict[Annotated[str, Field(min_length=1, max_length=256)], Name]
CameraNames = Annotated[
    tuple[Name, ...], _LIST, Field(max_length=64), AfterValidator(_validate_unique), AfterValidator(tuple)
]
JointNames = Annotated[tuple[JointName, ...], _LIST, Field(max_length=256), AfterValidator(tuple)]
Rate = Annotated[float, Field(ge=0.1, le=1000)]
# Exactly the names of the table.
Overlap = Annotated[str, GetPydanticSchema(lambda source, handler: core_schema.literal_schema(list(AGGREGATIONS)))]


@dataclass(frozen=True)
class SessionRequest:
    """The body of `POST /sessions`: each field with its bounds and its description.

    `service.api.schemas` builds the models of request bodies and the OpenAPI documents from these fields.
    `SessionSettings.check` checks requests of this process.
    """

    session_id: Annotated[Name, Field(description="Id of the session; its rooms are named after it.")]
    policy_path: Annotated[
        PolicyPath,
        Field(
            json_schema_extra={"pattern": r"\S"},
            description="A folder on the server's machine, or a Hub repo id (owner/name).",
        ),
    ]
    transport_server_url: Annotated[
        Text,
        AfterValidator(_validate_url),
        Field(
            json_schema_extra={"pattern": "^(direct$|(https?|wss?)://[A-Za-z0-9])"},
            description="http(s) or ws(s) URL of the transport server; this server's own address works. `direct`: no "
            "rooms, the robot's client comes to this server (docs/robots/direct.md).",
        ),
    ]
    camera_names: Annotated[
        CameraNames,
        Field(json_schema_extra={"uniqueItems": True}, description="The policy's cameras; one video room each."),
    ] = ("front",)
    workspace_id: Annotated[Name | None, Field(description="Workspace of all its rooms. Null: a new workspace.")] = None
    policy_type: Annotated[
        PolicyType,
        Field(description="Type of the policy: the checkpoint's own type, which POST /policies/check returns."),
    ] = "act"
    language_instruction: Annotated[
        Annotated[Text, AfterValidator(_validate_instruction)] | None,
        Field(
            description="Task of the robot, in words. Policies that read language (`language` in their requirements) "
            "require it; with other policies, only recordings contain it."
        ),
    ] = None
    prompt_cut: Annotated[
        Literal["task", "lerobot"],
        Field(
            description="Cut part of a prompt that is too long and has the joints after the instruction (pi0.5): the "
            "end of the instruction (task), or the end of the prompt, with joints that the policy then does not see "
            "(lerobot). stats.warnings contain instruction_cut."
        ),
    ] = "task"
    rate: Annotated[
        Rate | None,
        Field(
            description="Control ticks per second, up to the server's limit. Null: the policy's own rate, else the "
            "server's default."
        ),
    ] = None
    revision: Annotated[Revision | None, Field(description="Branch, tag or commit of a policy from the Hub.")] = None
    auto_update: Annotated[
        Literal["off", "stage", "swap"],
        Field(
            description="Effect of a push to the revision (a branch or tag), or of a change of the folder. off: none. "
            "stage: the new policy is checked and waits for POST /sessions/{session_id}/policy. swap: it takes over "
            "by itself."
        ),
    ] = "off"
    joint_names: Annotated[
        JointNames | None,
        Field(
            description="Names of the policy's joints in the order of its actions. Needed if its checkpoint has none, "
            "except without rooms if its actions are not targets of the joints that its state measures."
        ),
    ] = None
    dry_run: Annotated[bool, Field(description="Do everything except send commands to the robot.")] = False
    shadow_policy_path: Annotated[
        PolicyPath | None,
        Field(description="A second policy that is also computed and moves nothing; stats show how the two differ."),
    ] = None
    shadow_revision: Annotated[
        Revision | None, Field(description="Branch, tag or commit of the shadow policy from the Hub.")
    ] = None
    max_relative_target: Annotated[
        Step | dict[JointName, Step] | None,
        Field(
            description="Largest step of a joint from one tick to the next, in the joint's unit: a number for all "
            "joints, or an object of numbers by name."
        ),
    ] = None
    overlap: Annotated[
        Overlap | None,
        Field(
            description=f"How a new chunk joins what is left of the plan: {AGGREGATIONS_TEXT}. "
            "Null: ensemble where the checkpoint says so, else the default."
        ),
    ] = None
    temporal_ensemble_coeff: Annotated[
        Annotated[float, Field(ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)] | None,
        Field(description="For ensemble: above 0, older actions weigh more. Null: the checkpoint's, else 0.01."),
    ] = None
    ask_ahead: Annotated[
        Annotated[float, Field(ge=0, le=MAX_ASK_AHEAD)] | None,
        Field(
            description="Seconds between the request of the next chunk and its first action. Null: the measured time "
            "of an inference."
        ),
    ] = None
    action_steps: Annotated[
        Annotated[int, Field(ge=1, le=10_000)] | None,
        Field(
            description="Actions of a chunk that are executed before the next chunk takes over. Null: the policy's "
            "own number; 1 with ensemble."
        ),
    ] = None
    degrade: Annotated[
        bool,
        Field(
            description="Run fewer inferences where the device has no time for all, instead of a refusal (409); stats "
            "show the rate as inferences_per_second."
        ),
    ] = False
    record: Annotated[bool, Field(description="Record every tick after a start, and each act of a client.")] = False
    rename: Annotated[
        Annotated[Rename, Field(max_length=64)] | None,
        Field(
            description="Names of cameras in the checkpoint, and their names on the robot, which all other fields use: "
            '{"Top Cam": "front"}. Null: both have the same names.'
        ),
    ] = None
    accept_units: Annotated[
        bool,
        Field(
            description="Accept a state that is far outside the policy's training data, or moves as in radians or as a "
            "gripper in 0..1, instead of a hold (`joints_units`) or a refusal of the request (422). True only if the "
            "robot reports in the policy's unit."
        ),
    ] = False


# Fields that PATCH /sessions/{session_id} changes while the robot moves.
ADJUSTABLE = ("overlap", "temporal_ensemble_coeff", "ask_ahead", "action_steps", "language_instruction", "accept_units")


@dataclass(frozen=True)
class NewSession(SessionRequest):
    """A requested session; ``owner`` is the owner of the caller's key, or None without keys."""

    owner: str | None = None

    @property
    def is_direct(self) -> bool:
        """Whether it has no rooms, because its robot's client connects to this server directly."""
        return self.transport_server_url == DIRECT

    def rooms(self) -> Rooms:
        """Return the session's rooms; none for a session of a direct client."""
        if self.is_direct:
            return Rooms(self.workspace_id or "")
        return rooms_of(self.session_id, self.camera_names, self.workspace_id)

    def room_paths(self) -> frozenset[str]:
        """Return workspace and id of each of its rooms; none while the workspace is not known."""
        ids = () if self.workspace_id is None else self.rooms().ids
        return frozenset(f"{self.workspace_id}/{room}" for room in ids)


def describe_shared_room(new: NewSession, path: str, other: str, owner: str | None) -> str:
    """Return the error text for a new session that would share a room (``workspace/room``) with another session."""
    workspace, _, room = path.partition("/")
    whose = f"session {other!r}" if new.owner in (None, owner) else "a session of another key"
    return (
        f"session {new.session_id!r} would share the room {room!r} of workspace {workspace!r} with {whose}; rename the "
        "camera or the session, use another workspace, or delete the other session"
    )


@dataclass(frozen=True)
class SessionSettings:
    """Settings of all sessions; times in seconds.

    Attributes:
        limits_file: content of the file of ``safety.limits``.
        max_failed: largest number of failed sessions in the list; the oldest are dropped.
        close_within: time to leave the rooms, after which a link is abandoned.
        samples: number of newest samples that percentiles are computed from.
    """

    limits: LimitSettings = field(default_factory=LimitSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    safety: SafetySettings = field(default_factory=SafetySettings)
    limits_file: LimitsFile | None = None
    max_failed: int = 16
    max_frame_pixels: int = 1920 * 1200
    close_within: float = 3.0
    samples: int = 2048

    def check(self, new: NewSession) -> None:
        """Check a request without loading anything.

        Raises:
            InvalidRequest: with the place in the request's body.
        """
        _check_name(new.session_id, "session_id")
        if new.workspace_id is not None:
            _check_name(new.workspace_id, "workspace_id")
        if not new.policy_path.strip():
            raise InvalidRequest("policy_path is empty; send a folder or a Hub repo id", ("body", "policy_path"))
        if new.auto_update != "off" and new.revision is not None and _COMMIT.fullmatch(new.revision):
            raise InvalidRequest(
                f"auto_update is {new.auto_update!r}, but the revision is a commit, which never moves; "
                "name a branch or a tag, or leave revision out",
                ("body", "auto_update"),
            )
        cameras = ("body", "camera_names")
        if len(new.camera_names) > self.limits.max_cameras:
            raise InvalidRequest(
                f"{len(new.camera_names)} cameras; at most {self.limits.max_cameras} are taken", cameras
            )
        for position, name in enumerate(new.camera_names):
            _check_name(name, "camera_names", position)
        if len(set(new.camera_names)) != len(new.camera_names):
            raise InvalidRequest(f"camera_names {list(new.camera_names)} name a camera twice", cameras)
        # Whether the rooms' names would collide is the transport's own rule.
        rooms_of(new.session_id, new.camera_names, new.workspace_id)
        ahead = new.ask_ahead
        if ahead is not None and not 0 <= ahead <= MAX_ASK_AHEAD:
            raise InvalidRequest(f"ask_ahead is {ahead}; wanted 0 to {MAX_ASK_AHEAD:g} seconds", ("body", "ask_ahead"))
        if new.rate is not None and not (math.isfinite(new.rate) and 0 < new.rate <= self.control.max_rate):
            raise InvalidRequest(
                f"rate is {new.rate}; wanted more than 0 and at most {self.control.max_rate:g} per second",
                ("body", "rate"),
            )


def _check_name(name: str, what: str, *place: int) -> None:
    if not NAME.match(name):
        raise InvalidRequest(
            f"{what} {name[:80]!r}: wanted 1 to 64 letters, digits, '_', '.' or '-' (not only dots)",
            ("body", what, *place),
        )


CheckRequest = Callable[[NewSession], Awaitable[None]]


class RequestRules:
    """Policy sources and transport servers that sessions may use, checked before anything is loaded.

    Args:
        destinations: None where links do not leave this process.
    """

    def __init__(self, sources: SourceRules, destinations: Destinations | None = None):
        self.sources = sources
        self.destinations = destinations

    async def check(self, new: NewSession) -> None:
        """Check a requested session."""
        await asyncio.to_thread(self.sources.check, new.policy_path, revision=new.revision)
        if new.shadow_policy_path is not None:
            shadow, revision = new.shadow_policy_path, new.shadow_revision
            await asyncio.to_thread(self.sources.check, shadow, "shadow_policy_path", revision)
        if self.destinations is not None and not new.is_direct:
            await self.destinations.resolve_addresses(new.transport_server_url)
