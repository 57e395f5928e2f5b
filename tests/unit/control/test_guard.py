"""Action guard without a controller: results are inside the limits, valid input is unchanged, errors name the fault."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.control.config import Mode, SafetySettings
from service.control.guard import ActionGuard, ChunkClamp, Motion
from service.control.joints import SO100, Joint, JointTable
from service.control.limits import FileLimits, MotionLimits, create_motion_limits

TABLE = JointTable(SO100)
HOME = np.array([0, 0, 0, 0, 0, 50], np.float32)
REST = Motion(HOME, np.zeros(6), np.zeros(6))
STEPS = 20


def limits(mode: Mode = "clamp", **values: float) -> MotionLimits:
    """Return limits of 25 units per action (the jaw: 12.5) at 20 actions per second, changed by ``values``."""
    joints = {}
    for name in TABLE.names:
        numbers: dict[str, Any] = {"velocity": 250.0 if name == "Jaw" else 500.0} | values
        joints[name] = FileLimits(**numbers, origin="f")
    return create_motion_limits(TABLE, SafetySettings(safety=mode), file=joints)


def guard(found: MotionLimits | None = None, *, rate: float = 20, action_rate: float = 20) -> ActionGuard:
    return ActionGuard(found or limits(), rate=rate, action_rate=action_rate, chunk=STEPS)


def line(step: float, joint: int = 0, chunk: int = STEPS) -> np.ndarray:
    plan = np.repeat(HOME[None], chunk, axis=0)
    plan[:, joint] += step * np.arange(1, chunk + 1, dtype=np.float32)
    return plan


def test_a_chunk_inside_the_limits_is_unchanged() -> None:
    plan = line(2.0)
    judged = guard().judge(plan, REST)
    assert judged.actions is plan
    assert judged.clamped == ()


@pytest.mark.parametrize(
    ("plan", "values", "reasons"),
    [
        (line(2.0, joint=5) + 21, {}, {"position", "seam"}),
        (line(30.0, chunk=3), {}, {"seam", "velocity"}),
        (line(3.0), {"step": 2.0}, {"seam", "step"}),
        (line(3.0), {"velocity": 50.0}, {"seam", "velocity"}),
        (line(3.0), {"acceleration": 500.0}, {"acceleration"}),
        (line(3.0), {"jerk": 20_000.0}, {"jerk"}),
    ],
)
def test_a_chunk_outside_is_clamped_and_counted_by_reason(plan, values, reasons) -> None:
    judging = guard(limits(**values))
    judged = judging.judge(plan, REST)
    assert set(judged.clamped) == reasons
    assert judging.clamped.by_reason() == dict.fromkeys(sorted(reasons), 1)
    again = judging.judge(judged.actions, REST)
    assert set(again.clamped) <= {"jerk"}, "the clamped chunk is inside the limits"
    assert judging.stats()["clamped"]


def test_only_joints_outside_their_limits_are_changed() -> None:
    judging = guard()
    plan = line(1.0)
    plan[:, 2] = 99
    judged = judging.judge(plan, REST)
    assert np.array_equal(np.delete(judged.actions, 2, axis=1), np.delete(plan, 2, axis=1))
    assert judging.joints.by_reason() == {"Elbow": 1}
    assert np.diff(judged.actions[:, 2], prepend=0)[:4] == pytest.approx([25, 25, 25, 24])


def test_the_seam_is_measured_from_the_previous_motion() -> None:
    plan = line(10.0, chunk=10)  # 10, 20, ... 100
    moving = Motion(np.array([52, 0, 0, 0, 0, 50.0]), np.array([200.0, 0, 0, 0, 0, 0]), None, is_at_rest=False)
    assert guard().judge(plan, moving, 5).actions is plan
    judged = guard().judge(plan, moving, 9)
    assert judged.clamped == ("seam",)
    assert judged.actions[9, 0] == 77
    turned = guard(limits(acceleration=3000.0)).judge(plan, moving, 3)
    assert turned.clamped == ("acceleration",)
    assert turned.actions[3, 0] == pytest.approx(54.5), "the step is at most 7.5 smaller than the 10 before"


REFUSED = {
    "position": (
        np.where(np.arange(STEPS)[:, None] == 7, [120, 120, *HOME[2:]], HOME),
        {"velocity": 1e6},
        "position of joint 'Rotation' (and",
    ),
    "velocity": (line(26.0, chunk=3), {}, "velocity of joint 'Rotation': changes by 26, the limit is 25 per action"),
    "step": (line(3.0), {"step": 2.0}, "step of joint"),
    "acceleration": (line(3.0) * np.where(np.arange(STEPS) % 2, 1, 1.1)[:, None], {"acceleration": 900.0}, "accel"),
    "jerk": (line(3.0) + np.where(np.arange(STEPS) % 2, 1, -1)[:, None], {"jerk": 900.0}, "jerk of joint"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_chunk_names_a_joint_and_its_values(reason: str) -> None:
    plan, values, message = REFUSED[reason]
    judging = guard(limits("refuse", **values))
    judged = judging.judge(plan.astype(np.float32), REST)
    assert (judged.actions, judged.reason) == (None, reason)
    assert message in judged.text
    assert (judging.refused[reason], judging.clamped.total) == (1, 0)


def test_refuse_mode_clamps_small_excess_and_judges_the_past() -> None:
    judging = guard(limits("refuse"))
    near = line(0.0)
    near[:, 0] = 104
    judged = judging.judge(near, REST)
    assert judged.reason is None
    assert judged.actions[:, 0].max() == 100
    assert judged.actions[0, 0] == 25, "the motion begins at 0"
    moving = replace(REST, is_at_rest=False)
    assert judging.judge(near, moving).reason == "seam"
    plan = line(0.0)
    plan[1, 0] = 90
    assert guard(limits("refuse")).judge(plan, REST, 5).reason == "velocity"
    assert guard().judge(plan, REST, 5).actions is plan, "the action is never executed"


@pytest.mark.parametrize("velocity", [500.0, 40.0])
def test_a_chunk_that_begins_at_a_pose_outside_is_not_refused(velocity: float) -> None:
    judging = guard(limits("refuse", velocity=velocity))
    outside = np.array([-115, 0, 0, 0, 0, 50], np.float32)
    plan = np.repeat(outside[None], STEPS, axis=0)
    plan[:, 0] += np.arange(1, STEPS + 1) * 0.5
    at_rest = judging.judge(plan, Motion(outside, np.zeros(6), np.zeros(6)))
    step = velocity / 20
    assert at_rest.actions[:3, 0] == pytest.approx([min(-115 + n * step, -100) for n in (1, 2, 3)])
    for commanded in (-113, -100):  # The command is on the way back, ahead of the measured pose.
        position = np.array([commanded, 0, 0, 0, 0, 50], np.float32)
        moving = Motion(position, np.zeros(6), None, is_at_rest=False, pose=outside)
        led = judging.judge(plan, moving)
        assert led.actions is not None, led.text
        assert led.actions[:, 0].max() <= -100
        assert np.abs(np.diff(led.actions[:, 0], prepend=commanded)).max() <= step + 1e-4
    assert judging.judge(plan - 11, Motion(outside, np.zeros(6), np.zeros(6))).reason == "position"


def ending(joint: int, value: float) -> np.ndarray:
    """Return a plan at rest whose last action moves this joint to the value."""
    plan = line(0.0)
    plan[-1, joint] = value
    return plan[None]


FORMS = {
    "a list": ([[0.0] * 6], "shape", ""),
    "too wide": (np.zeros((1, STEPS, 7), np.float32), "shape", ""),
    "no batch": (np.zeros((STEPS, 6), np.float32), "shape", ""),
    "whole numbers": (np.zeros((1, STEPS, 6), np.int64), "shape", ""),
    "a NaN": (np.full((1, STEPS, 6), np.nan), "not_finite", ""),
    "infinite in float32": (np.full((1, STEPS, 6), 1e300), "not_finite", ""),
    "far above": (ending(0, 301.0), "wild", "Rotation"),
    "far below": (ending(3, -301.0), "wild", "Wrist_Pitch"),
    "jaw above": (ending(5, 201.0), "wild", "Jaw"),
    "jaw below": (ending(5, -101.0), "wild", "Jaw"),
    "huge": (ending(2, 1e30), "wild", "Elbow"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["clamp", "refuse"])
def test_an_invalid_chunk_is_refused_in_every_mode(form: str, mode: Mode) -> None:
    answer, reason, name = FORMS[form]
    judging = guard(limits(mode))
    wrong = judging.check_shape(answer)
    assert wrong[0] == reason
    assert name in wrong[1]
    assert judging.refused.by_reason() == {reason: 1}
    assert judging.check_shape(np.zeros((1, STEPS, 6), np.float32)) is None


def test_a_command_is_limited_to_the_step_and_range_of_its_tick() -> None:
    judging = guard(rate=100)
    assert judging.limit(HOME + 4, HOME) is not HOME
    assert np.array_equal(judging.limit(HOME + 4, HOME)[:5], np.full(5, 4, np.float32))
    assert np.array_equal(judging.limit(HOME + 40, HOME), HOME + np.array([5, 5, 5, 5, 5, 2.5]))
    over = judging.limit(np.array([101, 0, 0, 0, 0, 50], np.float32), np.array([99, 0, 0, 0, 0, 50], np.float32))
    assert over[0] == 100
    poisoned = judging.limit(np.full(6, np.nan, np.float32), HOME)
    assert np.array_equal(poisoned, HOME)
    assert judging.clamped["tick"] == 5


def test_a_joint_outside_returns_and_never_moves_further_out() -> None:
    judging = guard(limits(low=-10.0, high=10.0, velocity=40.0, acceleration=200.0))
    outside = Motion(np.array([30, -30, 0, 0, 0, 9.0]), np.zeros(6), np.zeros(6))
    plan = np.tile(np.array([90, -90, 0, 0, 0, 9], np.float32), (STEPS, 1))
    judged = judging.judge(plan, outside)
    assert judged.actions[:8, 0] == pytest.approx([29.5, 28.5, 27, 25, 23, 21, 19, 17]), "steps grow to 2 per tick"
    assert judged.actions[:, 0].max() < 30
    assert judged.actions[:, 1].min() > -30
    assert judged.actions[-1, :2] == pytest.approx([10, -10])
    command = outside.position.astype(np.float32)
    assert judging.limit(plan[0], command)[:2] == pytest.approx([28, -28])
    back = judging.limit(judged.actions[0], command)
    assert back[:2] == pytest.approx([29.5, -29.5]), "the command follows the smooth chunk"
    assert judging.clamped["tick"] == 1


def test_100_000_random_chunks_leave_inside_all_limits() -> None:
    """One chunk of 100,000 joints replaces 100,000 chunks, because each joint is clamped on its own."""
    random = np.random.default_rng(7)
    count, steps = 100_000, 24
    low = random.uniform(-100, 0, count)
    high = low + random.uniform(0.1, 200, count)
    speed = (high - low) * 10 ** random.uniform(-3, 0.5, count)
    acceleration = np.where(random.random(count) < 0.5, np.inf, speed * 10 ** random.uniform(-1.5, 0.5, count))
    jerk = np.where(random.random(count) < 0.5, np.inf, speed * 10 ** random.uniform(-1.5, 0.5, count))
    start = random.uniform(low, high)
    wild = start + (high - low) * np.cumsum(
        random.normal(0, 10 ** random.uniform(-3, 1, count), (steps, count)), axis=0
    )
    rest = np.zeros(count)
    for bent in (acceleration, np.full(count, np.inf)):
        made = ChunkClamp(low, high, speed, bent, jerk if bent is acceleration else bent).clamp_chunk(
            wild, start, rest, rest
        )
        tiny = 1e-9 * (high - low) + 1e-9
        changes = np.diff(np.concatenate([[start], made]), axis=0)
        bends = np.diff(np.concatenate([[rest], changes]), axis=0)
        assert np.isfinite(made).all()
        assert (made <= high + tiny).all()
        assert (made >= low - tiny).all()
        assert (np.abs(changes) <= speed + tiny).all()
        assert (np.abs(bends) <= bent + 4 * tiny).all()
        inside = (wild == made).all(axis=0)
        assert 0 < inside.sum() < count, "the sample has chunks inside and outside"


def test_motion_inside_the_limits_is_unchanged() -> None:
    random = np.random.default_rng(8)
    count, steps = 5000, 30
    calm = np.cumsum(np.cumsum(random.uniform(-1, 1, (steps, count)), axis=0), axis=0)
    reach = 1e3 * np.ones(count)
    rest = np.zeros(count)
    made = ChunkClamp(-reach, reach, np.full(count, 40.0), np.ones(count), np.full(count, 2.0)).clamp_chunk(
        calm, rest, rest, rest
    )
    assert np.allclose(made, calm, rtol=0, atol=1e-6)


def test_judging_a_chunk_takes_little_time() -> None:
    """Bound the CPU time of this process, with a margin for a loaded machine. docs/robots/safety.md has figures."""
    table = JointTable([replace(SO100[0], name=f"j{index}", alias=None) for index in range(14)])
    judging = ActionGuard(create_motion_limits(table), rate=50, action_rate=50, chunk=100)
    rest = Motion(np.zeros(14), np.zeros(14), np.zeros(14))
    random = np.random.default_rng(9)
    calm = np.cumsum(random.normal(0, 0.5, (100, 14)), axis=0).astype(np.float32)
    wild = random.normal(0, 90, (100, 14)).astype(np.float32)

    def cost(call, *arguments) -> float:
        for _ in range(5):
            call(*arguments)
        began = time.process_time()
        for _ in range(50):
            call(*arguments)
        return (time.process_time() - began) / 50

    assert judging.judge(calm, rest).actions is calm
    assert cost(judging.limit, calm[0], calm[1]) < 60e-6
    assert cost(judging.judge, calm, rest) < 300e-6
    assert cost(judging.judge, wild, rest) < 3e-3


def test_only_a_known_range_of_joints_or_data_makes_values_wild() -> None:
    # A file may limit a joint to a small part of the range that its policy uses.
    narrow = create_motion_limits(TABLE, file={"Rotation": FileLimits(low=-1.0, high=1.0, origin="f")})
    assert guard(narrow).check_shape(ending(0, 90.0)) is None
    table = JointTable([Joint("a", 0), Joint("b", 1)])
    of_data = create_motion_limits(table, action_range=([-1.0, 0.0], [1.0, 2.0]))
    for found, value, is_wild in (
        (create_motion_limits(table), 1e9, False),
        (of_data, 1e9, True),
        (of_data, 2.5, False),
    ):
        judging = ActionGuard(found, rate=20, action_rate=20, chunk=1)
        assert (judging.check_shape(np.full((1, 1, 2), value, np.float32)) is not None) is is_wild


def test_the_quick_check_of_a_chunk_agrees_with_the_full_check() -> None:
    random, judging = np.random.default_rng(0), guard()
    seen = set()
    for _ in range(300):
        steps = np.full((STEPS, 6), 0.9)
        steps[random.integers(STEPS), random.integers(6)] = random.choice(
            [0.999, 1.0, np.nextafter(1, 2), 1.0001, 1.01]
        )
        plan = HOME + np.cumsum(steps * 12.5 * random.choice([-1, 1], (STEPS, 6)) * [2, 2, 2, 2, 2, 1], axis=0)
        plan = np.clip(plan, judging.limits.low - random.choice([0, 1e-4]), judging.limits.high).astype(np.float32)
        is_inside = not judging._find_violations(plan.astype(np.float64), REST, 0)
        assert judging._is_plainly_inside(plan, HOME) == is_inside
        seen.add(is_inside)
    assert seen == {True, False}


def test_a_float32_is_judged_like_the_same_float64() -> None:
    judging = guard()
    believed = []
    for end in judging.limits.believable.flat:
        near = np.float32(end)
        for value in (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))):
            for joint in range(6):
                chunk = np.repeat(HOME[None, None], STEPS, axis=1)
                chunk[0, -1, joint] = value
                verdict = judging.check_shape(chunk)
                assert verdict == judging.check_shape(chunk.astype(np.float64))
                believed.append(verdict is None)
    assert {True, False} == set(believed)
