"""Controller with a scripted robot, camera and policy. Time is a number that the test advances."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.control.aggregation import AGGREGATIONS, EnsembleAggregation
from service.control.chunk_scheduler import ChunkRequest, PolicyAnswer
from service.control.config import ControlConfig, ControlSettings, SafetySettings
from service.control.controller import ControlEvent, Controller, TickResult
from service.control.joints import SO100, JointTable
from service.control.limits import create_motion_limits
from service.control.observation_buffer import ObservationBuffer, Snapshot
from service.control.policy_runner import PolicyRunner
from service.control.robot_io import RobotIO
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy
from service.stage import Move
from service.transport.link import LinkDown, LinkEvent, LinkRequest, LinkUp, RobotLeft
from tests.testing.doubles import MemoryTransport, ScriptedPolicy

FRAME = np.zeros((8, 8, 3), np.uint8)
POSE = {joint.name: 10.0 + joint.index for joint in SO100}
SAFETY = SafetySettings(frozen="warn")
CONFIG = ControlConfig(rate=20, action_rate=20, action_steps=20, chunk=20, width=6, safety=SAFETY)


def plan(snapshot: Snapshot, chunk: int = 20) -> np.ndarray:
    steps = np.arange(1, chunk + 1, dtype=np.float32)[None, :, None]
    return snapshot.joints[None, None, :] + steps


@dataclass
class World:
    """Robot, camera and policy around a controller; the test advances the time.

    Attributes:
        sees: Whether a frame arrives at every tick.
        age: Age of the frames in seconds.
        latency: Seconds that the policy takes.
        policy: Function that returns the answer; a string is the text of an exception.
    """

    config: ControlConfig = CONFIG
    sees: bool = True
    age: float = 0.0
    latency: float = 0.01
    policy: Callable[[Snapshot], object] = plan
    now: float = 100.0
    sent: list[tuple[float, list[float]]] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    answers: list[tuple[float, ChunkRequest]] = field(default_factory=list)
    events: list[ControlEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer = ObservationBuffer(["front"], JointTable(SO100))
        # The joints of this robot never move, so frozen joints are only a warning.
        safety = self.config.safety.model_copy(update={"frozen": "warn"})
        self.control = Controller(self.buffer, replace(self.config, safety=safety))
        self.buffer.put_joints(POSE, self.now)

    def do(self, step: TickResult) -> None:
        if step.command is not None:
            self.sent.append((self.now, step.command.tolist()))
        if step.request is not None:
            assert not self.answers, "two requests in flight"
            self.asked.append(self.now)
            self.answers.append((self.now + self.latency, step.request))
        self.events += step.events

    def run(self, seconds: float, *, late: float = 0.0) -> "World":
        """Tick as the loop does, with every wake-up ``late`` seconds after its deadline."""
        end = self.now + seconds
        while True:
            idle = self.control.is_idle
            wake = float("inf") if idle else max(self.control.clock.next_deadline(self.now) + late, self.now)
            if self.answers and self.answers[0][0] <= min(wake, end):
                self.now, request = self.answers.pop()
                self.answer(request)
                continue
            if wake > end + 1e-9:
                self.now = end
                return self
            self.now = wake
            if self.sees:
                self.buffer.put_frame("front", FRAME, self.now - self.age)
            self.do(self.control.tick(self.now))

    def answer(self, request: ChunkRequest) -> None:
        chunk = self.policy(request.snapshot)
        error = ("policy_failed", chunk) if isinstance(chunk, str) else None
        self.do(self.control.accept(PolicyAnswer(request, None if error else chunk, error), self.now))

    def begin(self) -> "World":
        self.events.clear()
        self.control.begin(self.now)
        return self

    def event(self, event: LinkEvent) -> None:
        self.do(self.control.take_link_event(event, self.now, carries_joints=True))

    def fail(self, policy: Callable[[Snapshot], object]) -> None:
        self.policy = policy
        while self.control.hold is None or not self.control.hold.code.startswith("policy_"):
            self.run(0.05)

    def commands(self, since: float = 0.0) -> list[list[float]]:
        return [command for at, command in self.sent if at >= since]

    def held(self, since: float) -> list[float]:
        """Return the command of a hold that starts now: the measured pose with the last commanded jaw."""
        jaw = next(command[-1] for at, command in reversed(self.sent) if at < since)
        return [*list(POSE.values())[:-1], jaw]


def test_a_session_with_all_inputs_sends_one_action_per_tick() -> None:
    world = World().begin().run(3.0)
    times = [at for at, _ in world.sent]
    assert np.diff(times) == pytest.approx(0.05)
    assert len(times) == 60  # There are 61 ticks. The first tick only requests a chunk.
    assert (world.control.starvations, world.control.hold) == (0, None)


def test_nothing_moves_before_all_cameras_and_joints_have_reported() -> None:
    world = World(sees=False).begin().run(1.0)
    assert (world.sent, world.asked) == ([], [])
    assert world.control.hold.text == "camera 'front': no frame yet"
    world.sees = True
    world.run(0.2)
    assert world.sent
    assert world.control.hold is None


def test_a_following_chunk_is_aligned_to_its_observation() -> None:
    config = replace(CONFIG, action_steps=10, ask_ahead=0.0)
    world = World(latency=0.12, config=config).begin().run(1.0)
    # The first chunk begins with its action 0. Its tenth action requests the next chunk, which arrives 0.12 s later:
    # the times of its actions 0, 1 and 2 have passed.
    done = [round(command[0] - POSE["Rotation"]) for _, command in world.sent]
    assert done == [*range(1, 11), 11, 12, 4, 5, 6, 7, 8, 9]
    assert world.control.queue.late == 3


REST = {
    "start": lambda world: world.begin(),
    "stop and start": lambda world: (world.do(world.control.halt(world.now)), world.begin()),
    "stop, wait and start": lambda world: (world.do(world.control.halt(world.now)), world.run(1.0), world.begin()),
    "camera": lambda world: (setattr(world, "sees", False), world.run(1.0), setattr(world, "sees", True)),
    "link": lambda world: (
        world.event(LinkDown("arm", "gone")),
        world.run(0.06),
        world.event(LinkUp("arm")),
        world.buffer.put_joints(POSE, world.now),
    ),
    "robot replaced": lambda world: (
        world.event(RobotLeft("arm", is_replaced=True)),
        world.run(0.3),
        world.buffer.put_joints(POSE, world.now),
    ),
    "failure": lambda world: world.fail(lambda snapshot: "broken"),
    "refused chunk": lambda world: world.fail(BAD_CHUNKS["nan"]),
    "emergency stop and reset": lambda world: (
        world.do(world.control.halt(world.now, always_hold=True)),
        world.run(2.0),
        world.begin(),
    ),
}


@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("latency", [0.01, 0.7])
@pytest.mark.parametrize("on_hold", ["hold", "ramp"])
def test_the_first_command_after_a_rest_is_action_0(rest: str, latency: float, on_hold: Any) -> None:
    safety, control = SafetySettings(on_hold=on_hold, frozen="warn"), ControlSettings(failures_allowed=9)
    config = replace(CONFIG, safety=safety, control=control)
    world = World(latency=latency, config=config).begin().run(2.0)
    assert len(world.sent) > 20
    REST[rest](world)
    world.policy, late, sent = plan, world.control.queue.late, len(world.sent)
    while world.control.hold is not None or len(world.sent) == sent:
        sent = len(world.sent)
        world.run(world.control.clock.next_deadline(world.now) - world.now)
    assert world.control.queue.late == late
    world.run(0.3 if rest != "link" else 1.0)  # This hold repeats its command during the request.
    moved = [command[0] - POSE["Rotation"] for command in world.commands()[sent:]]
    assert list(dropwhile(lambda step: step == 0, moved))[:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(("rate", "expected"), [(20, [1, 2, 3, 4]), (50, [1, 1.4, 1.8, 2.2]), (10, [1, 3, 5, 7])])
@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("late", [0.0, 0.004, 0.13])
def test_the_plan_is_timed_from_its_first_tick_at_every_rate(rate, expected, name, late) -> None:
    config = replace(CONFIG, rate=rate, overlap=AGGREGATIONS[name])
    world = World(latency=0.7, config=config).begin().run(0.72)
    world.run(0.4, late=late)
    world.run(0.4)
    count = 1 if late > 0.1 else 4
    assert [sent[0] - POSE["Rotation"] for _, sent in world.sent[:count]] == pytest.approx(expected[:count])
    assert world.control.queue.late == 0 or late > 0.1


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_second_chunk_observed_before_the_motion_skips_no_action(name: str) -> None:
    config = replace(CONFIG, overlap=AGGREGATIONS[name], action_steps=10)
    world = World(latency=0.7, age=0.2, config=config).begin().run(2.0)
    # The first command requests the second chunk. Its frame shows the arm at rest, so it is the same plan.
    assert world.asked[1] == world.sent[0][0]
    assert [command[0] - POSE["Rotation"] for command in world.commands()[:20]] == pytest.approx([*range(1, 21)])


def test_a_chunk_after_starving_continues_after_the_executed_actions() -> None:
    world = World(latency=0.02).begin().run(3.0)
    world.latency = 1.3
    asked = len(world.asked)
    while len(world.asked) == asked:
        world.run(0.05)
    world.run(1.2)
    assert world.control.hold.code == "starved"
    done = sum(at >= world.asked[-1] for at, command in world.sent if command[0] != POSE["Rotation"])
    resumed = world.now
    world.run(0.4)
    assert [command[0] - POSE["Rotation"] for command in world.commands(resumed)][:3] == [done + n for n in (1, 2, 3)]
    assert world.control.hold is None


def test_a_policy_slower_than_its_chunk_executes_one_chunk_after_each_rest() -> None:
    world = World(latency=1.5).begin().run(3.05)
    assert [command[0] - POSE["Rotation"] for _, command in world.sent] == [*range(1, 21), *([0] * 4)]
    assert world.control.hold.code == "policy_late"
    assert "1500 ms after its frame" in world.control.hold.text
    assert "covers only 1000 ms" in world.control.hold.text
    since = world.now
    world.run(2.0)
    assert [command[0] - POSE["Rotation"] for command in world.commands(since)][:3] == [1, 2, 3]
    world = World(latency=2.5).begin().run(6.0)
    assert (world.sent, world.control.holds["inference_slow"]) == ([], 2)


def test_a_pause_with_an_answer_in_flight_is_one_hold() -> None:
    world = World(latency=0.03).begin().run(1.0)
    while not world.answers:
        world.run(world.control.clock.next_deadline(world.now) - world.now)
    before, sent = world.control.holds.by_reason(), len(world.sent)
    world.now += 2.0
    world.sees = False
    world.answers = [(world.now, world.answers[0][1])]
    world.run(0.1)
    # The answer reports camera_stale and the next tick reports paused, but the robot receives one hold.
    assert world.control.holds.by_reason() == {**before, "camera_stale": 1, "paused": 1}
    world.run(1.0)
    assert len(world.sent) - sent == 4


def test_a_stalled_camera_holds_at_the_measured_pose_four_times() -> None:
    world = World().begin().run(2.0)
    stalled, world.sees = world.now, False
    world.run(2.0)
    since = world.control.hold.since
    assert since - stalled == pytest.approx(0.35, abs=0.051)
    held = [(at, command) for at, command in world.sent if at >= since]
    assert [command for _, command in held] == 4 * [world.held(since)]
    assert np.diff([at for at, _ in held]) == pytest.approx(0.05)
    assert world.control.hold.code == "camera_stale"
    assert world.control.holds.by_reason()["camera_stale"] == 1


def test_an_answer_to_frames_from_before_a_hold_is_discarded() -> None:
    world = World(latency=0.9).begin().run(0.1)
    world.sees = False
    world.run(0.6)
    resumed, world.sees = world.now, True
    world.run(0.5)
    assert (world.control.scheduler.discarded, world.commands()) == (1, [])
    assert world.asked[-1] > resumed


BAD_CHUNKS = {
    "nan": lambda snapshot: np.where(np.arange(20)[None, :, None] == 7, np.nan, plan(snapshot)).astype(np.float32),
    "infinite": lambda snapshot: np.full((1, 20, 6), np.inf, np.float32),
    "too wide": lambda snapshot: np.zeros((1, 20, 7), np.float32),
    "too short": lambda snapshot: plan(snapshot)[:, :19],
    "no batch": lambda snapshot: plan(snapshot)[0],
    "two robots": lambda snapshot: np.repeat(plan(snapshot), 2, axis=0),
    "whole numbers": lambda snapshot: plan(snapshot).astype(np.int32),
    "a list": lambda snapshot: plan(snapshot).tolist(),
    "none": lambda snapshot: None,
    "an exception": lambda snapshot: "the policy raised ValueError",
}


@pytest.mark.parametrize("kind", BAD_CHUNKS)
def test_nothing_of_a_bad_chunk_is_sent_and_the_robot_is_held(kind: str) -> None:
    world = World(config=replace(CONFIG, control=ControlSettings(failures_allowed=100))).begin().run(1.2)
    bad_since, world.policy = world.now, BAD_CHUNKS[kind]
    world.run(2.0)
    refused = next(at for at in world.asked if at >= bad_since) + world.latency
    assert world.commands(refused) == 4 * [world.held(refused)]
    assert world.control.hold.code == ("policy_failed" if kind == "an exception" else "policy_invalid")
    world.policy = plan
    world.run(1.0)
    assert (world.control.hold, world.events) == (None, [])


@pytest.mark.parametrize("bad", ["none", "an exception"])
def test_three_failures_in_a_row_end_the_motion_but_two_do_not(bad: str) -> None:
    kinds = iter([bad, bad, "good", bad, bad, bad])
    world = World()
    world.policy = lambda snapshot: BAD_CHUNKS.get(next(kinds), plan)(snapshot)
    world.begin()
    while not world.events:
        world.run(0.05)
    assert list(kinds) == []
    assert not world.control.is_running
    if bad == "an exception":
        assert world.events == [ControlEvent(Move.FAILED, "the policy raised ValueError (3 times in a row)")]
        return
    [(move, reason)] = world.events
    assert move is Move.EMERGENCY_STOP, "an invalid chunk stops the robot, and the session stays"
    assert re.fullmatch(r"policy_invalid: .*\(3 times in a row\)", reason)
    assert world.control.rejected == 5


def test_a_policy_that_stalls_during_a_motion_causes_a_hold() -> None:
    world = World().begin().run(3.0)
    world.latency = 4.0
    world.run(3.0)
    assert (world.control.starvations, world.control.hold.code) == (1, "inference_slow")
    assert world.control.holds["starved"] == 1
    assert world.commands()[-4:] == 4 * [world.held(world.control.hold.since)]


def test_a_short_wait_for_the_policy_is_counted_without_a_hold() -> None:
    world = World(config=replace(CONFIG, chunk=4, action_steps=4))
    world.policy = lambda snapshot: plan(snapshot, 4)
    world.begin().run(1.0)
    world.latency = 0.16
    world.run(0.4)
    assert world.control.starvations >= 1
    assert world.control.holds.by_reason() == {}


def test_a_halt_holds_at_once_clears_the_queue_and_ends_commands() -> None:
    world = World().begin().run(1.0)
    sent = len(world.sent)
    world.do(world.control.halt(world.now))
    world.run(1.0)
    assert world.commands()[sent:] == [list(POSE.values())] * 4
    assert world.sent[sent][0] == world.sent[sent - 1][0]
    assert world.control.is_idle


def test_only_an_emergency_stop_commands_a_robot_that_never_moved() -> None:
    world = World()
    assert world.control.halt(world.now).command is None
    assert world.control.is_idle
    world.do(world.control.halt(world.now, always_hold=True))
    world.run(0.5)
    sent = len(world.sent)
    assert sent == 4
    # The pose from before the joints were lost is not sent again.
    world.buffer.distrust_joints()
    world.do(world.control.halt(world.now, always_hold=True))
    assert len(world.run(0.5).sent) == sent


def test_an_answer_that_comes_after_a_stop_moves_nothing() -> None:
    world = World(latency=0.3).begin().run(0.1)
    world.do(world.control.halt(world.now))
    world.run(0.5)
    world.begin().run(0.2)
    assert (world.sent, world.control.scheduler.discarded) == ([], 1)


def test_a_late_wake_up_skips_missed_ticks_and_keeps_the_phase() -> None:
    world = World().begin().run(1.0)
    for early in (0.0, 0.01):
        assert world.control.tick(world.now + early) == TickResult()
    before, sent = world.now, len(world.sent)
    world.now += 0.47  # The loop is not woken for nine and a half ticks.
    world.buffer.put_frame("front", FRAME, world.now)
    world.do(world.control.tick(world.now))
    assert world.control.missed_ticks == 8
    assert len(world.sent) == sent + 1
    assert world.control.clock.next_deadline(world.now) == pytest.approx(before + 0.5)
    assert world.control.lateness.newest_ms == pytest.approx(420)


def test_after_a_long_pause_there_is_one_hold_and_then_a_new_plan() -> None:
    world = World().begin().run(1.0)
    paused, sent = world.now, len(world.sent)
    world.now += 2.0
    world.do(world.control.tick(world.now))
    assert world.commands()[sent:] == [world.held(world.now)]
    world.run(1.0)
    assert world.control.holds.by_reason() == {"paused": 1}
    assert len(world.commands(paused + 2.0)) <= 22
    assert world.control.hold is None


def test_deadlines_do_not_drift() -> None:
    world = World().begin()
    start = world.now
    world.run(100.0, late=0.004)
    ticks = np.array([at for at, _ in world.sent]) - 0.004 - start
    assert np.abs(ticks / 0.05 - np.round(ticks / 0.05)).max() < 1e-6
    assert world.control.missed_ticks == 0
    assert world.control.lateness.percentiles_ms(50, 99) == pytest.approx({"p50": 4, "p99": 4})


CLOSED = 5.0


@pytest.fixture
def gripping() -> World:
    """Return an arm that holds an object: the measured jaw never moves, and a command moves it by 2 units per tick."""

    def closed(snapshot: Snapshot) -> np.ndarray:
        chunk = plan(snapshot)
        chunk[..., -1] = CLOSED
        return chunk

    world = World(policy=closed)
    limits = create_motion_limits(world.buffer.joints, requested={"Jaw": 2.0})
    world.control = Controller(world.buffer, world.config, limits)
    world.begin().run(2.0)
    assert world.sent[-1][1][-1] == CLOSED
    return world


@pytest.mark.parametrize("on_hold", ["hold", "ramp"])
def test_a_hold_and_the_motion_after_it_keep_the_grip(on_hold: str, gripping: World) -> None:
    gripping.control.config = replace(gripping.config, safety=SafetySettings(on_hold=on_hold))
    gripping.sees, stalled = False, gripping.now
    gripping.run(2.0)
    assert gripping.sent[-1][1] == [*list(POSE.values())[:-1], CLOSED]
    gripping.sees = True
    gripping.run(1.0)
    assert gripping.control.hold is None
    assert {command[-1] for command in gripping.commands(stalled)} == {CLOSED}


def test_a_stop_releases_the_grip_and_a_start_uses_the_measured_jaw(gripping: World) -> None:
    stopped = gripping.now
    gripping.do(gripping.control.halt(stopped))
    gripping.run(1.0)
    assert gripping.commands(stopped)[-4:] == 4 * [list(POSE.values())]
    started = gripping.now
    gripping.begin().run(1.0)
    assert gripping.commands(started)[0][-1] == POSE["Jaw"] - 2


def test_a_hold_after_the_robot_left_keeps_no_grip(gripping: World) -> None:
    gripping.control.release_grip()
    gripping.buffer.distrust_joints()
    assert gripping.run(2.0).sent[-1][1] == list(POSE.values())


@pytest.mark.parametrize("outside", [-115.0, 130.0])
@pytest.mark.parametrize("on_hold", ["hold", "ramp"])
def test_an_arm_outside_its_range_is_held_there_and_returns_slowly(outside: float, on_hold: Any) -> None:
    seen: list[float] = []

    def note(snapshot: Snapshot) -> np.ndarray:
        seen.append(float(snapshot.joints[0]))
        return plan(snapshot)

    world = World(policy=note)
    limits = create_motion_limits(world.buffer.joints, requested=1.0)
    world.control = Controller(world.buffer, replace(CONFIG, safety=SafetySettings(on_hold=on_hold)), limits)
    world.buffer.put_joints({"Rotation": outside}, world.now)
    world.do(world.control.halt(world.now, always_hold=True))
    assert world.sent[-1][1][0] == outside, "a hold does not move the arm"
    world.begin().run(1.0)
    assert set(seen) == {outside}, "the policy sees the pose as measured"
    turn = np.sign(-outside)
    begun = [command[0] for command in world.commands() if command[0] != outside]
    assert begun[:3] == pytest.approx([outside + turn * n for n in (1, 2, 3)]), "the arm returns at its step limit"
    world.sees = False
    world.run(2.0)
    assert world.control.hold is not None
    assert world.sent[-1][1][0] == outside


def test_an_obstacle_holds_until_it_is_cleared() -> None:
    world = World().begin().run(1.0)
    world.control.obstruct("link_lost", "room 'a' is lost: socket closed")
    world.run(1.0)
    assert (world.control.hold.code, world.control.hold.text) == ("link_lost", "room 'a' is lost: socket closed")
    world.control.clear("link_lost")
    cleared = world.now
    world.run(1.0)
    assert world.control.hold is None
    assert len(world.commands(cleared)) >= 18


def test_a_restart_clears_the_plan_the_hold_and_the_failures() -> None:
    world = World(policy=BAD_CHUNKS["nan"]).begin().run(1.0)
    assert [event.move for event in world.events] == [Move.EMERGENCY_STOP]
    world.policy = plan
    world.begin().run(1.0)
    assert (world.control.hold, world.events) == (None, [])
    assert len(world.sent) >= 18


def test_ensembling_requests_a_chunk_at_every_tick() -> None:
    world = World(config=replace(CONFIG, overlap=EnsembleAggregation(), action_steps=1)).begin().run(1.0)
    assert (len(world.asked), world.control.starvations) == (21, 0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_tick_sends_at_most_one_finite_command(data: st.DataObject) -> None:
    world = World(config=replace(CONFIG, control=ControlSettings(failures_allowed=1000))).begin()
    kinds = ["sees", "blind", "slow", "quick", "plan", *BAD_CHUNKS, "halt", "begin", "pause", "joints", "lost", "found"]
    for kind in data.draw(st.lists(st.sampled_from(kinds), max_size=25)):
        if kind in BAD_CHUNKS:
            world.policy = BAD_CHUNKS[kind]
        elif kind == "plan":
            world.policy = plan
        elif kind in ("sees", "blind"):
            world.sees = kind == "sees"
        elif kind in ("slow", "quick"):
            world.latency = 0.7 if kind == "slow" else 0.01
        elif kind == "halt":
            world.do(world.control.halt(world.now))
        elif kind == "begin":
            world.begin()
        elif kind == "pause":
            world.now += 1.23
        elif kind == "joints":
            world.buffer.put_joints({"Jaw": float("nan"), "Elbow": 1e999, "Pitch": 5.0, "x": 1}, world.now)
        elif kind == "lost":
            world.control.obstruct("link_lost", "lost")
        elif kind == "found":
            world.control.clear("link_lost")
        since = len(world.sent)
        world.run(data.draw(st.floats(0, 0.5)))
        assert all(np.isfinite(command).all() for _, command in world.sent)
        times = [at for at, _ in world.sent[since:]]
        slots = np.floor((np.array(times) - world.control.clock._anchor) / world.control.period + 1e-6)
        assert (np.diff(slots) >= 1).all(), times
    if not world.control.is_running:
        world.run(1.0)
        assert world.control.is_idle


class Loop:
    """RobotIO around a controller, with a clock that the test advances and a link in memory."""

    def __init__(self, world: World, passes: Callable[[], None]) -> None:
        self.world, self.slept, self._passes = world, list[float](), passes
        world.buffer.put_frame("front", FRAME, world.now)
        policy = LoadedPolicy(ScriptedPolicy())
        runner = PolicyRunner(policy, engine=Engine())
        self.io = RobotIO(world.buffer.joints, world.control, runner, clock=lambda: world.now, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.world.now += seconds
        self.slept.append(self.world.now)
        self.world.buffer.put_frame("front", FRAME, self.world.now)
        self._passes()
        await asyncio.sleep(0)

    async def run(self, until: Callable[[], Awaitable[None]]) -> None:
        transport = MemoryTransport()
        async with transport.connect(LinkRequest("memory://", "s", ("front",), None, self.io)) as link:
            task = asyncio.create_task(self.io.run(link))
            await until()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.io.runner._engine.close()


async def test_the_loop_sleeps_until_each_deadline_and_not_when_idle() -> None:
    world = World()

    def passes() -> None:
        if len(loop.slept) == 10:
            loop.io.halt()

    loop = Loop(world, passes)

    async def until() -> None:
        await loop.io.wait_idle()
        assert loop.slept == []
        loop.io.begin()
        await loop.io.wait_idle()

    await loop.run(until)
    assert len(loop.slept) >= 10
    assert np.diff(loop.slept) == pytest.approx(0.05)


async def test_a_command_from_before_a_pause_is_not_sent() -> None:
    world = World()
    tick, ticks = world.control.tick, list[float]()

    def slow_tick(now: float) -> TickResult:
        ticks.append(now)
        result = tick(now)
        if len(ticks) == 3:
            world.now += 2.0  # The process pauses directly after the tick.
        return result._replace(command=np.array(list(POSE.values()), np.float32))

    world.control.tick = slow_tick  # type: ignore[method-assign]
    loop = Loop(world, lambda: None)
    sent: list[tuple[int, int]] = []

    async def until() -> None:
        loop.io.begin()
        while len(ticks) < 5:
            await asyncio.sleep(0)
            sent.append((len(ticks), loop.io.commands_refused))

    await loop.run(until)
    assert dict(sent)[2] == 0
    assert dict(sent)[4] == 1, "only the command from before the pause is refused"
