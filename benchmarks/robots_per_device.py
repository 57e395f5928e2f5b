"""How many robots does one device serve, one inference at a time and batched, and where does it break?

    python benchmarks/robots_per_device.py [--quick] [--two-lanes] [--frame 480x640]
    python benchmarks/robots_per_device.py --big [--lerobot-python /path/to/venv/bin/python]

Engines in this process, with the shipped policy, and robots that ask at the moments of their grid and need the answer
before they ask again (at every tick), or before the actions they mean to do of a chunk are done. The most robots
without a single miss, by doubling and halving, the median of some searches, as each is lucky or not; answers to robots
that all ask at one moment; processor time per answer. Sides take turns, so that whatever else the machine does meets
all of them, and how fast it is meanwhile is measured before each try. ``--big`` is for accelerators: ACT of LeRobot's
size with random weights, two cameras of 480x640, up to 64 robots that tick at 50 Hz and infer at 5 Hz, and one
inference beside LeRobot's own, eager and under torch.compile.

Last result: benchmarks/results/robots_per_device.json
"""

import argparse
import asyncio
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

from benchmarks import act_latency
from benchmarks.measured import RESULTS, SHIPPED, percentiles, quietness, result, write

GROWING = (1, 2, 4, 8, 16, 32)
TURNS = 3
# Of the rows of robots; each is a part of the seconds of a try.
ROUNDS = 9
ONE, BATCHED, TWO = "one at a time", "batched", "batched, two lanes"


@dataclass
class Ridden:
    """What a fleet found.

    Attributes:
        misses: answers that came after the robot's plan had run dry.
        late: how late the loop woke robots up.
    """

    seconds: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    misses: int = 0
    wall: float = 0.0
    processor: float = 0.0

    def add(self, other: "Ridden") -> None:
        """Count what another ride of as many robots found, too."""
        for mine, more in ((self.seconds, other.seconds), (self.late, other.late)):
            mine += more
        self.batches += other.batches
        self.misses += other.misses
        self.wall += other.wall
        self.processor += other.processor

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
        frame: height and width of its cameras' pictures; those that the policy was trained with when None.
    """

    def __init__(
        self, policy: str, batch_sizes: Sequence[int], devices: Sequence[str], frame: tuple[int, int] | None = None
    ):
        self.engine = Engine(batch_sizes=batch_sizes, devices=devices)
        self._policy = policy
        self._devices = devices
        self._frame = frame
        self._stack = AsyncExitStack()
        self.served: LoadedPolicy

    async def __aenter__(self) -> "Side":
        self.served = await self._stack.enter_async_context(
            self.engine.open_policy(self._load, self._policy, None, lambda word: None)
        )
        if self._frame is not None:
            await self.engine.compile(self.served, dict.fromkeys(self.served.requirements.cameras, self._frame))
        async with asyncio.timeout(COMPILED_WITHIN):
            while self.engine.get_stats()["batch_sizes_to_compile"]:  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.1)
        return self

    def _load(
        self, path: str, revision: str | None = None, /, *, like: object = None, on_progress: object = None
    ) -> Any:
        return jaxmodels.load_policy(path, revision, device=next(iter(self._devices), None))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        await self.engine.close()

    @property
    def costs(self) -> LatencyModel:
        """What batches of its robots' pictures take."""
        sizes = {name: self._frame or size for name, size in self.served.requirements.cameras.items()}
        return self.served.replicas[0].latencies[frozenset(sizes.items())]

    def observations(self, count: int) -> list[dict[str, np.ndarray]]:
        """What so many robots see; beyond 16 some see the same."""
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
        """So many robots, each asking once in a period, one after the other within it."""
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
        """Seconds until each of so many robots that ask at one moment is answered."""
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
    """Twice as many until there is a miss, then halfway between; 0 for none.

    A number counts as too many when it fails twice.

    Args:
        misses: of so many robots.
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


async def measure(options: argparse.Namespace, policy: str, periods: Mapping[str, float]) -> dict[str, Any]:
    """All sides over one policy; ``periods`` are seconds between a robot's questions, by name."""
    sizes = [size for size in GROWING if size <= options.largest_batch]
    device = options.device
    sides: dict[str, tuple[Sequence[int], Sequence[str]]] = {ONE: ((1,), (device,)), BATCHED: (sizes, (device,))}
    if options.two_lanes:
        sides[TWO] = (sizes, (device, device))
    found: dict[str, Any] = {"most_robots": {}, "together_ms": {}, "searched": {}, "tried": {}}
    async with AsyncExitStack() as stack:
        ready = {
            name: await stack.enter_async_context(Side(policy, *side, options.frame)) for name, side in sides.items()
        }

        async def ride(what: str, side: Side, period: float, tried: list[dict[str, Any]], robots: int) -> int:
            ridden = await side.ride(robots, period, options.seconds)
            tried.append(figures := ridden.figures(robots))
            print(f"{what}:", json.dumps(figures), flush=True)
            return ridden.misses

        found["batch_ms"] = {name: side.costs.get_stats() for name, side in ready.items()}
        print("batches:", json.dumps(found["batch_ms"]), flush=True)
        for robots in GROWING:
            answers: dict[str, list[float]] = {name: [] for name in ready}
            for _ in range(TURNS):
                for name, side in ready.items():
                    answers[name] += await side.together(robots, options.rounds)
            found["together_ms"][str(robots)] = {name: percentiles(taken, (50, 99)) for name, taken in answers.items()}
            print(f"{robots} at one moment:", json.dumps(found["together_ms"][str(robots)]), flush=True)
        for rate, period in periods.items() if options.searches else ():
            tried = found["tried"][rate] = {name: [] for name in ready}
            searched = found["searched"][rate] = {name: [] for name in ready}
            for turn, (name, side) in itertools.product(range(options.searches), ready.items()):
                if turn and name == TWO:
                    continue  # it takes long, and fleets are planned with the others
                misses = partial(ride, f"{rate}, {name}", side, period, tried[name])
                searched[name].append(await most_without_a_miss(misses, options.most))
            found["most_robots"][rate] = {name: median_low(each) for name, each in searched.items()}
            print(f"{rate}:", json.dumps(searched), flush=True)
        growing = next(iter(periods.values()))
        counts = [robots for robots in GROWING if robots <= options.most]
        rows = {name: {robots: Ridden() for robots in counts} for name in ready}
        # All rows meet the same moments: two robots had answers in 1.2 ms, and in 1.9 half a minute later.
        for turn, robots in itertools.product(range(ROUNDS), counts):
            for name in _in_turns(list(ready), turn):
                rows[name][robots].add(await ready[name].ride(robots, growing, options.seconds / ROUNDS))
        found["growing"] = {
            name: [ridden.figures(robots) for robots, ridden in each.items()] for name, each in rows.items()
        }
    found["ratios"] = {
        rate: {name: round(count / max(counts[ONE], 1), 2) for name, count in counts.items() if name != ONE}
        for rate, counts in found["most_robots"].items()
    }
    return found


def _in_turns(names: Sequence[str], turn: int) -> Sequence[str]:
    """Each of them goes first in turn: the first finds the device warm."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def beside_lerobot(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One inference, host to host, of both; in processes of their own that take turns."""
    commands = {"robojax": [sys.executable, act_latency.__file__, "--serve"]}
    if options.lerobot_python:
        peer = [str(options.lerobot_python), str(Path(__file__).parent / "act_latency_peer.py")]
        commands |= {"lerobot eager": peer, "lerobot torch.compile": [*peer, "--compile"]}
    return act_latency.measure(commands, act_latency.CASES["2 cameras 480x640"], options.rounds, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter, and at every tick of 20 Hz only")
    parser.add_argument("--seconds", type=float, help="of each try; default 6, or 2 with --quick")
    parser.add_argument("--most", type=int, default=1024, help="robots that are tried at most")
    parser.add_argument(
        "--searches", type=int, help="for the most robots, of which the median is told; default 3, or 1 with --quick"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--largest-batch", type=int, default=32)
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--two-lanes", action="store_true", help="also two batches at a time on the device")
    parser.add_argument("--policy", default=str(SHIPPED))
    parser.add_argument("--frame", type=_size, metavar="HxW", help="of the cameras' pictures, as 480x640")
    parser.add_argument("--big", action="store_true", help="ACT of LeRobot's size, for an accelerator")
    parser.add_argument("--lerobot-python", type=Path, help="a Python that can import lerobot 0.4.4; with --big")
    parser.add_argument("--output", "--out", type=Path)
    options = parser.parse_args()
    options.seconds = options.seconds or (2.0 if options.quick else 6.0)
    if options.searches is None:
        options.searches = 1 if options.quick else 3
    if options.searches < 0:
        parser.error(f"--searches: found {options.searches}; wanted 0 or more")
    kind = "_big" if options.big else "" if options.frame is None else "_{}x{}".format(*options.frame)
    output = options.output or RESULTS / f"robots_per_device{kind}.json"
    quiet = quietness()
    with tempfile.TemporaryDirectory() as temporary:
        policy, extra = options.policy, {}
        periods = {"20 Hz, at every tick": 1 / 20}
        if options.big:
            folder = Path(temporary) / "act"
            act_latency.write_policy(folder, *act_latency.CASES["2 cameras 480x640"])
            if options.device == "cpu:0":
                options.device = _first_device()
            platform = "cuda" if options.device.startswith(("cuda", "gpu")) else "cpu"
            config = folder / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"device": platform}))
            policy, periods = str(folder), {"50 Hz, inference at 5 Hz": 1 / 5}
            extra["one_inference_ms"] = beside_lerobot(options, folder)
        elif not options.quick:
            # 5 actions of each chunk are done, as the policy says.
            periods |= {
                "20 Hz, every 5th tick": 5 / 20,
                "50 Hz, at every tick": 1 / 50,
                "50 Hz, every 5th tick": 5 / 50,
            }
        found = asyncio.run(measure(options, policy, periods)) | extra
    flags = [f"--{name.replace('_', '-')}" for name in ("big", "quick", "two_lanes") if getattr(options, name)]
    flags += [] if options.searches else ["--searches 0"]
    flags += [] if options.frame is None else ["--frame {}x{}".format(*options.frame)]
    command = " ".join(["python benchmarks/robots_per_device.py", *flags])
    question = "How many robots does one device serve, one inference at a time and batched?"
    given = {"seconds": options.seconds, "most": options.most}
    write(output, result(question, command, quiet, device=options.device, **given, **found))
    print("most robots:", json.dumps(found["most_robots"]), "ratios:", json.dumps(found["ratios"]))


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no height and width, as 480x640")
    return int(found[1]), int(found[2])


def _first_device() -> str:
    import jax

    return f"{jax.devices()[0].platform}:0"


if __name__ == "__main__":
    main()
