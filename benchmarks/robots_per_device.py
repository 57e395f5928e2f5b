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

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import act_latency, pictures
from benchmarks.chains import Chains
from benchmarks.fleet import Ridden, Side
from benchmarks.fleet_pace import growing_with
from benchmarks.measured import RESULTS, SHIPPED, percentiles, quietness, result, write
from benchmarks.most_robots import most_without_a_miss

GROWING = (1, 2, 4, 8, 16, 32)
TURNS = 3
# Of the rows of robots; each is a part of the seconds of a try.
ROUNDS = 9
ONE, BATCHED, TWO = "one at a time", "batched", "batched, two lanes"


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
        chains: Chains | None = None
        if not options.big:  # what fleets are planned with (fleet_sim)
            chains = await stack.enter_async_context(Chains(policy, sizes, device, options.frame))

        async def look(during: str) -> None:
            if chains is not None:
                await chains.look(during)

        async def ride(what: str, side: Side, period: float, tried: list[dict[str, Any]], robots: int) -> int:
            await look(what)
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
            await look(growing_with(robots))
            for name in _in_turns(list(ready), turn):
                rows[name][robots].add(await ready[name].ride(robots, growing, options.seconds / ROUNDS))
        found["growing"] = {
            name: [ridden.figures(robots) for robots, ridden in each.items()] for name, each in rows.items()
        }
        if chains is not None:
            found |= chains.figures()
            print("batches one after the other:", json.dumps(found["chained_ms"]), flush=True)
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
    rows = {f"{rate}: {name}": float(n) for rate, each in found["most_robots"].items() for name, n in each.items()}
    ours = [name for name in rows if BATCHED in name]
    if rows:
        pictures.bars(output.with_suffix(".png"), "Robots without a miss", rows, "robots", ours)
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
