"""A robot whose pose encodes the time: a command shows which report the policy saw and which action it is."""

import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from service.transport.address import Address, Kind
from service.transport.client.connection import RoomConnection, TransportTimeouts
from service.transport.client.rest import RoomsApi, http_session
from service.transport.client.robot import JointRoomListener, Robot, connect_robot
from service.transport.link import EmergencyStop, Rooms
from service.transport.protocol import ParticipantRole
from tests.faults.script import CHUNK, RATE, STEP

JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
STILL = dict(zip(JOINTS[1:], (-20.0, 30.0, -40.0, 50.0, 60.0), strict=True))
SPEED = 1.0  # Units per second of the clock joint.
PERIOD = 1 / RATE
FRAMES = 25.0
# The robot itself is not under test: it reconnects at once.
QUICK = TransportTimeouts(retry_first=0.05, retry_longest=0.1, greet=0.05)


@dataclass(frozen=True)
class Reading:
    """Times of a command's report and action; a hold is a measured pose."""

    is_hold: bool
    observed_at: float
    due_at: float


class ClockPose:
    """Pose with one joint that is a clock."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()

    def at(self, now: float) -> dict[str, float]:
        return {"Rotation": -90 + (now - self.began_at) * SPEED, **STILL}

    def read(self, target: Mapping[str, float], before: Mapping[str, float] | None = None) -> Reading | None:
        """Decode a complete target; None if it was changed between the policy and the robot.

        Args:
            before: the previous target. A hold keeps its jaw, which may be far from the pose after a jump.
        """
        if target.keys() != set(JOINTS) or not all(map(math.isfinite, target.values())):
            return None
        offsets = [target[joint] - value for joint, value in STILL.items()]
        steps = np.array(offsets) / STEP
        step = round(float(steps[:-1].mean()))
        keeps_jaw = before is not None and before.get(JOINTS[-1]) == target[JOINTS[-1]]
        if step == 0 and (keeps_jaw or 0 <= steps[-1] <= CHUNK):
            steps[-1] = 0  # The jaw of a hold may also be between two actions.
        if not 0 <= step <= CHUNK or np.abs(steps - step).max() > 0.1:
            return None
        observed_at = self.began_at + (target["Rotation"] - step * STEP + 90) / SPEED
        return Reading(step == 0, observed_at, observed_at + max(step - 1, 0) * PERIOD)


class Life:
    """Reports and pictures at 25 Hz; ``camera`` is live, frozen (the same picture again) or stalled."""

    def __init__(self, robot: Robot, cameras: Collection[str], pose: Callable[[float], Mapping[str, float]]):
        self.camera = "live"
        self.shown_at = 0.0
        self._robot, self._cameras = robot, cameras
        self._pose = pose

    async def run(self, size: tuple[int, int]) -> None:
        number, due = 0, time.monotonic()
        while True:
            now = time.monotonic()
            self._robot.send_joints(self._pose(now))
            if self.camera != "stalled":
                number += self.camera == "live"
                picture = np.full((*size, 3), 60, np.uint8)
                picture[:, : 1 + number * 4 % size[1]] = 200
                for camera in self._cameras:
                    self._robot.show(camera, picture)
                self.shown_at = now
            due = max(due + 1 / FRAMES, now)
            await asyncio.sleep(due - now)


@asynccontextmanager
async def living_robot(
    url: str,
    rooms: Rooms,
    *,
    on_command: Callable[[Mapping[str, float], float], None],
    on_stop: Callable[[EmergencyStop], None] | None = None,
    pose: Callable[[float], Mapping[str, float]],
    size: tuple[int, int] = (48, 64),
    sessions: str | None = None,
) -> AsyncIterator[tuple[Robot, Life]]:
    async with connect_robot(
        url, rooms, on_command=on_command, on_emergency_stop=on_stop, rate=FRAMES, pace=QUICK, sessions=sessions
    ) as robot:
        life = Life(robot, rooms.cameras, pose)
        living = asyncio.create_task(life.run(size))
        try:
            yield robot, life
        finally:
            living.cancel()


@asynccontextmanager
async def witness(
    url: str, rooms: Rooms, on_command: Callable[[Mapping[str, float], float], None]
) -> AsyncIterator[None]:
    """Add another participant to the room of the commands, which records them when the robot is dead."""
    listener = JointRoomListener(lambda: None, lambda stop: None, on_command)
    async with http_session() as session:
        api = RoomsApi(session, Address.parse(url), QUICK)
        connection = RoomConnection(
            api,
            Kind.ROBOTICS,
            rooms.workspace_id,
            rooms.joint_output,
            id_prefix="witness",
            role=ParticipantRole.CONSUMER,
            listener=listener,
        )
        listener.connection = connection
        await connection.open()
        running = asyncio.create_task(connection.run())
        try:
            yield
        finally:
            running.cancel()
            await connection.close()


async def run(url: str, rooms: Rooms, began_at: float) -> None:
    """Run until killed: ``python -m tests.faults.robot URL ROOMS BEGAN``."""
    pose = ClockPose()
    pose.began_at = began_at
    async with living_robot(url, rooms, on_command=lambda values, received_at: None, pose=pose.at):
        sys.stdout.write(f"robot at {url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    address, places, began = sys.argv[1:]
    asyncio.run(run(address, Rooms(**json.loads(places)), float(began)))
