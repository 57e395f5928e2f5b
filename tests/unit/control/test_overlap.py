"""Overlap of chunks: LeRobot's functions, alignment by due time, and the effect on a controlled robot."""

from dataclasses import replace
from itertools import cycle, pairwise

import numpy as np
import pytest

from jaxmodels import Requirements
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH
from service.control.action_queue import ActionQueue
from service.control.aggregation import (
    AGGREGATIONS,
    DEFAULT_AGGREGATION,
    Aggregation,
    CrossfadeAggregation,
    EnsembleAggregation,
    WeightedAggregation,
    choose_aggregation,
)
from service.control.chunk_scheduler import PolicyAnswer, plan_prefix
from service.control.observation_buffer import Snapshot
from tests.unit.control.test_control import CONFIG, POSE, World, plan

# Results of AGGREGATE_FUNCTIONS in lerobot/async_inference/configs.py for 1 (old) and 2 (new).
LEROBOT = {"weighted_average": 1.7, "latest_only": 2.0, "average": 1.5, "conservative": 1.3}
ACT = Requirements(policy_type="act", action=6, chunk=20, action_steps=5)


def constant(value: float, length: int = 10) -> np.ndarray:
    return np.full((length, 1), value, np.float32)


@pytest.mark.parametrize("name", LEROBOT)
def test_lerobots_functions_weigh_all_times_that_both_chunks_cover(name: str) -> None:
    queue = ActionQueue(0.1, aggregation=AGGREGATIONS[name])
    queue.push(constant(1), observed_at=0.0, now=0.0)
    joined = queue.aggregate(constant(2), observed_at=0.4)
    assert joined[:6, 0] == pytest.approx([LEROBOT[name]] * 6), "six actions of the old chunk are left"
    assert joined[6:, 0].tolist() == [2, 2, 2, 2], "after the old chunk, only the new chunk counts"
    queue.push(constant(1), observed_at=0.3, now=0.3)
    before = queue.aggregate(constant(2), observed_at=0.1)[:4, 0]
    assert before == pytest.approx([2, 2, *[LEROBOT[name]] * 2]), "before the plan, only the new chunk counts"
    queue.push(constant(1), observed_at=0.0, now=5.0)
    new = constant(2)
    assert queue.aggregate(new, 0.5) is new, "the old plan has ended"


def test_the_old_plan_is_the_joined_plan_interpolated_in_time() -> None:
    queue = ActionQueue(0.1, aggregation=AGGREGATIONS["average"])
    for number, value in enumerate((0, 4, 8)):
        observed_at = 0.1 * number
        queue.push(queue.aggregate(constant(value), observed_at), observed_at, observed_at)
    assert queue.aggregate(constant(8), 0.2)[0, 0] == pytest.approx(6.5)
    ramp = np.arange(10, dtype=np.float32)[:, None]
    queue.push(ramp, observed_at=0.0, now=0.0)
    # The same motion, observed two and a half actions later, does not change.
    joined = queue.aggregate(ramp + 2.5, observed_at=0.25)
    assert joined[:, 0] == pytest.approx(ramp[:, 0] + 2.5)


def test_a_crossfade_begins_near_the_plan_and_ends_in_the_new_chunk() -> None:
    queue = ActionQueue(0.1, aggregation=CrossfadeAggregation(3))
    queue.push(constant(0), observed_at=0.0, now=0.0)
    joined = queue.aggregate(constant(4), 0.2, 3)
    assert joined[:, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4, 4], "action 3 is the first that can be executed"
    # The plan has two actions left.
    assert queue.aggregate(constant(3), 0.7, 1)[:, 0].tolist() == pytest.approx([0, 1, 2, 3, 3, 3, 3, 3, 3, 3])
    assert queue.aggregate(constant(3), 0.9, 5)[:, 0].tolist() == [0] + [3] * 9, "no executable action is left"


@pytest.mark.parametrize("coefficient", [0.01, 0.0, -3.0, 10.0, -10.0])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_an_ensemble_weighs_the_newest_by_lerobots_series(coefficient: float, count: int) -> None:
    weights = np.exp(-coefficient * np.arange(count + 1, dtype=np.longdouble))
    [share] = EnsembleAggregation(coefficient).new_weights(np.array([count]), np.array([1]))
    assert share == pytest.approx(float(weights[-1] / weights.sum()), abs=1e-12)


def test_a_new_overlap_counts_the_ensemble_as_one_prediction() -> None:
    queue = ActionQueue(0.1, aggregation=EnsembleAggregation(0.0))
    for _ in range(5):
        queue.push(queue.aggregate(constant(0), 0.0), 0.0, 0.0)
    queue.set_aggregation(AGGREGATIONS["average"])
    queue.set_aggregation(EnsembleAggregation(0.0))
    assert queue.aggregate(constant(4), 0.0)[0, 0] == pytest.approx(2)


def test_the_overlap_is_the_requested_the_own_or_the_default() -> None:
    assert choose_aggregation(ACT).name == DEFAULT_AGGREGATION
    assert choose_aggregation(replace(ACT, temporal_ensemble_coeff=0.2)) == EnsembleAggregation(0.2)
    assert choose_aggregation(replace(ACT, temporal_ensemble_coeff=0.2), "average").name == "average"
    assert choose_aggregation(ACT, "ensemble") == EnsembleAggregation(0.01)
    assert choose_aggregation(ACT, "ensemble", -0.5) == EnsembleAggregation(-0.5)
    assert choose_aggregation(replace(ACT, takes_prefix=True), "rtc").sends_plan
    assert choose_aggregation(ACT, "crossfade", action_rate=50) == CrossfadeAggregation(12)


@pytest.mark.parametrize(
    ("name", "coefficient", "message"),
    [
        ("rtc", None, "needs a policy that continues a plan"),
        ("weighted", None, "none of this name; possible with this policy: 'replace', 'weighted_average'"),
        ("average", 0.1, "has no coefficient"),
        ("ensemble", 11.0, "wanted -10 to 10"),
        ("ensemble", float("nan"), "wanted -10 to 10"),
    ],
)
def test_an_impossible_overlap_names_the_possible_ones(name: str, coefficient: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        choose_aggregation(ACT, name, coefficient)
    assert "'rtc'," not in str(error.value), "rtc is not offered to a policy without a prefix"


def line_at(moment: float) -> float:
    return POSE["Rotation"] + (moment - 100)


def line(snapshot: Snapshot) -> np.ndarray:
    """Return a straight motion of one unit per second that depends only on time."""
    steps = (snapshot.observed_at - 100 + 0.05 * np.arange(20, dtype=np.float64))[None, :, None]
    return (np.array(list(POSE.values())) + steps).astype(np.float32)


def noisy(snapshot: Snapshot) -> np.ndarray:
    """Return the plan with an offset whose sign alternates between chunks."""
    off = 0.5 if round(snapshot.observed_at * 20) % 2 else -0.5
    return (plan(snapshot) + off).astype(np.float32)


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("rate", [20, 50, 10])
def test_every_overlap_works_at_every_rate_without_missed_ticks(name: str, rate: float) -> None:
    config = replace(CONFIG, rate=rate, action_steps=5)
    world = World(config=config, policy=noisy, latency=0.12).begin().run(1.0)
    before = len(world.sent)
    world.control.adjust(replace(config, overlap=AGGREGATIONS[name], action_steps=4, ask_ahead=0.2))
    world.run(2.0)
    assert world.control.starvations == world.control.missed_ticks == 0
    assert world.control.hold is None
    assert np.diff([at for at, _ in world.sent[before - 1 :]]) == pytest.approx(1 / rate)


def test_mixing_overlaps_make_the_seams_smaller() -> None:
    def roughness(name: str) -> float:
        config = replace(CONFIG, overlap=AGGREGATIONS[name], action_steps=5)
        world = World(config=config, policy=lambda seen: noisy(seen) * np.float32(0.1), latency=0.12).begin().run(5.0)
        return float(np.abs(np.diff([command[0] for command in world.commands()], 3)).mean())

    rough = {name: roughness(name) for name in ("replace", "weighted_average", "average", "crossfade")}
    assert rough["replace"] > rough["weighted_average"] > rough["average"]
    assert rough["crossfade"] < 0.7 * rough["replace"]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_new_policy_is_faded_in_without_the_old_plan(name: str) -> None:
    world = World(config=replace(CONFIG, overlap=AGGREGATIONS[name]), policy=line).begin().run(1.02)
    world.control.request_soon()
    world.latency = 0.2
    world.run(0.06)
    _, asked = world.answers.pop()
    changed = world.now
    chunk = (line(asked.snapshot) - 1).astype(np.float32)
    world.control.accept(PolicyAnswer(asked, chunk, fade=3), world.now)
    world.run(0.5)
    # Distance from the motion of the new policy at each tick.
    off = [command[0] - line_at(at) + 1 for at, command in world.sent if at > changed]
    assert off[:4] == pytest.approx([0.75, 0.5, 0.25, 0], abs=1e-4)
    assert off[4:] == pytest.approx([0] * (len(off) - 4), abs=1e-4)


def test_adjust_refuses_fields_that_cannot_change_while_running() -> None:
    world = World().begin()
    with pytest.raises(ValueError, match="only overlap, ask_ahead, action_steps"):
        world.control.adjust(replace(CONFIG, rate=30))


def continuing(snapshot: Snapshot) -> np.ndarray:
    """Return a chunk that begins with the prefix, as a policy with real-time chunking does, and then jumps by 0.3."""
    actions, [delay], [length] = (snapshot.prefix[name] for name in (PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH))
    chunk = (plan(snapshot) + 0.3).astype(np.float32)
    begin = min(int(delay), int(length))
    chunk[0, :begin] = actions[0, :begin]
    return chunk


def test_a_real_time_chunk_begins_with_the_executed_actions() -> None:
    chunks: list[tuple[float, np.ndarray, Snapshot]] = []

    def policy(snapshot: Snapshot) -> np.ndarray:
        chunks.append((snapshot.observed_at, continuing(snapshot), snapshot))
        return chunks[-1][1]

    config = replace(CONFIG, overlap=AGGREGATIONS["rtc"], action_steps=8)
    world = World(config=config, policy=policy, latency=0.17).begin().run(5.0)
    sent = {round((at - 100) / 0.05): command for at, command in world.sent}
    assert len(chunks) > 8
    for observed_at, chunk, snapshot in chunks[2:-1]:
        [delay], [length] = snapshot.prefix[PREFIX_DELAY], snapshot.prefix[PREFIX_LENGTH]
        # Three ticks pass during the inference. The tick of the request counts too.
        assert (delay, length) == (4, 12)
        assert snapshot.prefix[PREFIX_ACTIONS].shape == (1, 20, 6)
        assert not snapshot.prefix[PREFIX_ACTIONS][0, length:].any()
        tick = round((observed_at - 100) / 0.05)
        done = [sent[tick + number] for number in range(int(delay))]
        assert chunk[0, :delay] == pytest.approx(np.array(done))
    assert world.control.scheduler.delay == 4


def test_rtc_blends_from_the_prefix_to_the_new_actions() -> None:
    def largest_step(overlap: Aggregation) -> float:
        sides = cycle((0.15, -0.15))

        def policy(snapshot: Snapshot) -> np.ndarray:
            chunk = line(snapshot) + np.float32(next(sides))
            begin = int(snapshot.prefix[PREFIX_DELAY][0])
            chunk[0, :begin] = snapshot.prefix[PREFIX_ACTIONS][0, :begin]
            return chunk

        world = (
            World(config=replace(CONFIG, overlap=overlap, action_steps=8), policy=policy, latency=0.17).begin().run(5.0)
        )
        return max(abs(late[0] - early[0]) for early, late in pairwise(world.commands()[20:]))

    assert largest_step(WeightedAggregation("replaced", 1.0, sends_plan=True)) == pytest.approx(0.05 + 0.3, abs=1e-3)
    assert largest_step(AGGREGATIONS["rtc"]) == pytest.approx(0.05 + 0.3 / 7, abs=1e-3)


def test_only_real_time_chunking_sends_the_remaining_plan() -> None:
    world = World(config=replace(CONFIG, overlap=AGGREGATIONS["rtc"]), latency=1.0).begin().run(0.1)
    [(_, request)] = world.answers
    snapshot = request.snapshot
    assert snapshot.prefix[PREFIX_LENGTH].tolist() == snapshot.prefix[PREFIX_DELAY].tolist() == [0]
    assert set(snapshot.prefix) == {PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH}
    other = World(config=replace(CONFIG, overlap=AGGREGATIONS["average"]), latency=1.0).begin().run(0.1)
    assert other.answers[0][1].snapshot.prefix == {}
    prefix = plan_prefix(np.ones((3, 6), np.float32), 7, CONFIG)
    assert prefix[PREFIX_DELAY].tolist() == prefix[PREFIX_LENGTH].tolist() == [3]
    assert prefix[PREFIX_DELAY].dtype == np.int32
