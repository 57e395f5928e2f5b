"""The processes that ``benchmarks/load.py`` measures: a server, robots, and bare loops that send the same.

    python benchmarks/load_roles.py server --policy scripted
    python benchmarks/load_roles.py robots --url URL --count 32
    python benchmarks/load_roles.py bare --url URL --count 32 --rate 50

Each prints one line when it is there; SIGUSR1 begins a measurement anew, SIGUSR2 prints its figures as JSON.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from jaxmodels import Requirements
from service.app import create_app
from service.engine.scripted_policy import ScriptedPolicy
from service.motion.control_loop import sleep_until
from service.serving import listen, run
from service.settings import Settings
from service.stats import Recent
from service.transport.base import JointValue, LinkEvent
from service.transport.client import RoomsTransport
from service.transport.names import rooms_of
from service.transport.pace import Pace
from service.transport.robot import Robot, connect_robot

# More would take the loop that is measured a fifth of a second to make, when measuring begins.
SAMPLES = 20_000
# Joining is not what is measured.
PATIENT = Pace(join=60.0, request=60.0, heartbeat=20.0)
JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
STILL: Mapping[str, float] = dict(zip(JOINTS, (10.0, -20.0, 30.0, -40.0, 50.0, 60.0), strict=True))
BITS = 24  # of a picture's time in milliseconds, one black or white bar each


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """In milliseconds."""
    if not len(seconds):
        return {}
    found = {f"p{p:g}": float(v) for p, v in zip((50, 99, 99.9), np.percentile(seconds, (50, 99, 99.9)), strict=True)}
    return {name: round(value * 1e3, 3) for name, value in (found | {"max": float(seconds.max())}).items()}


def processor_seconds() -> float:
    """What this process used of a core since its start, all threads."""
    return time.process_time()


# Pictures that tell when they were taken.


def picture(size: tuple[int, int], now: float) -> np.ndarray:
    """Bars for the bits of ``now``, in milliseconds."""
    bits = int(now * 1e3) % (1 << BITS)
    bars = np.array([200 if bits >> place & 1 else 50 for place in range(BITS)], np.uint8)
    row = bars[np.arange(size[1]) * BITS // size[1]]
    return np.broadcast_to(row[None, :, None], (*size, 3))


def taken_at(image: np.ndarray, now: float) -> float | None:
    """When it was taken, in this machine's monotonic time; None when it cannot be read."""
    places = ((np.arange(BITS) + 0.5) * image.shape[1] / BITS).astype(int)
    bars = image[image.shape[0] // 2, places, 1].astype(int)
    bits = sum(1 << place for place, bar in enumerate(bars) if bar > 125)
    age = (int(now * 1e3) - bits) % (1 << BITS)
    return now - age / 1e3 if age < 10_000 else None


# The server.


class Ages:
    """A tap that notes how old the newest picture is at every tick, from the moment it was taken."""

    def __init__(self) -> None:
        self.at_ticks = Recent(SAMPLES)
        self.on_the_way = Recent(SAMPLES)
        self._taken: dict[str, float] = {}

    def saw(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        taken = taken_at(image, seen_at)
        if taken is not None:
            self._taken[camera] = taken
            self.on_the_way.add(seen_at - taken)

    def planned(self, chunk: np.ndarray, seen_at: float, at: float) -> None:
        pass

    def ticked(self, tick: Any) -> None:
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
        self._began, self._used = time.monotonic(), processor_seconds()
        for session in self._sessions().list():
            if session.drive is None:
                continue
            session.drive.control.lateness = Recent(SAMPLES)
            for stage in session.drive.thinking.seconds:
                session.drive.thinking.seconds[stage] = Recent(SAMPLES)
            if session.new.camera_names:
                if session.id not in self._ages:
                    self._ages[session.id] = Ages()
                    session.attach(self._ages[session.id])
                self._ages[session.id].at_ticks = Recent(SAMPLES)
                self._ages[session.id].on_the_way = Recent(SAMPLES)
            self._before[session.id] = _counts(session)

    def end(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        measured = [one for one in self._sessions().list() if one.id in self._before and one.drive is not None]
        lateness = [one.drive.control.lateness.samples for one in measured]
        late = np.concatenate(lateness) if lateness else np.zeros(0)
        after = {one.id: _counts(one) for one in measured}
        changes: dict[str, int] = {}
        for name, counts in after.items():
            for key, value in counts.items():
                changes[key] = changes.get(key, 0) + value - self._before[name].get(key, 0)
        periods = [one.drive.control.period for one in measured]
        inference = [one.drive.thinking.seconds["total"].samples for one in measured]
        ages = [self._ages[one.id] for one in measured if one.id in self._ages]
        return {
            "seconds": round(seconds, 2),
            "ticks": len(late),
            "lateness_ms": percentiles(late),
            "later_than_half_a_period": sum(int((s > p / 2).sum()) for s, p in zip(lateness, periods, strict=True)),
            "longest_burst_of_missed_ticks": max(
                (int(s.max() / p) for s, p in zip(lateness, periods, strict=True) if len(s)), default=0
            ),
            "cpu_of_a_core": round((processor_seconds() - self._used) / seconds, 3),
            "counts": changes,
            "inference_ms": percentiles(np.concatenate(inference)) if inference else {},
            "frame_age_ms": percentiles(np.concatenate([one.at_ticks.samples for one in ages])) if ages else {},
            "frame_way_ms": percentiles(np.concatenate([one.on_the_way.samples for one in ages])) if ages else {},
            "rss_mb": round(_rss() / 1e6, 1),
        }


def _counts(session: Any) -> dict[str, int]:
    control = session.drive.control
    return {
        "commands": session.drive.commands_sent,
        "holds": control.holds.total,
        "starvations": control.starvations,
        "missed_ticks": control.missed_ticks,
        "late_actions": control.actions.late,
        **{f"frames_{camera}": rate.count for camera, rate in session.drive.buffer.frames.items()},
    }


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def server(options: argparse.Namespace) -> None:
    """``robojax serve``, with policies that need no computing when asked for."""
    cameras = {name: (480, 640) for name in options.cameras}

    needs = Requirements(
        policy_type="act", cameras=cameras, state=6, action=6, chunk=20, action_steps=10, rate=options.rate
    )

    def load(path: str, revision: str | None = None, /, **more: Any) -> ScriptedPolicy:
        return ScriptedPolicy(needs, step=0.01)

    settings = Settings(max_sessions=128, state="off", embedded_transport=False)
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


# Robots.


class Obedient:
    """What one robot heard: when it last moved, and when it was held after that."""

    def __init__(self) -> None:
        self.moved_at = self.held_at = 0.0
        self._target: dict[str, float] = {}

    def obey(self, values: Mapping[str, float], seen_at: float) -> None:
        self._target.update(values)
        if all(abs(self._target.get(joint, 1e9) - STILL[joint]) < 1e-3 for joint in JOINTS):
            self.held_at = seen_at
        else:
            self.moved_at = seen_at


async def live(robot: Robot, options: argparse.Namespace, phase: float) -> None:
    size = (options.height, options.width)
    start = time.monotonic() + phase
    number = 0
    while True:
        now = time.monotonic()
        number = max(number + 1, int((now - start) * options.fps))  # nothing is made up for what came late
        for camera in options.cameras:
            robot.show(camera, picture(size, now))
        # The last joint tells that the robot is there; a hold is told by the others.
        robot.send_joints(STILL if number % 100 == 1 else {"Jaw": 60 + 1e-4 * (number % 2)})
        await sleep_until(start + number / options.fps)


async def robots(options: argparse.Namespace) -> None:
    """Robots that stand still, in rooms that are there already."""
    heard = [Obedient() for _ in range(options.count)]

    def tell() -> None:
        say(event="heard", moved_at=[one.moved_at for one in heard], held_at=[one.held_at for one in heard])

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, tell)
    async with AsyncExitStack() as stack:
        for number in range(options.count):
            rooms = rooms_of(f"{options.prefix}{number}", options.cameras, options.workspace)
            joined = connect_robot(options.url, rooms, on_command=heard[number].obey, rate=options.fps, pace=PATIENT)
            robot = await stack.enter_async_context(joined)
            living = asyncio.create_task(live(robot, options, number / options.count / options.fps))
            stack.callback(living.cancel)
        say(event="ready")
        await asyncio.Event().wait()


# Bare loops.


class Nobody:
    """An inbox that throws everything away."""

    def frame(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        pass

    def joints(self, values: Mapping[str, float], seen_at: float) -> None:
        pass

    def event(self, event: LinkEvent) -> None:
        pass


async def bare(options: argparse.Namespace) -> None:
    """Loops with nothing but a deadline and a message, on links as sessions have them."""
    lateness = Recent(SAMPLES)
    used = began = 0.0

    def begin() -> None:
        nonlocal lateness, used, began
        lateness, used, began = Recent(SAMPLES), processor_seconds(), time.monotonic()
        say(event="measuring")

    def end() -> None:
        late = lateness.samples
        say(
            event="measured",
            ticks=len(late),
            lateness_ms=percentiles(late),
            later_than_half_a_period=int((late > 0.5 / options.rate).sum()),
            cpu_of_a_core=round((processor_seconds() - used) / (time.monotonic() - began), 3),
        )

    async def beat(send: Callable[[Sequence[JointValue]], bool], phase: float) -> None:
        start = time.monotonic() + phase
        number = 0
        while True:
            deadline = start + number / options.rate
            await sleep_until(deadline)
            now = time.monotonic()
            lateness.add(now - deadline)
            send([JointValue(j, STILL[j] + 0.01 * (number % 20), i) for i, j in enumerate(JOINTS)])
            number = max(number + 1, int((now - start) * options.rate))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, begin)
    loop.add_signal_handler(signal.SIGUSR2, end)
    phases = np.random.default_rng(1).uniform(0, 1 / options.rate, options.count)
    links: list[Any] = []
    async with AsyncExitStack() as stack:
        for number in range(options.count):
            opened = RoomsTransport(pace=PATIENT).connect(
                options.url,
                session_id=f"{options.prefix}{number}",
                cameras=options.cameras,
                workspace_id=options.workspace,
                inbox=Nobody(),
            )
            links.append(await stack.enter_async_context(opened))
        for link, phase in zip(links, phases, strict=True):
            beating = asyncio.create_task(beat(link.send, phase))
            stack.callback(beating.cancel)
        say(event="ready")
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["server", "robots", "bare"])
    parser.add_argument("--policy", choices=["scripted", "real"], default="scripted")
    parser.add_argument("--url", default="")
    parser.add_argument("--prefix", default="s")
    parser.add_argument("--workspace", default="load")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--fps", type=float, default=25.0)
    parser.add_argument("--cameras", nargs="*", default=[])
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--height", type=int, default=96)
    options = parser.parse_args()
    if options.role == "server":
        server(options)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run((robots if options.role == "robots" else bare)(options))


if __name__ == "__main__":
    main()
