"""Joint rooms of a session: joints that come in, commands that go out."""

import time
from collections.abc import Callable

from service.transport.client.rest import Presence, RoomsApi
from service.transport.link import BadInput, EmergencyStop, Inbox, LinkDown, LinkUp, RobotLeft, Rooms
from service.transport.protocol import EmergencyStop as StopMessage
from service.transport.protocol import JointUpdate, Message

# The source of joints that were set over REST.
API = "api"


class SessionRoom:
    """What a session hears in each of its rooms: emergency stops, and whether it is in the room."""

    def __init__(self, room: str, inbox: Inbox):
        self.room = room
        self.inbox = inbox

    def joined(self, participant_id: str) -> None:
        """Tell the session."""
        self.inbox.event(LinkUp(self.room))

    def received(self, message: Message, seen_at: float) -> None:
        """Pass an emergency stop on."""
        if isinstance(message, StopMessage):
            self.inbox.event(EmergencyStop(message.reason or "no reason given", message.source or "unknown"))

    def lost(self, reason: str) -> None:
        """Tell the session."""
        self.inbox.event(LinkDown(self.room, reason))


class JointOutput(SessionRoom):
    """The room that a session commands: it hears stops there, and tells of its own while that is latched.

    Rooms do not keep a stop, so it is said again after a lost connection, and when somebody is new in the room. The
    server of the room may have said it to them at once; once more does no harm.
    """

    def __init__(self, room: str, inbox: Inbox, send: Callable[[Message], bool]):
        super().__init__(room, inbox)
        self._send = send
        self._latch: str | None = None
        self._is_said = True
        self._ids: set[str] = set()
        self._known: frozenset[str] = frozenset()

    def latch(self, reason: str | None) -> None:
        """An emergency stop is latched, for this reason, or none (any more)."""
        if reason != self._latch:
            self._latch = reason
            self._is_said = reason is None
            self._say()

    def joined(self, participant_id: str) -> None:
        """Tell the session, and the room of what is latched."""
        self._ids.add(participant_id)
        self._is_said = self._latch is None
        self._say()
        super().joined(participant_id)

    def received(self, message: Message, seen_at: float) -> None:
        """The echo of our own stop is no other one."""
        if not (isinstance(message, StopMessage) and message.source in self._ids):
            super().received(message, seen_at)

    async def present(self, presence: Presence) -> None:
        """Whoever is new in the room does not know."""
        if presence.consumers - self._known:
            self._is_said = self._latch is None
        self._known = presence.consumers
        self._say()

    def _say(self) -> None:
        if not self._is_said and self._latch is not None:
            self._is_said = self._send(StopMessage(reason=self._latch))


class JointInput(SessionRoom):
    """What a session hears in the room the robot reports in: joints, and emergency stops."""

    def __init__(self, rooms: Rooms, api: RoomsApi, inbox: Inbox):
        super().__init__(rooms.joint_input, inbox)
        self.updates = 0
        self._workspace = rooms.workspace_id
        self._api = api
        self._producer: str | None = None
        self._is_reporting = False  # whether a robot is in the room, rather than somebody who sets joints over REST
        self._heard: set[str] = set()

    def joined(self, participant_id: str) -> None:
        """Forget what was heard: the room may be a new one."""
        self._producer = None
        self._is_reporting = False
        self._heard.clear()
        super().joined(participant_id)

    def received(self, message: Message, seen_at: float) -> None:
        """Deliver joints. ``state_sync`` is left aside: a room keeps the joints of a robot that left long ago."""
        if isinstance(message, JointUpdate) and self._is_of_another(message):
            self.inbox.event(BadInput({"not_the_robot": len(message.data)}))
        elif isinstance(message, JointUpdate):
            self._is_reporting = self._is_reporting or message.source != API
            values, contradicting = _agreed(message)
            self._heard |= values.keys()
            if contradicting:
                self.inbox.event(BadInput({"contradicting": contradicting}))
            if values:
                self.updates += 1
                self.inbox.joints(values, seen_at)
        super().received(message, seen_at)

    def _is_of_another(self, update: JointUpdate) -> bool:
        """Whether somebody set joints over REST beside the robot: what it does not say of itself is no measurement."""
        return update.source == API and self._is_reporting

    def refused(self) -> None:
        """A frame came that is no message: one value that cannot be used, whatever it was meant to say."""
        self.inbox.event(BadInput({"malformed": 1}))

    async def present(self, presence: Presence) -> None:
        """When a robot is new in the room, fetch its joints: the server forwards changes only, so one that stands
        where the room's state already is would never be heard of. Nobody tells of one that leaves, either."""
        if self._producer not in (None, presence.producer):
            self._producer = None
            self._heard.clear()
            self.inbox.event(RobotLeft(self.room))
        self._is_reporting = presence.producer not in (None, API)
        if presence.producer is None:
            self._heard.clear()
        elif presence.producer != self._producer:
            values = await self._api.joints(self._workspace, self.room)
            self._producer = presence.producer
            # What came by the socket meanwhile is newer than this answer.
            missed = {name: value for name, value in values.items() if name not in self._heard}
            if missed:
                self.updates += 1
                self.inbox.joints(missed, time.monotonic())


def _agreed(update: JointUpdate) -> tuple[dict[str, float], int]:
    """Joint name to value, without those that one update gives two different values; and how many those are."""
    values: dict[str, float] = {}
    contradicting: set[str] = set()
    for joint in update.data:
        name, value = joint["name"], float(joint["value"])
        if values.setdefault(name, value) != value:
            contradicting.add(name)
    return {name: value for name, value in values.items() if name not in contradicting}, len(contradicting)
