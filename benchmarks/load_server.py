"""The server that ``benchmarks/load.py`` measures: ``robojax serve``, and its own figures between two signals.

    python -m benchmarks.load_server --policy scripted

It prints one line when it is there; SIGUSR1 begins a new measurement, SIGUSR2 prints its figures as JSON.
"""

import argparse
import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil

from benchmarks.control_jitter import counts_of
from benchmarks.measured import percentiles
from benchmarks.processes import say
from benchmarks.timed_pictures import taken_at
from service.app import create_app
from service.http.server import listen, run
from service.settings import Settings
from service.stats import Recent
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy

# More would take the loop that is measured a fifth of a second to make, when measuring begins.
SAMPLES = 20_000


class Ages:
    """An observer that notes how old the newest picture is at every tick, from the moment it was taken."""

    def __init__(self) -> None:
        self.at_ticks = Recent(SAMPLES)
        self.on_the_way = Recent(SAMPLES)
        self._taken: dict[str, float] = {}

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        taken = taken_at(image, observed_at)
        if taken is not None:
            self._taken[camera] = taken
            self.on_the_way.add(observed_at - taken)

    def on_chunk(self, chunk: np.ndarray, observed_at: float, at: float) -> None:
        pass

    def on_tick(self, tick: Any) -> None:
        for taken in self._taken.values():
            self.at_ticks.add(tick.at - taken)


class Measurement:
    """The server's own figures between two signals."""

    def __init__(self, sessions: Callable[[], Any]):
        self._sessions = sessions
        self._ages: dict[str, Ages] = {}
        self._before: dict[str, dict[str, int]] = {}
        self._began = self._used = 0.0

    def begin(self) -> None:
        self._began, self._used = time.monotonic(), time.process_time()
        for session in self._sessions().list():
            if session.robot_io is None:
                continue
            session.robot_io.controller.lateness = Recent(SAMPLES)
            for stage in session.robot_io.runner.seconds:
                session.robot_io.runner.seconds[stage] = Recent(SAMPLES)
            if session.new.camera_names:
                if session.id not in self._ages:
                    self._ages[session.id] = Ages()
                    session.attach(self._ages[session.id])
                self._ages[session.id].at_ticks = Recent(SAMPLES)
                self._ages[session.id].on_the_way = Recent(SAMPLES)
            self._before[session.id] = _counts(session)

    def end(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        measured = [one for one in self._sessions().list() if one.id in self._before and one.robot_io is not None]
        lateness = [one.robot_io.controller.lateness.samples for one in measured]
        late = np.concatenate(lateness) if lateness else np.zeros(0)
        after = {one.id: _counts(one) for one in measured}
        changes: dict[str, int] = {}
        for name, counts in after.items():
            for key, value in counts.items():
                changes[key] = changes.get(key, 0) + value - self._before[name].get(key, 0)
        periods = [one.robot_io.controller.period for one in measured]
        inference = [one.robot_io.runner.seconds["total"].samples for one in measured]
        ages = [self._ages[one.id] for one in measured if one.id in self._ages]
        return {
            "seconds": round(seconds, 2),
            "ticks": len(late),
            "lateness_ms": percentiles(late),
            "later_than_half_a_period": sum(int((s > p / 2).sum()) for s, p in zip(lateness, periods, strict=True)),
            "longest_burst_of_missed_ticks": max(
                (int(s.max() / p) for s, p in zip(lateness, periods, strict=True) if len(s)), default=0
            ),
            "cpu_of_a_core": round((time.process_time() - self._used) / seconds, 3),
            "counts": changes,
            "inference_ms": percentiles(np.concatenate(inference)) if inference else {},
            "frame_age_ms": percentiles(np.concatenate([one.at_ticks.samples for one in ages])) if ages else {},
            "frame_way_ms": percentiles(np.concatenate([one.on_the_way.samples for one in ages])) if ages else {},
            "rss_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        }


def _counts(session: Any) -> dict[str, int]:
    robot_io = session.robot_io
    return {
        **counts_of(robot_io),
        **{f"holds_{reason}": count for reason, count in robot_io.controller.holds.by_reason().items()},
        **{f"frames_{camera}": rate.count for camera, rate in robot_io.buffer.frames.items()},
    }


def server(options: argparse.Namespace) -> None:
    """Serve with the shipped policy, or with a scripted policy that computes nothing."""
    cameras = {name: (480, 640) for name in options.cameras}

    needs = replace(SO100_REQUIREMENTS, cameras=cameras, action_steps=10, rate=options.rate)

    def load(path: str, revision: str | None = None, /, **more: Any) -> ScriptedPolicy:
        return ScriptedPolicy(needs, step=0.01)

    # The robots stand still, which would hold them as frozen.
    settings = Settings.from_values(max_sessions=128, state="off", embedded_transport=False, frozen="warn")
    if options.policy == "real":
        app = create_app(settings)
    else:
        app = create_app(settings, load=load, read_requirements=lambda path, revision: needs)
    measurement = Measurement(lambda: app.ctx.sessions)

    @app.after_server_start
    async def hear(app: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: (measurement.begin(), say(event="measuring")))
        loop.add_signal_handler(signal.SIGUSR2, lambda: say(event="measured", **measurement.end()))

    run(app, listen("127.0.0.1", 0), lambda url: say(event="ready", url=url))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=["scripted", "real"], default="scripted")
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--cameras", nargs="*", default=[])
    server(parser.parse_args())


if __name__ == "__main__":
    main()
