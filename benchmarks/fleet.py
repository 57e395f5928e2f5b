"""Simulated robots that ask an engine at their rate and need each answer before they ask again."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np

import jaxmodels
from benchmarks.measured import percentiles
from service.errors import ServiceError
from service.inference.batching import LatencyModel
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy

COMPILED_WITHIN = 1800.0


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
            self.engine.policy_cache.open_policy(self._load, self._policy, None, lambda word: None)
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

    async def chained(self, size: int, seconds: float) -> list[float]:
        """Seconds from the end of a full batch on the device to the end of the next, while others wait already: two
        groups of so many robots that take turns for so long. The engine should know no larger batch.
        """
        ends: list[tuple[float, bool]] = []
        seen, over = self.observations(size), time.perf_counter() + seconds

        async def ask(observation: Mapping[str, np.ndarray]) -> tuple[float, int]:
            asked, due = time.perf_counter(), time.monotonic() + COMPILED_WITHIN
            inference = await self.engine.infer(self.served, observation, due=due)
            return asked + inference.total, inference.batch

        async def group() -> None:
            while time.perf_counter() < over:
                together = await asyncio.gather(*(ask(observation) for observation in seen))
                ends.append((min(end for end, _ in together), {batch for _, batch in together} == {size}))

        await asyncio.gather(group(), group())
        return [end - before for (before, _), (end, is_full) in pairwise(sorted(ends)) if is_full]
