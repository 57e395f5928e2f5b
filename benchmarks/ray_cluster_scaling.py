"""How many answers engines of a Ray cluster give, for ``benchmarks/ray_cluster.py``: a process for each number of them.

python -m benchmarks.ray_cluster_scaling ENGINES SECONDS
"""

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from benchmarks.measured import SHIPPED, percentiles
from benchmarks.processes import say
from service.distributed.cluster import Cluster
from service.distributed.engine_actor import EngineOptions
from service.distributed.remote_engine import RemoteLoader
from service.distributed.scaling import Bounds
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy

ROBOTS = 16
RATE = 20.0
ASKERS = 32


async def scaled(engines: int, seconds: float) -> dict[str, Any]:
    """So many engines, asked by robots at their rate, and by others as fast as they answer."""
    engine = Engine(are_remote=True)
    cluster = Cluster("auto", "benchmark", EngineOptions(batch_sizes=(1, 2, 4, 8, 16)), Bounds(engines, engines))
    await cluster.open(engine)
    try:
        async with AsyncExitStack() as stack:
            load = RemoteLoader(cluster)
            served = await stack.enter_async_context(
                engine.policy_cache.open_policy(load, str(SHIPPED), None, lambda stage: None)
            )
            async with asyncio.timeout(120):
                while len(served.replicas) < engines:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.2)
            await asyncio.sleep(12)  # larger batches are compiled when nobody asks
            found: dict[str, Any] = {"engines": engines, "robots": await _at_rate(engine, served, seconds)}
            found["as_fast_as_possible"] = await _flat_out(engine, served, seconds)
    finally:
        await cluster.close()
        await engine.close()
    return found


def _observation(served: LoadedPolicy) -> dict[str, np.ndarray]:
    needs = served.requirements
    images = {f"observation.images.{name}": np.zeros((1, *size, 3), np.uint8) for name, size in needs.cameras.items()}
    return images | {"observation.state": np.zeros((1, needs.state or 0), np.float32)}


async def _at_rate(engine: Engine, served: LoadedPolicy, seconds: float) -> dict[str, Any]:
    observation, total = _observation(served), list[float]()
    misses = 0

    async def ride(phase: float) -> None:
        nonlocal misses
        asker, start = asyncio.Event(), time.monotonic() + phase
        for number in range(int(seconds * RATE)):
            await asyncio.sleep(max(start + number / RATE - time.monotonic(), 0))
            due = start + (number + 1) / RATE
            total.append((await engine.infer(served, observation, due=due, caller=asker)).total)
            misses += time.monotonic() > due

    used = time.process_time()
    await asyncio.gather(*(ride(number / ROBOTS / RATE) for number in range(ROBOTS)))
    used = time.process_time() - used
    figures = {
        "answer_ms": percentiles(np.asarray(total)),
        "front_cpu_ms_per_answer": round(1e3 * used / len(total), 3),
    }
    return {"robots": ROBOTS, "answers": len(total), "misses": misses, **figures}


async def _flat_out(engine: Engine, served: LoadedPolicy, seconds: float) -> dict[str, Any]:
    observation, batches = _observation(served), list[int]()
    end = time.monotonic() + seconds

    async def ask() -> None:
        asker = asyncio.Event()
        while time.monotonic() < end:
            batches.append((await engine.infer(served, observation, caller=asker)).batch)

    await asyncio.gather(*(ask() for _ in range(ASKERS)))
    return {
        "askers": ASKERS,
        "answers_per_second": round(len(batches) / seconds, 1),
        "mean_batch": round(float(np.mean(batches)), 2),
    }


if __name__ == "__main__":
    say(event="scaled", found=asyncio.run(scaled(int(sys.argv[1]), float(sys.argv[2]))))
