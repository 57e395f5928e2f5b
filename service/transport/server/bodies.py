"""Request bodies of the rooms' REST endpoints."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from service.transport import protocol

# Ids are parts of URL paths, in which clients resolve "." and "..".
_IDENTIFIER = re.compile(r"(?!\.+$)[A-Za-z0-9_.-]{1,160}")

Body = TypeVar("Body", bound=BaseModel)


class Unprocessable(Exception):
    """An invalid request; ``detail`` is FastAPI's list of ``{type, loc, msg}`` without the input."""

    def __init__(self, detail: list[dict[str, Any]]):
        super().__init__("; ".join(entry["msg"] for entry in detail))
        self.detail = detail


class VideoEncoding(StrEnum):
    """Encoding that a producer declares for its video."""

    JPEG = "jpeg"
    H264 = "h264"
    VP8 = "vp8"
    VP9 = "vp9"


class RecoveryPolicy(StrEnum):
    """What a client shows while frames are missing; it has no effect on the relay."""

    FREEZE_LAST_FRAME = "freeze_last_frame"
    CONNECTION_INFO = "connection_info"
    BLACK_SCREEN = "black_screen"
    FADE_TO_BLACK = "fade_to_black"
    OVERLAY_STATUS = "overlay_status"


class RobotType(StrEnum):
    """Robot type of a room; it has no effect."""

    SO_ARM100 = "so-arm100"
    GENERIC = "generic"


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class VideoConfig(_Body):
    """Video settings of a room, which are shown to clients and not enforced."""

    encoding: VideoEncoding | None = VideoEncoding.VP8
    resolution: Mapping[str, int] | None = Field(default={"width": 640, "height": 480}, max_length=8)
    framerate: int | None = Field(default=30, ge=1, le=120)
    bitrate: int | None = Field(default=1_000_000, ge=100_000)
    quality: int | None = Field(default=80, ge=1, le=100)


class RecoveryConfig(_Body):
    """Recovery settings, which clients of the reference server send; they have no effect."""

    frame_timeout_ms: int = Field(default=100, ge=10, le=1000)
    max_frame_reuse_count: int = Field(default=3, ge=1, le=10)
    recovery_policy: RecoveryPolicy = RecoveryPolicy.FREEZE_LAST_FRAME
    fallback_policy: RecoveryPolicy = RecoveryPolicy.CONNECTION_INFO
    show_hold_indicators: bool = True
    info_frame_bg_color: tuple[int, int, int] = (20, 30, 60)
    info_frame_text_color: tuple[int, int, int] = (200, 200, 200)
    fade_intensity: float = Field(default=0.7, ge=0.0, le=1.0)
    overlay_opacity: float = Field(default=0.3, ge=0.0, le=1.0)


def _check_identifier(value: str) -> str:
    if not _IDENTIFIER.fullmatch(value):
        raise PydanticCustomError(
            "string_pattern_mismatch", "String should be 1 to 160 of A-Z a-z 0-9 '_' '.' '-', and not only dots"
        )
    return value


Identifier = Annotated[str, AfterValidator(_check_identifier)]


class NewRoom(_Body):
    """Body of a new room in both services; ``workspace_id`` is ignored, because the path has it."""

    room_id: Annotated[str, AfterValidator(lambda value: _check_identifier(value) if value else value)] | None = None
    workspace_id: str | None = None
    name: str | None = None
    max_consumers: int = Field(default=10, ge=1, le=100)

    @property
    def consumer_limit(self) -> int | None:
        """The limit that the caller sent; the default of 10 is not enforced."""
        return self.max_consumers if "max_consumers" in self.model_fields_set else None


class NewRoboticsRoom(NewRoom):
    """POST /robotics/workspaces/{workspace}/rooms."""

    robot_type: RobotType = RobotType.SO_ARM100


class NewVideoRoom(NewRoom):
    """POST /video/workspaces/{workspace}/rooms."""

    config: VideoConfig | None = None
    recovery_config: RecoveryConfig | None = None


class JointBody(_Body):
    """One joint of a command, in the robot's unit."""

    name: str = Field(min_length=1, max_length=50)
    value: float = Field(ge=-360.0, le=360.0)
    speed: float | None = Field(default=None, ge=0.0, le=100.0)


class CommandBody(_Body):
    """POST /robotics/.../command."""

    joints: list[JointBody] = Field(min_length=1, max_length=20)


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        protocol.encode(value)
    except protocol.WireError as error:
        raise PydanticCustomError("finite_number", "Input should hold finite numbers only") from error
    return value


class Signal(_Body):
    """POST /video/.../webrtc/signal; ``message`` is not validated here, because a missing sdp answers 500, not 422."""

    client_id: str = Field(min_length=1, max_length=100)
    message: Annotated[dict[str, Any], AfterValidator(_check_json)]


def read_body(model: type[Body], raw: bytes) -> Body:
    """Read a required body; raises Unprocessable if it is missing or as ``read_optional_body``."""
    body = read_optional_body(model, raw)
    if body is None:
        raise Unprocessable([{"type": "missing", "loc": ["body"], "msg": "Field required"}])
    return body


def read_optional_body(model: type[Body], raw: bytes) -> Body | None:
    """Read a body, None if it is missing or null; raises Unprocessable if it is not JSON or does not fit the model."""
    if not raw:
        return None
    try:
        content = protocol.decode(raw)
    except protocol.WireError as error:
        raise Unprocessable(
            [{"type": "json_invalid", "loc": ["body", error.position], "msg": "JSON decode error"}]
        ) from error
    return None if content is None else _validate(TypeAdapter(model), content, "body")


def read_workspace(value: str) -> str:
    """Check the workspace id of a path for a new room; raises Unprocessable if a URL could not contain it."""
    return _validate(_WORKSPACE, value, "path", "workspace_id")


def _validate(adapter: TypeAdapter[Any], content: object, *where: str) -> Any:
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        # Pydantic's error contains the input, which may be a secret.
        entries = error.errors(include_url=False, include_input=False, include_context=False)
        raise Unprocessable(
            [{"type": e["type"], "loc": [*where, *e["loc"]], "msg": e["msg"]} for e in entries]
        ) from error


_WORKSPACE: TypeAdapter[str] = TypeAdapter(Identifier)
