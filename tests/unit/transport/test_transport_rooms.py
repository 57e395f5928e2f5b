"""Room table without sockets and without a clock."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from service.transport import protocol
from service.transport.address import Kind
from service.transport.protocol import Join, JointUpdate, ParticipantRole, WireError
from service.transport.server import websocket
from service.transport.server.rooms import Close, RoomLimits, RoomPath, RoomTable, Send, TooManyRooms, UnknownRoom

ARM = RoomPath(Kind.ROBOTICS, "w", "arm")
CAMERA = RoomPath(Kind.VIDEO, "w", "camera")
PRODUCER, CONSUMER = ParticipantRole.PRODUCER, ParticipantRole.CONSUMER


@pytest.fixture
def table() -> RoomTable:
    table = RoomTable()
    for path in (ARM, CAMERA):
        table.create(path, now=0.0)
    return table


def recipients(effects) -> list[tuple[object, str]]:
    """Return the connection and message type of each sent message."""
    return [(peer, effect.message.type) for effect in effects if isinstance(effect, Send) for peer in effect.to]


def closed(effects) -> set[object]:
    return {peer for effect in effects if isinstance(effect, Close) for peer in effect.to}


def test_one_id_may_be_producer_and_consumer_of_one_room(table):
    table.join("a", ARM, Join("me", PRODUCER), 0.0)
    table.join("b", ARM, Join("me", CONSUMER), 0.0)
    table.leave("a")
    assert (table.get(ARM).producer, table.get(ARM).consumers) == (None, ["me"])
    stop = websocket.receive_message(table, "b", protocol.EmergencyStopMessage(), 0.0)
    assert recipients(stop) == [("b", "emergency_stop")]


def test_a_broadcast_is_one_effect_for_any_number_of_consumers(table):
    table.join("p", ARM, Join("p", PRODUCER), 0.0)
    for number in range(5):
        table.join(number, ARM, Join(f"c{number}", CONSUMER), 0.0)
    effects = websocket.receive_message(table, "p", JointUpdate(({"name": "Jaw", "value": 1},)), 0.0)
    assert len(effects) == 1
    assert [peer for peer, _ in recipients(effects)] == [0, 1, 2, 3, 4]


def test_rooms_participants_and_joint_names_have_limits():
    table = RoomTable(RoomLimits(joints=3))
    table.create(ARM, 0.0)
    table.join("p", ARM, Join("p", PRODUCER), 0.0)
    many = JointUpdate(tuple({"name": f"j{number}", "value": 1} for number in range(4)))
    assert recipients(websocket.receive_message(table, "p", many, 0.0)) == [("p", "error")]
    assert table.get(ARM).joints == {}
    with pytest.raises(WireError, match="4 joint names in one room; the limit is 3"):
        websocket.publish_joints(table, table.get(ARM), many.data, "api", None)
    table = RoomTable(RoomLimits(rooms=1, participants=1))
    table.create(ARM, 0.0)
    table.create(ARM, 0.0)
    with pytest.raises(TooManyRooms, match="1 rooms exist, the limit"):
        table.create(CAMERA, 0.0)
    table.join("a", ARM, Join("a", CONSUMER), 0.0)
    assert closed(table.join("b", ARM, Join("b", CONSUMER), 0.0)) == {"b"}
    table.leave("a")
    assert not closed(table.join("b", ARM, Join("b", CONSUMER), 0.0))


def test_one_owner_cannot_take_all_rooms_and_places():
    table = RoomTable(RoomLimits(per_owner=2))
    first, second, third = (RoomPath(Kind.ROBOTICS, "w", name) for name in "abc")
    for path in (first, second, first):
        table.create(path, 0.0, owner="ann")
    with pytest.raises(TooManyRooms, match="2 rooms are of this owner"):
        table.create(third, 0.0, owner="ann")
    table.create(third, 0.0, owner="bob")
    for path, name in ((first, "a"), (second, "b")):
        assert not closed(table.join(name, path, Join(name, CONSUMER), 0.0))
    assert closed(table.join("c", first, Join("c", CONSUMER), 0.0)) == {"c"}
    assert not closed(table.join("d", third, Join("d", CONSUMER), 0.0))


def test_only_idle_and_empty_rooms_are_removed(table):
    table.join("c", ARM, Join("c", CONSUMER), 0.0)
    assert table.remove_idle(now=3600.0, idle=3600.0) == []
    assert table.remove_idle(now=3601.0, idle=3600.0) == [CAMERA]
    table.leave("c")
    assert table.remove_idle(now=3601.0, idle=3600.0) == [ARM]
    assert not table.rooms


@pytest.mark.parametrize("message", [protocol.Heartbeat(), protocol.StatusUpdate(), JointUpdate(())])
def test_any_message_keeps_a_room_from_removal(table, message):
    table.join("p", ARM, Join("p", PRODUCER), 0.0)
    websocket.receive_message(table, "p", message, 50.0)
    table.leave("p")
    assert ARM not in table.remove_idle(now=100.0, idle=60.0)


def test_only_the_settings_of_a_producer_are_stored(table):
    table.join("p", CAMERA, Join("p", PRODUCER), 0.0)
    table.join("c", CAMERA, Join("c", CONSUMER), 0.0)
    websocket.receive_message(table, "c", protocol.VideoConfigUpdate({"framerate": 5}), 0.0)
    assert table.get(CAMERA).config.framerate == 30
    websocket.receive_message(table, "p", protocol.VideoConfigUpdate({"framerate": 5, "encoding": "h264"}), 0.0)
    assert (table.get(CAMERA).config.framerate, table.get(CAMERA).config.encoding) == (5, "h264")


@pytest.mark.parametrize("update", [{"framerate": 0}, {"encoding": "x264"}, {"resolution": "big"}, {"quality": [1]}])
def test_invalid_settings_are_relayed_but_not_stored(table, update):
    table.join("p", CAMERA, Join("p", PRODUCER), 0.0)
    table.join("c", CAMERA, Join("c", CONSUMER), 0.0)
    before = table.get(CAMERA).config
    effects = websocket.receive_message(table, "p", protocol.VideoConfigUpdate(update), 0.0)
    assert recipients(effects) == [("c", "video_config_update")]
    assert table.get(CAMERA).config == before


def test_a_long_reason_is_cut(table):
    table.join("c", ARM, Join("c", CONSUMER), 0.0)
    (effect,) = websocket.receive_message(table, "c", protocol.EmergencyStopMessage("x" * 10_000), 0.0)
    assert len(effect.message.reason) == websocket.MAX_REASON


def test_a_signal_stays_in_its_room(table):
    other = RoomPath(Kind.VIDEO, "elsewhere", "camera")
    table.create(other, 0.0)
    table.join("p", CAMERA, Join("p", PRODUCER), 0.0)
    table.join("c", other, Join("c", CONSUMER), 0.0)
    _, effects = websocket.relay_signal(table, CAMERA, "p", {"type": "offer", "sdp": "v=0", "target_consumer": "c"})
    assert effects == []
    answer = {"type": "answer", "sdp": "v=0", "target_producer": "p"}
    assert websocket.relay_signal(table, CAMERA, "c", answer) == (None, [])


def test_an_unknown_room_is_named():
    with pytest.raises(UnknownRoom, match="no robotics room 'arm' in workspace 'w'"):
        RoomTable().get(ARM)


ids = st.sampled_from(["a", "b", "c"])
places = st.sampled_from([ARM, CAMERA, RoomPath(Kind.VIDEO, "w", "arm"), RoomPath(Kind.ROBOTICS, "v", "arm")])
frames = st.sampled_from(
    [
        protocol.Heartbeat(),
        protocol.EmergencyStopMessage(),
        JointUpdate(({"name": "Jaw", "value": 1},)),
        JointUpdate(({"name": "Jaw", "value": 2},)),
        protocol.StreamStarted({}),
        protocol.Unknown("dance"),
    ]
)


class RoomLifecycle(RuleBasedStateMachine):
    """Any order of create, delete, join, send and leave. Connections are numbers."""

    connections = Bundle("connections")

    def __init__(self):
        super().__init__()
        self.table = RoomTable(RoomLimits(rooms=3, participants=4))
        self.made = 0
        self.live: set[int] = set()

    def check(self, effects):
        for effect in effects:
            assert set(effect.to) <= self.live, "a message was sent to a closed connection"
            assert len(set(effect.to)) == len(effect.to), "a message was sent twice"
            if isinstance(effect, Close):
                self.live -= set(effect.to)

    @rule(path=places)
    def create(self, path):
        try:
            self.table.create(path, 0.0)
        except TooManyRooms:
            assert len(self.table.rooms) == 3

    @rule(path=places)
    def delete(self, path):
        try:
            self.check(self.table.delete(path))
        except UnknownRoom:
            assert path not in self.table.rooms

    @rule(target=connections, path=places, who=ids, role=st.sampled_from(ParticipantRole))
    def join(self, path, who, role):
        self.made += 1
        self.live.add(self.made)
        self.check(self.table.join(self.made, path, Join(who, role), 0.0))
        return self.made

    @rule(connection=connections, message=frames)
    def send(self, connection, message):
        effects = websocket.receive_message(self.table, connection, message, 0.0)
        assert connection in self.live or not effects, "a message of a connection outside of all rooms had an effect"
        self.check(effects)
        self.check(websocket.refuse_message(self.table, connection, WireError("x", "joint_update")))

    @rule(connection=consumes(connections))
    def leave(self, connection):
        self.live.discard(connection)
        self.check(self.table.leave(connection))

    @rule(path=places, who=ids, other=ids, kind=st.sampled_from(["offer", "answer", "ice"]))
    def signal(self, path, who, other, kind):
        signal = {"type": kind, "sdp": "", "candidate": {}, "target_consumer": other, "target_producer": other}
        try:
            _, effects = websocket.relay_signal(self.table, path, who, signal)
        except UnknownRoom:
            return
        self.check(effects)

    @invariant()
    def listed_participants_equal_connected_participants(self):
        listed = 0
        for room in self.table.rooms.values():
            participants = self.table.participants(room)
            names = [*([room.producer] if room.producer else []), *room.consumers]
            assert [participant.id for participant in participants] == names
            assert {participant.connection for participant in participants} <= self.live
            listed += len(names)
        assert listed == len(self.live) == sum(self.table.connections(kind) for kind in Kind)


TestRoomLifecycle = RoomLifecycle.TestCase
TestRoomLifecycle.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
