"""What does an engine in another process cost, per chunk?

    python benchmarks/ray_latency.py

One robot asks, one question after the other: the shipped policy in this process, and in an engine of a local Ray, by
turns in one run; at the pictures' own size and at 480x640. What is added is the way there and back: the picture through
the object store, the chunk back, and two processes taking turns on the cores.
"""

import argparse
import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import jaxmodels
from benchmarks import pictures
from benchmarks.measured import RESULTS, SHIPPED, percentiles, quietness, result, write
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy

SIZES = {"96x96": (96, 96), "480x640": (480, 640)}
HERE, RAY = "in this process", "an engine of Ray"


async def asked(engine: Engine, served: LoadedPolicy, size: tuple[int, int], count: int) -> Mapping[str, list[float]]:
    """Seconds of so many questions, one after the other: all of each, and what the device computed."""
    random = np.random.default_rng(0)
    needs = served.requirements
    observation = {
        f"observation.images.{camera}": random.integers(0, 255, (1, *size, 3), np.uint8) for camera in needs.cameras
    } | {"observation.state": np.zeros((1, needs.state or 0), np.float32)}
    total, compute = [], []
    for _ in range(count):
        inference = await engine.infer(served, observation)
        total.append(inference.total)
        compute.append(inference.compute)
        await asyncio.sleep(0.02)  # a robot's next question comes a little later, to cores that went to sleep
    return {"total": total, "compute": compute}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """By turns, so that both have the machine as it was."""
    # Here, so that main can say what is missing.
    from service.distributed.cluster import Cluster
    from service.distributed.engine_actor import EngineOptions
    from service.distributed.remote_engine import RemoteLoader
    from service.distributed.scaling import Bounds

    here = Engine()
    there = Engine(are_remote=True)
    cluster = Cluster("local", "benchmark", EngineOptions(), Bounds())
    await cluster.open(there)
    found: dict[str, dict[str, dict[str, list[float]]]] = {size: {} for size in SIZES}
    try:
        async with AsyncExitStack() as stack:

            async def load(engine: Engine, loader: Any) -> LoadedPolicy:
                return await stack.enter_async_context(
                    engine.policy_cache.open_policy(loader, str(options.policy), None, lambda stage: None)
                )

            sides = {
                HERE: (here, await load(here, jaxmodels.load_policy)),
                RAY: (there, await load(there, RemoteLoader(cluster))),
            }
            for engine, served in sides.values():
                for size in SIZES.values():
                    await engine.compile(served, dict.fromkeys(served.requirements.cameras, size))
                await asked(engine, served, SIZES["96x96"], 20)
            for number in range(options.rounds):
                for name, size in SIZES.items():
                    for side, (engine, served) in sides.items():
                        times = await asked(engine, served, size, options.count)
                        kept = found[name].setdefault(side, {"total": [], "compute": []})
                        for what, seconds in times.items():
                            kept[what] += seconds
                print(f"round {number + 1} of {options.rounds}", flush=True)
    finally:
        await cluster.close()
        await here.close()
    return {name: _compared(sides) for name, sides in found.items()}


def _compared(sides: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    told: dict[str, Any] = {side: percentiles(np.asarray(times["total"])) for side, times in sides.items()}
    over = {side: np.asarray(times["total"]) - np.asarray(times["compute"]) for side, times in sides.items()}
    told["beside_computing_ms"] = {side: percentiles(seconds) for side, seconds in over.items()}
    told["added_ms"] = {name: round(told[RAY][name] - told[HERE][name], 3) for name in ("p50", "p99")}
    print(told, flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, default=SHIPPED)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--count", type=int, default=150, help="questions of each side, size and round")
    parser.add_argument("--output", type=Path, default=RESULTS / "ray_latency.json")
    options = parser.parse_args()
    if find_spec("ray") is None:
        parser.error("Ray is not installed: pip install -e '.[ray]'")
    quiet = quietness()
    found = asyncio.run(measure(options))
    question = (__doc__ or "").splitlines()[0]
    write(options.output, result(question, "python benchmarks/ray_latency.py", quiet, "ray", **{"sizes": found}))
    rows = {f"{size}, {side}": sides[side]["p50"] for size, sides in found.items() for side in (HERE, RAY)}
    pictures.bars(options.output.with_suffix(".png"), "One chunk, median", rows, "ms", [RAY])


if __name__ == "__main__":
    main()
