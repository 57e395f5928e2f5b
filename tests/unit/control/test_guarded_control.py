"""Controller with limits: start, continuation, refusal, hold and ramp of a motion. Time is a number."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from service.control.aggregation import EnsembleAggregation
from service.control.chunk_scheduler import PolicyAnswer
from service.control.config import ControlConfig, SafetySettings
from service.control.controller import ControlEvent, Controller, TickResult
from service.control.guard import Ramp
from service.control.joints import SO100, JointTable
from service.control.limits import FileLimits, MotionLimits, create_motion_limits
from service.control.observation_buffer import ObservationBuffer, Snapshot
from service.errors import InvalidRequest
from service.stage import Move
from tests.testing.rig import POSE
from tests.testing.waiting import until

pytestmark = pytest.mark.timed

FRAME = np.zeros((8, 8, 3), np.uint8)
TABLE = JointTable(SO100)
CONFIG = ControlConfig(rate=20, action_rate=20, action_steps=10, chunk=20, width=6)
RAMPED = replace(CONFIG, safety=SafetySettings(on_hold="ramp"))
CONFIGS = {"hold": CONFIG, "ramp": RAMPED}
RATES = [
    CONFIG,
    replace(CONFIG, rate=50),
    replace(CONFIG, rate=7),
    replace(CONFIG, overlap=EnsembleAggregation(0.1), action_steps=1),
]


def towards(step: float, joint: int = 0) -> Callable[[Snapshot], np.ndarray]:
    def plan(snapshot: Snapshot) -> np.ndarray:
        chunk = np.repeat(snapshot.joints[None, None], CONFIG.chunk, axis=1)
        chunk[0, :, joint] += step * np.arange(1, CONFIG.chunk + 1, dtype=np.float32)
        return chunk

    return plan


@dataclass
class Arm:
    """Robot that reaches its target at once, a camera, and a policy that answers at once."""

    policy: Callable[[Snapshot], np.ndarray]
    limits: MotionLimits = field(default_factory=lambda: create_motion_limits(TABLE))
    config: ControlConfig = CONFIG
    sees: bool = True
    is_choked: bool = False
    now: float = 100.0
    sent: list[np.ndarray] = field(default_factory=list)
    events: list[ControlEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer = ObservationBuffer(["front"], TABLE)
        self.control = Controller(self.buffer, self.config, self.limits)
        self.move(np.array([0, 0, 0, 0, 0, 50.0]))
        self.control.begin(self.now)

    def move(self, pose: np.ndarray) -> None:
        self.buffer.put_joints(dict(zip(TABLE.names, pose.tolist(), strict=True)), self.now)

    def tick(self, times: int = 1, *, follows: bool = True) -> "Arm":
        for _ in range(times):
            if self.sees:
                self.buffer.put_frame("front", FRAME, self.now)
            self.do(self.control.tick(self.now), follows)
            self.now = self.control.clock.next_deadline(self.now + 1e-4)
        return self

    def do(self, step: TickResult, follows: bool = True) -> None:
        if step.command is not None and self.is_choked:
            self.control.confirm(False, self.now)
        elif step.command is not None:
            self.control.confirm(True, self.now)
            self.sent.append(step.command)
            if follows:
                self.move(step.command)
        self.events += step.events
        if step.request is not None:
            answer = PolicyAnswer(step.request, self.policy(step.request.snapshot))
            self.do(self.control.accept(answer, self.now + 1e-3), follows)

    @property
    def steps(self) -> np.ndarray:
        return np.abs(np.diff(np.array(self.sent), axis=0))


def limits(mode: Any = "clamp", requested: float | None = None, **values: float) -> MotionLimits:
    file = {name: FileLimits(**values, origin="f") for name in TABLE.names} if values else None
    return create_motion_limits(TABLE, SafetySettings(safety=mode), file=file, requested=requested)


async def test_a_session_shows_its_limits_and_refuses_unknown_joints(rigged) -> None:
    async with rigged(max_relative_target=9.0) as rig:
        with pytest.raises(InvalidRequest, match="'knee'"):
            await rig.running(max_relative_target={"knee": 1.0})
        await rig.running(max_relative_target={"gripper": 0.05})
        await until(lambda: rig.stats["safety"]["clamped"].get("seam", 0) > 0)
        safety = rig.stats["safety"]
        json.dumps(safety, allow_nan=False)
        assert (safety["mode"], safety["unlimited"]) == ("clamp", [])
        assert (safety["limits"]["Jaw"]["step"], safety["limits"]["Jaw"]["origin"]) == (0.05, "request, joint table")
        assert safety["limits"]["Elbow"]["step"] == 9
        assert set(safety["clamped_joints"]) == {"Jaw"}
        # A hold after a pause of the test machine commands the measured pose, which may be far from the last command.
        steps = [
            abs(later.values["Jaw"] - earlier.values["Jaw"])
            for earlier, later in pairwise(rig.link.sent)
            if later.values != POSE
        ]
        assert max(steps) <= 0.0501


def test_the_first_motion_begins_smoothly_at_the_measured_pose() -> None:
    def far(snapshot: Snapshot) -> np.ndarray:
        return np.full((1, CONFIG.chunk, 6), 90, np.float32)

    for mode in ("clamp", "refuse"):
        arm = Arm(far, limits(mode, velocity=100.0)).tick(6)
        assert [round(float(command[0])) for command in arm.sent] == [5, 10, 15, 20, 25]
        assert arm.control.rejected == 0
        # The arm is moved by hand during the hold. The motion continues from the new pose.
        arm.sees = False
        arm.tick(10)
        arm.move(np.array([-40, 0, 0, 0, 0, 50.0]))
        arm.sees = True
        before = len(arm.sent)
        arm.tick(3)
        assert [round(float(command[0])) for command in arm.sent[before:]] == [-35, -30]


def test_large_steps_are_clamped_and_reported_as_requested() -> None:
    arm = Arm(towards(4.0), limits(requested=1.5)).tick(30)
    assert arm.steps.max() == pytest.approx(1.5, abs=1e-4)
    assert arm.control.guard.clamped["step"] > 0
    assert (arm.control.hold, arm.control.starvations) == (None, 0)
    assert 3.999 < arm.control.largest_step[0] < 8.001, "at a seam, a step is measured from the last command"
    calm = Arm(towards(1.0), limits(requested=2.5)).tick(30)
    assert calm.control.largest_step[0] == pytest.approx(1.0, abs=1e-4)
    assert calm.control.guard.clamped.total == 0


@pytest.mark.parametrize("config", RATES)
def test_a_calm_plan_is_unchanged_at_other_rates_and_ensembled(config: ControlConfig) -> None:
    arm = Arm(towards(1.0), config=config).tick(20)
    assert arm.control.guard.clamped.total == 0
    assert arm.steps.max() <= max(20 / config.rate, 1.0) * 1.2


@pytest.mark.parametrize("config", RATES)
def test_every_command_of_a_wild_policy_is_inside_all_limits(config: ControlConfig) -> None:
    random = np.random.default_rng(3)

    def wild(snapshot: Snapshot) -> np.ndarray:
        # Clip to the believable range, because a chunk outside of it is refused.
        plan = random.normal(0, 10 ** random.uniform(0, 30), (1, CONFIG.chunk, 6))
        return np.clip(plan, -99, 199).astype(np.float32)

    arm = Arm(wild, limits(requested=3.0, velocity=80.0, low=-20.0, high=60.0), config).tick(200)
    commands = np.array(arm.sent)
    assert len(commands) > 190
    assert commands.min() >= -20.001
    assert commands.max() <= 60.001
    assert arm.steps.max() <= min(3.0, 80 / config.rate) * 1.001


def test_a_refused_chunk_causes_a_hold_and_three_cause_a_stop() -> None:
    arm = Arm(towards(1.0), limits("refuse", velocity=60.0)).tick(15)
    assert arm.control.chunks > 1
    arm.policy = towards(4.0)
    while arm.control.hold is None:
        arm.tick()
    assert arm.control.hold.code == "policy_invalid"
    assert "velocity of joint 'Rotation': changes by 4, the limit is 3 per action" in arm.control.hold.text
    assert arm.control.guard.refused["velocity"] == arm.control.rejected
    arm.tick(4)
    [(move, reason)] = arm.events
    assert (move, reason[:16]) == (Move.EMERGENCY_STOP, "policy_invalid: ")
    assert arm.steps.max() <= 3.001


def test_a_hold_stops_at_once_and_a_ramp_slows_down_first() -> None:
    def held(on_hold: Any) -> tuple[Arm, np.ndarray]:
        arm = Arm(towards(4.0), limits(acceleration=400.0), CONFIGS[on_hold]).tick(15, follows=True)
        arm.control.obstruct("link_lost", "lost")
        before = len(arm.sent)
        arm.tick(20, follows=False)  # The arm does not follow, so the measured pose stays.
        return arm, np.array(arm.sent[before - 1 :])[:, 0]

    arm, commands = held("hold")
    assert len(commands) == 5
    assert (commands == commands[0]).all(), "the hold repeats the last command"
    arm, commands = held("ramp")
    changes = np.diff(commands)[:-4]
    assert (np.diff(changes) <= 1e-3).all(), "each step is smaller than the step before"
    assert 0 < changes[-1] < changes[0] < 4.0
    assert np.abs(np.diff(changes)).max() <= 400 / 20**2 + 1e-3
    assert (commands[-4:] == arm.buffer.pose[0]).all(), "the ramp ends with the measured pose, four times"  # type: ignore[index]
    assert arm.control.hold.code == "link_lost"


@pytest.fixture
def ramping() -> Arm:
    """Return an arm that begins to slow down because its link is lost."""
    arm = Arm(towards(4.0), limits(velocity=100.0), RAMPED).tick(10)
    arm.control.obstruct("link_lost", "lost")
    return arm.tick(2)


def test_motion_after_a_ramp_continues_from_the_last_command(ramping: Arm) -> None:
    ramping.control.clear("link_lost")
    ramping.tick(8)
    assert ramping.control.hold is None
    assert ramping.steps.max() <= 5.001


def test_a_stop_during_a_ramp_stops_at_once(ramping: Arm) -> None:
    before = len(ramping.sent)
    ramping.do(ramping.control.halt(ramping.now))
    ramping.tick(10)
    assert len(ramping.sent) - before == 4
    assert (np.array(ramping.sent[before:]) == ramping.sent[before]).all()


@pytest.mark.parametrize("on_hold", ["hold", "ramp"])
def test_a_hold_is_completed_when_its_reason_is_cleared_early(on_hold: Any) -> None:
    arm = Arm(towards(2.0), limits(velocity=100.0, acceleration=100.0), CONFIGS[on_hold]).tick(12)
    before = len(arm.sent)
    for tick in range(20):
        if tick == 1:
            arm.control.clear("compiling")
        else:
            arm.control.obstruct("compiling", "for a while")
        arm.tick()
        arm.control.scheduler.withdraw()
    held = arm.sent[before:]
    assert len(held) >= 4 + (on_hold == "ramp")
    assert all((each == held[-1]).all() for each in held[-4:])

    arm.move(np.array([-60, 0, 0, 0, 0, 50.0]))  # The arm is moved by hand.
    arm.control.clear("compiling")
    arm.policy = towards(0.0)
    before = len(arm.sent)
    arm.tick(6)
    assert {float(each[0]) for each in arm.sent[before:]} == {-60.0}


@pytest.mark.parametrize("slowed", [0, 1])
def test_a_pause_of_the_process_holds_without_a_ramp(slowed: int) -> None:
    arm = Arm(towards(2.0), limits(velocity=100.0, acceleration=100.0), RAMPED).tick(12)
    if slowed:
        arm.control.obstruct("compiling", "for a while")
        arm.tick(slowed)
    arm.now += 5.0
    arm.move(np.array([-60, 0, 0, 0, 0, 50.0]))  # The arm is moved by hand.
    arm.sees = False
    before = len(arm.sent)
    arm.tick(20)
    assert [float(each[0]) for each in arm.sent[before:]] == 4 * [-60.0]


@pytest.mark.parametrize(("ticks", "holds"), [(4, {}), (20, {"link_choked": 1})])
def test_commands_that_the_link_refuses_do_not_advance_the_motion(ticks: int, holds: dict[str, int]) -> None:
    arm = Arm(towards(2.0), limits(step=2.5)).tick(12)
    before = len(arm.sent)
    arm.is_choked = True
    arm.tick(ticks)
    assert len(arm.sent) == before
    arm.is_choked = False
    arm.tick(20)
    assert len(arm.sent) > before + 10
    assert arm.steps.max() <= 2.5 + 1e-3
    assert arm.control.holds.by_reason() == holds


def test_a_ramp_ends_within_half_a_second_and_within_range() -> None:
    slow = limits(acceleration=1.0)
    ramp = Ramp(slow, np.full(6, 99.0), np.full(6, 200.0), 50)
    commands = []
    while (command := ramp.next()) is not None:
        commands.append(command)
    assert len(commands) == 25
    assert np.array(commands).max() == 100
    assert Ramp(slow, np.zeros(6), np.zeros(6), 50).next() is None
