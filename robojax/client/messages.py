"""What goes over a session's stream: messages as values, and as msgpack. Nothing here opens a connection."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robojax.client.answers import Action, Chunk, read_action, read_chunk
from robojax.client.errors import Garbled


@dataclass(frozen=True)
class Welcome:
    """The first message: what the session's policy wants and gives.

    Attributes:
        cameras: name to (height, width) that the policy was trained with.
        joint_ranges: name to (low, high); None where nobody knows.
        rate: of the session's control loop, per second.
        silence_s: a client that was not heard of for so long counts as gone.
        max_bytes: the largest message that is taken.
    """

    session_id: str
    status: str
    cameras: Mapping[str, tuple[int, int]]
    joint_names: tuple[str, ...]
    joint_ranges: Mapping[str, tuple[float, float] | None]
    rate: float | None
    silence_s: float
    max_bytes: int | None
    reads_prompt: bool


@dataclass(frozen=True)
class Command:
    """Where the joints should be now.

    Attributes:
        joints: wire name to target.
        observation: number of the newest observation that had one.
        age_ms: since that one came to the server.
    """

    joints: Mapping[str, float]
    number: int | None = None
    observation: int | None = None
    age_ms: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class Status:
    """The session's stage changed, or why it holds."""

    status: str
    reason: str | None = None
    hold: str | None = None
    hold_code: str | None = None


@dataclass(frozen=True)
class Stopped:
    """An emergency stop, whoever asked for it."""

    reason: str


@dataclass(frozen=True)
class Pong:
    """The answer to a ping: its number and time, and the server's monotonic clock."""

    number: int | None
    time: float | None
    server_time: float | None


@dataclass(frozen=True)
class Wrong:
    """A message of this client could not be used."""

    code: str
    detail: str
    number: int | None = None


Message = Welcome | Command | Status | Stopped | Pong | Wrong | Chunk | Action


def read(data: bytes | str) -> Message | None:
    """A message of the server's; None for a kind that this client does not know.

    Raises:
        Garbled: it cannot be read.
    """
    found = _map(data)
    kind = found.get("kind")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    try:
        return None if reader is None else reader(found)
    except (KeyError, TypeError, ValueError) as error:
        raise Garbled(f"the server's message of kind {kind!r} lacks something: {error!r}") from error


def write(kind: str, fields: Mapping[str, object]) -> bytes:
    """A message of ours."""
    import msgpack

    data = msgpack.packb({"kind": kind, **fields})
    assert data is not None, "packb gives bytes"
    return data


def _map(data: bytes | str) -> dict[str, Any]:
    import msgpack

    try:
        if isinstance(data, str):
            import json

            found = json.loads(data)
        else:
            found = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise Garbled("the server sent a message that cannot be read") from error
    if not isinstance(found, dict):
        raise Garbled("the server sent a message that is no map")
    return found


def _welcome(found: dict[str, Any]) -> Welcome:
    ranges = found.get("joint_ranges") or {}
    return Welcome(
        session_id=str(found["session_id"]),
        status=str(found["status"]),
        cameras={name: (int(size[0]), int(size[1])) for name, size in found["cameras"].items()},
        joint_names=tuple(found["joint_names"]),
        joint_ranges={name: None if pair is None else (pair[0], pair[1]) for name, pair in ranges.items()},
        rate=found.get("rate"),
        silence_s=float(found.get("silence_s") or 2.0),
        max_bytes=found.get("max_bytes"),
        reads_prompt=bool(found.get("reads_prompt")),
    )


def _command(found: dict[str, Any]) -> Command:
    import math

    joints = {str(name): float(value) for name, value in found["joints"].items()}
    if not all(map(math.isfinite, joints.values())):
        raise Garbled("the server sent a command that is not finite; it is not done")
    return Command(joints, found.get("number"), found.get("observation"), found.get("age_ms"), found.get("time"))


READERS = {
    "welcome": _welcome,
    "command": _command,
    "chunk": read_chunk,
    "action": read_action,
    "status": lambda found: Status(
        str(found["status"]), found.get("reason"), found.get("hold"), found.get("hold_code")
    ),
    "stopped": lambda found: Stopped(str(found.get("reason") or "no reason given")),
    "pong": lambda found: Pong(found.get("number"), found.get("time"), found.get("server_time")),
    "error": lambda found: Wrong(str(found.get("code") or ""), str(found.get("detail") or ""), found.get("number")),
}
