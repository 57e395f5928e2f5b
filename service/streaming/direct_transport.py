"""Transport of sessions whose clients call this server directly, without rooms."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from service.sessions.request import DIRECT
from service.sessions.session import SessionEvent
from service.threads import call_in_thread
from service.transport.link import (
    Inbox,
    JointValue,
    Link,
    LinkDown,
    LinkRequest,
    LinkUp,
    Orphan,
    RobotLatch,
    RobotLeft,
    Rooms,
    Transport,
)

logger = logging.getLogger(__name__)

STREAM_ROOM = "stream"  # Name of the link in events.


@dataclass(eq=False)
class LinkClient:
    """Client that streams to a session, as its link uses it.

    Attributes:
        send_command: sends a command of the session's control loop; False if the client has not read older ones.
        on_session_event: receives the name and payload of each event of the session.
        last_message_at: monotonic time of the client's newest message.
        robot_latch: reason of the emergency stop that the client's program has latched, or None.
    """

    send_command: Callable[[Sequence[JointValue]], bool]
    on_session_event: Callable[[str, Mapping[str, object]], None]
    last_message_at: float = field(default_factory=time.monotonic)
    robot_latch: str | None = None


class DirectLink:
    """``Link`` to the clients that stream to a session.

    Attributes:
        driver: client whose robot the session commands, or None.
        listeners: clients that receive the session's events, including the driver.
        pending_acts, answered_acts: number of acts in progress, and of answered acts.
        published_at: monotonic time of the last observation of an act that was published to viewers.
    """

    def __init__(self, rooms: Rooms, inbox: Inbox):
        self.rooms = rooms
        self.inbox = inbox
        self.driver: LinkClient | None = None
        self.listeners: set[LinkClient] = set()
        self.pending_acts = 0
        self.answered_acts = 0
        self.published_at = -math.inf
        self._connected = self._sent = self._refused = 0

    def send(self, joints: Sequence[JointValue]) -> bool:
        """Send a command to the client in control."""
        is_taken = self.driver is not None and self.driver.send_command(joints)
        self._sent += is_taken
        self._refused += not is_taken
        return is_taken

    def latch(self, reason: str | None) -> None:
        """Do nothing, because streams report the latch with the session's status."""

    def health(self) -> Mapping[str, object]:
        """Return JSON-ready counters."""
        return {
            "connected": self.driver is not None,
            "reconnects": max(self._connected - 1, 0),
            "commands_sent": self._sent,
            "commands_refused": self._refused,
            "acts": self.answered_acts,
            "acts_under_way": self.pending_acts,
        }

    def take_control(self, driver: LinkClient, silence_timeout: float) -> bool:
        """Give a client control of the robot; False while another client was active in ``silence_timeout`` seconds."""
        if self.driver is driver:
            return True
        if self.driver is not None:
            if time.monotonic() - self.driver.last_message_at < silence_timeout:
                return False
            self.release_control(self.driver, "it was silent, and another client came")
        self.driver = driver
        self._connected += 1
        self.report_latch(driver)  # Before the link is up, so that a latched robot never counts as running.
        self.inbox.on_event(LinkUp(STREAM_ROOM))
        return True

    def report_latch(self, driver: LinkClient) -> None:
        """Report the latch of the client in control to the session; ignore the latches of other clients."""
        if self.driver is driver:
            self.inbox.on_event(RobotLatch(STREAM_ROOM, driver.robot_latch))

    def release_control(self, driver: LinkClient, reason: str) -> None:
        """Take control from a disconnected client, unless it has no control."""
        if self.driver is driver:
            self.driver = None
            self.inbox.on_event(LinkDown(STREAM_ROOM, reason))
            self.inbox.on_event(RobotLeft(STREAM_ROOM, is_replaced=True))
            self.inbox.on_event(RobotLatch(STREAM_ROOM, None))  # The next client reports its own latch.


class DirectTransport:
    """``Transport`` of sessions whose clients stream to the server; ``links`` maps session ids to open links."""

    def __init__(self) -> None:
        self.links: dict[str, DirectLink] = {}

    @asynccontextmanager
    async def connect(self, request: LinkRequest) -> AsyncIterator[DirectLink]:
        """Open a link that is down until a client connects."""
        session_id = request.session_id
        link = self.links[session_id] = DirectLink(Rooms(request.workspace_id or ""), request.inbox)
        request.inbox.on_event(LinkDown(STREAM_ROOM, "no client is connected to the session's stream"))
        try:
            yield link
        finally:
            if self.links.get(session_id) is link:
                del self.links[session_id]
            for watcher in tuple(link.listeners):
                watcher.on_session_event("session.deleted", {"session_id": session_id})

    async def remove_empty_rooms(self, orphan: Orphan) -> Sequence[str]:
        """Do nothing, because there are no rooms."""
        return ()

    def on_event(self, event: SessionEvent) -> None:
        """Notify the clients of a session of an event."""
        link = self.links.get(event.session.new.session_id)
        for watcher in tuple(link.listeners) if link is not None else ():
            watcher.on_session_event(event.name, event.payload)


def _log_failure(loading: asyncio.Future[Transport]) -> None:
    if not loading.cancelled() and (error := loading.exception()) is not None:
        logger.critical("the transport over rooms cannot be loaded, and sessions cannot be made", exc_info=error)


class TransportByUrl:
    """``Transport`` that chooses by the URL: `DirectTransport` for direct sessions, rooms for the others.

    Args:
        create_rooms: imports and creates the transport over rooms; called once, on a thread.
    """

    def __init__(self, direct: DirectTransport, create_rooms: Callable[[], Transport]):
        self._direct = direct
        self._create_rooms = create_rooms
        self._rooms: asyncio.Future[Transport] | None = None

    def load(self) -> asyncio.Future[Transport]:
        """Return the future of the transport over rooms, which the first call begins to create."""
        if self._rooms is None:
            self._rooms = call_in_thread(self._create_rooms, "import of rooms")
            self._rooms.add_done_callback(_log_failure)
        return self._rooms

    @asynccontextmanager
    async def connect(self, request: LinkRequest) -> AsyncIterator[Link]:
        """Connect with the transport that the URL asks for."""
        async with (await self._choose(request.url)).connect(request) as link:
            yield link

    async def remove_empty_rooms(self, orphan: Orphan) -> Sequence[str]:
        """Remove rooms with the transport that the URL asks for."""
        return await (await self._choose(orphan.url)).remove_empty_rooms(orphan)

    async def _choose(self, url: str) -> Transport:
        # Direct sessions wait, too, because an import on another thread delays ticks.
        rooms = await asyncio.shield(self.load())
        return self._direct if url == DIRECT else rooms
