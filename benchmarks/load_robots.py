"""The robots of ``benchmarks/load.py``, and bare loops that send to the same rooms what sessions send.

    python -m benchmarks.load_robots robots --url URL --count 32
    python -m benchmarks.load_robots bare --url URL --count 32 --rate 50

Each prints one line when it is there. Robots tell at SIGUSR2 what they heard; bare loops begin a new measurement at
SIGUSR1 and print its figures as JSON at SIGUSR2.
"""

import argparse
import asyncio
import itertools
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np
import uvloop

from benchmarks.measured import beat, percentiles, sleep_until
from benchmarks.processes import say
from benchmarks.timed_pictures import picture
from service.stats import Recent
from service.transport.client.connection import TransportTimeouts
from service.transport.client.robot import Robot, connect_robot
from service.transport.client.rooms_link import RoomsTransport
from service.transport.link import JointValue, LinkEvent, LinkRequest
from service.transport.protocol import rooms_of

SAMPLES = 20_000
# Joining is not what is measured.
PATIENT = TransportTimeouts(join=60.0, request=60.0, heartbeat=20.0)
JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
STILL: Mapping[str, float] = dict(zip(JOINTS, (10.0, -20.0, 30.0, -40.0, 50.0, 60.0), strict=True))


class Obedient:
    """What one robot heard: when it last moved, and when it was held after that."""

    def __init__(self) -> None:
        self.moved_at = self.held_at = 0.0
        self._target: dict[str, float] = {}

    def obey(self, values: Mapping[str, float], received_at: float) -> None:
        self._target.update(values)
        if all(abs(self._target.get(joint, 1e9) - STILL[joint]) < 1e-3 for joint in JOINTS):
            self.held_at = received_at
        else:
            self.moved_at = received_at


async def live(robot: Robot, options: argparse.Namespace, phase: float) -> None:
    size = (options.height, options.width)
    start = time.monotonic() + phase
    number = 0
    while True:
        now = time.monotonic()
        number = max(number + 1, int((now - start) * options.fps))  # nothing is made up for what came late
        for camera in options.cameras:
            robot.show(camera, picture(size, now))
        # The last joint shows that the robot is connected; the other joints show a hold.
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

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        pass

    def on_joints(self, values: Mapping[str, float], observed_at: float) -> None:
        pass

    def on_event(self, event: LinkEvent) -> None:
        pass


async def bare(options: argparse.Namespace) -> None:
    """Loops with nothing but a deadline and a message, on links as sessions have them."""
    lateness = Recent(SAMPLES)
    used = began = 0.0

    def begin() -> None:
        nonlocal lateness, used, began
        lateness, used, began = Recent(SAMPLES), time.process_time(), time.monotonic()
        say(event="measuring")

    def end() -> None:
        late = lateness.samples
        say(
            event="measured",
            ticks=len(late),
            lateness_ms=percentiles(late),
            later_than_half_a_period=int((late > 0.5 / options.rate).sum()),
            cpu_of_a_core=round((time.process_time() - used) / (time.monotonic() - began), 3),
        )

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, begin)
    loop.add_signal_handler(signal.SIGUSR2, end)
    plan = [[JointValue(j, STILL[j] + 0.01 * step, i) for i, j in enumerate(JOINTS)] for step in range(20)]
    phases = np.random.default_rng(1).uniform(0, 1 / options.rate, options.count)
    links: list[Any] = []
    async with AsyncExitStack() as stack:
        for number in range(options.count):
            request = LinkRequest(
                options.url, f"{options.prefix}{number}", options.cameras, options.workspace, Nobody()
            )
            opened = RoomsTransport(timeouts=PATIENT).connect(request)
            links.append(await stack.enter_async_context(opened))
        for link, phase in zip(links, phases, strict=True):
            values = itertools.cycle(plan)
            send = partial(lambda link, values: link.send(next(values)), link, values)
            beating = asyncio.create_task(beat(options.rate, send, lambda late: lateness.add(late), phase=phase))
            stack.callback(beating.cancel)
        say(event="ready")
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["robots", "bare"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--prefix", default="s")
    parser.add_argument("--workspace", default="load")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--fps", type=float, default=25.0)
    parser.add_argument("--cameras", nargs="*", default=[])
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--height", type=int, default=96)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run((robots if options.role == "robots" else bare)(options))


if __name__ == "__main__":
    main()
