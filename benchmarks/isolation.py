"""Does one session that fails keep the others waiting?

    python benchmarks/isolation.py [--quick]

Eight sessions of the shipped policy in one process, all of one copy of its weights and in the same batches, with frames
and joints at 20 Hz. In turns: seven alone, seven beside an eighth that is well, and seven beside one whose inferences
raise, answer NaN, or do not come back. What is compared are the ticks of the seven, as late as their control counts
them, and the answers of the policy to them.

Last result: benchmarks/results/isolation.json
"""

import argparse
import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import jaxmodels
from benchmarks import pictures
from benchmarks.measured import RESULTS, SHIPPED, percentiles, quietness, result, write
from service.control.config import ControlSettings, SafetySettings
from service.inference.engine import Engine
from service.inference.loaded_policy import FrameSizes, Policy
from service.sessions.store import NewSession, Session, Sessions, SessionSettings
from tests.testing.doubles import MemoryLink, MemoryTransport

RATE, GOOD = 20.0, 7
POSE = {"Rotation": 0.0, "Pitch": 0.0, "Elbow": 0.0, "Wrist_Pitch": 0.0, "Wrist_Roll": 0.0, "Jaw": 30.0}
MARK = 77.0  # where the first joint of the session that fails is
ALONE, WELL, RAISES, NOT_FINITE, STALLS = "seven alone", "an eighth is well", "raises", "answers NaN", "stalls"


class Spoiled:
    """The shipped policy, but odd about the session whose first joint is at the mark."""

    def __init__(self, policy: jaxmodels.Policy):
        self._policy = policy
        self.commit = policy.commit
        self.fault = WELL
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        marked = np.abs(observation["observation.state"][:, 0] - MARK) < 0.01
        if marked.any() and self.fault == RAISES:
            raise RuntimeError("as the benchmark wants it")
        if marked.any() and self.fault == STALLS:
            self.released.wait(60)
        chunk = self._policy.act(observation)
        if self.fault == NOT_FINITE:
            chunk[marked] = np.nan
        return chunk

    def compile(self, batch: int = 1, cameras: FrameSizes | None = None) -> None:
        self._policy.compile(batch, cameras)

    def on(self, device: str) -> Policy:
        raise NotImplementedError("one device is enough here")


async def robot(link: MemoryLink, first: float, phase: float) -> None:
    """Frames and joints of one robot, on a grid of its own."""
    image = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    deadline = time.monotonic() + phase
    while True:
        await asyncio.sleep(max(deadline - time.monotonic(), 0))
        link.deliver_frame("front", image)
        link.deliver_joints(POSE | {"Rotation": first})
        deadline += 1 / RATE


class House:
    """Seven sessions and one, driven by robots that only stand there."""

    def __init__(self, spoiled: Spoiled, batch_sizes: Sequence[int], action_steps: int):
        self._spoiled = spoiled
        self._action_steps = action_steps
        self._transport = MemoryTransport()
        self._engine = Engine(batch_sizes=batch_sizes, stuck_after=2.0)
        # The robots show and report the same all the time.
        control = ControlSettings(failures_allowed=1 << 30)
        settings = SessionSettings(control=control, safety=SafetySettings(frozen="warn"))

        def load(path: str, revision: str | None = None, /, *, like: object = None, on_progress: object = None) -> Any:
            return spoiled

        self.sessions = Sessions(transport=self._transport, load=load, engine=self._engine, settings=settings)
        self._robots: list[asyncio.Task[None]] = []

    async def add(self, name: str, first: float, phase: float) -> Session:
        new = NewSession(name, "shipped", f"memory://{name}", rate=RATE, action_steps=self._action_steps)
        session = await self.sessions.create(new)
        self._robots.append(asyncio.create_task(robot(self._transport.link, first, phase)))
        return session

    async def fill(self) -> list[Session]:
        good = [await self.add(f"good-{number}", 0.0, number / GOOD / RATE) for number in range(GOOD)]
        while self._engine.get_stats()["batch_sizes_to_compile"]:  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        for session in good:
            await self.sessions.start(session.id)
        return good

    async def close(self) -> None:
        for task in self._robots:
            task.cancel()
        self._spoiled.released.set()
        await self.sessions.close()

    async def round(self, good: Sequence[Session], fault: str, seconds: float) -> dict[str, Any]:
        """What the seven are like beside an eighth that has this fault."""
        self._spoiled.fault, self._spoiled.released = fault, threading.Event()
        if fault != ALONE:
            await self.add("bad", MARK, 0.5 / RATE)
            await self.sessions.start("bad")
        await asyncio.sleep(0.5)
        controls = [session.robot_io.controller for session in good if session.robot_io is not None]
        marks = [(control.lateness.count, control.starvations) for control in controls]
        await asyncio.sleep(seconds)
        late: list[float] = []
        answers: list[float] = []
        starved = 0
        for control, (ticks, starvations) in zip(controls, marks, strict=True):
            late += list(control.lateness.samples[-(control.lateness.count - ticks) :])
            answers += list(control.latency.samples)
            starved += control.starvations - starvations
        self._spoiled.released.set()
        found = {"late": late, "answers": answers, "starvations": starved}
        if fault != ALONE:
            found["errors"] = self.sessions.get("bad").status().stats["errors"]
            await self.sessions.delete("bad")
            self._robots.pop().cancel()
        await asyncio.sleep(0.2)
        return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    spoiled = Spoiled(jaxmodels.load_policy(SHIPPED))
    house = House(spoiled, (1, 2, 4, 8), options.action_steps)
    rounds: dict[str, list[dict[str, Any]]] = {fault: [] for fault in (ALONE, WELL, RAISES, NOT_FINITE, STALLS)}
    try:
        good = await house.fill()
        for number in range(options.rounds):
            for fault in rounds if number % 2 == 0 else reversed(rounds):
                rounds[fault].append(await house.round(good, fault, options.seconds))
                print(number, fault, percentiles(rounds[fault][-1]["late"]), flush=True)
    finally:
        await house.close()
    figures: dict[str, Any] = {}
    for fault, found in rounds.items():
        p99 = float(np.median([np.percentile(one["late"], 99) for one in found]))
        figures[fault] = {
            "late_ms": percentiles([late for one in found for late in one["late"]]),
            "late_p99_of_rounds_ms": round(p99 * 1e3, 3),
            "answer_ms": percentiles([taken for one in found for taken in one["answers"]], (50, 99)),
            "starvations": sum(one["starvations"] for one in found),
            "errors_of_the_eighth": sum(one.get("errors", 0) for one in found),
        }
    for beside in (ALONE, WELL):
        usual = figures[beside]["late_p99_of_rounds_ms"]
        for fault in (RAISES, NOT_FINITE, STALLS):
            ratio = figures[fault]["late_p99_of_rounds_ms"] / max(usual, 1e-3)
            figures[fault][f"p99_ratio_to_{beside.replace(' ', '_')}"] = round(ratio, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each round")
    parser.add_argument("--action-steps", type=int, default=5)
    parser.add_argument("--output", "--out", type=Path, default=RESULTS / "isolation.json")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 6)
    options.seconds = options.seconds or (3.0 if options.quick else 6.0)
    quiet = quietness()
    found = asyncio.run(measure(options))
    question = "Does one session that fails keep the others waiting?"
    write(options.output, result(question, "python benchmarks/isolation.py", quiet, cases=found))
    print(json.dumps(found, indent=1))
    rows = {fault: figures["late_p99_of_rounds_ms"] for fault, figures in found.items()}
    pictures.bars(options.output.with_suffix(".png"), "Lateness of seven sessions' ticks, p99", rows, "ms", (ALONE,))
    worst = max(value for figures in found.values() for name, value in figures.items() if name.startswith("p99_ratio"))
    print(f"largest ratio of p99: {worst:.2f}" if math.isfinite(worst) else "no ratio")


if __name__ == "__main__":
    main()
