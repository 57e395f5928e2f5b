import asyncio
import json
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import websockets

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from robojax.sim.arm import CAMERA, FRAME, HORIZON, SimulatedArm
from service.api.websockets import create_openpi_app
from service.auth.caller import Role
from service.auth.keys import KeyFile
from service.control.joints import Joint, JointTable
from service.errors import InvalidRequest
from service.http.server import listen, serve_app
from service.sessions.compatibility import find_mismatches
from service.sessions.request import DIRECT, NewSession
from service.streaming import codec
from service.streaming.observation import ClientObservation, ObservationSpec
from service.streaming.openpi import read_openpi_observation, rename_keys
from tests.testing.doubles import ScriptedPolicy
from tests.testing.peers import OPENPI_PYTHON, require_peers
from tests.testing.rig import started
from tests.testing.waiting import until

ROOT = Path(__file__).parents[3]
IMAGE = np.full((48, 64, 3), 9, np.uint8)
STATE = np.array([0.0, 10.0, -20.0, 30.0, 0.0, 50.0])


async def infer(client, **observation):
    await client.send(codec.pack_openpi(observation))
    answer = await client.recv()
    return answer if isinstance(answer, str) else codec.unpack(answer)


OBSERVATIONS = [
    {"observation/image": IMAGE, "observation/state": STATE, "prompt": "lift"},
    {"observation.images.front": IMAGE, "observation.state": STATE, "unknown": 1.0},
    {"images": {"front": np.ascontiguousarray(IMAGE.transpose(2, 0, 1))}, "state": STATE},
    {"front": IMAGE[None], "image": IMAGE[:1], "state": STATE.astype(">f4")},
]


@pytest.mark.parametrize("uses_openpi_port", [False, True])
async def test_a_client_that_connects_during_a_load_waits_for_metadata(serve, uses_openpi_port):
    async with serve(create=False) as server, server.loading():
        address = server.openpi if uses_openpi_port else server.stream("/sessions/arm/openpi").uri
        async with websockets.connect(address) as socket:
            receiving = asyncio.create_task(socket.recv())
            await socket.send(codec.pack_openpi({"observation/image": IMAGE, "observation/state": STATE}))
            done, _ = await asyncio.wait([receiving], timeout=0.5)
            assert not done
            assert server.policy.acted == 0
            server.load.gate.set()
            async with asyncio.timeout(30):
                assert codec.unpack(await receiving)["cameras"] == {"front": [48, 64]}
                np.testing.assert_allclose(codec.unpack(await socket.recv())["actions"][0], STATE + 0.1, atol=1e-5)


@pytest.mark.parametrize("how", ["failed", "deleted", "left"])
async def test_a_client_that_waits_for_a_failed_load_gets_the_reason(serve, how):
    async with serve(create=False) as server:
        server.load.failure = JaxModelsError("the weights are torn") if how == "failed" else None
        async with server.loading(), server.stream("/sessions/arm/openpi") as socket:
            owners = server.app.ctx.stream_clients._socket_owners
            await until(lambda: owners)
            if how == "left":
                await socket.close()
                await until(lambda: not owners)
                return
            if how == "failed":
                server.load.gate.set()
            else:
                assert (await server.call("DELETE", "/sessions/arm"))[0] == 200
            with pytest.raises(websockets.ConnectionClosed) as closed:
                async with asyncio.timeout(30):
                    await socket.recv()
            assert closed.value.rcvd.code == 1011
            reasons = {"failed": "policy: .*the weights are torn", "deleted": "unknown_session: .*was deleted"}
            assert re.search(reasons[how], closed.value.rcvd.reason)


async def test_the_openpi_port_prefers_a_loaded_session(serve):
    async with serve(create=False) as server:
        await server.create("ready")
        server.load.loads.clear()
        async with server.loading("policies/other"), websockets.connect(server.openpi) as socket:
            assert codec.unpack(await socket.recv())["session_id"] == "ready"


async def test_observations_by_names_of_openpi_clients_are_read(server):
    for observation in OBSERVATIONS:
        async with server.stream("/sessions/arm/openpi") as socket:
            metadata = codec.unpack(await socket.recv())
            assert (metadata["action_steps"], metadata["cameras"]) == (20, {"front": [48, 64]})
            first = await infer(socket, **observation)
            again = await infer(socket, **observation)
        np.testing.assert_allclose(first["actions"][0], STATE + 0.1, atol=1e-5, err_msg=str(list(observation)))
        assert set(first["server_timing"]) == {"infer_ms"}
        assert set(again["server_timing"]) == {"infer_ms", "prev_total_ms"}
        assert again["policy_timing"]["infer_ms"] >= 0
    session = server.app.ctx.sessions.get("arm")
    assert (session.new.language_instruction, session.protocol) == ("lift", "openpi")


WIDE, TALL = np.full((48, 64, 3), 9, np.uint8), np.full((3, 64, 64), 8, np.uint8)
JOINTS = np.linspace(0.1, 0.7, 7)
DROID = {
    "observation/exterior_image_1_left": WIDE,
    "observation/wrist_image_left": WIDE,
    "observation/joint_position": JOINTS,
}
# Cameras of the policy; width of the state, width of the actions, and whether actions are joint targets; the message of
# openpi's examples; and the resulting state.
ROBOTS = {
    "droid": (
        ("exterior_image_1_left", "wrist_image_left"),
        (8, 8, False),
        DROID | {"observation/gripper_position": np.array([0.25])},
        [*JOINTS, 0.25],
    ),
    "aloha": (
        ("cam_high", "cam_left_wrist"),
        (14, 14, True),
        {"images": {"cam_high": TALL, "cam_left_wrist": TALL, "cam_low": TALL}, "state": np.arange(14.0)},
        [*range(14)],
    ),
    "libero": (
        ("image", "wrist_image"),
        (8, 7, False),
        {"observation/image": WIDE, "observation/wrist_image": WIDE, "observation/state": np.arange(8.0)},
        [*range(7)],
    ),
    "droid with openpi's camera names": (
        ("base_0_rgb", "left_wrist_0_rgb"),
        (8, 8, True),
        DROID | {"observation/gripper_position": np.float64(0.25)},
        [*JOINTS, 0.25],
    ),
}


@pytest.mark.parametrize("robot", ROBOTS)
async def test_observations_of_openpis_robots_are_found_by_name(robot: str, serve):
    cameras, (state, action, controls_joints), message, expected = ROBOTS[robot]
    requirements = Requirements(
        "pi05",
        cameras=dict.fromkeys(cameras, (48, 64)),
        state=state,
        action=action,
        chunk=5,
        action_steps=5,
        language=True,
        controls_joints=controls_joints,
        is_positional=True,
        metadata={"reset_pose": [0.5]},
    )
    async with serve(policy=ScriptedPolicy(requirements), create=False) as server:
        await server.create(policy_type="pi05", camera_names=list(cameras), language_instruction="wait")
        async with server.stream("/sessions/arm/openpi") as socket:
            metadata = codec.unpack(await socket.recv())
            assert metadata["reset_pose"] == [0.5]
            assert metadata["joint_names"] == [f"action_{number + 1}" for number in range(action)]
            answer = await infer(socket, prompt="fold the towel", **message)
            np.testing.assert_allclose(
                answer["actions"], np.array(expected) + 0.1 * np.arange(1, 6)[:, None], rtol=1e-5
            )
            assert answer["clamped"] == []
        assert server.policy.told[-1] == ("fold the towel",)
        for missing in (name for name in message if name != "images"):
            async with server.stream("/sessions/arm/openpi") as socket:
                await socket.recv()
                text = await infer(socket, **{name: value for name, value in message.items() if name != missing})
                assert isinstance(text, str)
                assert missing in text
        status, _ = await server.call("POST", "/sessions/arm/start")
        assert status == (200 if controls_joints else 409)


def test_actions_without_joint_targets_need_a_direct_session():
    requirements = Requirements("act", {"front": (48, 64)}, 8, None, 7, 5, 5, controls_joints=False)
    new = NewSession("arm", "policies/act", "http://localhost", ("front",), "act")
    (text,) = find_mismatches(requirements, new)
    assert "no targets of joints" in text
    assert find_mismatches(requirements, replace(new, transport_server_url=DIRECT)) == []


REFUSED = [
    ({"observation/state": STATE}, "no picture of camera 'front'"),
    ({"observation/image": IMAGE, "other": 1}, "Received: 'observation/image', 'other'"),
    ({"front": IMAGE, "state": STATE[:3]}, "wanted 6 numbers"),
    ({"front": IMAGE, "state": np.full(6, np.inf)}, "infinity"),
    ({"front": "text", "state": STATE}, "wanted an array"),
    ({"front": IMAGE.astype(np.float32), "state": STATE}, "uint8"),
]


async def test_an_error_is_text_without_a_traceback_and_closes_the_socket(server):
    for observation, message in REFUSED:
        async with server.stream("/sessions/arm/openpi") as socket:
            await socket.recv()
            answer = await infer(socket, **observation)
            assert isinstance(answer, str)
            assert message in answer
            assert "Traceback" not in answer
            await socket.wait_closed()
            assert socket.close_code == 1011


async def test_the_openpi_port_serves_the_only_direct_session_of_a_key(serve, tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    key, other = (file.create(name, Role.OPERATOR, name, time.time()) for name in ("alice", "bob"))
    async with serve(key=key, keys_file=str(file.path), create=False) as server:

        async def refused(status: int, sent: str) -> None:
            with pytest.raises(websockets.InvalidStatus) as found:
                await websockets.connect(server.openpi, additional_headers={"authorization": f"Api-Key {sent}"})
            assert found.value.response.status_code == status
            assert b"Traceback" not in (found.value.response.body or b"")

        async with server.http.get(server.openpi.replace("ws", "http") + "/healthz", headers={}) as answer:
            assert (answer.status, await answer.text()) == (200, "OK\n")
        await refused(409, key)
        await server.create()
        await refused(401, "rjk_wrong")
        await refused(409, other)
        async with websockets.connect(
            server.openpi, compression=None, additional_headers={"authorization": f"Api-Key {key}"}
        ) as socket:
            await socket.recv()
            assert (await infer(socket, image=IMAGE, state=STATE))["actions"].shape == (20, 6)
            # Send fragments, a ping, and more messages than one read accepts.
            body = codec.pack_openpi({"image": IMAGE, "state": STATE})
            await socket.send([body[:50], body[50:5000], body[5000:]])
            await (await socket.ping())
            assert not isinstance(await socket.recv(), str)
            for _ in range(8):
                await socket.send(body)
            assert [isinstance(await socket.recv(), bytes) for _ in range(8)] == [True] * 8
        await server.create("second")
        await refused(409, key)


async def test_invalid_websocket_frames_end_the_connection(server):
    head = (
        b"GET /sessions/arm/openpi HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    too_long = b"\x82\xff" + struct.pack(">Q", 1 << 40) + b"abcd"
    for frame, code in (
        (b"\x82\x01a", 1002),
        (b"\xc2\x80abcd", 1002),
        (b"\x89\xfe\x00\x80abcd", 1002),
        (too_long, 1009),
    ):
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(head)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame)
        answer = await asyncio.wait_for(reader.read(), 30)
        assert struct.pack(">H", code) in answer
        writer.close()


@pytest.mark.needs_peers
def test_openpi_client_picks_up_a_cube():
    require_peers("openpi-client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    serve = [sys.executable, "-m", "robojax.cli", "serve", "--port", "0", "--openpi-port", port, "--state", "off"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server, closing(SimulatedArm()) as arm:
        try:
            url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            new = {"session_id": "arm", "policy_path": "robojax/sim/policy", "transport_server_url": "direct"}
            body = json.dumps(new).encode()
            request = urllib.request.Request(f"{url}/sessions", body, {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=60).close()
            relay = [OPENPI_PYTHON, str(ROOT / "benchmarks" / "openpi_peer.py"), "relay", "127.0.0.1", port]
            with subprocess.Popen(relay, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
                assert play(arm, client)
                client.kill()
        finally:
            server.terminate()


def play(arm, client) -> bool:
    def read():
        return codec.unpack(client.stdout.read(*struct.unpack(">I", client.stdout.read(4))))

    arm.reset(5000)
    steps, plan = read()["action_steps"], np.zeros((0, 6))
    for tick in range(HORIZON):
        if tick % steps == 0:
            observation = {f"observation.images.{CAMERA}": arm.picture(CAMERA, *FRAME), "observation/state": arm.joints}
            packed = codec.pack_openpi(observation)
            client.stdin.write(struct.pack(">I", len(packed)) + packed)
            client.stdin.flush()
            plan = read()["actions"]
        arm.step(plan[tick % steps])
    return arm.is_lifted


async def test_closing_the_openpi_port_holds_all_robots_first():
    async with started(policy_owners=("policies",)) as server:
        app = server.app
        await app.ctx.sessions.create(NewSession("arm", "policies/act", DIRECT))
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(serve_app(create_openpi_app(app), listen("127.0.0.1", 0)))
            # This client sends nothing and does not acknowledge the close.
            async with websockets.connect(url.replace("http", "ws"), close_timeout=0.1) as socket:
                await socket.recv()
                socket.transport.pause_reading()
                ending = asyncio.create_task(stack.aclose())
                await until(lambda: app.ctx.sessions.is_closing, within=30.0)
                await ending


SPEC = ObservationSpec(("front",), JointTable([Joint("shoulder", 0, -1.0, 1.0)]), 1 << 20)


def make_image(value: int) -> np.ndarray:
    return np.full((2, 2, 3), value, np.uint8)


@pytest.mark.parametrize(
    ("message", "value"),
    [
        ({"observation/image": make_image(0), "state": np.zeros(1)}, 0),
        # The exact name is preferred to the usual name.
        ({"observation/image": make_image(9), "state": np.zeros(1), "observation.images.front": make_image(2)}, 2),
        ({"images": {"front": make_image(3)}, "state": np.zeros(1), "prompt": "lift"}, 3),
    ],
)
def test_a_camera_is_found_by_its_usual_names(message: dict, value: int) -> None:
    renamed = rename_keys(message, SPEC)
    assert renamed["images"]["front"][0, 0, 0] == value
    assert renamed.get("prompt") == message.get("prompt")


def read(message: dict) -> ClientObservation:
    return read_openpi_observation(memoryview(bytearray(codec.pack_openpi(message))), SPEC)


@pytest.mark.parametrize(
    "message",
    [
        {"image": make_image(7), "state": np.full(1, 0.5)},
        {"image": make_image(7), "state": np.full(1, 0.5, ">f4"), "prompt": "lift"},
        {"image": make_image(7)[None], "state": np.full((1, 1), 0.5)},
        {"image": np.full((3, 2, 2), 7, np.uint8), "state": [0.5]},
        {"image": make_image(7), "wrist": np.zeros((2, 2, 3), np.uint8), "state": np.full(1, 0.5, np.float16)},
    ],
)
def test_every_form_of_an_observation_is_read(message: dict) -> None:
    found = read(message)
    np.testing.assert_array_equal(found.frames["front"], make_image(7))
    assert (found.joints, found.prompt, found.files) == ({"shoulder": 0.5}, message.get("prompt"), {})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"image": {"front": make_image(0)}}, "no picture"),
        ({"image": "x"}, "wanted an array"),
        ({"state": np.full(1, np.nan)}, "finite"),
        ({"state": np.full(1, -1e300)}, "finite"),
        ({"prompt": "\x07ush"}, r"prompt has the control character '\\x07'"),
        ({"prompt": "x" * 2049}, "prompt has 2049 characters; wanted text of at most 2048"),
        ({"prompt": 5}, "prompt is 5"),
    ],
)
def test_unusable_observations_are_refused(fields: dict, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read({"image": make_image(0), "state": np.zeros(1)} | fields)


async def test_only_the_newest_observation_of_a_fast_client_is_kept(server, monkeypatch):
    recent = server.app.ctx.sessions.get("arm").robot_io.runner.recent
    async with server.stream("/sessions/arm/openpi") as socket:
        await socket.recv()
        monkeypatch.setattr("service.streaming.direct_inference._PUBLISH_INTERVAL", 60.0)
        for value in range(3):
            await infer(socket, front=np.full((48, 64, 3), value, np.uint8), state=STATE)
        await until(lambda: [_brightness(observation) for observation, _ in recent] == [2])
        monkeypatch.setattr("service.streaming.direct_inference._PUBLISH_INTERVAL", 0.0)
        for value in range(3, 5):
            await infer(socket, front=np.full((48, 64, 3), value, np.uint8), state=STATE)
        await until(lambda: [_brightness(observation) for observation, _ in recent] == [2, 3, 4])


def _brightness(observation):
    return int(observation["observation.images.front"][0, 0, 0, 0])
