"""A transport without a network: a test delivers what comes in and reads what went out."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from service.errors import TransportError
from service.transport.base import EmergencyStop, Inbox, JointValue, LinkDown, LinkUp, Made, Rooms
from service.transport.names import rooms_of


class Gate(Protocol):
    """What connecting waits at, when a test wants it slow; an ``asyncio.Event`` is one."""

    async def wait(self) -> object:
        """Return when connecting may go on."""
        ...


@dataclass(frozen=True)
class Sent:
    """One joint_update that a session put on the wire, and when."""

    joints: tuple[JointValue, ...]
    at: float

    @property
    def values(self) -> dict[str, float]:
        """Wire name to value."""
        return {joint.name: joint.value for joint in self.joints}


class MemoryLink:
    """A ``Link`` whose other end is the test.

    Attributes:
        rooms: the rooms of the session.
        sent: every joint_update taken by ``send``, oldest first.
        refused: how many calls of ``send`` were not taken.
        is_choked: set it to make ``send`` refuse as when the socket's buffer is over its limit.
        is_closed: whether the session has left.
        latched: the emergency stop that the room was told of last, or None.
    """

    def __init__(self, rooms: Rooms, cameras: Sequence[str], inbox: Inbox, clock: Callable[[], float]):
        self.rooms = rooms
        self.sent: list[Sent] = []
        self.refused = 0
        self.is_choked = False
        self.is_closed = False
        self.latched: str | None = None
        self._inbox = inbox
        self._clock = clock
        self._up: dict[str, bool] = dict.fromkeys(
            [*rooms.cameras.values(), rooms.joint_input, rooms.joint_output], False
        )
        self._frames = dict.fromkeys(cameras, 0)
        self._joints = 0
        self._reconnects = 0

    def send(self, joints: Sequence[JointValue]) -> bool:
        """Keep one joint_update; False when the output room is down, the link is choked or closed."""
        if self.is_closed or self.is_choked or not self._up[self.rooms.joint_output]:
            self.refused += 1
            return False
        self.sent.append(Sent(tuple(joints), self._clock()))
        return True

    def latch(self, reason: str | None) -> None:
        """Keep it."""
        self.latched = reason

    def health(self) -> Mapping[str, object]:
        """The same kind of counters as a real link."""
        return {
            "rooms": {room: {"connected": up} for room, up in self._up.items()},
            "frames_received": dict(self._frames),
            "joints_received": self._joints,
            "commands_sent": len(self.sent),
            "commands_refused": self.refused,
            "reconnects": self._reconnects,
        }

    # What a test does.

    def deliver_frame(self, camera: str, image: np.ndarray, seen_at: float | None = None) -> None:
        """As if this picture (uint8, (h, w, 3), RGB) had just been decoded."""
        if camera not in self._frames:
            raise KeyError(f"no camera {camera!r} in this link; it has {sorted(self._frames)}")
        self._frames[camera] += 1
        self._inbox.frame(camera, image, self._clock() if seen_at is None else seen_at)

    def deliver_joints(self, values: Mapping[str, float], seen_at: float | None = None) -> None:
        """As if the robot had sent this joint_update."""
        self._joints += 1
        self._inbox.joints(values, self._clock() if seen_at is None else seen_at)

    def deliver_emergency_stop(self, reason: str = "a test", source: str = "robot") -> None:
        """As if somebody in a room had asked for an emergency stop."""
        self._inbox.event(EmergencyStop(reason=reason, source=source))

    def go_down(self, room: str | None = None, reason: str = "socket closed") -> None:
        """Lose the connection to one room, or to all."""
        for name in self._named(room):
            if self._up[name]:
                self._up[name] = False
                self._inbox.event(LinkDown(room=name, reason=reason))

    def come_up(self, room: str | None = None) -> None:
        """Join one room, or all, again."""
        for name in self._named(room):
            if not self._up[name]:
                self._up[name] = True
                self._inbox.event(LinkUp(room=name))

    def reconnect(self, room: str | None = None, reason: str = "socket closed") -> None:
        """Down and up again."""
        self.go_down(room, reason)
        self._reconnects += 1
        self.come_up(room)

    def _named(self, room: str | None) -> list[str]:
        if room is None:
            return list(self._up)
        if room not in self._up:
            raise KeyError(f"no room {room!r} in this link; it has {sorted(self._up)}")
        return [room]


class MemoryTransport:
    """A ``Transport`` that hands out ``MemoryLink``s.

    Attributes:
        links: every link made, oldest first.
        existing: ids of the rooms that exist now, as ``workspace/room``.
        occupied: those of them that somebody else is in.
        refuse: set it to an error to make the next connections fail.
        gate: set it to an ``asyncio.Event`` to hold connecting until the test sets it.
        leaving: the same for leaving.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.links: list[MemoryLink] = []
        self.existing: set[str] = set()
        self.occupied: set[str] = set()
        self.refuse: TransportError | None = None
        self.gate: Gate | None = None
        self.leaving: Gate | None = None
        self._clock = clock

    @property
    def link(self) -> MemoryLink:
        """The newest link."""
        if not self.links:
            raise LookupError("nothing has connected yet")
        return self.links[-1]

    @asynccontextmanager
    async def connect(
        self,
        url: str,
        *,
        session_id: str,
        cameras: Sequence[str],
        workspace_id: str | None,
        inbox: Inbox,
        made: Made | None = None,
    ) -> AsyncIterator[MemoryLink]:
        """Make the rooms, say that each is joined, and take them away again at the end."""
        rooms = rooms_of(session_id, cameras, workspace_id)
        if self.gate is not None:
            await self.gate.wait()
        if self.refuse is not None:
            raise self.refuse
        link = MemoryLink(rooms, cameras, inbox, self._clock)
        ours: dict[str, str] = {}
        for room in link._named(None):
            name = f"{rooms.workspace_id}/{room}"
            if name not in self.existing:
                if made is not None:
                    await made.add(room)
                self.existing.add(name)
                ours[name] = room
            elif made is not None and room in made:
                ours[name] = room
        self.links.append(link)
        link.come_up()
        try:
            yield link
        finally:
            link.is_closed = True
            if self.leaving is not None:
                await self.leaving.wait()
            self.existing -= {name for name, room in ours.items() if made is None or room in made}

    async def clear(
        self, url: str, *, workspace_id: str, rooms: Sequence[str], cameras: Sequence[str], claim: str | None = None
    ) -> Sequence[str]:
        """Remove rooms but those that a test says somebody is in."""
        if self.refuse is not None:
            raise self.refuse
        left = [room for room in rooms if f"{workspace_id}/{room}" in self.occupied]
        self.existing -= {f"{workspace_id}/{room}" for room in rooms if room not in left}
        return left
