"""Contract between a session and its rooms: inbox, link, events."""

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
        joint_input: ``{session}-joint-input``; the robot produces, we consume.
        joint_output: ``{session}-joint-output``; we produce, the robot consumes.
    """

    workspace_id: str
    cameras: Mapping[str, str] = field(default_factory=dict)
    joint_input: str = ""
    joint_output: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all its rooms; none of a session without rooms."""
        return tuple(filter(None, (*self.cameras.values(), self.joint_input, self.joint_output)))


@dataclass(frozen=True)
class JointValue:
    """One joint on the wire: wire name, value in the sender's unit, position in the joint order."""

    name: str
    value: float
    index: int | None = None


class Inbox(Protocol):
    """Receiver of a link's data, on the event loop; ``observed_at`` is the monotonic receive or decode time."""

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Take one picture: uint8, (h, w, 3), RGB. The array is the receiver's to keep."""
        ...

    def on_joints(self, values: Mapping[str, float], observed_at: float) -> None:
        """Take a partial joint update: wire name to value, as sent. Unknown names and non-finite values may occur."""
        ...

    def on_event(self, event: "LinkEvent") -> None:
        """Take a change of the link or an emergency stop."""
        ...


@dataclass(frozen=True)
class EmergencyStop:
    """Emergency stop that a participant of one of the rooms requested."""

    reason: str
    source: str


@dataclass(frozen=True)
class LinkDown:
    """A room's connection is gone (socket closed, heartbeat unanswered, refused join); it is being re-made."""

    room: str
    reason: str


@dataclass(frozen=True)
class LinkUp:
    """A room's connection is (again) joined; sent once per room, also the first time."""

    room: str


@dataclass(frozen=True)
class BadInput:
    """Unusable input of a joint room: how many values, by reason. Nothing of them is delivered."""

    reasons: Mapping[str, int]


@dataclass(frozen=True)
class RobotLeft:
    """The robot that reported the joints left, or was replaced (``is_replaced``), so its last report is not a pose."""

    room: str
    is_replaced: bool = False


@dataclass(frozen=True)
class RobotLatch:
    """Whether the robot's program holds the robot after an emergency stop: the stop's reason, or None."""

    room: str
    reason: str | None


LinkEvent = EmergencyStop | LinkDown | LinkUp | BadInput | RobotLeft | RobotLatch


class Link(Protocol):
    """One session's live connection to its rooms. It reconnects by itself until its context ends."""

    rooms: Rooms

    def send(self, joints: Sequence[JointValue]) -> bool:
        """Send a joint_update to the output room without waiting; False: dropped, the link is down or full."""
        ...

    def latch(self, reason: str | None) -> None:
        """Announce a latched emergency stop, or None for a reset, to the robot's room and later participants."""
        ...

    def health(self) -> Mapping[str, object]:
        """Plain counters per room for the session's stats: connected, reconnects, frames, rtt of the heartbeat."""
        ...


class CreatedRooms(Protocol):
    """Rooms of a session that this server created, kept over its restarts."""

    def __contains__(self, room: object) -> bool:
        """Whether this server created the room of this id."""
        ...

    async def add(self, room: str) -> None:
        """Note a room; awaited before the room is created."""
        ...


class Transport(Protocol):
    """Makes links. ``service.transport.client.rooms_link`` speaks the RobotHub wire, ``memory`` is the test double."""

    def connect(
        self,
        url: str,
        *,
        session_id: str,
        cameras: Sequence[str],
        workspace_id: str | None,
        inbox: Inbox,
        created_rooms: CreatedRooms | None = None,
    ) -> AbstractAsyncContextManager[Link]:
        """Create and join the rooms, deliver to ``inbox`` until the context ends, then leave.

        On entering, the joint rooms are joined; cameras connect when their producer comes. A failure raises
        ``TransportError``, after new rooms are removed. Existing rooms are joined and kept at the end, except
        ``created_rooms``.
        """
        ...

    async def remove_empty_rooms(
        self, url: str, *, workspace_id: str, rooms: Sequence[str], cameras: Sequence[str], claim: str | None = None
    ) -> Sequence[str]:
        """Remove empty rooms (``cameras`` are video rooms) of a session's ``claim``; returns the occupied ones."""
        ...
