"""How many machines do 10 to 100,000 robots need, how late are their chunks, and what when one machine in 100 fails?

    python benchmarks/fleet_sim.py [--period 0.2] [--link 1 20] [--price 0.40]

A simulation in simulated time (simpy), fed by what was measured: times of batches, and what one answer costs beside its
batch, come from the results of robots_per_device. First it foretells what was measured there, robot by robot count;
then it plans fleets. Machines form batches by the engine's own code (``service.inference.batching``) and, to compare,
one at a time, by arrival, and by arrival with a wait for others. A fleet larger than a cell is made of cells that know
nothing of each other, of which some are simulated.

Last result: benchmarks/results/fleet_sim.json
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import pictures
from benchmarks.fleet_calibration import USED, Machine, calibrated
from benchmarks.fleet_forming import ByDeadline, formings
from benchmarks.fleet_model import Link, Plan, simulate
from benchmarks.fleet_pace import growing_with
from benchmarks.measured import RESULTS, quietness, result, write
from benchmarks.most_robots import most_without_a_miss
from service.processes import exit_with_parent

MEASURED = RESULTS / "robots_per_device.json"
FLEETS = (10, 100, 1_000, 10_000, 100_000)
CELL = 100  # machines
SIMULATED_CELLS = 3  # of a larger fleet
SIMULATED_TIMES = 5  # for what was measured once
SEARCHED = 4.0  # seconds of each try of the search
SEARCHED_MACHINES = 8  # of each try: some are slow just then
HOURS = 730.0  # of a month
# A machine's share of late answers with which its load is still taken for sound.
LATE = 1e-4
# Seconds between a robot's questions, as robots_per_device names them.
PERIODS = {
    "20 Hz, at every tick": 0.05,
    "20 Hz, every 5th tick": 0.25,
    "50 Hz, at every tick": 0.02,
    "50 Hz, every 5th tick": 0.1,
}
ONE, BATCHED = "one at a time", "batched"


def foretold(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each measured number of robots, and the most of them at each rate, beside what the simulation says.

    Rows that the simulation was told of (``benchmarks/fleet_calibration.py``) are no predictions; the others are.
    """
    rows: list[dict[str, Any]] = []
    for side in (ONE, BATCHED):
        growing = found["growing"][side]
        machine = calibrated(found, side)
        plan = _plan(machine, 1 / 20)
        for measured in growing:
            robots = measured["robots"]
            here = replace(plan, robots=robots, pace=machine.paces[growing_with(robots)])
            told = {**measured["answer_ms"], "mean_batch": measured["mean_batch"]}
            said = _told_of(here)
            row = {"side": side, "robots": robots, "is_told": robots in USED}
            row |= {"measured_ms": told, "foretold_ms": said}
            rows.append(row | {"ratio_p50": round(said["p50"] / told["p50"], 3)})
            print(json.dumps(rows[-1]), flush=True)
        for rate, sides in found["most_robots"].items():
            most = sides[side]
            tried = replace(_plan(machine, PERIODS[rate]), pace=machine.paces[f"{rate}, {side}"])
            said_most = _most_as_measured(replace(tried, seconds=found["seconds"], warm=0.0), found["most"])
            row = {"side": side, "rate": rate, "most_robots": {"measured": most, "foretold": said_most}}
            rows.append(row | {"ratio": round(said_most / max(most, 1), 3)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _told_of(plan: Plan) -> dict[str, float]:
    """What is said of a row that was measured: the median of some simulations, as each is lucky or not."""
    found = [simulate(plan, seed) for seed in range(SIMULATED_TIMES)]
    said = {f"p{percent}": round(median(one.percentile(percent) for one in found) * 1e3, 3) for percent in (50, 99)}
    return said | {"mean_batch": round(median(one.mean_batch for one in found), 2)}


def _most_as_measured(plan: Plan, largest: int) -> int:
    """The most robots without a late answer, searched for as ``robots_per_device`` does; the median of some searches:
    each is lucky or not.
    """
    seeds = itertools.count()

    async def misses(robots: int) -> int:
        return simulate(replace(plan, robots=robots), next(seeds)).late

    return round(median(asyncio.run(most_without_a_miss(misses, largest)) for _ in range(SIMULATED_TIMES)))


def _plan(machine: Machine, period: float) -> Plan:
    return Plan(
        robots=1,
        machines=1,
        period=period,
        times=machine.times,
        pace=machine.pace,
        wake=machine.wake,
        forming=ByDeadline,
        front=machine.front,
        cold=(machine.cold, machine.fading),
        is_even=True,
    )


def most_robots(plan: Plan, late: float) -> int:
    """How many robots each machine serves with no larger share of late answers; by doubling and halving."""

    def holds(robots: int) -> bool:
        found = simulate(replace(plan, robots=robots * plan.machines))
        return bool(found.answers) and found.late_share <= late

    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def failing(machines: int, share: float) -> int:
    """How many of them fail: one at least, unless none do."""
    return max(1, round(machines * share)) if share else 0


def machines_for(robots: int, each: int, share: float) -> int:
    """The fewest machines of which those that do not fail carry all robots."""
    machines = math.ceil(robots / each)
    while (machines - failing(machines, share)) * each < robots:
        machines += 1
    return machines


def fleet(plan: Plan, robots: int, each: int, share: float) -> dict[str, Any]:
    """So many robots on as many machines as they need, of which a share fails."""
    machines = machines_for(robots, each, share)
    cells = math.ceil(machines / CELL)
    here = math.ceil(machines / cells)
    part = replace(plan, robots=math.ceil(robots / cells), machines=here, failing=failing(here, share))
    found = [simulate(part, seed) for seed in range(min(cells, SIMULATED_CELLS))]
    held = [seconds for one in found for seconds in one.held]
    answers = sum(len(one.answers) for one in found)
    return {
        "robots": robots,
        "machines": machines,
        "cells": cells,
        "cells_simulated": len(found),
        "p99_ms": round(max(one.percentile(99) for one in found) * 1e3, 2),
        "late_share": round(sum(one.late for one in found) / max(answers, 1), 6),
        "busy": round(sum(one.busy for one in found) / len(found), 3),
        "robots_held": len(held),
        "longest_hold_s": round(max(held, default=0.0), 3),
    }


def planned(options: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Fleets of all sizes, for each way to form batches."""
    plan = replace(
        _plan(machine, options.period),
        is_even=False,
        link=Link(options.link[0] / 1e3, options.link[1] / 1e3),
        robots_of_a_front=options.front_robots,
        seconds=options.seconds,
    )
    names = list(formings(options.window / 1e3))
    # One of them beside another: simulated time is nobody else's.
    context, leash = get_context("spawn"), (os.getpid(),)
    with ProcessPoolExecutor(mp_context=context, initializer=exit_with_parent, initargs=leash) as pool:
        return dict(zip(names, pool.map(partial(_of_forming, options, plan), names), strict=True))


def _of_forming(options: argparse.Namespace, plan: Plan, name: str) -> dict[str, Any]:
    here = replace(plan, forming=formings(options.window / 1e3)[name])
    seconds = SEARCHED * max(options.period, 0.25) / 0.25
    searched = replace(here, machines=SEARCHED_MACHINES, seconds=seconds, warm=options.period)
    each = max(int(most_robots(searched, LATE) * (1 - options.spare)), 1)
    rows = []
    for robots in FLEETS:
        if robots > options.most:
            break
        row = fleet(here, robots, each, 0.0)
        row["failing"] = fleet(here, robots, each, options.failing)
        row["price_per_robot_month"] = round(row["machines"] * options.price * HOURS / robots, 2)
        rows.append(row)
        print(f"{name}:", json.dumps(row), flush=True)
    return {"robots_per_machine": each, "fleets": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measured", type=Path, default=MEASURED, help="results of robots_per_device")
    parser.add_argument("--period", type=float, default=0.25, help="seconds between a robot's questions [0.25]")
    parser.add_argument("--link", type=float, nargs=2, default=(1.0, 20.0), metavar=("P50", "P99"), help="ms, one way")
    parser.add_argument("--window", type=float, default=5.0, help="ms, of those who wait for others to come")
    parser.add_argument("--failing", type=float, default=0.01, help="share of machines that fail in the middle")
    parser.add_argument("--spare", type=float, default=0.1, help="share of a machine's robots that it is not given")
    parser.add_argument("--front-robots", type=int, default=100, help="robots that share a front")
    parser.add_argument("--price", type=float, default=0.40, help="of a machine's hour, in any currency")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are simulated of each fleet")
    parser.add_argument("--most", type=int, default=FLEETS[-1], help="robots of the largest fleet")
    parser.add_argument("--output", "--out", type=Path, default=RESULTS / "fleet_sim.json")
    options = parser.parse_args()
    if not options.measured.is_file():
        parser.error(
            f"there is no {options.measured}: python benchmarks/robots_per_device.py measures what is simulated"
        )
    quiet = quietness()
    measured = json.loads(options.measured.read_text())
    try:
        machine = calibrated(measured, BATCHED)
    except ValueError as error:
        parser.error(f"{options.measured}: {error}")
    beside = foretold(measured)
    plans = planned(options, machine)
    question = "How many machines do 10 to 100,000 robots need, and what when one in 100 fails?"
    given = {name: value for name, value in vars(options).items() if name not in ("measured", "output")}
    write(
        options.output,
        result(question, "python benchmarks/fleet_sim.py", quiet, "simpy", given=given, foretold=beside, plans=plans),
    )
    rows = {f"{name}": float(plan["robots_per_machine"]) for name, plan in plans.items()}
    pictures.bars(options.output.with_suffix(".png"), "Robots per machine", rows, "robots", ["by deadline"])


if __name__ == "__main__":
    main()
