"""How many robots does one device serve, one inference at a time and batched?

    python -m benchmarks.robots_per_device [--policy PATH] [--device gpu:0] [--two-lanes] [--frame 480x640]
    python -m benchmarks.robots_per_device --quick

Engines in processes of their own, and robots that each ask once in a period and need the answer before they ask again.
The figure is the largest number of robots without a miss, found by doubling and halving, as the median of several
searches. Sides take turns, so other load meets all of them alike.
Last figure, AMD EPYC, 2 cores, 2026-11-23, the shipped policy at 20 Hz: 56 robots one at a time, 104 batched, 136 with
two lanes (benchmarks/results/robots_per_device.json).
"""

import argparse
import asyncio
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.control_jitter import open_engines
from benchmarks.measured import RESULTS, SHIPPED, percentiles, quietness, result, write
from service.errors import ServiceError
from service.inference.batching import FrameSizesKey, LatencyModel
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy

TOGETHER = (1, 2, 4, 8, 16, 32)
TURNS = 3
FIRST = 8
COMPILED_WITHIN = 1800.0
ONE, BATCHED, TWO = "one at a time", "batched", "batched, two lanes"


@dataclass
class Ridden:
    """Answers that one fleet of robots got.

    Attributes:
        seconds: Latency of each answer.
        late: Delay of each wake-up of a robot, in seconds.
        misses: Answers after the robot's plan had run dry.
    """

    seconds: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    misses: int = 0
    wall: float = 0.0
    processor: float = 0.0

    def figures(self, robots: int) -> dict[str, Any]:
        answers = max(len(self.seconds), 1)
        return {
            "robots": robots,
            "answers": len(self.seconds),
            "misses": self.misses,
            "answer_ms": percentiles(self.seconds, (50, 99)),
            "late_ms": percentiles(self.late, (50, 99)),
            "mean_batch": round(float(np.mean(self.batches or [0])), 2),
            "processor_ms_per_answer": round(self.processor / answers * 1e3, 3),
            "cores_per_robot": round(self.processor / max(self.wall, 1e-9) / robots, 4),
        }


class Side:
    """An engine with a policy in it, every batch size compiled.

    Args:
        frame: Height and width of camera pictures. The default is the size that the policy was trained with.
    """

    def __init__(
        self, policy: str, batch_sizes: Sequence[int], devices: Sequence[str], frame: tuple[int, int] | None = None
    ):
        self._engines = open_engines(devices, batch_sizes)
        self._policy, self._batch_sizes, self._frame = policy, set(batch_sizes), frame
        self._stack = AsyncExitStack()
        self.engine: Engine
        self.served: LoadedPolicy

    async def __aenter__(self) -> "Side":
        self.engine, load = await self._stack.enter_async_context(self._engines)
        self.served = await self._stack.enter_async_context(
            self.engine.policy_cache.open_policy(load, self._policy, None, lambda word: None)
        )
        if self._frame is not None:
            await self.engine.compile(self.served, dict.fromkeys(self.served.requirements.cameras, self._frame))
        async with asyncio.timeout(COMPILED_WITHIN):
            while any(  # noqa: ASYNC110 - other processes compile
                set(replica.batch_sizes.get(self._frames, ())) < self._batch_sizes for replica in self.served.replicas
            ):
                await asyncio.sleep(0.1)
        return self

    @property
    def _frames(self) -> FrameSizesKey:
        sizes = {name: self._frame or size for name, size in self.served.requirements.cameras.items()}
        return frozenset(sizes.items())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def costs(self) -> LatencyModel:
        """Measured latencies of batches."""
        return self.served.replicas[0].latencies[self._frames]

    def observations(self, count: int) -> list[dict[str, np.ndarray]]:
        """Return observations of ``count`` robots; beyond 16, robots share them."""
        rng, need = np.random.default_rng(0), self.served.requirements
        made = []
        for _ in range(min(count, 16)):
            seen = {
                f"observation.images.{name}": rng.integers(0, 256, (1, *(self._frame or size), 3), np.uint8)
                for name, size in need.cameras.items()
            }
            if need.state is not None:
                seen["observation.state"] = rng.standard_normal((1, need.state)).astype(np.float32)
            made.append(seen)
        return [made[number % len(made)] for number in range(count)]

    async def ride(self, robots: int, period: float, seconds: float) -> Ridden:
        """Run ``robots`` robots. Each asks once in a period; their phases are spread over it."""
        found, seen = Ridden(), self.observations(robots)
        start, began, spent = time.monotonic() + 0.1, time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(robots):
                robot = self._robot(seen[number], start + period * number / robots, period, seconds, found)
                tasks.create_task(robot)
        found.wall, found.processor = time.perf_counter() - began, time.process_time() - spent
        return found

    async def _robot(
        self, seen: Mapping[str, np.ndarray], start: float, period: float, seconds: float, found: Ridden
    ) -> None:
        asker, end = asyncio.Event(), start + seconds
        deadline = start
        while deadline < end:
            while (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left)
            asked = time.monotonic()
            found.late.append(asked - deadline)
            due = deadline + period
            try:
                inference = await self.engine.infer(self.served, seen, due=due, caller=asker)
            except ServiceError:
                found.misses += 1
                inference = None
            now = time.monotonic()
            if inference is not None:
                found.seconds.append(now - asked)
                found.batches.append(inference.batch)
            late = now - due
            if late > 0:
                found.misses += 1
            deadline += period * (1 if late <= 0 else int(late / period) + 2)

    async def together(self, robots: int, times: int) -> list[float]:
        """Return the latencies of ``robots`` robots that ask at the same moment."""
        seen, found = self.observations(robots), []

        async def one(observation: Mapping[str, np.ndarray]) -> None:
            asked = time.perf_counter()
            await self.engine.infer(self.served, observation, due=time.monotonic() + 1.0)
            found.append(time.perf_counter() - asked)

        for _ in range(times):
            await asyncio.gather(*(one(observation) for observation in seen))
            await asyncio.sleep(0.002)
        return found


async def most_without_a_miss(misses: Callable[[int], Awaitable[int]], largest: int) -> int:
    """Return the largest number of robots without a miss; 0 if there is none.

    The number doubles until there is a miss and is bisected then. It counts as too large if it fails twice.

    Args:
        misses: Returns the misses of a number of robots.
        largest: Largest number to try.
    """

    async def holds(robots: int) -> bool:
        return not await misses(robots) or not await misses(robots)

    low, high = 0, FIRST
    while high <= largest and await holds(high):
        low, high = high, 2 * high
    high = min(high, largest + 1)
    while high - low > max(1, low // 20):
        middle = (low + high) // 2
        low, high = (middle, high) if await holds(middle) else (low, middle)
    return low


async def measure(options: argparse.Namespace, periods: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of all sides.

    Args:
        periods: Name of a rate to the seconds between two requests of a robot.
    """
    sizes = [size for size in TOGETHER if size <= options.largest_batch]
    device = options.device
    sides: dict[str, tuple[Sequence[int], Sequence[str]]] = {ONE: ((1,), (device,)), BATCHED: (sizes, (device,))}
    if options.two_lanes:
        sides[TWO] = (sizes, (device, device))
    found: dict[str, Any] = {"most_robots": {}, "searched": {}, "at_most": {}, "together_ms": {}}
    async with AsyncExitStack() as stack:
        ready = {
            name: await stack.enter_async_context(Side(options.policy, *side, options.frame))
            for name, side in sides.items()
        }
        found["batch_ms"] = {name: side.costs.get_stats() for name, side in ready.items()}
        for robots in TOGETHER:
            answers: dict[str, list[float]] = {name: [] for name in ready}
            for _ in range(TURNS):
                for name, side in ready.items():
                    answers[name] += await side.together(robots, 10)
            found["together_ms"][str(robots)] = {name: percentiles(taken, (50, 99)) for name, taken in answers.items()}
            print(f"{robots} at one moment:", json.dumps(found["together_ms"][str(robots)]), flush=True)

        async def ride(what: str, side: Side, period: float, robots: int) -> int:
            ridden = await side.ride(robots, period, options.seconds)
            print(f"{what}:", json.dumps(ridden.figures(robots)), flush=True)
            return ridden.misses

        for rate, period in periods.items():
            searched: dict[str, list[int]] = {name: [] for name in ready}
            for _, (name, side) in itertools.product(range(options.searches), ready.items()):
                misses = partial(ride, f"{rate}, {name}", side, period)
                searched[name].append(await most_without_a_miss(misses, options.most))
            most = found["most_robots"][rate] = {name: median_low(each) for name, each in searched.items()}
            found["searched"][rate] = searched
            found["at_most"][rate] = {
                name: (await side.ride(most[name], period, options.seconds)).figures(most[name])
                for name, side in ready.items()
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tries of 2 s, one search, 20 Hz at every tick only")
    parser.add_argument("--most", type=int, default=1024, help="largest number of robots")
    parser.add_argument("--largest-batch", type=int, default=32)
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--two-lanes", action="store_true", help="also two batches at a time on the device")
    parser.add_argument("--policy", default=str(SHIPPED))
    parser.add_argument("--frame", type=_size, metavar="HxW", help="size of camera pictures, such as 480x640")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.seconds, options.searches = (2.0, 1) if options.quick else (6.0, 3)
    kind = "" if options.frame is None else "_{}x{}".format(*options.frame)
    quiet = quietness()
    periods = {"20 Hz, at every tick": 1 / 20}
    if not options.quick:
        # The shipped policy executes 5 actions of each chunk.
        periods |= {
            "20 Hz, every 5th tick": 5 / 20,
            "50 Hz, at every tick": 1 / 50,
            "50 Hz, every 5th tick": 5 / 50,
        }
    found = asyncio.run(measure(options, periods))
    found["ratios"] = {
        rate: {name: round(count / max(counts[ONE], 1), 2) for name, count in counts.items() if name != ONE}
        for rate, counts in found["most_robots"].items()
    }
    question = "How many robots does one device serve, one inference at a time and batched?"
    command = shlex.join(("python", "-m", "benchmarks.robots_per_device", *sys.argv[1:]))
    given = {"device": options.device, "seconds": options.seconds, "most": options.most}
    write(
        options.output or RESULTS / f"robots_per_device{kind}.json", result(question, command, quiet, **given, **found)
    )
    print("most robots:", json.dumps(found["most_robots"]), "ratios:", json.dumps(found["ratios"]))


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no height and width, as 480x640")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main()
