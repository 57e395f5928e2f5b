"""How soon a second engine answers when the first one has too much to do, for ``benchmarks/ray_serve.py``.

python -m benchmarks.ray_serve_growing pool|serve
"""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports] - an extra
from ray import serve  # pyright: ignore[reportMissingImports] - for this benchmark only

import jaxmodels
from benchmarks.measured import SHIPPED
from benchmarks.processes import say
from benchmarks.ray_serve_load import Load
from service.distributed.cluster import Cluster
from service.distributed.engine_actor import EngineOptions
from service.distributed.remote_engine import RemoteLoader
from service.distributed.scaling import GROW_AFTER, Bounds
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy

ASKERS = 24
BATCH_SIZES = (1,)
# Seconds of load after both pools have grown, and seconds that one call may take.
AFTERWARDS = 5.0
PATIENCE = 90.0
BOUNDS = Bounds(1, 2)


class Replica:
    """What Serve runs: an engine like those of our pool, with the shipped policy."""

    def __init__(self, policy: str):
        self._engine = Engine(batch_sizes=BATCH_SIZES, stuck_after=PATIENCE)
        self._policy = policy
        self._stack = AsyncExitStack()
        self._served: LoadedPolicy | None = None
        self._loading = asyncio.Lock()

    async def act(self, observation: Mapping[str, np.ndarray]) -> tuple[int, np.ndarray]:
        """The process that answers, and the chunk."""
        inference = await self._engine.infer(await self.ready(), observation)
        return os.getpid(), inference.chunk

    async def ready(self) -> LoadedPolicy:
        """The policy, read and compiled."""
        async with self._loading:
            if self._served is None:
                self._served = await self._stack.enter_async_context(
                    self._engine.policy_cache.open_policy(jaxmodels.load_policy, self._policy, None, lambda stage: None)
                )
        return self._served

    async def check_health(self) -> None:
        """Serve asks this before it sends anything, so that nobody waits for a replica that still compiles."""
        await self.ready()


def observation(served: Any) -> dict[str, np.ndarray]:
    """Something to see, of the policy's own size."""
    random, needs = np.random.default_rng(0), served.requirements
    images = {
        f"observation.images.{name}": random.integers(0, 255, (1, *size, 3), np.uint8)
        for name, size in needs.cameras.items()
    }
    return images | {"observation.state": np.zeros((1, needs.state or 0), np.float32)}


async def pool() -> dict[str, Any]:
    """Engines of ours, as a front has them."""
    # Serve waits for as long as it takes, so does this.
    engine = Engine(are_remote=True, stuck_after=PATIENCE)
    options = EngineOptions(batch_sizes=BATCH_SIZES, stuck_after=PATIENCE)
    cluster = Cluster("local", "benchmark", options, BOUNDS, stuck_after=PATIENCE)
    await cluster.open(engine)
    try:
        async with AsyncExitStack() as stack:
            loading = engine.policy_cache.open_policy(RemoteLoader(cluster), str(SHIPPED), None, lambda stage: None)
            served = await stack.enter_async_context(loading)
            seen = observation(served)

            async def ask() -> bool:
                # Who owes the fewest answers is asked: of the questions since the second one is there, the first.
                is_there = len(served.replicas) > 1
                await engine.infer(served, seen)
                return is_there

            await ask()
            return await Load(ASKERS, GROW_AFTER, AFTERWARDS, PATIENCE).put_on(ask)
    finally:
        await cluster.close()
        await engine.close()


async def serving() -> dict[str, Any]:
    """Replicas of Serve: which one answered is in its answer."""
    ray.init("local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
    deployment: Any = serve.deployment(
        Replica,
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=ASKERS,
        health_check_timeout_s=PATIENCE,
        autoscaling_config={
            "min_replicas": BOUNDS.least,
            "max_replicas": BOUNDS.most,
            # More than a batch of one, less than what the askers keep waiting.
            "target_ongoing_requests": 4,
            "upscale_delay_s": GROW_AFTER,
            # As often as our pool looks, and no further back than it does.
            "metrics_interval_s": 0.5,
            "look_back_period_s": GROW_AFTER,
        },
    )
    handle = serve.run(deployment.bind(str(SHIPPED)), name="engines", route_prefix=None)
    policy = jaxmodels.load_policy(str(SHIPPED))
    seen = observation(policy)
    first = (await handle.act.remote(seen))[0]

    async def ask() -> bool:
        return (await handle.act.remote(seen))[0] != first

    try:
        return await Load(ASKERS, GROW_AFTER, AFTERWARDS, PATIENCE).put_on(ask)
    finally:
        await asyncio.to_thread(serve.shutdown)
        ray.shutdown()


if __name__ == "__main__":
    say(event="grown", found=asyncio.run({"pool": pool, "serve": serving}[sys.argv[1]]()))
