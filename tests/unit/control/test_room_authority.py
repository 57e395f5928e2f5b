"""Last check of a command before it leaves for a robot: its sender and its values. Without sockets."""

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.control.joints import SO100, JointTable
from service.control.limits import create_motion_limits
from service.control.observation_buffer import ObservationBuffer
from service.sessions.records import Latch
from service.sessions.room_authority import RoomAuthority
from service.stage import MOVING, Stage
from service.stats import Tally
from service.transport import protocol
from service.transport.address import Kind
from service.transport.protocol import Join, JointUpdate, ParticipantRole
from service.transport.server import websocket
from service.transport.server.rooms import CommandRefused, RoomPath, RoomTable, Send

pytestmark = pytest.mark.timed

ARM = RoomPath(Kind.ROBOTICS, "w", "arm-joint-output")
NAMES = [joint.name for joint in SO100]
OWN, OTHER = "the session's secret", "another secret"


class SessionDouble:
    """Session and robot as the room authority sees them."""

    def __init__(self, stage: Stage = Stage.RUNNING, latch: str | None = None):
        table = JointTable(SO100)
        self.id, self.claim, self.stage, self.latch = "arm", OWN, stage, latch
        self.refused_commands = Tally()
        self.new = SimpleNamespace(workspace_id="w", owner=None, is_direct=False, dry_run=False)
        self.buffer = ObservationBuffer((), table)
        self.measure(dict.fromkeys(NAMES, 10.0))
        control = SimpleNamespace(guard=SimpleNamespace(limits=create_motion_limits(table)))
        self.robot_io: Any = SimpleNamespace(table=table, buffer=self.buffer, controller=control)

    def measure(self, pose: dict[str, float]) -> None:
        self.buffer.put_joints(pose, time.monotonic())


class SessionRoom:
    """Room of this session with a robot in it; other clients may send commands too."""

    def __init__(self, session: SessionDouble | None):
        self.session, self.latch = session, None
        authority = RoomAuthority()
        authority.sessions = self  # type: ignore[assignment]
        self.table = RoomTable(authority=authority)
        self.table.create(ARM, 0.0, claim=OWN)
        self.table.join("robot", ARM, Join("robot", ParticipantRole.CONSUMER), 0.0)
        self.received: list[dict[str, float]] = []

    def find(self, session_id: str) -> Any:
        return self.session

    def get_latch(self, session_id: str) -> Latch | None:
        return self.latch

    def perform(self, effects: Any) -> list[Any]:
        sent = [(who, effect.message) for effect in effects if isinstance(effect, Send) for who in effect.to]
        for who, message in sent:
            if who == "robot" and isinstance(message, (JointUpdate, protocol.StateSync)):
                self.received.append(dict(message.values if isinstance(message, JointUpdate) else message.data))
        return [message for _, message in sent]

    def join(self, who: str, claim: str | None) -> bool:
        self.perform(self.table.join(who, ARM, Join(who, ParticipantRole.PRODUCER), 0.0, claim=claim))
        return self.table.get_participant(who) is not None

    def send(self, who: str, values: dict[str, float]) -> list[Any]:
        data = tuple({"name": name, "value": value} for name, value in values.items())
        return self.perform(websocket.receive_message(self.table, who, JointUpdate(data), 0.0))

    def post(self, values: dict[str, float], claim: str | None = None) -> str | None:
        data = tuple({"name": name, "value": value} for name, value in values.items())
        try:
            self.perform(websocket.publish_joints(self.table, self.table.get(ARM), data, "api", claim)[1])
        except CommandRefused as refused:
            return refused.code
        return None


def joined_room(stage: Stage = Stage.RUNNING, latch: str | None = None) -> SessionRoom:
    room = SessionRoom(SessionDouble(stage, latch))
    assert room.join("session", OWN)
    return room


def test_only_the_secret_of_the_session_may_command() -> None:
    room = joined_room()
    assert room.post({"Jaw": 50.0}) == room.post({"Jaw": 50.0}, OTHER) == "robot_taken"
    assert room.post({"Jaw": 50.0}, OWN) is None
    room.table.leave("session")
    assert not room.join("session", OTHER)
    assert not room.join("arm-joint-output-producer-00000000", None)
    assert room.join("anything", OWN)
    assert room.received == [{"Jaw": 50.0}]


def test_commands_from_before_the_session_are_not_sent_to_new_clients() -> None:
    room = SessionRoom(None)  # Every client may command a room without a session.
    assert room.post({"Jaw": 90.0}, OWN) is None
    room.session = SessionDouble()
    assert room.join("session", OWN)
    # A client may move its robot to the state that it receives when it joins.
    joined = room.perform(room.table.join("late", ARM, Join("late", ParticipantRole.CONSUMER), 0.0))
    assert protocol.StateSync({}) in joined
    assert not [message for message in joined if isinstance(message, protocol.StateSync) and message.data]


def test_a_stopped_session_keeps_its_room_and_hides_commands() -> None:
    room = joined_room()
    room.send("session", {"Jaw": 50.0})
    join = Join("late", ParticipantRole.CONSUMER)
    assert protocol.StateSync({"Jaw": 50.0}) in room.perform(room.table.join("late", ARM, join, 0.0))
    room.table.leave("late")
    room.session.stage = Stage.STOPPED
    assert protocol.StateSync({}) in room.perform(room.table.join("late", ARM, join, 0.0))
    for who in ("late", "robot", "session"):
        room.table.leave(who)
    with pytest.raises(CommandRefused):
        room.table.create(ARM, 1.0, claim=OTHER)
    room.table.create(ARM, 1.0, claim=OWN)
    room.session.stage, room.session.new.dry_run = Stage.RUNNING, True
    assert room.post({"Jaw": 50.0}, OWN) == "dry_run"


def test_a_forbidden_command_is_refused_and_counted() -> None:
    room = joined_room()
    for values in ({"Rotation": 100.1}, {"Jaw": -0.1}, {"Tail": 1.0}, {"Pitch": float("nan")}, {"Elbow": 1e300}):
        [error] = room.send("session", {"Wrist_Roll": 3.0} | values)
        assert isinstance(error, protocol.VideoError)
    assert room.session.refused_commands.by_reason() == {"not_finite": 1, "position": 3, "unknown_joint": 1}
    assert (room.received, room.table.get(ARM).joints) == ([], {})
    room.send("session", {"Rotation": 100.0, "Jaw": 0.0})
    assert room.received == [{"Rotation": 100.0, "Jaw": 0.0}]


def test_a_hold_is_a_recently_measured_pose_even_outside_the_limits() -> None:
    limits = {"low": np.full(6, -5.0), "high": np.full(6, 5.0)}  # The arm is outside, at 10.
    room = joined_room(Stage.STOPPED, "smoke")
    guard = room.session.robot_io.controller.guard
    guard.limits = type(guard.limits)(**{**vars(guard.limits), **limits})
    assert room.post({"Rotation": 4.0}, OWN) == "latched"
    assert room.post({"Rotation": 10.0, "Jaw": 9.0}, OWN) == "latched"
    assert room.post(dict.fromkeys(NAMES, 10.0), OWN) is None
    room.session.measure({"Rotation": 11.0})
    room.send("session", {"Rotation": 11.0})
    room.send("session", {"Rotation": 10.0})  # The pose of a moment ago may still be on its way.
    assert room.received == [dict.fromkeys(NAMES, 10.0), {"Rotation": 11.0}, {"Rotation": 10.0}]
    room.session.buffer._past = type(room.session.buffer._past)(
        (until - 2, pose) for until, pose in room.session.buffer._past
    )
    assert room.post({"Rotation": 10.0}, OWN) == "latched"
    room.session.stage, room.session.latch = Stage.RUNNING, None
    assert room.post({"Rotation": 12.0}, OWN) == "position", "a command may not move the arm further out"
    assert room.post({"Rotation": 8.0}, OWN) is None, "a command may move the arm back"
    assert room.post({"Rotation": 4.0}, OWN) is None
    room.session.latch = "smoke"  # The stage stays RUNNING.
    assert room.post({"Rotation": 4.0}, OWN) == "latched"


def test_a_latch_outlives_its_session_for_its_owner_only() -> None:
    room = joined_room(Stage.STOPPED, "smoke")
    room.table.leave("session")
    room.session, room.latch = None, Latch("smoke", "ann")
    assert room.post({"Jaw": 1.0}, OWN) == "latched"
    messages = room.perform(room.table.join("late", ARM, Join("late", ParticipantRole.CONSUMER), 0.0))
    assert messages[-1] == protocol.EmergencyStopMessage("smoke", "arm")
    room.table.get(ARM).owner = "bob"
    assert room.post({"Jaw": 1.0}) is None
    room.table.get(ARM).owner = room.latch = None
    assert room.post({"Jaw": 2.0}) is None


values = st.sampled_from([-340.0, -100.0, 0.0, 10.0, 55.0, 100.0, 100.1, 340.0, float("nan"), float("inf")])
poses = st.dictionaries(st.sampled_from([*NAMES, "Tail"]), values, min_size=1, max_size=3)
steps = st.one_of(
    st.tuples(st.just("rest"), poses, st.sampled_from([None, OTHER, OWN])),
    st.tuples(st.just("seat"), st.sampled_from(["session", "stranger"])),
    st.tuples(st.just("say"), st.sampled_from(["session", "stranger", "robot"]), poses),
    st.tuples(st.just("leave"), st.sampled_from(["session", "stranger"]), st.booleans()),
    st.tuples(st.just("measure"), st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.0, 10.0, 30.0]))),
    st.tuples(st.just("hold")),
    st.tuples(st.just("stage"), st.sampled_from(list(Stage))),
    st.tuples(st.just("latch"), st.booleans()),
    st.tuples(st.just("delete"), st.sampled_from([None, OTHER, OWN])),
    st.tuples(st.just("robot joins")),
)


@given(st.lists(steps, max_size=40))
@example([("rest", {"Rotation": math.inf}, OWN)])
def test_no_order_of_events_sends_an_unsafe_command(script: list[Any]) -> None:
    room = SessionRoom(SessionDouble(Stage.READY))
    session = room.session
    assert session is not None
    measured: list[dict[str, float]] = [dict.fromkeys(NAMES, 10.0)]
    for step in script:
        before = len(room.received)
        match step:
            case ("rest", pose, claim):
                code = room.post(pose, claim)
                assert claim == OWN or code == "robot_taken" or ARM not in room.table.rooms
            case ("seat", who):
                assert not (room.join(who, OWN if who == "session" else OTHER) and who == "stranger")
            case ("say", who, pose):
                room.send(who, pose)
            case ("leave", who, is_orderly):
                room.table.leave(who, is_orderly)
            case ("measure", pose):
                session.measure(pose)
                measured.append(measured[-1] | pose)
            case ("hold",):
                room.send("session", measured[-1])
            case ("stage", stage):
                session.stage = stage
            case ("latch", is_latched):
                session.latch = "smoke" if is_latched else None
            case ("delete", claim):
                try:
                    room.table.delete(ARM, claim)
                    assert claim == OWN
                    room.table.create(ARM, 0.0, claim=claim)
                except CommandRefused:
                    assert claim != OWN
            case ("robot joins",):
                room.table.leave("robot")
                room.perform(room.table.join("robot", ARM, Join("robot", ParticipantRole.CONSUMER), 0.0))
        for received in room.received[before:]:
            assert received.keys() <= set(NAMES)
            assert all(joint.low <= received.get(joint.name, joint.low) <= joint.high for joint in SO100)
            if session.latch is not None or session.stage not in MOVING:
                assert not received or any(received.items() <= pose.items() for pose in measured)
