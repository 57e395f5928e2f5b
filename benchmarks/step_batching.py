"""Would robots get chunks earlier if they joined a running batch between two denoising steps?

    python -m benchmarks.step_batching

A simulation without a device. Both sides have the times of pi0.5 that were measured on an H200 (bfloat16, 3 cameras, 50
actions, 10 steps): 22.9 ms for one robot, 53.3 ms for a batch of 4 and 169.7 ms for a batch of 16. "Whole batches" runs
the server's own ``BatchScheduler``. "Step boundaries" encodes waiting robots between two steps of the running robots;
the best of several settings counts. It is worth building if the median for 4 robots is at least 1.3 times lower.

How the time of a batch of 16 divides into encoding and steps was not measured, so there are three assumptions, and
one in which the host takes no time at all to let a robot join.
Last figure (simulated, 2026-11-27), medians of whole batches over medians at step boundaries for 4 robots: 0.99 with a
chunk every 0.5 s, 0.99 back to back, 1.07 if all ask at one moment; at most 1.19 without time of the host. Not built.
With N robots that always wait, the mean wait is N divided by the answers per second, and whole batches already give the
most answers per second. The best setting runs all 10 steps before another robot joins, which is a batch.
"""

import argparse
import heapq
import itertools
import json
import random
import shlex
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.measured import RESULTS, percentiles, quietness, result, write
from service.inference.batching import BatchScheduler, LatencyModel

GOAL = 1.3
PERIOD = 0.5
FLEETS = (1, 2, 4, 8, 16)
STEPS = 10
# Seconds of a whole batch of pi0.5; 2 and 8 are interpolated.
WHOLE = {1: 0.0229, 2: 0.0330, 4: 0.0533, 8: 0.0921, 16: 0.1697}
# Seconds of one batch for the host and for the modulations of the steps. One program call takes the last figure.
HOST, MODULATIONS, CALL = 0.0026, 0.0006, 0.0003
# Seconds of the ten steps by number of robots: they read the weights once for up to 4 robots.
ESTIMATED = {1: 0.0102, 2: 0.0108, 4: 0.0121, 8: 0.0147, 16: 0.0200}
# Assumption to the seconds of steps, of a robot that joins and of each program call.
ASSUMPTIONS = {
    "as estimated": (ESTIMATED, HOST + MODULATIONS, CALL),
    "cheap steps": ({1: 0.0102, 2: 0.0104, 4: 0.0110, 8: 0.0125, 16: 0.0150}, HOST + MODULATIONS, CALL),
    "expensive steps": ({1: 0.0102, 2: 0.0112, 4: 0.0135, 8: 0.0180, 16: 0.0280}, HOST + MODULATIONS, CALL),
    "free host": (ESTIMATED, 0.0, 0.0),
}
RIDES = 8


@dataclass(eq=False)
class Request:
    """A robot's request in simulated seconds."""

    robot: int
    asked: float
    due: float
    is_alone: bool = False
    is_awaited: bool = True
    steps_left: int = STEPS


class Device(Protocol):
    """A device that serves requests without a clock of its own."""

    def add(self, request: Request) -> None: ...

    def run(self, now: float) -> tuple[float, Sequence[Request]] | None:
        """Start the next work; return its seconds and the requests that it completes, or None if nothing waits."""
        ...


@dataclass
class Served:
    """What a fleet got: seconds of each answer, late answers, answers a second, and requests in each batch."""

    seconds: list[float] = field(default_factory=list)
    late: int = 0
    per_second: float = 0.0
    members: list[int] = field(default_factory=list)


def measured(seconds: Mapping[int, float]) -> LatencyModel:
    """Return the latencies that the server has after it measured batches of these seconds."""
    latency = LatencyModel()
    for size, value in seconds.items():
        latency.record(size, value)
    latency.mark_fresh()
    return latency


class WholeBatches:
    """A device that runs the batches of the server's scheduler, in constant seconds by batch size."""

    def __init__(self, seconds: Mapping[int, float]):
        self._seconds, self._latency = seconds, measured(seconds)
        self._scheduler: BatchScheduler[Request] = BatchScheduler()

    def add(self, request: Request) -> None:
        self._scheduler.add("policy", request, self._latency, self._seconds)

    def run(self, now: float) -> tuple[float, Sequence[Request]] | None:
        batch = self._scheduler.next_batch(now)
        if batch is None:
            return None
        seconds = self._seconds[batch.size]
        self._latency.record(batch.size, seconds)
        return seconds, batch.members


class StepBoundaries:
    """A device that encodes new robots between the steps of the running robots.

    Args:
        steps: seconds of ten steps by number of robots.
        join: seconds of the host for the robots that join together.
        call: seconds of the host for each program call.
        joining: number of robots that are encoded together at most.
        quantum: steps that run before more robots may join.
    """

    def __init__(self, steps: Mapping[int, float], join: float, call: float, joining: int, quantum: int):
        self._steps, self._join, self._call, self._joining, self._quantum = steps, join, call, joining, quantum
        self._encoding = {size: WHOLE[size] - HOST - MODULATIONS - steps[size] for size in WHOLE}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def run(self, now: float) -> tuple[float, Sequence[Request]] | None:
        most = min(self._joining, max(WHOLE) - len(self._running))
        new = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._running += new
        if not self._running:
            return None
        count = min(self._quantum, *(request.steps_left for request in self._running))
        seconds = self._call + count * _bucket(self._steps, len(self._running)) / STEPS
        if new:
            seconds += self._join + _bucket(self._encoding, len(new))
        for request in self._running:
            request.steps_left -= count
        done = [request for request in self._running if not request.steps_left]
        self._running = [request for request in self._running if request.steps_left]
        return seconds, done


def _bucket(seconds: Mapping[int, float], count: int) -> float:
    sizes = sorted(seconds)
    return seconds[sizes[bisect_left(sizes, count)]]


def simulate(device: Device, periods: Sequence[float], phases: Iterable[float], seconds: float) -> Served:
    """Serve robots that ask once in their period; an answer after the period is late.

    Args:
        periods: seconds between two requests of each robot; 0 asks again at once.
        phases: shares of the period at which each robot asks first.
    """
    found, now = Served(), 0.0
    asking = [
        ((period or WHOLE[1]) * phase, robot) for robot, (period, phase) in enumerate(zip(periods, phases, strict=True))
    ]
    heapq.heapify(asking)
    while True:
        while asking and asking[0][0] <= now:
            asked, robot = heapq.heappop(asking)
            device.add(Request(robot, asked, asked + (periods[robot] or 2 * WHOLE[1])))
        work = device.run(now)
        if work is None:
            if not asking or asking[0][0] > seconds:
                break
            now = asking[0][0]
            continue
        now += work[0]
        found.members.append(len(work[1]))
        for request in work[1]:
            taken, period = now - request.asked, periods[request.robot]
            found.seconds.append(taken)
            found.late += bool(period) and taken > period + 1e-9
            after = request.asked + period * max(-(-taken // period), 1) if period else now
            if after <= seconds:
                heapq.heappush(asking, (after, request.robot))
    found.per_second = len(found.seconds) / max(now, 1e-9)
    return found


def compare(
    fleet: int, kind: str, assumption: tuple[Mapping[int, float], float, float], seconds: float
) -> dict[str, Any]:
    """Return the figures of both sides for a number of robots, and the ratio of their medians."""
    periods = [0.0 if kind == "back to back" else PERIOD] * fleet
    chance = random.Random(fleet)
    rides = [[0.0 if kind == "at one moment" else chance.random() for _ in periods] for _ in range(RIDES)]

    def ride(make: Callable[[], Device]) -> dict[str, float]:
        served = [simulate(make(), periods, phases, seconds) for phases in rides]
        answers = percentiles([taken for one in served for taken in one.seconds], (50, 95, 99))
        return answers | {"per_second": round(sum(one.per_second for one in served) / RIDES, 1)}

    settings = itertools.product((1, 2, 4, 16), (1, 2, 5, 10))
    boundaries = {each: ride(partial(StepBoundaries, *assumption, *each)) for each in settings}
    best = min(boundaries, key=lambda each: boundaries[each]["p50"])
    whole = ride(partial(WholeBatches, WHOLE))
    return {
        "whole batches": whole,
        "step boundaries": boundaries[best] | {"joining": best[0], "quantum": best[1]},
        "ratio": round(whole["p50"] / boundaries[best]["p50"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated seconds of each ride")
    parser.add_argument("--output", type=Path, default=RESULTS / "step_batching.json")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    kinds = ("every 0.5 s", "back to back", "at one moment")
    for (name, assumption), kind in itertools.product(ASSUMPTIONS.items(), kinds):
        fleets = {str(fleet): compare(fleet, kind, assumption, options.seconds) for fleet in FLEETS}
        figures[f"{name}, {kind}"] = fleets
        for fleet, each in fleets.items():
            print(f"{name}, {kind}, {fleet} robots:", json.dumps(each), flush=True)
    four = {name: fleets["4"]["ratio"] for name, fleets in figures.items()}
    question = "Would robots get chunks earlier if they joined a running batch between two denoising steps?"
    command = shlex.join(("python", "-m", "benchmarks.step_batching", *sys.argv[1:]))
    found = {"goal": GOAL, "ratio_of_medians_for_4_robots": four, "figures": figures}
    write(options.output, result(question, command, quietness(), **found))
    print("ratio of the medians for 4 robots:", json.dumps(four))


if __name__ == "__main__":
    main()
