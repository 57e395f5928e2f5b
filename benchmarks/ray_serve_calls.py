"""Calls to an actor and through Ray Serve, on one Ray, for ``benchmarks/ray_serve.py``.

python -m benchmarks.ray_serve_calls ROUNDS COUNT
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports] - an extra
from ray import serve  # pyright: ignore[reportMissingImports] - for this benchmark only

from benchmarks.processes import say
from benchmarks.ray_serve import ACTOR, SERVE

PAYLOADS = {
    "nothing": None,
    "96x96": np.zeros((96, 96, 3), np.uint8),
    "480x640": np.zeros((480, 640, 3), np.uint8),
}
WARM = 50  # calls that do not count


class Answering:
    """What both do: answer with a chunk of a hundred actions, without computing anything."""

    async def act(self, payload: np.ndarray | None) -> np.ndarray:
        return np.zeros((1, 20, 5), np.float32)


async def called(rounds: int, count: int) -> dict[str, dict[str, list[list[float]]]]:
    """Seconds, by payload and way, of each round."""
    ray.init("local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
    kind: Any = ray.remote(Answering)
    # As engines of ours are: they wait for many answers at a time.
    actor = kind.options(num_cpus=0, max_concurrency=4096).remote()
    deployment: Any = serve.deployment(Answering, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=4096)
    handle = serve.run(deployment.bind(), name="answering", route_prefix=None)
    ways: dict[str, Callable[[Any], Awaitable[Any]]] = {
        ACTOR: lambda payload: actor.act.remote(payload),
        SERVE: lambda payload: handle.act.remote(payload),
    }
    found: dict[str, dict[str, list[list[float]]]] = {what: {way: [] for way in ways} for what in PAYLOADS}
    for payload in PAYLOADS.values():
        for ask in ways.values():
            await _asked(ask, payload, WARM)
    for number in range(rounds):
        for what, payload in PAYLOADS.items():
            for way, ask in sorted(ways.items(), reverse=bool(number % 2)):
                found[what][way].append(await _asked(ask, payload, count))
    serve.shutdown()
    ray.shutdown()
    return found


async def _asked(ask: Callable[[Any], Awaitable[Any]], payload: Any, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await ask(payload)
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    say(event="called", found=asyncio.run(called(int(sys.argv[1]), int(sys.argv[2]))))
