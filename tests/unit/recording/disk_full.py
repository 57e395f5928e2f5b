"""Two sessions at 50 Hz in one server, one of them recorded by a process that may write no large file (F12).

Prints how the recording ended and what each session missed, as JSON. Run by a test, as a process of its own.
"""

import asyncio
import itertools
import json
import resource
import sys
import time

import numpy as np

from tests.testing.doubles import MemoryLink
from tests.testing.recordings import noise
from tests.testing.rig import JOINTS, started

LARGEST = 150 << 10
RATE, SECONDS = 50, 1.0


async def feed(link: MemoryLink) -> None:
    image = noise((48, 64))
    for number in itertools.count():
        # Another picture each time: the same again takes no room.
        link.deliver_frame("front", np.roll(image, number, 1))
        link.deliver_joints(dict.fromkeys(JOINTS, 1.0))
        await asyncio.sleep(1 / RATE)


async def main(folder: str) -> None:
    async with started(recordings=folder, recording_free=0) as server:
        for name, is_recorded in (("full", True), ("bare", False)):
            status, told = await server.create(name, rate=RATE, record=is_recorded)
            assert status == 200, told
        feeding = [asyncio.create_task(feed(link)) for link in server.transport.links]
        await asyncio.sleep(0.1)
        for name in ("full", "bare"):
            status, told = await server.call("POST", f"/sessions/{name}/start")
            assert status == 200, told

        async def stats(name: str) -> dict:
            _, found = await server.call("GET", f"/sessions/{name}")
            return {"status": found["status"], **found["stats"]}

        deadline = time.monotonic() + 60
        while (at_end := await stats("full"))["recording"]["state"] == "on":
            assert time.monotonic() < deadline, at_end["recording"]
            await asyncio.sleep(0.05)
        sent_at_end = {name: (await stats(name))["commands_sent"] for name in ("full", "bare")}
        await asyncio.sleep(SECONDS)
        # After a pause of the machine both are held until the next picture and its chunk are there.
        while True:
            after = {name: await stats(name) for name in ("full", "bare")}
            sent = after["full"]["commands_sent"] - sent_at_end["full"]
            if after["full"]["hold"] is None and sent >= 0.4 * RATE * SECONDS:
                break
            assert time.monotonic() < deadline, after["full"]
            await asyncio.sleep(0.01)
        for task in feeding:
            task.cancel()
        _, listed = await server.call("GET", "/recordings")
        kept = ("status", "hold", "missed_ticks", "ticks", "commands_sent", "recording")
        found = {name: {key: one[key] for key in kept} for name, one in after.items()}
        sys.stdout.write(json.dumps({**found, "sent_at_end": sent_at_end, "listed": listed}))


if __name__ == "__main__":
    # A write beyond fails as on a full disk; SIGXFSZ is ignored by Python.
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    asyncio.run(main(sys.argv[1]))
