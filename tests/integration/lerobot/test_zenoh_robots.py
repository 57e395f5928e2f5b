"""Robots of LeRobot's remote inference over Zenoh: handshake, actions, stops, presence, links and refusals."""

import asyncio
import datetime
import io
import json
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zenoh
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from PIL import Image

from service.http.config import LerobotSettings
from service.http.server import CannotListen
from service.lerobot import zenoh_server, zenoh_session
from service.lerobot.envelopes import MAX_BYTES
from service.lerobot.zenoh_server import LerobotZenohServer, make_config
from service.setting_types import SettingsError
from tests.testing import rig
from tests.testing.child_process import ROOT, serving
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy
from tests.testing.waiting import until
from tests.testing.zenoh_robot import ALIGNED, ZenohRobot, free_endpoint, open_zenoh, read_array, rgb, tensor

APPEND = {"chunk_settings": None, "required_capabilities": []}


@asynccontextmanager
async def serve(folder: Path, needs: Any = SO100_REQUIREMENTS, **settings: Any) -> AsyncIterator[Any]:
    policy, endpoint = ScriptedPolicy(needs), settings.get("lerobot_zenoh", free_endpoint())
    settings = {
        "policy_roots": (str(folder),),
        "policy_owners": ("policies",),
        "frame_age_limit": 10.0,
        "lerobot_zenoh": endpoint,
        "lerobot_deployments": {"act": str(folder)},
    } | settings
    parts = {"read_requirements": lambda path, revision: needs}
    async with (
        rig.started(load=ScriptedLoader(lambda: policy), parts=parts, **settings) as server,
        LerobotZenohServer(server.app) as robots,
    ):
        server.policy, server.robots = policy, robots
        yield server, endpoint


@asynccontextmanager
async def robot(endpoint: str, **more: Any) -> AsyncIterator[ZenohRobot]:
    client = await asyncio.to_thread(ZenohRobot, endpoint, loop=asyncio.get_running_loop(), **more)
    try:
        await client.describe()
        yield client
    finally:
        await client.close()


def code_of(reply: dict[str, Any]) -> str:
    assert reply["message_type"] == "error", reply
    assert reply["body"]["message"]
    return reply["body"]["code"]


def is_action(reply: dict[str, Any]) -> bool:
    return reply["message_type"] == "action"


async def list_sessions(server: Any) -> list[str]:
    return [each["session_id"] for each in rig.expect_ok(await server.call("GET", "/sessions"))]


@pytest.mark.parametrize(("encoding", "merge"), [("raw", ALIGNED), ("jpeg", APPEND)])
async def test_an_observation_is_answered_with_its_fields(tmp_path, encoding, merge) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start(encoding=encoding, **merge)
        state = np.array([0, 10, -20, 30, 0, 50], np.float32)
        picture, file = np.full((48, 64, 3), 90, np.uint8), io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=90)
        image = rgb(picture, encoding, None if encoding == "raw" else file.getvalue())
        features = {"observation.state": tensor(state), "observation.images.front": image}
        sent = client.observation(features=features, cursor=3, observation_cursor=2)
        if merge == APPEND:
            del sent["observation_cursor"]
        reply = await client.send(sent, "r1")
        assert (reply["message_type"], reply["request_id"]) == ("action", "r1")
        body = reply["body"]
        echoed = {"artifact_identity", "observation_id", "capture_time", "task", "task_version"}
        echoed |= {"cursor", "observation_cursor"} if merge == ALIGNED else set()
        assert {name: body[name] for name in echoed} == {name: sent[name] for name in echoed}
        actions = {"canonical_actions", "model_actions", "execution_steps", "server_durations"}
        assert set(body) == echoed | actions
        expected = state + 0.1 * np.arange(1, 21)[:, None]
        np.testing.assert_allclose(read_array(body["canonical_actions"]), expected, atol=1e-4)
        assert (body["execution_steps"], body["model_actions"]) == (20, None)
        assert (await client.control("close", "c"))["message_type"] == "ack"
        assert (await client.control("close", "c"))["message_type"] == "ack"
        assert await list_sessions(server) == []
        assert code_of(await client.observe()) == "stale"


V1 = {"chunk_merge": "aligned", "blend_steps": 0, "blend_weight": 0.5, "blend_components": []}
CONTRACTS: list[tuple[dict[str, Any], str, str]] = [
    ({"required_capabilities": ["chunk_alignment_v1"], "chunk_settings": V1}, "unsupported", "chunk_alignment_v2"),
    ({"required_capabilities": []}, "unsupported", "chunk_alignment_v2"),
    ({"chunk_settings": V1}, "unsupported", "aligned"),
    ({"mode": "rtc_trained"}, "unsupported", "chunk"),
    ({"encoding": "png"}, "unsupported", "jpeg"),
    ({"semantics": "other"}, "incompatible", "robot-units"),
    ({"expected_artifact": "sha256:0"}, "incompatible", "sha256"),
    ({"features": []}, "incompatible", "shoulder_pan.pos"),
    ({"action_feature": tensor(np.zeros(2, np.float32))}, "incompatible", "shoulder_pan.pos"),
    ({"action_interval": 0.01}, "incompatible", "0.0"),
]


async def test_other_contracts_are_refused_with_the_reason(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        for changes, code, accepted in CONTRACTS:
            reply = await client.open(**changes)
            assert code_of(reply) == code
            assert reply["body"]["message"].startswith(next(iter(changes)))
            assert accepted in reply["body"]["message"]
        assert await list_sessions(server) == []


async def test_messages_of_another_version_or_place_are_refused(tmp_path) -> None:
    async with serve(tmp_path) as (_, endpoint), robot(endpoint) as client:
        key = f"{client.root}/instances/{client.instance}/open"
        assert code_of(await client.get(key, client.pack("observation", {}, session_id=""))) == "protocol"
        assert code_of(await client.get(key, client.pack("open", {}, instance_id="other"))) == "protocol"
        assert code_of(await client.get(key, client.pack("open", {}, request_id=""))) == "malformed"
        assert code_of(await client.get(key, b"\xc1")) == "malformed"
        assert await client.get_all(key, bytes(MAX_BYTES + 1)) == []  # It is dropped, and its client does not wait.
        client.version = 2
        assert code_of(await client.open()) == "unsupported"


async def test_a_repeated_open_has_one_session(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        first, second = await asyncio.gather(client.open("o"), client.open("o"))
        assert first == second
        assert await list_sessions(server) == ["zenoh-act-1"]


async def test_stale_busy_and_unfit_observations_are_refused(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        assert is_action(await client.observe("a"))
        assert code_of(await client.observe("a")) == "stale"
        assert code_of(await client.observe(sequence=1)) == "stale"
        features = client.observation()["features"] | {"observation.state": tensor(np.zeros(5, np.float32))}
        assert code_of(await client.observe(features=features)) == "incompatible"
        bad: list[dict[str, Any]] = [
            {"delay": 21},
            {"task_version": -1},
            {"capture_time": 1},
            {"observation_cursor": 1},
        ]
        for changes in bad:
            assert code_of(await client.observe(**changes)) == "malformed"
        server.policy.latency = 0.3
        first = asyncio.create_task(client.observe("b"))
        await until(lambda: server.policy.acted > 1)
        replies = {reply["request_id"]: reply for reply in (await client.observe("c"), await first)}
        assert (code_of(replies["c"]), is_action(replies["b"])) == ("busy", True)
        client.generation = 1
        assert code_of(await client.observe()) == "stale"
        ack = await client.control("invalidate", "i")
        assert ack["body"] == {"operation": "invalidate", "applied_generation": 1}
        assert await client.control("invalidate", "i") == ack
        assert code_of(await client.control("status")) == "malformed"
        assert is_action(await client.observe())


async def test_a_late_inference_ends_the_session(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(zenoh_session, "ACTION_DEADLINE", 0.2)
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        server.policy.latency = 0.5
        assert code_of(await client.observe()) == "timeout"
        monkeypatch.undo()
        assert code_of(await client.observe()) == "stale"
        assert code_of(await client.control("reset")) == "stale"
        assert (await client.control("close"))["message_type"] == "ack"
        await client.start()
        assert is_action(await client.observe())


async def test_observations_that_waited_are_not_used(tmp_path) -> None:
    async with serve(tmp_path, frame_age_limit=1e-6) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        assert code_of(await client.observe()) == "timeout"
        assert server.policy.acted == 0


async def test_language_requests_are_unsupported(tmp_path) -> None:
    async with serve(tmp_path) as (_, endpoint), robot(endpoint) as client:
        await client.start()
        assert not client.descriptor["capabilities"].get("language", False)
        request = client.observation(kind="vqa", text="Where is the cube?", intent_generation=0)
        client.zenoh.put(f"{client.key}/language/request", client.pack("language_request", request, "l"))
        reply = await client.next_reply()
        assert (code_of(reply), reply["request_id"]) == ("unsupported", "l")
        assert is_action(await client.observe())  # Only the request failed.


async def test_an_emergency_stop_ends_actions_until_its_reset(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        rig.expect_ok(await server.call("POST", "/sessions/zenoh-act-1/emergency_stop"))
        assert code_of(await client.observe()) == "execution"
        client.generation = 1
        assert code_of(await client.control("reset")) == "execution"
        assert code_of(await client.open()) == "execution"
        await client.control("close")
        async with robot(endpoint) as other:  # The stop stays with the deployment when its client is gone.
            refusal = await other.open()
            assert code_of(refusal) == "execution"
            assert "/debug/sessions/zenoh-act-1/reset" in refusal["body"]["message"]
            rig.expect_ok(await server.call("POST", "/debug/sessions/zenoh-act-1/reset"))
            await other.start()
            assert is_action(await other.observe())


async def test_a_stop_ends_the_session_of_its_robot(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        rig.expect_ok(await server.call("POST", "/sessions/zenoh-act-1/stop"))
        for _ in range(2):
            assert code_of(await client.observe()) == "execution"
        await client.control("close")
        client.sequence = 0
        await client.start()
        assert is_action(await client.observe())


async def test_robots_share_policies_until_admission_refuses(tmp_path) -> None:
    deployments = {"act": str(tmp_path), "other": "policies/other"}
    async with (
        serve(tmp_path, max_sessions=3, lerobot_deployments=deployments) as (server, endpoint),
        robot(endpoint) as first,
        robot(endpoint) as second,
        robot(endpoint, deployment="other") as third,
    ):
        robots = (first, second, third)
        for each in robots:
            await each.start()
        assert await list_sessions(server) == ["zenoh-act-1", "zenoh-act-2", "zenoh-other-1"]
        assert server.load.loads == list(deployments.values())
        replies = await asyncio.gather(*(each.observe() for each in robots))
        assert all(map(is_action, replies))
        assert first.descriptor["artifact_identity"] != third.descriptor["artifact_identity"]
        refused = await second.open()
        assert code_of(refused) == "busy"
        assert refused["body"]["details"]["admission_blocker"] == "active_session"


@pytest.mark.timed
async def test_a_killed_robot_may_return_within_the_grace(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(zenoh_server, "IDLE_TIMEOUT", 1.0)
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as again:
        async with robot(endpoint) as client:
            await client.start()
            assert is_action(await client.observe())
        await asyncio.sleep(0.4)
        again.resume(client)
        await asyncio.sleep(1.2)
        assert is_action(await again.observe())
        again.token.undeclare()

        async def is_gone() -> bool:
            return await list_sessions(server) == []

        await until(is_gone)


@pytest.mark.parametrize(("delay", "mode"), [(0, "rtc_guided"), (4, "rtc_trained")])
async def test_policies_that_continue_plans_get_the_rest_of_the_plan(tmp_path, monkeypatch, delay, mode) -> None:
    compiled, compile_policy = [], ScriptedPolicy.compile

    def record(policy: ScriptedPolicy, batch: int, *sizes: Any, with_plan: bool) -> None:
        compiled.append((batch, with_plan))
        compile_policy(policy, batch, *sizes, with_plan=with_plan)

    monkeypatch.setattr(ScriptedPolicy, "compile", record)
    needs = replace(SO100_REQUIREMENTS, takes_prefix=True, trained_delay=delay)
    async with serve(tmp_path, needs) as (_, endpoint), robot(endpoint) as client:
        assert code_of(await client.open(mode=mode)) == "unsupported"  # Plans are not aligned by the client.
        assert compiled.count((1, True)) == 1
        await client.start(mode=mode, **APPEND)
        assert compiled.count((1, True)) == 1  # No robot waits for it; larger batches are compiled at any time.
        actions = read_array((await client.observe())["body"]["model_actions"])
        rest = tensor(np.ascontiguousarray(actions[5:]) + np.float32(0.5))
        reply = await client.observe(delay=2, canonical_continuation=rest, model_continuation=rest)
        assert (reply["message_type"], reply["body"]["execution_steps"]) == ("action", 20)
        np.testing.assert_allclose(read_array(reply["body"]["canonical_actions"])[:2], read_array(rest)[:2], atol=1e-4)
        for wrong in (None, tensor(np.zeros((3, 6), np.float32)), tensor(np.zeros(6, np.float32)), 7):
            refused = await client.observe(canonical_continuation=rest, model_continuation=wrong)
            assert code_of(refused) == "malformed"


async def test_a_router_connects_server_and_robot(tmp_path) -> None:
    endpoint = free_endpoint()
    router = open_zenoh(endpoint, mode="router", listen__endpoints=[endpoint], connect__endpoints=[])
    try:
        async with (
            serve(tmp_path, lerobot_zenoh=endpoint, lerobot_zenoh_mode="client") as (server, _),
            robot(endpoint, mode="client") as client,
        ):
            await client.start()
            assert is_action(await client.observe())
            (command,) = server.robots.list_client_commands()
            assert "--inference.zenoh_mode=client" in command
    finally:
        router.close()


def make_certificates(folder: Path) -> None:
    """Write two authorities and their certificates of localhost: of a server and a robot, and of a thief."""
    now, encoding = datetime.datetime.now(datetime.UTC), serialization.Encoding.PEM

    def sign(name: str, issuer: str) -> None:
        keys[name] = ec.generate_private_key(ec.SECP256R1())
        subject, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer))
        builder = x509.CertificateBuilder(by, subject, keys[name].public_key(), len(keys), now, now + one_day)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(name == issuer, None), critical=True)
        (folder / f"{name}.pem").write_bytes(builder.sign(keys[issuer], hashes.SHA256()).public_bytes(encoding))
        key = keys[name].private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{name}.key").write_bytes(key)

    keys: dict[str, ec.EllipticCurvePrivateKey] = {}
    one_day = datetime.timedelta(days=1)
    for name, issuer in (("ca", "ca"), ("server", "ca"), ("robot", "ca"), ("others", "others"), ("thief", "others")):
        sign(name, issuer)


def tls(folder: Path, name: str, side: str, ca: str = "ca") -> dict[str, Any]:
    files = {f"{side}_certificate": f"{name}.pem", f"{side}_private_key": f"{name}.key"}
    named = {key: str(folder / file) for key, file in (files | {"root_ca_certificate": f"{ca}.pem"}).items()}
    return {"enable_mtls": True, **named}


async def test_only_robots_with_certificates_use_a_tls_endpoint(tmp_path) -> None:
    make_certificates(tmp_path)
    file = tmp_path / "zenoh.json5"
    file.write_text(json.dumps({"transport": {"link": {"tls": tls(tmp_path, "server", "listen")}}}))
    endpoint = free_endpoint().replace("tcp/127.0.0.1", "tls/localhost")
    async with serve(tmp_path, lerobot_zenoh=endpoint, lerobot_zenoh_config=str(file)):
        async with robot(endpoint, transport__link__tls=tls(tmp_path, "robot", "connect")) as client:
            await client.start()
            assert is_action(await client.observe())
        with pytest.raises(zenoh.ZError):  # The client does not trust the server.
            open_zenoh(
                endpoint, connect__timeout_ms=500, transport__link__tls=tls(tmp_path, "robot", "connect", "others")
            )
        with pytest.raises(zenoh.ZError):
            open_zenoh(endpoint, connect__timeout_ms=500, transport__link__tls=tls(tmp_path, "thief", "connect"))


@pytest.mark.parametrize(
    ("endpoint", "file", "is_open"),
    [
        ("tcp/127.0.0.1:7447", None, True),
        ("tcp/0.0.0.0:7447", None, False),
        ("tls/[::]:7447", None, False),
        ("tls/[::]:7447", {"transport": {"link": {"tls": {"enable_mtls": True}}}}, True),
        ("tcp/0.0.0.0:7447", {"transport": {"link": {"tls": {"enable_mtls": True}}}}, False),
        ("tcp/0.0.0.0:7447", {"access_control": {"enabled": True, "default_permission": "deny"}}, True),
        ("tcp/0.0.0.0:7447", {"access_control": {"enabled": True, "default_permission": "allow"}}, False),
        ("tcp/0.0.0.0:7447", {"transport": {"auth": {"usrpwd": {"dictionary_file": "users"}}}}, True),
        ("tcp/127.0.0.1:7447", "{", False),
    ],
)
def test_other_machines_need_a_file_with_access_rules(tmp_path, endpoint, file, is_open) -> None:
    path = tmp_path / "zenoh.json5"
    path.write_text(file if isinstance(file, str) else json.dumps(file))
    settings = LerobotSettings(
        lerobot_zenoh=endpoint,
        lerobot_zenoh_config=None if file is None else str(path),
        lerobot_deployments={"act": ("policies/act", None)},
    )
    if is_open:
        assert json.loads(make_config(settings).get_json("listen/endpoints")) == [endpoint]
    else:
        with pytest.raises(CannotListen, match=r"lerobot.zenoh.config"):
            make_config(settings)


@pytest.mark.parametrize(
    ("changes", "settings", "word"),
    [
        ({"joint_names": None}, {}, "--lerobot-joints"),
        ({"observation_steps": 2}, {}, "several observations"),
        ({}, {"lerobot_joints": {"act": ("one", "two")}}, "joint_names"),
        ({}, {"lerobot_deployments": {"_act": "policies/act"}}, "name"),
    ],
)
async def test_policies_that_robots_cannot_use_are_refused_at_the_start(tmp_path, changes, settings, word) -> None:
    with pytest.raises(SettingsError, match=word):
        async with serve(tmp_path, replace(SO100_REQUIREMENTS, **changes), **settings):
            pass


async def test_a_used_port_is_refused_at_the_start(tmp_path) -> None:
    async with serve(tmp_path) as (_, endpoint):
        with pytest.raises(CannotListen, match=r"lerobot_zenoh: tcp/127"):
            async with serve(tmp_path, lerobot_zenoh=endpoint):
                pass


async def test_the_command_of_the_guide_serves_the_shipped_policy(tmp_path) -> None:
    endpoint, page = free_endpoint(), (ROOT / "docs" / "robots" / "lerobot.md").read_text()
    flags = re.findall(r"^robojax serve (--lerobot-zenoh tcp.*)$", page, re.MULTILINE)[0]
    async with serving(tmp_path, *shlex.split(flags.replace("tcp/127.0.0.1:7447", endpoint))) as output:
        lines = [(await output.readline()).decode() for _ in range(2)]
        (shown,) = re.findall(r"lerobot-rollout .*", lines[1])
        flags = f"--inference.endpoint={endpoint} --inference.deployment=act --inference.semantics=robot-units --fps=25"
        assert flags in shown
        async with robot(endpoint) as client:
            await client.start()
            assert client.descriptor["capabilities"]["action_feature"]["names"][0] == "shoulder_pan.pos"
            assert is_action(await client.observe())
