"""The robot as a process that can be killed: ``python -m tests.faults.robot_process URL ROOMS BEGAN``."""

import asyncio
import json
import sys

from service.transport.link import Rooms
from tests.faults.robot import TellingPose, living_robot


async def run(url: str, rooms: Rooms, began_at: float) -> None:
    pose = TellingPose()
    pose.began_at = began_at
    async with living_robot(url, rooms, on_command=lambda values, received_at: None, pose=pose.at):
        sys.stdout.write(f"robot at {url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    address, places, began = sys.argv[1:]
    asyncio.run(run(address, Rooms(**json.loads(places)), float(began)))
