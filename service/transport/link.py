"""Interfaces between a session and its rooms: inbox, link, events."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Rooms:
    """The rooms of one session, all in one workspace.

    Attributes:
        cameras: camera name to room id, ``{session}-{camera}``.
        joint_input: ``{session}-joint-input``, in which the robot reports its joints.
        joint_output: ``{session}-joint-output``, in which the session sends commands.

    Example:
        >>> Rooms("lab", {"front": "arm-front"}, "arm-joint-input", "arm-joint-output").ids
        ('arm-front', 'arm-joint-input', 'arm-joint-output')
    """

    workspace_id: str
    cameras: Mapping[str, str] = field(default_factory=dict)
    joint_input: str = ""
    joint_output: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all rooms."""
        return tuple(filter(None, (*self.cameras.values(), self.joint_input, self.joint_output)))


@dataclass(frozen=True)
class JointValue:
    """One joint on the wire: name, value in the sender's unit, position in the joint order."""

    name: str
    value: float
    index: int | None = None


class Inbox(Protocol):
    """Receiver of a link's data, on the event loop; ``observed_at`` is the monotonic receive or decode time."""

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Take one picture: uint8 (h, w, 3), RGB; the sender does not change the array later."""
        ...

    def on_joints(self, values: Mapping[str, float], observed_at: float) -> None:
        """Take a partial joint update: wire name to value, unchecked."""
        ...

    def on_event(self, event: "LinkEvent") -> None:
        """Take a change of the link or an emergency stop."""
        ...


@dataclass(frozen=True)
class EmergencyStop:
    """Emergency stop by a participant of a room."""

    reason: str
    source: str


@dataclass(frozen=True)
class LinkDown:
    """The connection to a room is lost, and is being restored."""

    room: str
    reason: str


@dataclass(frozen=True)
class LinkUp:
    """A room is joined, for the first time or again."""

    room: str


@dataclass(frozen=True)
class BadInput:
    """Number of unusable values of a joint room by reason; they are not delivered."""

    reasons: Mapping[str, int]


@dataclass(frozen=True)
class RobotLeft:
    """The robot that reported the joints left or was replaced, so its last report is not a valid pose."""

    room: str
    is_replaced: bool = False


@dataclass(frozen=True)
class RobotLatch:
    """Reason of the emergency stop after which the robot's program holds the robot, or None."""

    room: str
    reason: str | None


LinkEvent = EmergencyStop | LinkDown | LinkUp | BadInput | RobotLeft | RobotLatch


class Link(Protocol):
    """One session's live connection to its rooms. It reconnects by itself until its context ends."""

    rooms: Rooms

    def send(self, joints: Sequence[JointValue]) -> bool:
        """Send a joint_update to the output room without waiting; False if it was dropped: the link is down or full."""
        ...

    def latch(self, reason: str | None) -> None:
        """Announce a latched emergency stop, or None for a reset, to the robot's room and later participants."""
        ...

    def health(self) -> Mapping[str, object]:
        """Return JSON-ready counters per room for the session's stats."""
        ...


class CreatedRooms(Protocol):
    """Rooms of a session that this server created, kept over its restarts."""

    def __contains__(self, room: object) -> bool:
        """Whether this server created the room with this id."""
        ...

    async def add(self, room: str) -> None:
        """Store a room; awaited before the room is created."""
        ...


@dataclass(frozen=True)
class LinkRequest:
    """What a session connects to.

    Attributes:
        url: the transport server, or ``direct``.
        cameras: names of the cameras.
        workspace_id: workspace of the rooms; None for a new one.
        inbox: receives the data of the link.
        created_rooms: rooms of the session that this server created before; None without a record.
        owner: owner of the session; None without keys.
        claim: secret by which the transport server recognizes the session, or None.
    """

    url: str
    session_id: str
    cameras: Sequence[str]
    workspace_id: str | None
    inbox: Inbox
    created_rooms: CreatedRooms | None = None
    owner: str | None = None
    claim: str | None = None


@dataclass(frozen=True)
class Orphan:
    """Rooms of a deleted session, until they are removed.

    Attributes:
        rooms: ids of all its rooms.
        cameras: ids of its video rooms.
        tries: number of failed removals.
        claim: secret by which the transport server recognizes the session, or None.
    """

    id: str
    url: str
    workspace_id: str
    rooms: tuple[str, ...]
    cameras: tuple[str, ...]
    tries: int = 0
    claim: str | None = field(default=None, repr=False)


class Transport(Protocol):
    """Creates links of sessions."""

    def connect(self, request: LinkRequest) -> AbstractAsyncContextManager[Link]:
        """Create and join the rooms, deliver to the inbox until the context ends, then leave.

        Existing rooms are joined and kept at the end, except ``created_rooms``.

        Raises:
            TransportError: a room cannot be created or joined; new rooms are removed.
        """
        ...

    async def remove_empty_rooms(self, orphan: Orphan) -> Sequence[str]:
        """Remove the empty rooms of a deleted session; returns the occupied rooms."""
        ...
