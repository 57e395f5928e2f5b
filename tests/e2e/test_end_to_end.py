"""The main job over real sockets: the server's HTTP API, rooms on a transport server, video, and a compiled ACT.

The robot is simulated: it sends a picture of one color and a pose, and records its commands. `tests/faults` covers
lost links, lost robots and emergency stops over the same sockets.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from flax import nnx

from jaxmodels.normalization import build_normalization
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.act import Act, ActConfig
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar
from jaxmodels.types import Feature
from jaxmodels.weights import flatten
from service.app import create_app
from service.http.server import listen, serve_app
from service.settings import Settings
from service.transport.client.connection import TransportTimeouts
from service.transport.client.robot import Robot, connect_robot
from service.transport.link import Rooms
from service.transport.server.app import serve_transport
from tests.testing.compiling import compiling_quickly
from tests.testing.pauses import Pauses

RATE = 25.0
JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
POSE = dict(zip(JOINTS, (10.0, -20.0, 30.0, -40.0, 50.0, 60.0), strict=True))
QUICK = TransportTimeouts(retry_first=0.05, retry_longest=0.2, greet=0.05)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small ACT with random weights; its actions stay near the middle of the joints' ranges."""
    inputs = (Feature("observation.state", "STATE", (6,)), Feature("observation.images.front", "VISUAL", (3, 32, 32)))
    outputs = (Feature("action", "ACTION", (6,)),)
    config = ActConfig(
        input_features=inputs,
        output_features=outputs,
        chunk_size=20,
        n_action_steps=5,
        vision_backbone="small_cnn",
        pretrained_backbone_weights=None,
        dim_model=32,
        n_heads=2,
        dim_feedforward=32,
        n_encoder_layers=1,
        use_vae=False,
    )
    vector = {"mean": np.zeros(6, np.float32), "std": np.full(6, 20, np.float32)}
    image = {"mean": np.full((3, 1, 1), 0.5, np.float32), "std": np.full((3, 1, 1), 0.25, np.float32)}
    stats = {"observation.state": vector, "action": vector, "observation.images.front": image}
    with compiling_quickly():  # a program for each shape that is drawn
        weights = {name: np.asarray(array) for name, array in flatten(Act(config, rngs=nnx.Rngs(0))).items()}
    normalization = build_normalization(inputs, outputs, config.normalization_mapping, stats)
    folder = tmp_path_factory.mktemp("policy") / "act"
    lerobot_folder.write_checkpoint(
        folder, Checkpoint(config, weights, normalization, Sidecar(rate=RATE, joint_names=JOINTS))
    )
    return folder


class Rig:
    """A server, its rooms, and the calls of an operator."""

    def __init__(self, url: str, transport_url: str, policy: Path, http: aiohttp.ClientSession, pauses: Pauses):
        self.url, self.transport_url, self._policy, self._http = url, transport_url, policy, http
        self.pauses = pauses
        self.commands: list[tuple[float, Mapping[str, float]]] = []

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._http.request(method, self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def create(self) -> Rooms:
        body = {"session_id": "arm", "policy_path": str(self._policy), "transport_server_url": self.transport_url}
        status, made = await self.call("POST", "/sessions", body)
        assert status == 200, made
        return Rooms(
            made["workspace_id"], made["camera_room_ids"], made["joint_input_room_id"], made["joint_output_room_id"]
        )

    async def status(self) -> dict[str, Any]:
        status, session = await self.call("GET", "/sessions/arm")
        assert status == 200, session
        return session

    @contextlib.asynccontextmanager
    async def robot(self, rooms: Rooms) -> AsyncIterator[Robot]:
        """A robot at rest: it sends a picture that changes and its pose 25 times a second."""

        async def live(robot: Robot) -> None:
            for number in itertools.count():
                robot.show("front", np.full((64, 64, 3), (200, 40 + 4 * (number % 25), 40), np.uint8))
                robot.send_joints(POSE)
                await asyncio.sleep(1 / RATE)

        def obey(values: Mapping[str, float], received_at: float) -> None:
            self.commands.append((received_at, dict(values)))

        async with connect_robot(
            self.transport_url,
            rooms,
            on_command=obey,
            rate=RATE,
            pace=QUICK,
            sessions=self.url,
        ) as robot:
            living = asyncio.create_task(live(robot))
            try:
                yield robot
            finally:
                living.cancel()

    async def rest(self, seconds: float) -> None:
        """Wait until server and robot, which run in this process, have had this many seconds."""
        began = time.monotonic()
        while self.pauses.running(began) < seconds:  # noqa: ASYNC110 - it is time that is waited for
            await asyncio.sleep(0.02)

    async def moves(self, count: int, within: float = 30.0) -> None:
        """Wait for `count` more commands."""
        wanted, deadline = len(self.commands) + count, time.monotonic() + within
        while len(self.commands) < wanted:
            assert time.monotonic() < deadline, f"no commands in {within} s; the session is {await self.status()}"
            await asyncio.sleep(0.02)


@pytest.fixture
async def rig(policy: Path, pauses: Pauses) -> AsyncIterator[Rig]:
    app = create_app(Settings.from_values(frozen="warn"))  # its robot stays at one pose, whatever is commanded
    async with (
        serve_app(app, listen("127.0.0.1", 0)) as url,
        serve_transport() as transport_url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
    ):
        rig = Rig(url, transport_url, policy, http, pauses)
        try:
            yield rig
        finally:
            await rig.call("DELETE", "/sessions/arm")


async def test_actions_arrive_at_the_policys_rate_and_stop_when_told(rig: Rig) -> None:
    rooms = await rig.create()
    assert rooms.cameras == {"front": "arm-front"}
    assert (await rig.status())["status"] == "ready"
    async with rig.robot(rooms):
        status, answer = await rig.call("POST", "/sessions/arm/start")
        assert status == 200, answer
        await rig.moves(5)
        first = len(rig.commands)
        began = time.monotonic()
        await rig.moves(50)
        rate = (len(rig.commands) - first) / rig.pauses.running(began)
        assert rate == pytest.approx(RATE, rel=0.15)
        values = np.array([list(values.values()) for _, values in rig.commands[-20:] if len(values) == 6])
        assert np.isfinite(values).all()
        assert (np.abs(values) <= 100).all()
        session = await rig.status()
        assert session["inference_stats"]["inference_count"] >= 5
        assert session["stats"]["images_received"]["front"] > 10
        assert session["stats"]["measured_joints"] == pytest.approx(POSE)
        status, _ = await rig.call("POST", "/sessions/arm/stop")
        assert status == 200
        await rig.rest(0.5)  # the hold's repeats may still be on their way
        heard = len(rig.commands)
        await rig.rest(0.4)
        assert len(rig.commands) == heard
        held = {name: value for _, values in rig.commands for name, value in values.items()}
        assert held == pytest.approx(POSE), "a stop holds the measured pose"
    status, _ = await rig.call("DELETE", "/sessions/arm")
    assert status == 200
    async with aiohttp.ClientSession() as http:
        for kind in ("robotics", "video"):
            async with http.get(f"{rig.transport_url}/{kind}/workspaces/{rooms.workspace_id}/rooms") as answer:
                assert (await answer.json())["rooms"] == [], f"{kind} rooms are left behind"
