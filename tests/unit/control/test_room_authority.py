"""The last check of what leaves for a robot: whose it is, and what it is; no sockets."""

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
OWN, OTHER = "the session's secret", "another one"


class Double:
    """A session as its room sees it, and its robot."""

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


class Arena:
    """A room of this session, with a robot in it and strangers about."""

    def __init__(self, session: Double | None):
        self.session, self.latch = session, None
        authority = RoomAuthority()
        authority.sessions = self  # type: ignore[assignment]
        self.table = RoomTable(authority=authority)
        self.table.create(ARM, 0.0, claim=OWN)
        self.table.join("robot", ARM, Join("robot", ParticipantRole.CONSUMER), 0.0)
        self.heard: list[dict[str, float]] = []

    def find(self, session_id: str) -> Any:
        return self.session

    def get_latch(self, session_id: str) -> Latch | None:
        return self.latch

    def perform(self, effects: Any) -> list[Any]:
        sent = [(who, effect.message) for effect in effects if isinstance(effect, Send) for who in effect.to]
        for who, message in sent:
            if who == "robot" and isinstance(message, (JointUpdate, protocol.StateSync)):
                self.heard.append(dict(message.values if isinstance(message, JointUpdate) else message.data))
        return [message for _, message in sent]

    def seat(self, who: str, claim: str | None) -> bool:
        self.perform(self.table.join(who, ARM, Join(who, ParticipantRole.PRODUCER), 0.0, claim=claim))
        return self.table.get_participant(who) is not None

    def say(self, who: str, values: dict[str, float]) -> list[Any]:
        data = tuple({"name": name, "value": value} for name, value in values.items())
        return self.perform(websocket.receive_message(self.table, who, JointUpdate(data), 0.0))

    def over_rest(self, values: dict[str, float], claim: str | None = None) -> str | None:
        data = tuple({"name": name, "value": value} for name, value in values.items())
        try:
            self.perform(websocket.publish_joints(self.table, self.table.get(ARM), data, "api", claim)[1])
        except CommandRefused as refused:
            return refused.code
        return None


def seated(stage: Stage = Stage.RUNNING, latch: str | None = None) -> Arena:
    arena = Arena(Double(stage, latch))
    assert arena.seat("session", OWN)
    return arena


def test_only_the_secret_of_the_session_commands() -> None:
    arena = seated()
    assert arena.over_rest({"Jaw": 50.0}) == arena.over_rest({"Jaw": 50.0}, OTHER) == "robot_taken"
    assert arena.over_rest({"Jaw": 50.0}, OWN) is None
    arena.table.leave("session")
    assert not arena.seat("session", OTHER)
    assert not arena.seat("arm-joint-output-producer-00000000", None)
    assert arena.seat("anything", OWN)
    assert arena.heard == [{"Jaw": 50.0}]


def test_what_somebody_commanded_before_the_session_did_is_told_to_nobody() -> None:
    """A client may move its robot to what it is told when it joins."""
    arena = Arena(None)  # there is no session of this server yet, and the room is anybody's
    assert arena.over_rest({"Jaw": 90.0}, OWN) is None
    arena.session = Double()
    assert arena.seat("session", OWN)
    joined = arena.perform(arena.table.join("late", ARM, Join("late", ParticipantRole.CONSUMER), 0.0))
    assert protocol.StateSync({}) in joined
    assert not [message for message in joined if isinstance(message, protocol.StateSync) and message.data]


def test_a_stopped_session_keeps_its_room_and_hides_commands() -> None:
    arena = seated()
    arena.say("session", {"Jaw": 50.0})
    join = Join("late", ParticipantRole.CONSUMER)
    assert protocol.StateSync({"Jaw": 50.0}) in arena.perform(arena.table.join("late", ARM, join, 0.0))
    arena.table.leave("late")
    arena.session.stage = Stage.STOPPED
    assert protocol.StateSync({}) in arena.perform(arena.table.join("late", ARM, join, 0.0))
    for who in ("late", "robot", "session"):
        arena.table.leave(who)
    with pytest.raises(CommandRefused):
        arena.table.create(ARM, 1.0, claim=OTHER)
    arena.table.create(ARM, 1.0, claim=OWN)
    arena.session.stage, arena.session.new.dry_run = Stage.RUNNING, True
    assert arena.over_rest({"Jaw": 50.0}, OWN) == "dry_run"


def test_a_forbidden_command_is_refused_and_counted() -> None:
    arena = seated()
    for values in ({"Rotation": 100.1}, {"Jaw": -0.1}, {"Tail": 1.0}, {"Pitch": float("nan")}, {"Elbow": 1e300}):
        [error] = arena.say("session", {"Wrist_Roll": 3.0} | values)
        assert isinstance(error, protocol.VideoError)
    assert arena.session.refused_commands.by_reason() == {"not_finite": 1, "position": 3, "unknown_joint": 1}
    assert (arena.heard, arena.table.get(ARM).joints) == ([], {})
    arena.say("session", {"Rotation": 100.0, "Jaw": 0.0})
    assert arena.heard == [{"Rotation": 100.0, "Jaw": 0.0}]


def test_a_hold_is_a_pose_that_was_measured_just_now_wherever_that_is() -> None:
    limits = {"low": np.full(6, -5.0), "high": np.full(6, 5.0)}  # the arm stands outside, at 10
    arena = seated(Stage.STOPPED, "a hand")
    guard = arena.session.robot_io.controller.guard
    guard.limits = type(guard.limits)(**{**vars(guard.limits), **limits})
    assert arena.over_rest({"Rotation": 4.0}, OWN) == "latched"
    assert arena.over_rest({"Rotation": 10.0, "Jaw": 9.0}, OWN) == "latched"
    assert arena.over_rest(dict.fromkeys(NAMES, 10.0), OWN) is None
    arena.session.measure({"Rotation": 11.0})
    arena.say("session", {"Rotation": 11.0})
    arena.say("session", {"Rotation": 10.0})  # of a moment ago, and on its way while the next was measured
    assert arena.heard == [dict.fromkeys(NAMES, 10.0), {"Rotation": 11.0}, {"Rotation": 10.0}]
    arena.session.buffer._past = type(arena.session.buffer._past)(
        (until - 2, pose) for until, pose in arena.session.buffer._past
    )
    assert arena.over_rest({"Rotation": 10.0}, OWN) == "latched"
    arena.session.stage, arena.session.latch = Stage.RUNNING, None
    assert arena.over_rest({"Rotation": 12.0}, OWN) == "position", "not further out than it is"
    assert arena.over_rest({"Rotation": 8.0}, OWN) is None, "led back"
    assert arena.over_rest({"Rotation": 4.0}, OWN) is None
    arena.session.latch = "a hand"  # whatever its stage is
    assert arena.over_rest({"Rotation": 4.0}, OWN) == "latched"


def test_a_latch_outlives_its_session_for_its_owner_only() -> None:
    arena = seated(Stage.STOPPED, "smoke")
    arena.table.leave("session")
    arena.session, arena.latch = None, Latch("smoke", "ann")
    assert arena.over_rest({"Jaw": 1.0}, OWN) == "latched"
    told = arena.perform(arena.table.join("late", ARM, Join("late", ParticipantRole.CONSUMER), 0.0))
    assert told[-1] == protocol.EmergencyStopMessage("smoke", "arm")
    arena.table.get(ARM).owner = "bob"
    assert arena.over_rest({"Jaw": 1.0}) is None
    arena.table.get(ARM).owner = arena.latch = None
    assert arena.over_rest({"Jaw": 2.0}) is None


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
    arena = Arena(Double(Stage.READY))
    session = arena.session
    assert session is not None
    measured: list[dict[str, float]] = [dict.fromkeys(NAMES, 10.0)]
    for step in script:
        before = len(arena.heard)
        match step:
            case ("rest", pose, claim):
                code = arena.over_rest(pose, claim)
                assert claim == OWN or code == "robot_taken" or ARM not in arena.table.rooms
            case ("seat", who):
                assert not (arena.seat(who, OWN if who == "session" else OTHER) and who == "stranger")
            case ("say", who, pose):
                arena.say(who, pose)
            case ("leave", who, is_orderly):
                arena.table.leave(who, is_orderly)
            case ("measure", pose):
                session.measure(pose)
                measured.append(measured[-1] | pose)
            case ("hold",):
                arena.say("session", measured[-1])
            case ("stage", stage):
                session.stage = stage
            case ("latch", is_latched):
                session.latch = "smoke" if is_latched else None
            case ("delete", claim):
                try:
                    arena.table.delete(ARM, claim)
                    assert claim == OWN
                    arena.table.create(ARM, 0.0, claim=claim)
                except CommandRefused:
                    assert claim != OWN
            case ("robot joins",):
                arena.table.leave("robot")
                arena.perform(arena.table.join("robot", ARM, Join("robot", ParticipantRole.CONSUMER), 0.0))
        for heard in arena.heard[before:]:
            assert heard.keys() <= set(NAMES)
            assert all(joint.low <= heard.get(joint.name, joint.low) <= joint.high for joint in SO100)
            if session.latch is not None or session.stage not in MOVING:
                assert not heard or any(heard.items() <= pose.items() for pose in measured)
