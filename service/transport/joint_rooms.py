"""What a session hears in its two joint rooms."""

import time

from service.transport.base import BadInput, EmergencyStop, Inbox, LinkDown, LinkUp, RobotLeft, Rooms
from service.transport.messages import EmergencyStop as StopMessage
from service.transport.messages import JointUpdate, Message
from service.transport.rest import Presence, RoomsApi


class JointOutput:
    """What a session hears in the room it commands: emergency stops."""

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


class JointInput(JointOutput):
    """What a session hears in the room the robot reports in: joints, and emergency stops."""

    def __init__(self, rooms: Rooms, api: RoomsApi, inbox: Inbox):
        super().__init__(rooms.joint_input, inbox)
        self.updates = 0
        self._workspace = rooms.workspace_id
        self._api = api
        self._producer: str | None = None
        self._heard: set[str] = set()

    def joined(self, participant_id: str) -> None:
        """Forget what was heard: the room may be a new one."""
        self._producer = None
        self._heard.clear()
        super().joined(participant_id)

    def received(self, message: Message, seen_at: float) -> None:
        """Deliver joints. ``state_sync`` is left aside: a room keeps the joints of a robot that left long ago."""
        if isinstance(message, JointUpdate):
            values, contradicting = _agreed(message)
            self._heard |= values.keys()
            if contradicting:
                self.inbox.event(BadInput({"contradicting": contradicting}))
            if values:
                self.updates += 1
                self.inbox.joints(values, seen_at)
        super().received(message, seen_at)

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
