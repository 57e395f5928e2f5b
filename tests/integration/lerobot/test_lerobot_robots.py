"""Robots of LeRobot's client: sessions, observations, action chunks, stops, and access."""

import asyncio
import datetime
import pickle
import re
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from jaxmodels.errors import JaxModelsError
from service.http.server import CannotListen
from service.lerobot import robot
from service.lerobot.pickles import MAX_BYTES
from tests.integration.lerobot.conftest import (
    BEGIN,
    END,
    JOINTS,
    MIDDLE,
    PIECE,
    POSE,
    RobotClient,
    pack_piece,
)
from tests.testing.child_process import serving
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy
from tests.testing.rig import expect_ok
from tests.testing.waiting import until

ROOT = Path(__file__).parents[3]
StatusCode = grpc.StatusCode


async def expect_error(call, code: StatusCode, *words: str) -> None:
    """Check the code of a refused call, and words of its text."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = caught.value.details() or ""
    assert caught.value.code() is code, details
    assert [word for word in words if word not in details] == [], details


async def test_a_robot_gets_a_session_and_numbered_actions(server) -> None:
    async with server.started(actions_per_chunk=8) as client:
        (session,) = await server.sessions()
        assert (session["session_id"], session["status"]) == ("lerobot-127.0.0.1-1", "ready")
        assert session["stats"]["protocol"] == "lerobot-grpc"
        sent = await client.observe(7, must_go=True)
        actions = await client.get_actions()
        assert [timed.timestep for timed in actions] == list(range(7, 15))
        np.testing.assert_allclose([timed.timestamp for timed in actions], sent.timestamp + np.arange(8) / 20)
        expected = np.array(list(POSE.values())) + 0.1 * np.arange(1, 9)[:, None]
        np.testing.assert_allclose([timed.action for timed in actions], expected, atol=1e-4)


async def test_both_loops_of_the_client_execute_actions_in_order(server) -> None:
    async with server.started(actions_per_chunk=10) as client:
        await client.run(60)
        timesteps = [timestep for timestep, _ in client.executed]
        assert timesteps == sorted(set(timesteps))
        assert len(client.chunks) > 3
        steps = np.diff([action for _, action in client.executed], axis=0)
        assert (steps > -0.05).all(), "chunks continue the executed motion"


@pytest.mark.parametrize(("must_go", "first"), [(False, 1.5), (True, 5.1)], ids=["moving", "at rest"])
async def test_a_chunk_continues_the_executed_motion(serve, must_go, first) -> None:
    async with serve(max_relative_target=0.5) as server, server.started() as client:
        await client.observe(0, must_go=True)
        assert (await client.get_actions())[9].action[0] == pytest.approx(POSE[JOINTS[0]] + 1.0, abs=1e-3)
        await client.observe(10, must_go=must_go, **{JOINTS[0]: POSE[JOINTS[0]] + 5.0})
        assert (await client.get_actions())[0].action[0] == pytest.approx(POSE[JOINTS[0]] + first, abs=1e-3)


async def test_get_actions_waits_for_an_observation(server) -> None:
    async with server.started() as client:
        assert await client.get_actions() == []
        waiting = asyncio.create_task(client.get_actions())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.observe()
        assert len(await waiting) == 20


@pytest.mark.parametrize(
    ("timestep", "moved", "must_go", "is_answered"),
    [
        (5, 0.0, False, False),
        (5, 30.0, False, False),
        (6, 0.5, False, False),
        (6, 1.5, False, True),
        (5, 0.0, True, True),
    ],
    ids=["the same", "its timestep", "similar", "moved", "must go"],
)
async def test_similar_observations_are_answered_only_if_they_must(server, timestep, moved, must_go, is_answered):
    async with server.started() as client:
        await client.observe(5)
        assert await client.get_actions()
        pose = {JOINTS[0]: POSE[JOINTS[0]] + moved}
        await client.observe(timestep, must_go=must_go, **pose)
        assert bool(await client.get_actions()) is is_answered


async def test_a_must_go_observation_is_replaced_only_by_a_newer_one(server) -> None:
    async with server.started() as client:
        await client.observe(0)
        assert await client.get_actions()
        await client.observe(1, must_go=True)
        await client.observe(2)
        assert (await client.get_actions())[0].timestep == 2
        assert await client.get_actions() == []


async def test_a_failed_inference_is_made_up_by_the_next_observation(server) -> None:
    async with server.started() as client:
        server.policy.failures.append(JaxModelsError("no chunk"))
        await client.observe(3, must_go=True)
        await expect_error(client.get_actions(), StatusCode.INTERNAL, "policy_failed")
        await client.observe(3)
        assert await client.get_actions()


async def test_a_waiting_observation_becomes_too_old(serve) -> None:
    async with serve(frame_age_limit=0.1) as server, server.started() as client:
        await client.observe(0, must_go=True)
        await asyncio.sleep(0.2)
        assert await client.get_actions() == []
        await client.observe(0)
        assert await client.get_actions()


async def test_the_task_is_the_instruction_of_the_policy(serve) -> None:
    policy = ScriptedPolicy(replace(SO100_REQUIREMENTS, language=True))
    async with serve(policy) as server, server.started() as client:
        await expect_error(client.observe(), StatusCode.INVALID_ARGUMENT, "--task")
        await client.observe(task="lift the cube")
        assert await client.get_actions()
        assert policy.told[-1] == ("lift the cube",)


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("/etc", StatusCode.PERMISSION_DENIED, ("policy_roots",)),
        ("else/act", StatusCode.PERMISSION_DENIED, ("policy_owners",)),
        ("policies/act", StatusCode.NOT_FOUND, ("policies/act", "robojax check")),
    ],
    ids=["a folder", "an owner", "not cached"],
)
async def test_policies_must_be_allowed_and_present(server, path, code, words) -> None:
    async with server.connect() as client:
        client.path = path
        await expect_error(client.start(), code, *words)
        assert (server.load.loads, await server.sessions()) == ([], [])
        await expect_error(client.observe(), StatusCode.FAILED_PRECONDITION, "robot_client")


async def test_policies_of_the_hub_are_taken_from_the_cache_or_a_session(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    async with server.connect() as client:
        client.path = "policies/act"
        expect_ok(await server.create("arm", transport_server_url="direct"))
        await client.start()
        expect_ok(await server.call("DELETE", "/sessions/arm"))
    async with server.connect() as client:
        client.path, commit = "policies/other", "c" * 40
        repo = tmp_path / "models--policies--other"
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
        await expect_error(client.start(), StatusCode.NOT_FOUND, "policies/other")
        (repo / "snapshots" / commit / "model.safetensors").touch()
        await client.start()
        assert server.app.ctx.sessions.list()[-1].new.revision == commit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": JOINTS[:5]}, ("joint_names", "6")),
        ({"names": JOINTS[::-1]}, ("joint_names", "shoulder_pan")),
        ({"names": None}, ("observation.state", "names")),
        ({"camera": "wrist"}, ("camera_names", "front", "--robot.cameras")),
        ({"policy_type": "pi0"}, ("'act'", "'pi0'")),
    ],
    ids=["too few joints", "another order", "no joints", "another camera", "another type"],
)
async def test_a_robot_that_does_not_fit_the_policy_is_refused(server, changes, words) -> None:
    async with server.connect() as client:
        features = client.config().lerobot_features
        if "names" in changes:
            features["observation.state"]["names"] = changes["names"]
        features = {
            f"observation.images.{changes['camera']}" if "images" in name and "camera" in changes else name: each
            for name, each in features.items()
        }
        config = {"lerobot_features": features, "policy_type": changes.get("policy_type", "act")}
        await expect_error(client.start(**config), StatusCode.INVALID_ARGUMENT, *words)


async def test_an_emergency_stop_ends_actions_until_its_reset(server) -> None:
    async with server.started() as client:
        await client.observe()
        assert await client.get_actions()
        waiting = asyncio.create_task(client.get_actions())
        expect_ok(await server.call("POST", "/sessions/lerobot-127.0.0.1-1/emergency_stop"))
        # The answer empties the client's queue, and its only action is dropped.
        assert [action.timestep for action in await waiting] == [-1]
        await expect_error(client.observe(1, must_go=True), StatusCode.FAILED_PRECONDITION, "emergency stop")
        await expect_error(client.get_actions(), StatusCode.FAILED_PRECONDITION, "emergency stop")
        async with server.connect() as other:
            await expect_error(other.start(), StatusCode.FAILED_PRECONDITION, "lerobot-127.0.0.1-1/reset")
        await expect_error(client.start(), StatusCode.FAILED_PRECONDITION, "lerobot-127.0.0.1-1/reset")
        expect_ok(await server.call("POST", "/debug/sessions/lerobot-127.0.0.1-1/reset"))
        await client.start()
        await client.observe()
        assert await client.get_actions()


async def test_a_stop_during_a_poll_sends_no_actions(server) -> None:
    async with server.started() as client:
        waiting = asyncio.create_task(client.get_actions())
        expect_ok(await server.call("POST", "/debug/emergency_stop"))
        await expect_error(waiting, StatusCode.FAILED_PRECONDITION, "emergency stop")


async def test_a_stop_ends_the_plan_that_a_robot_executes(server) -> None:
    async with server.started() as client:
        await client.observe(must_go=True)
        receiving = asyncio.create_task(client.receive())
        await until(lambda: client.queue)
        expect_ok(await server.call("POST", "/debug/emergency_stop"))
        with pytest.raises(grpc.RpcError):
            await receiving  # It fails after the answer that replaces the plan.
        assert client.queue == {}


async def test_a_reset_stop_ends_with_new_instructions_only(server) -> None:
    async with server.started() as client:
        expect_ok(await server.call("POST", "/sessions/lerobot-127.0.0.1-1/emergency_stop"))
        expect_ok(await server.call("POST", "/debug/sessions/lerobot-127.0.0.1-1/reset"))
        await expect_error(client.get_actions(), StatusCode.FAILED_PRECONDITION, "was stopped")


async def test_two_robots_share_a_policy_in_their_own_sessions(server) -> None:
    async with server.started() as first, server.started() as second:
        first.pose[JOINTS[0]], second.pose[JOINTS[0]] = -60.0, 60.0
        await asyncio.gather(first.run(25), second.run(25))
        assert [session["session_id"] for session in await server.sessions()] == [
            "lerobot-127.0.0.1-1",
            "lerobot-127.0.0.1-2",
        ]
        assert max(action[0] for _, action in first.executed) < 0 < min(action[0] for _, action in second.executed)


async def test_robots_on_one_connection_are_refused(server) -> None:
    async with server.started() as client:
        calls = [asyncio.create_task(client.get_actions()) for _ in range(2)]
        for call in calls:
            await expect_error(call, StatusCode.FAILED_PRECONDITION)
        assert await server.sessions() == []


@pytest.mark.parametrize("way", ["silence", "ready", "disconnect"])
async def test_a_session_ends_with_its_robot(serve, way) -> None:
    async with serve(silence=0.5) as server, server.connect() as client:
        await client.start()
        assert len(await server.sessions()) == 1
        if way == "ready":
            await client.call("Ready")
            assert await server.sessions() == []
        if way == "disconnect":
            await client.channel.close()
        await until(server_is_empty(server))
        if way == "silence":
            await expect_error(client.get_actions(), StatusCode.FAILED_PRECONDITION, "start robot_client again")


def server_is_empty(server):
    async def is_empty() -> bool:
        return await server.sessions() == []

    return is_empty


async def test_a_polling_robot_is_not_silent(serve, monkeypatch) -> None:
    async with serve(silence=0.3) as server, server.started() as client:
        monkeypatch.setattr(robot, "POLL_TIMEOUT", 1.0)
        assert await client.get_actions() == []
        assert len(await server.sessions()) == 1


async def test_a_robot_that_disconnects_during_a_load_leaves_no_session(serve) -> None:
    async with serve() as server, server.connect() as client:
        server.load.gate = threading.Event()
        starting = asyncio.create_task(client.start())
        await server.until_loading()
        starting.cancel()
        await until(server_is_empty(server))
        server.load.gate.set()


HOSTILE = {
    "code": [pack_piece(END, pickle.dumps(print))],
    "a text": [pack_piece(END, b"cos\nsystem\n(S'true'\ntR.")],
    "no pickle": [pack_piece(END, b"")],
    "no message": [b"\xff\xff"],
    "no state": [pack_piece(0, b"x")],
    "no begin": [pack_piece(MIDDLE, b"x")],
    "no end": [pack_piece(BEGIN, b"x")],
    "nothing": [],
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_hostile_bytes_are_refused_while_another_robot_moves(server, case) -> None:
    async with server.started() as hostile, server.started() as client:
        moving = asyncio.create_task(client.run(30))
        for _ in range(10):
            await expect_error(hostile.send_pieces(HOSTILE[case]), StatusCode.INVALID_ARGUMENT)
            await expect_error(
                hostile.call("SendPolicyInstructions", b"".join(HOSTILE[case])), StatusCode.INVALID_ARGUMENT
            )
            await hostile.start()
        await moving


async def test_large_messages_and_observations_are_refused(server) -> None:
    async with server.started() as client:
        await expect_error(client.send_pieces([bytes(5 << 20)]), StatusCode.RESOURCE_EXHAUSTED)
        pieces = [pack_piece(BEGIN, bytes(PIECE)), *[pack_piece(MIDDLE, bytes(PIECE))] * (MAX_BYTES // PIECE)]
        await expect_error(client.send_pieces(pieces), StatusCode.RESOURCE_EXHAUSTED, "too_large")
        client.shape = (1080, 1920, 3)
        await client.observe()
        assert await client.get_actions()


@pytest.mark.parametrize(
    "changes",
    [{JOINTS[0]: float("nan")}, {"front": np.zeros((4, 4, 3), np.uint16)}, {"wrist": np.zeros((4, 4, 3), np.uint8)}],
    ids=["not finite", "depth", "unknown camera"],
)
async def test_observations_that_do_not_fit_are_refused(server, changes) -> None:
    async with server.started() as client:
        await expect_error(client.observe(**changes), StatusCode.INVALID_ARGUMENT)


async def test_robots_of_other_networks_are_refused(serve) -> None:
    async with serve(lerobot_allow=("10.0.0.0/8",)) as server, server.connect() as client:
        await expect_error(client.start(), StatusCode.PERMISSION_DENIED, "127.0.0.1", "--lerobot-allow")
    async with serve(lerobot_allow=("127.0.0.0/8",)) as server, server.started():
        assert len(await server.sessions()) == 1


async def test_the_number_of_robots_is_limited(server, monkeypatch) -> None:
    monkeypatch.setattr("service.lerobot.grpc_server.MAX_ROBOTS", 1)
    async with server.started(), server.connect() as client:
        await expect_error(client.start(), StatusCode.RESOURCE_EXHAUSTED, "too_many_requests")


def make_certificate(folder: Path) -> dict[str, str]:
    """Write a certificate of localhost that signs itself, and return the settings that name its files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    for extension in (
        x509.SubjectAlternativeName([x509.DNSName("localhost")]),
        x509.BasicConstraints(ca=True, path_length=None),
    ):
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    encoding, encryption = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(encoding))
    (folder / "key.pem").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, encryption))
    files = {"lerobot_tls_cert": "cert.pem", "lerobot_tls_key": "key.pem", "lerobot_tls_client_ca": "cert.pem"}
    return {name: str(folder / file) for name, file in files.items()}


async def test_certificates_admit_only_robots_that_have_one(serve, tmp_path) -> None:
    async with serve(**make_certificate(tmp_path)) as server:
        certificate, key = ((tmp_path / name).read_bytes() for name in ("cert.pem", "key.pem"))
        async with server.connect(grpc.ssl_channel_credentials(certificate, key, certificate)) as client:
            await client.start()
            await client.observe()
            assert await client.get_actions()
        for credentials in (None, grpc.ssl_channel_credentials(certificate)):
            async with server.connect(credentials) as client:
                await expect_error(client.start(), StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("file", "words"), [("cert.pem", "lerobot_tls_cert"), ("key.pem", "--lerobot-tls-key"), (None, "--lerobot-port")]
)
async def test_files_and_ports_that_cannot_be_used_are_named(server, serve, tmp_path, file, words) -> None:
    settings = make_certificate(tmp_path)
    if file == "cert.pem":
        (tmp_path / file).unlink()
    elif file == "key.pem":
        (tmp_path / file).write_text("no key")
    else:
        settings = {"lerobot_port": server.robots.port}
    with pytest.raises(CannotListen, match=words):
        async with serve(**settings):
            pass


async def test_the_end_of_the_server_holds_the_robots_first(serve) -> None:
    async with serve() as server, server.started() as client:
        waiting = asyncio.create_task(client.get_actions())
        await asyncio.sleep(0.05)
        await server.robots.__aexit__()
        assert server.app.ctx.sessions.is_closing
        with pytest.raises(grpc.aio.AioRpcError):
            await waiting


async def test_a_server_process_moves_a_robot_with_the_shipped_policy(tmp_path) -> None:
    async with serving(tmp_path, "--lerobot-port", "0") as output:
        (port,) = re.findall(r"LeRobot's robots: port (\d+)", (await output.readline()).decode())
        client = RobotClient(int(port), "robojax/sim/policy")
        client.shape = (96, 96, 3)
        client.pose = dict(zip(JOINTS, (0.0, -90.0, 90.0, 0.0, 0.0, 10.0), strict=True))
        await client.start(actions_per_chunk=10)
        await client.run(30)
        assert {len(chunk) for chunk in client.chunks} == {10}
        assert np.abs(np.diff([action for _, action in client.executed], axis=0)).max() < 30
        await client.channel.close()
