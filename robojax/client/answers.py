"""Responses of the server as typed values; unknown fields of newer servers are ignored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from robojax.client.codec import unpack_array
from robojax.client.errors import ProtocolError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class SessionRooms:
    """IDs of a session's rooms; empty for a direct session.

    Example:
        >>> with Client() as client:
        ...     session = client.create("arm", "robojax/sim/policy", transport_server_url=client.url)
        ...     session.status().rooms.joint_output
        'arm-joint-output'
    """

    workspace_id: str
    cameras: Mapping[str, str]
    joint_input: str
    joint_output: str


@dataclass(frozen=True)
class SessionStatus:
    """Status of a session, as GET /sessions/{id} returns it.

    Example:
        >>> with Client() as client:
        ...     status = client.create("arm", "robojax/sim/policy").status()
        >>> status.status, status.policy_type, status.camera_names, status.is_moving
        ('ready', 'act', ('front',), False)
    """

    session_id: str
    status: str
    policy_path: str
    policy_type: str
    camera_names: tuple[str, ...]
    rooms: SessionRooms
    stats: Mapping[str, Any]
    inference_stats: Mapping[str, Any] | None = None
    error_message: str | None = None

    @property
    def is_moving(self) -> bool:
        """Whether the session's control loop moves the robot."""
        return self.status in ("running", "degraded", "reconnecting")


@dataclass(frozen=True)
class Chunk:
    """A chunk of future actions.

    Attributes:
        actions: float32 (t, a), in the order of ``joint_names``; action i belongs ``i / action_rate`` seconds
            after the observation.
        action_steps: number of actions that the policy's authors execute before the next request.
        clamped: reasons why the action guard changed the actions; empty when it changed nothing.
        number: number of the observation.
        timings_ms: milliseconds that each stage took on the server.
        warnings: unusual input that the server found, e.g. a joint far outside its range; empty when it found none.

    Example:
        >>> frame, joints = np.zeros((96, 96, 3), np.uint8), [0.0, -90.0, 90.0, 0.0, 0.0, 10.0]
        >>> with Client() as client, client.create("arm", "robojax/sim/policy") as session:
        ...     chunk = session.act({"front": frame}, joints, number=1)
        >>> chunk.actions.shape, chunk.joint_names[-1], chunk.number, chunk.warnings
        ((20, 6), 'Jaw', 1, ())
    """

    actions: "np.ndarray"
    joint_names: tuple[str, ...]
    action_rate: float | None = None
    action_steps: int | None = None
    clamped: tuple[str, ...] = ()
    number: int | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Action:
    """The next action of a robot.

    Attributes:
        action: float32 (a,), in the order of ``joint_names``.
        left: actions of the chunk that are left before the server runs the policy again.
        clamped, number, timings_ms, warnings: as in ``Chunk``.

    Example:
        >>> frame, joints = np.zeros((96, 96, 3), np.uint8), [0.0, -90.0, 90.0, 0.0, 0.0, 10.0]
        >>> with Client() as client, client.create("arm", "robojax/sim/policy") as session:
        ...     first = session.next_action({"front": frame}, joints)
        ...     second = session.next_action({"front": frame}, joints)
        >>> first.action.shape, first.left - second.left
        ((6,), 1)
    """

    action: "np.ndarray"
    joint_names: tuple[str, ...]
    left: int = 0
    clamped: tuple[str, ...] = ()
    number: int | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_status(answer: Any) -> SessionStatus:
    """Parse the status of a session."""
    _check_object(answer, "a session")
    return SessionStatus(
        session_id=_read_field(answer, "session_id", str),
        status=_read_field(answer, "status", str),
        policy_path=_read_field(answer, "policy_path", str),
        policy_type=_read_field(answer, "policy_type", str),
        camera_names=tuple(_read_field(answer, "camera_names", list)),
        rooms=read_rooms(answer.get("rooms") or {}, answer.get("workspace_id")),
        stats=_read_field(answer, "stats", dict),
        inference_stats=answer.get("inference_stats"),
        error_message=answer.get("error_message"),
    )


def read_statuses(answer: Any) -> list[SessionStatus]:
    """Parse a list of statuses."""
    if not isinstance(answer, list):
        raise ProtocolError("the response is not a list of sessions; is this a robojax server?")
    return [read_status(status) for status in answer]


def read_rooms(answer: Any, workspace_id: Any = None) -> SessionRooms:
    """Parse a session's rooms."""
    _check_object(answer, "rooms")
    return SessionRooms(
        workspace_id=str(answer.get("workspace_id") or workspace_id or ""),
        cameras=dict(answer.get("camera_room_ids") or {}),
        joint_input=str(answer.get("joint_input_room_id") or ""),
        joint_output=str(answer.get("joint_output_room_id") or ""),
    )


def read_chunk(answer: Any) -> Chunk:
    """Parse a chunk."""
    actions = unpack_array(_check_object(answer, "a chunk").get("actions"))
    if actions.ndim != 2:
        raise ProtocolError(f"the server sent actions of shape {actions.shape}; expected (t, a)")
    rate, steps = answer.get("action_rate"), answer.get("action_steps")
    return Chunk(actions, action_rate=rate, action_steps=steps, **_read_common_fields(answer, actions))


def read_action(answer: Any) -> Action:
    """Parse an action."""
    action = unpack_array(_check_object(answer, "an action").get("action"))
    if action.ndim != 1:
        raise ProtocolError(f"the server sent an action of shape {action.shape}; expected (a,)")
    return Action(action, left=int(answer.get("left") or 0), **_read_common_fields(answer, action))


def _read_common_fields(answer: Mapping[str, Any], array: "np.ndarray") -> dict[str, Any]:
    import numpy as np

    names = tuple(answer.get("joint_names") or ())
    if names and len(names) != array.shape[-1]:
        raise ProtocolError(f"the server sent actions of {array.shape[-1]} joints with {len(names)} names")
    if not np.isfinite(array).all():
        raise ProtocolError("the server sent actions that are not finite; do not execute any of them")
    return {
        "joint_names": names,
        "clamped": tuple(answer.get("clamped") or ()),
        "number": answer.get("number"),
        "timings_ms": dict(answer.get("timings_ms") or {}),
        "warnings": tuple(map(str, answer.get("warnings") or ())),
    }


def _check_object(value: Any, what: str) -> Any:
    if not isinstance(value, dict):
        raise ProtocolError(f"the server sent a {type(value).__name__} instead of {what}; is this a robojax server?")
    return value


def _read_field(answer: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = answer.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"the session has no valid {name!r} but {value!r:.80}; is this a robojax server?")
    return value
