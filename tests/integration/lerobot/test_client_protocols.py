"""Each protocol gets the same limited actions, which are recorded, and none after a stop or a start of the session."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import websockets

from robojax.client import AsyncClient, RobojaxError
from service.lerobot.zenoh_server import LerobotZenohServer
from service.recording.mcap_files import McapSource
from service.recording.steps import decode_frame
from service.streaming import codec
from tests.integration.lerobot.conftest import JOINTS, POSE, Serve, Server
from tests.testing import rig
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy
from tests.testing.waiting import until
from tests.testing.zenoh_robot import ZenohRobot, free_endpoint, rgb, tensor

PICTURE = np.full((48, 64, 3), 7, np.uint8)
STATE = np.array(list(POSE.values()), np.float32)
LIMIT, STEPS = 0.5, 8

Ask = Callable[[], Awaitable[np.ndarray]]  # Returns the actions (t, a) for one observation; raises Refused.


class Refused(Exception):
    """The server refused an observation."""


@asynccontextmanager
async def ask_robojax(server: Server, protocol: str) -> AsyncIterator[tuple[str, Ask]]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(server.url))
        session = await create_session(server, client)
        asked = session if protocol == "http" else await stack.enter_async_context(session.stream())

        async def ask() -> np.ndarray:
            return (await asked.act({"front": PICTURE}, STATE)).actions

        yield session.id, ask


@asynccontextmanager
async def ask_openpi(server: Server) -> AsyncIterator[tuple[str, Ask]]:
    async with AsyncClient(server.url) as client:
        session = await create_session(server, client)

    async def ask() -> np.ndarray:
        async with websockets.connect(f"{server.url.replace('http', 'ws')}/sessions/arm/openpi") as socket:
            await socket.recv()  # The metadata.
            await socket.send(codec.pack_openpi({"observation/image": PICTURE, "observation/state": STATE}))
            answer = await socket.recv()
            if isinstance(answer, str):  # An error, after which the server closes the connection.
                raise Refused(answer)
            return codec.unpack(answer)["actions"]

    yield session.id, ask


@asynccontextmanager
async def ask_grpc(server: Server) -> AsyncIterator[tuple[str, Ask]]:
    async with server.started() as client:

        async def ask() -> np.ndarray:
            await client.observe(must_go=True)
            return np.array([timed.action for timed in await client.get_actions()])

        yield "lerobot-127.0.0.1-1", ask


@asynccontextmanager
async def ask_zenoh(server: Server) -> AsyncIterator[tuple[str, Ask]]:
    async with LerobotZenohServer(server.app):
        endpoint = str(server.app.ctx.settings.lerobot.lerobot_zenoh)
        client = await asyncio.to_thread(ZenohRobot, endpoint, loop=asyncio.get_running_loop())
        try:
            await client.start()

            async def ask() -> np.ndarray:
                features = {"observation.state": tensor(STATE), "observation.images.front": rgb(PICTURE)}
                answer = await client.observe(features=features)
                if answer["message_type"] == "error":
                    raise Refused(answer["body"])
                record = answer["body"]["canonical_actions"]
                return np.frombuffer(record["data"], record["dtype"]).reshape(record["shape"])

            yield "zenoh-act-1", ask
        finally:
            await client.close()


async def create_session(server: Server, client: AsyncClient) -> Any:
    return await client.create("arm", policy_path=server.path, camera_names=["front"], joint_names=JOINTS)


PROTOCOLS = {
    "http": partial(ask_robojax, protocol="http"),
    "stream": partial(ask_robojax, protocol="stream"),
    "openpi": ask_openpi,
    "lerobot-grpc": ask_grpc,
    "lerobot-zenoh": ask_zenoh,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_guard_and_recordings_work_with_each_protocol(serve: Serve, tmp_path: Path, protocol: str) -> None:
    policy = ScriptedPolicy(replace(SO100_REQUIREMENTS, chunk=STEPS, action_steps=STEPS), step=5.0)
    settings: dict[str, Any] = {"max_relative_target": LIMIT, "lerobot_zenoh": free_endpoint()}
    settings |= {"recordings": str(tmp_path / "recordings"), "recording_free": 0}
    settings |= {"lerobot_deployments": {"act": str(tmp_path / "policies" / "act")}, "lerobot_joints": {"act": JOINTS}}
    async with serve(policy, **settings) as server, PROTOCOLS[protocol](server) as (session_id, ask):
        rig.expect_ok(await server.call("POST", f"/sessions/{session_id}/record", json={"on": True}))
        # The policy asks for 5 per action, and the limit of a step is 0.5.
        expected = STATE + LIMIT * np.arange(1, STEPS + 1)[:, None]
        np.testing.assert_allclose(await ask(), expected, atol=1e-4)

        async def stats() -> dict[str, Any]:
            return rig.expect_ok(await server.call("GET", f"/sessions/{session_id}"))["stats"]

        assert (await stats())["protocol"] == protocol
        for call in ("start", "emergency_stop"):  # A robot has one controller: the control loop, once it is started.
            rig.expect_ok(await server.call("POST", f"/sessions/{session_id}/{call}"))
            acted = policy.acted
            with pytest.raises((RobojaxError, Refused, grpc.aio.AioRpcError)):
                await ask()
            assert policy.acted == acted
        assert (await stats())["emergency_stop"]
    (path,) = (tmp_path / "recordings").glob("*.mcap")
    source = McapSource(path)
    messages = list(source.messages())
    assert (source.header.protocol, source.outcome.episodes) == (protocol, 2)
    frames = [content for topic, _, content in messages if topic == "/cameras/front"]
    assert decode_frame(base64.b64decode(frames[0]["data"])).shape == PICTURE.shape
    (chunk,) = [content["actions"] for topic, _, content in messages if topic == "/chunks"]
    np.testing.assert_allclose(chunk, expected, atol=1e-4)
    position = next(content["position"] for topic, _, content in messages if topic == "/joints")
    np.testing.assert_allclose(list(position.values()), STATE, atol=1e-4)
    assert [name for _, name, _ in source.events()][:3] == ["start", "stop", "start"]  # The client; then the loop.


async def test_a_failed_recording_of_a_client_begins_again_by_request(serve: Serve, tmp_path: Path) -> None:
    policy = ScriptedPolicy(replace(SO100_REQUIREMENTS, chunk=STEPS, action_steps=STEPS))
    async with (
        serve(policy, recordings=str(tmp_path / "recordings"), recording_free=1 << 60) as server,
        ask_robojax(server, "http") as (session_id, ask),
    ):

        async def recording() -> dict[str, Any]:
            return rig.expect_ok(await server.call("GET", f"/sessions/{session_id}"))["stats"]["recording"]

        async def is_full() -> bool:
            return (await recording())["state"] == "disk_full"

        files = []
        for _ in range(2):
            rig.expect_ok(await server.call("POST", f"/sessions/{session_id}/record", json={"on": True}))
            await ask()
            await until(is_full)
            files.append((await recording())["file"])
            await ask()
            assert (await recording())["file"] == files[-1]
        assert len(set(files)) == 2
