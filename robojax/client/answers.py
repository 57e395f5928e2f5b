"""Typed answers of the server; fields that a newer server adds are ignored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from robojax.client.codec import unpacked
from robojax.client.errors import Garbled

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Rooms:
    """A session's rooms; without any when it is a direct one."""

    workspace_id: str
    cameras: Mapping[str, str]
    joint_input: str
    joint_output: str


@dataclass(frozen=True)
class SessionStatus:
    """One session, as GET /sessions/{id} tells it."""

    session_id: str
    status: str
    policy_path: str
    policy_type: str
    camera_names: tuple[str, ...]
    rooms: Rooms
    stats: Mapping[str, Any]
    inference_stats: Mapping[str, Any] | None = None
    error_message: str | None = None

    @property
    def is_moving(self) -> bool:
        """Whether its own control loop drives the robot."""
        return self.status in ("running", "degraded", "reconnecting")


@dataclass(frozen=True)
class Chunk:
    """Future actions.

    Attributes:
        actions: float32 (t, a), in the order of ``joint_names``; action i is meant for ``i / action_rate`` seconds
            after the observation.
        action_steps: how many of them the policy's authors do before they ask again.
        clamped: why the safety guard changed something; empty when it changed nothing.
        number: that of the observation.
        timings_ms: how long each stage took on the server.
    """

    actions: "np.ndarray"
    joint_names: tuple[str, ...]
    action_rate: float | None = None
    action_steps: int | None = None
    clamped: tuple[str, ...] = ()
    number: int | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Action:
    """The next action.

    Attributes:
        action: float32 (a,), in the order of ``joint_names``.
        left: how many of its chunk are left before the policy is asked again.
    """

    action: "np.ndarray"
    joint_names: tuple[str, ...]
    left: int = 0
    clamped: tuple[str, ...] = ()
    number: int | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)


def read_status(found: Any) -> SessionStatus:
    """A session's status."""
    _object(found, "a session")
    return SessionStatus(
        session_id=_field(found, "session_id", str),
        status=_field(found, "status", str),
        policy_path=_field(found, "policy_path", str),
        policy_type=_field(found, "policy_type", str),
        camera_names=tuple(_field(found, "camera_names", list)),
        rooms=read_rooms(found.get("rooms") or {}, found.get("workspace_id")),
        stats=_field(found, "stats", dict),
        inference_stats=found.get("inference_stats"),
        error_message=found.get("error_message"),
    )


def read_statuses(found: Any) -> list[SessionStatus]:
    """A list of them."""
    if not isinstance(found, list):
        raise Garbled("the server answered no list of sessions; is this a robojax server?")
    return [read_status(each) for each in found]


def read_rooms(found: Any, workspace_id: Any = None) -> Rooms:
    """A session's rooms."""
    _object(found, "rooms")
    return Rooms(
        workspace_id=str(found.get("workspace_id") or workspace_id or ""),
        cameras=dict(found.get("camera_room_ids") or {}),
        joint_input=str(found.get("joint_input_room_id") or ""),
        joint_output=str(found.get("joint_output_room_id") or ""),
    )


def read_chunk(found: Any) -> Chunk:
    """A chunk."""
    actions = unpacked(_object(found, "a chunk").get("actions"))
    if actions.ndim != 2:
        raise Garbled(f"the server answered actions of shape {actions.shape}; wanted (t, a)")
    rate, steps = found.get("action_rate"), found.get("action_steps")
    return Chunk(actions, action_rate=rate, action_steps=steps, **_common(found, actions))


def read_action(found: Any) -> Action:
    """One action."""
    action = unpacked(_object(found, "an action").get("action"))
    if action.ndim != 1:
        raise Garbled(f"the server answered an action of shape {action.shape}; wanted (a,)")
    return Action(action, left=int(found.get("left") or 0), **_common(found, action))


def _common(found: Mapping[str, Any], array: "np.ndarray") -> dict[str, Any]:
    import numpy as np

    names = tuple(found.get("joint_names") or ())
    if names and len(names) != array.shape[-1]:
        raise Garbled(f"the server answered actions of {array.shape[-1]} joints and {len(names)} names")
    if not np.isfinite(array).all():
        raise Garbled("the server answered actions that are not finite; none of them may be done")
    return {
        "joint_names": names,
        "clamped": tuple(found.get("clamped") or ()),
        "number": found.get("number"),
        "timings_ms": dict(found.get("timings_ms") or {}),
    }


def _object(found: Any, what: str) -> Any:
    if not isinstance(found, dict):
        raise Garbled(
            f"the server answered a {type(found).__name__} where {what} was wanted; is this a robojax server?"
        )
    return found


def _field(found: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = found.get(name)
    if not isinstance(value, kind):
        raise Garbled(f"the server's session has no usable {name!r}; is this a robojax server?")
    return value
