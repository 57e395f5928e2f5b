"""Joint rooms of a session: received joints and sent commands."""

import time
from collections.abc import Callable

from service.transport.client.connection import RoomListener
from service.transport.client.rest import Presence, RoomsApi
from service.transport.link import BadInput, EmergencyStop, Inbox, LinkDown, LinkUp, RobotLeft, Rooms
from service.transport.protocol import EmergencyStopMessage, JointUpdate, Message

REST_SOURCE = "api"  # Source of joints that were set over REST.


class SessionRoomListener(RoomListener):
    """Passes emergency stops and connection changes of a room to the session's inbox."""

    def __init__(self, room: str, inbox: Inbox):
        self.room = room
        self.inbox = inbox

    def on_joined(self, participant_id: str) -> None:
        """Report that the room is joined."""
        self.inbox.on_event(LinkUp(self.room))

    def on_message(self, message: Message, received_at: float) -> None:
        """Report an emergency stop."""
        if isinstance(message, EmergencyStopMessage):
            self.inbox.on_event(EmergencyStop(message.reason or "no reason given", message.source or "unknown"))

    def on_lost(self, reason: str) -> None:
        """Report that the room is lost."""
        self.inbox.on_event(LinkDown(self.room, reason))


class JointOutputListener(SessionRoomListener):
    """Announces a latched emergency stop in the room that a session commands.

    Rooms do not keep a stop, so it is repeated after a reconnection and for each new participant.
    """

    def __init__(self, room: str, inbox: Inbox, send: Callable[[Message], bool]):
        super().__init__(room, inbox)
        self._send = send
        self._latch: str | None = None
        self._is_stop_sent = True
        self._own_ids: set[str] = set()
        self._known_consumers: frozenset[str] = frozenset()

    def announce_latch(self, reason: str | None) -> None:
        """Announce a latched emergency stop with this reason; None after a reset."""
        if reason != self._latch:
            self._latch = reason
            self._is_stop_sent = reason is None
            self._send_latched_stop()

    def on_joined(self, participant_id: str) -> None:
        """Report the join, and announce a latched stop."""
        self._own_ids.add(participant_id)
        self._is_stop_sent = self._latch is None
        self._send_latched_stop()
        super().on_joined(participant_id)

    def on_message(self, message: Message, received_at: float) -> None:
        """Report a message, except the echo of this session's own stop."""
        if not (isinstance(message, EmergencyStopMessage) and message.source in self._own_ids):
            super().on_message(message, received_at)

    async def on_presence(self, presence: Presence) -> None:
        """Announce a latched stop to a new participant of the room."""
        if presence.consumers - self._known_consumers:
            self._is_stop_sent = self._latch is None
        self._known_consumers = presence.consumers
        self._send_latched_stop()

    def _send_latched_stop(self) -> None:
        if not self._is_stop_sent and self._latch is not None:
            self._is_stop_sent = self._send(EmergencyStopMessage(reason=self._latch))


class JointInputListener(SessionRoomListener):
    """Receives joints and emergency stops from the room in which the robot reports."""

    def __init__(self, rooms: Rooms, api: RoomsApi, inbox: Inbox):
        super().__init__(rooms.joint_input, inbox)
        self.updates = 0
        self._workspace = rooms.workspace_id
        self._api = api
        self._producer: str | None = None
        self._is_reporting = False  # Whether a robot is in the room, not only a REST client.
        self._received_names: set[str] = set()

    def on_joined(self, participant_id: str) -> None:
        """Forget received joints, because the room may be a new room."""
        self._producer = None
        self._is_reporting = False
        self._received_names.clear()
        super().on_joined(participant_id)

    def on_message(self, message: Message, received_at: float) -> None:
        """Deliver joints. ``state_sync`` is ignored, because a room keeps the joints of a robot that left."""
        if isinstance(message, JointUpdate) and self._is_reporting and message.source == REST_SOURCE:
            # Only the robot's own reports are measurements.
            self.inbox.on_event(BadInput({"not_the_robot": len(message.data)}))
        elif isinstance(message, JointUpdate):
            self._is_reporting = self._is_reporting or message.source != REST_SOURCE
            values, contradicting = _drop_contradicting(message)
            self._received_names |= values.keys()
            if contradicting:
                self.inbox.on_event(BadInput({"contradicting": contradicting}))
            if values:
                self.updates += 1
                self.inbox.on_joints(values, received_at)
        super().on_message(message, received_at)

    def on_malformed(self) -> None:
        """Report a malformed frame as one unusable value."""
        self.inbox.on_event(BadInput({"malformed": 1}))

    async def on_presence(self, presence: Presence) -> None:
        """Fetch the joints of a new robot, because the server forwards only changes; report a robot that left."""
        if self._producer not in (None, presence.producer):
            self._producer = None
            self._received_names.clear()
            self.inbox.on_event(RobotLeft(self.room))
        self._is_reporting = presence.producer not in (None, REST_SOURCE)
        if presence.producer is None:
            self._received_names.clear()
        elif presence.producer != self._producer:
            values = await self._api.get_joints(self._workspace, self.room)
            self._producer = presence.producer
            # Joints received from the socket are newer than this answer.
            missed = {name: value for name, value in values.items() if name not in self._received_names}
            if missed:
                self.updates += 1
                self.inbox.on_joints(missed, time.monotonic())


def _drop_contradicting(update: JointUpdate) -> tuple[dict[str, float], int]:
    """Return joint name to value without joints that have two different values, and the number of such joints."""
    values: dict[str, float] = {}
    contradicting: set[str] = set()
    for joint in update.data:
        name, value = joint["name"], float(joint["value"])
        if values.setdefault(name, value) != value:
            contradicting.add(name)
    return {name: value for name, value in values.items() if name not in contradicting}, len(contradicting)
