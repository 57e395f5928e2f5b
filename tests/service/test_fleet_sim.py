"""Simulated fleets against what can be said of them by hand."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fleet_sim
from benchmarks.fleet_calibration import calibrated
from benchmarks.fleet_forming import LEVELS, Ask, ByArrival, ByDeadline, Times, formings
from benchmarks.fleet_model import Found, Link, Plan, simulate
from benchmarks.fleet_pace import EVERY, Pace, resampled, smooth
from benchmarks.fleet_sim import failing, machines_for, most_robots
from benchmarks.most_robots import most_without_a_miss
from service.engine.costs import KEPT

# Always the same: 10 ms alone, 16 for two, 28 for four.
STEADY = Times({1: 0.010, 2: 0.016, 4: 0.028})
PLAN = Plan(robots=1, machines=1, period=0.1, times=STEADY, forming=ByDeadline, seconds=5.0, is_even=True)


def one_at_a_time(times: Times) -> ByDeadline:
    return ByDeadline(times, (1,))


def answered(found: Found) -> tuple[float, float]:
    return round(found.percentile(0) * 1e3, 6), round(found.percentile(100) * 1e3, 6)


def test_one_robot_waits_for_its_batch_the_way_and_the_front() -> None:
    assert answered(simulate(PLAN)) == (10, 10)
    far = replace(PLAN, link=Link(0.002, 0.002), front=0.004)
    assert answered(simulate(far)) == (10 + 2 * 2 + 4, 10 + 2 * 2 + 4)


def test_robots_that_ask_evenly_and_fit_never_meet() -> None:
    found = simulate(replace(PLAN, robots=10, forming=one_at_a_time))
    assert answered(found) == (10, 10)
    assert found.mean_batch == 1
    assert found.busy == pytest.approx(1.0, abs=0.01)
    assert (found.late, len(found.answers)) == (0, pytest.approx(400, abs=10))


def test_a_machine_serves_as_many_as_there_is_time_for_and_batches_make_more_of_it() -> None:
    assert most_robots(replace(PLAN, forming=one_at_a_time), 0.0) == 10  # 10 ms each of 100
    batched = most_robots(PLAN, 0.0)
    assert 12 <= batched <= 14  # four of them in 28 ms: 14
    assert 2 < simulate(replace(PLAN, robots=batched)).mean_batch <= 4


def test_with_too_many_robots_answers_come_late_and_are_counted() -> None:
    found = simulate(replace(PLAN, robots=15, forming=one_at_a_time))
    assert found.late_share > 0.2
    assert found.busy == pytest.approx(1.0, abs=0.01)


def test_a_machine_that_is_slow_for_a_while_is_late_with_all_of_that_time() -> None:
    plan = replace(PLAN, robots=7, forming=one_at_a_time, period=0.1, seconds=20.0)
    # A fifth slower all along is in time; as much in one piece, for a tenth of the time, is not.
    assert simulate(replace(plan, pace=Pace([1.2]))).late == 0
    pieces = simulate(replace(plan, pace=Pace([1.0] * 72 + [3.0] * 8)))
    assert pieces.late > 20
    assert pieces.percentile(50) == pytest.approx(0.010)
    assert Pace([1.0, 3.0]).at(2 * EVERY) == 1.0
    assert Pace([1.0, 3.0]).at(7.5 * EVERY) == 3.0


def test_a_pace_is_what_neighbours_have_in_common() -> None:
    taken = np.array([0.005] * 50 + [0.010] * 50)
    taken[[10, 70]] *= 5  # what hits one batch only is no pace
    assert resampled(taken, 0.005)[:6] == [1.0] * 6
    assert resampled(taken, 0.005)[-6:] == [2.0] * 6
    assert len(resampled(taken, 0.005)) == pytest.approx(taken.sum() / EVERY, abs=1)
    assert smooth(taken).max() == 0.010


def test_batches_are_drawn_from_what_was_measured_and_what_is_rare_is_rare() -> None:
    beside = np.interp(LEVELS, [0.0, 0.5, 0.99, 1.0], [0.8, 1.0, 1.2, 5.0]).tolist()
    times = Times({1: 0.010}, {1: beside})
    random = np.random.default_rng(0)
    drawn = np.array([times.draw(1, random) for _ in range(5000)])
    assert np.median(drawn) == pytest.approx(0.010, rel=0.01)
    assert (drawn > 0.012).mean() == pytest.approx(0.01, abs=0.005)
    assert 0.03 < drawn.max() <= 0.050
    known = times.costs((1,))
    assert (known.usual(1), known.slow(1)) == (pytest.approx(0.010, rel=0.01), pytest.approx(0.0116, rel=0.02))


def test_robots_ask_as_late_as_they_wake() -> None:
    plan = replace(PLAN, robots=10, forming=one_at_a_time, wake=Link(0.004, 0.004))
    found = simulate(plan)
    assert found.late == 0
    late = simulate(replace(plan, period=0.0135, robots=1))
    assert late.late_share > 0.9, "10 ms from when it asks, which is 4 ms after the moment to ask at"


def test_a_simulated_engine_learns_what_batches_take_as_a_real_one_does() -> None:
    forming = ByDeadline(STEADY)
    for number in range(4):
        forming.add(Ask(number, 0.0, 9.0), 0.0)
    first = forming.take(0.0)
    assert isinstance(first, tuple)
    assert first[1] == 4
    for _ in range(KEPT):
        forming.learn(2, STEADY.usual[2])
        forming.learn(4, 0.060)
    for number in range(4):
        forming.add(Ask(number, 0.0, 9.0), 0.0)
    taken = forming.take(0.0)
    assert isinstance(taken, tuple)
    assert taken[1] == 2


def test_the_most_robots_are_searched_for_and_one_miss_may_be_bad_luck() -> None:
    tried: list[int] = []

    async def misses(robots: int) -> int:
        tried.append(robots)
        return int(robots > 50 or (robots == 16 and tried.count(16) == 1))

    assert asyncio.run(most_without_a_miss(misses, 1024)) in (49, 50)
    assert tried[:6] == [8, 16, 16, 32, 64, 64]
    assert asyncio.run(most_without_a_miss(misses, 40)) == 40
    tried.clear()

    async def always(robots: int) -> int:
        return 1

    assert asyncio.run(most_without_a_miss(always, 1024)) == 0


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    plan = replace(PLAN, robots=7, is_even=False, link=Link(0.001, 0.02))
    first, again, other = (simulate(plan, seed).answers for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_robots_of_a_machine_that_fails_are_held_until_they_are_moved_and_the_others_never() -> None:
    plan = replace(PLAN, robots=20, machines=4, failing=1, notice=0.5, seconds=6.0)
    found = simulate(plan)
    assert len(found.held) == 5
    # Noticed 0.5 s after the failure; plans last up to two periods longer, and an answer takes 28 ms at most.
    assert 0.25 < min(found.held) <= max(found.held) < 0.5 + 5 * 0.028
    assert found.late == 0
    assert len(found.answers) > 20 * 10 * 5 * 0.95


def test_a_fleet_that_loses_its_only_machine_gets_no_more_answers() -> None:
    found = simulate(replace(PLAN, robots=3, failing=1))
    assert 0 < len(found.answers) < 3 * 40
    assert found.held == []


def test_who_waits_for_others_takes_them_all_or_the_time_is_up() -> None:
    forming = ByArrival(STEADY, window=0.005)
    asks = [Ask(number, 0.0, 1.0) for number in range(5)]
    for ask in asks[:3]:
        forming.add(ask, 1.0)
    assert forming.take(1.0) == 1.005
    assert forming.take(1.005) == (asks[:3], 4)
    for ask in asks:
        forming.add(ask, 2.0)
    assert forming.take(2.0) == (asks[:4], 4)
    asks[4].is_wanted = False
    assert forming.take(2.0) is None


@pytest.mark.parametrize("name", formings(0.005))
def test_every_way_to_form_batches_answers_everybody_when_there_is_time(name: str) -> None:
    found = simulate(replace(PLAN, robots=6, is_even=False, forming=formings(0.005)[name]))
    assert found.late == 0
    assert len(found.answers) == pytest.approx(6 * 10 * 4, abs=6)


def test_enough_machines_are_left_when_some_fail() -> None:
    assert [machines_for(robots, 50, 0.0) for robots in (10, 50, 51, 1000)] == [1, 1, 2, 20]
    assert [machines_for(robots, 50, 0.01) for robots in (10, 50, 51, 1000)] == [2, 2, 3, 21]
    assert machines_for(100_000, 50, 0.01) == 2020
    assert (2020 - failing(2020, 0.01)) * 50 >= 100_000


@pytest.mark.parametrize("pace", [1.0, 1.5])
def test_a_machine_that_gets_warm_is_known_from_three_rows_and_foretells_the_others(pace: float) -> None:
    # 1.1 ms warm, 0.1 of the front's, and up to 1.2 more after a pause, of which 63 % come in 10 ms.
    rows = {1: 2.39, 2: 2.27, 4: 1.99, 8: 1.64, 16: 1.39}
    found = {
        "batch_ms": {"batched": dict.fromkeys(("1", "2")), "one at a time": {"1": None}},
        "chained_ms": {"1": {"p50": 1.1, "beside": [1.0] * 14}, "2": {"p50": 1.7, "beside": [*[1.0] * 13, 1.1]}},
        "growing": {
            "batched": [
                {"robots": n, "answer_ms": {"p50": pace * p50}, "late_ms": {"p50": 0.5, "p99": 1.0}}
                for n, p50 in rows.items()
            ]
        },
        "pace": {"another": [1.0]} | {f"growing, {robots}": [pace] for robots in rows},
    }
    machine = calibrated(found, "batched")
    assert machine.times.usual == {1: 1.1e-3, 2: 1.7e-3}
    assert [machine.times.beside[2][place] for place in (0, -1)] == [1.0, 1.1]
    assert (machine.pace.factors, machine.wake) == ([1.0, *[pace] * 5], Link(0.5e-3, 1e-3))
    assert machine.front == pytest.approx(0.1e-3, rel=0.1)
    assert machine.cold == pytest.approx(1.2e-3, rel=0.05)
    assert machine.fading == pytest.approx(10e-3, rel=0.1)
    for robots in (2, 8):
        plan = Plan(robots, 1, 1 / 20, machine.times, ByDeadline, front=machine.front, is_even=True)
        said = simulate(replace(plan, cold=(machine.cold, machine.fading))).percentile(50) * 1e3
        assert said == pytest.approx(rows[robots], rel=0.02)
    del found["growing"]["batched"][2]  # of four robots
    assert calibrated(found, "batched").cold == 0
    found["growing"]["one at a time"] = found["growing"]["batched"]
    assert calibrated(found, "one at a time").times.sizes == (1,)


def test_results_that_do_not_say_how_batches_follow_one_another_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "measured.json").write_text(json.dumps({"batch_ms": {}}))
    monkeypatch.setattr("sys.argv", ["fleet_sim", "--measured", str(file), "--output", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit):
        fleet_sim.main()
    assert f"{file}: these results do not say how batches follow one another" in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()


def test_results_of_robots_per_device_are_foretold_and_fleets_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(robots: int, p50: float) -> dict[str, object]:
        late = {"p50": 0.1, "p99": 0.1}
        return {"robots": robots, "answer_ms": {"p50": p50, "p99": 2 * p50}, "late_ms": late, "mean_batch": 1.0}

    sizes = {"1": {"p50": 10.0, "p90": 10.0}, "4": {"p50": 28.0, "p90": 28.0}}
    measured = {
        "batch_ms": {"one at a time": {"1": sizes["1"]}, "batched": sizes},
        "chained_ms": {size: took | {"beside": [1.0] * 14} for size, took in sizes.items()},
        "growing": {side: [row(1, 12.0), row(2, 12.0)] for side in ("one at a time", "batched")},
        "most_robots": {"20 Hz, at every tick": {"one at a time": 5, "batched": 5}},
        "pace": {f"20 Hz, at every tick, {side}": [1.0] for side in ("one at a time", "batched")}
        | {f"growing, {robots}": [1.0] for robots in (1, 2)},
        "seconds": 2.0,
        "most": 64,
    }
    assert calibrated(measured, "batched").times.sizes == (1, 4)
    rows = fleet_sim.foretold(measured)
    assert [row["ratio_p50"] for row in rows if "ratio_p50" in row] == [1.0] * 4
    # 10 ms each of 50: five; batches of four could carry seven, but two of them take longer than 50.
    assert [row["most_robots"]["foretold"] for row in rows if "most_robots" in row] == [5, 5]
    file, output = tmp_path / "measured.json", tmp_path / "found.json"
    file.write_text(json.dumps(measured))
    brief = ["--most", "100", "--seconds", "3", "--link", "1", "2"]
    monkeypatch.setattr("sys.argv", ["fleet_sim", "--measured", str(file), "--output", str(output), *brief])
    fleet_sim.main()
    plans = json.loads(output.read_text())["plans"]
    fewest = {name: [row["machines"] for row in plan["fleets"]] for name, plan in plans.items()}
    assert fewest["by deadline"][-1] < fewest["one at a time"][-1]
    assert all(row["failing"]["machines"] > row["machines"] for plan in plans.values() for row in plan["fleets"])
