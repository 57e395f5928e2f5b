"""Two sessions at 50 Hz in one server, one of them recorded by a process that may write no large file (F12).

Prints how the recording ended and what each session missed, as JSON. Run by a test, as a process of its own.
"""

import asyncio
import itertools
import json
import resource
import sys
import time

import aiohttp
import numpy as np

from service.app import create_app
from service.engine.scripted_policy import ScriptedLoader
from service.serving import listen, serving
from service.settings import Settings
from service.transport.memory import MemoryLink, MemoryTransport
from tests.service.recording.robot import noise

LARGEST = 150 << 10
RATE, SECONDS = 50, 1.0


async def feed(link: MemoryLink) -> None:
    image = noise((48, 64))
    for number in itertools.count():
        # Another picture each time: the same again takes no room.
        link.deliver_frame("front", np.roll(image, number, 1))
        link.deliver_joints(dict.fromkeys(("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw"), 1.0))
        await asyncio.sleep(1 / RATE)


async def main(folder: str) -> None:
    transport = MemoryTransport()
    settings = Settings(recordings=folder, recording_free=0)
    app = create_app(settings, transport=transport, load=ScriptedLoader())
    async with serving(app, listen("127.0.0.1", 0)) as url, aiohttp.ClientSession(url) as http:
        for name, is_recorded in (("full", True), ("bare", False)):
            body = {"session_id": name, "policy_path": "act", "transport_server_url": "http://rooms.example"}
            async with http.post("/sessions", json=body | {"rate": RATE, "record": is_recorded}) as answer:
                assert answer.status == 200, await answer.text()
        feeding = [asyncio.create_task(feed(link)) for link in transport.links]
        await asyncio.sleep(0.1)
        for name in ("full", "bare"):
            async with http.post(f"/sessions/{name}/start") as answer:
                assert answer.status == 200, await answer.text()

        async def stats(name: str) -> dict:
            async with http.get(f"/sessions/{name}") as answer:
                found = await answer.json()
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
        async with http.get("/recordings") as answer:
            listed = await answer.json()
        kept = ("status", "hold", "missed_ticks", "ticks", "commands_sent", "recording")
        found = {name: {key: one[key] for key in kept} for name, one in after.items()}
        sys.stdout.write(json.dumps({**found, "sent_at_end": sent_at_end, "listed": listed}))


if __name__ == "__main__":
    # A write beyond fails as on a full disk; SIGXFSZ is ignored by Python.
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    asyncio.run(main(sys.argv[1]))
