"""Robots of LeRobot's remote inference over Zenoh: handshake, actions, stops, presence and refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.http.config import LerobotSettings
from service.http.server import CannotListen
from service.lerobot import zenoh_server
from service.lerobot.zenoh_server import LerobotZenohServer, make_config
from service.setting_types import SettingsError
from tests.testing import rig
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy
from tests.testing.waiting import until
from tests.testing.zenoh_robot import ZenohRobot, free_endpoint, read_array, tensor

JOINTS = tuple(f"{name}.pos" for name in SO100_REQUIREMENTS.joint_names or ())
NEEDS = replace(SO100_REQUIREMENTS, joint_names=JOINTS)


@asynccontextmanager
async def serve(folder: Any, needs: Any = NEEDS, **settings: Any) -> AsyncIterator[Any]:
    policy, endpoint = ScriptedPolicy(needs), free_endpoint()
    settings = {
        "policy_roots": (str(folder),),
        "lerobot_zenoh": endpoint,
        "lerobot_deployments": {"act": str(folder)},
    } | settings
    parts = {"read_requirements": lambda path, revision: needs}
    async with (
        rig.started(load=ScriptedLoader(lambda: policy), parts=parts, **settings) as server,
        LerobotZenohServer(server.app),
    ):
        yield server, endpoint


@asynccontextmanager
async def robot(endpoint: str) -> AsyncIterator[ZenohRobot]:
    client = ZenohRobot(endpoint)
    try:

        async def is_ready() -> bool:
            return (await client.describe())["ready"]

        await until(is_ready)
        yield client
    finally:
        await client.close()


def code_of(reply: dict[str, Any]) -> str:
    assert reply["message_type"] == "error", reply
    return reply["body"]["code"]


async def test_an_observation_is_answered_with_its_fields(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        state = np.array([0, 10, -20, 30, 0, 50], np.float32)
        features = client.observation()["features"] | {"observation.state": tensor(state)}
        reply = await client.observe("r1", features=features, cursor=3, observation_cursor=2)
        assert (reply["message_type"], reply["request_id"]) == ("action", "r1")
        body = reply["body"]
        assert (body["task"], body["cursor"], body["observation_cursor"]) == ("lift", 3, 2)
        assert body["capture_time"] == 12.1 + client.sequence
        actions = read_array(body["canonical_actions"])
        np.testing.assert_allclose(actions, state + 0.1 * np.arange(1, 21)[:, None], atol=1e-4)
        assert (body["execution_steps"], body["model_actions"]) == (20, None)
        assert (await client.control("close"))["message_type"] == "ack"
        assert rig.expect_ok(await server.call("GET", "/sessions")) == []


async def test_other_dialects_and_contracts_are_refused_with_the_reason(tmp_path) -> None:
    async with serve(tmp_path) as (_, endpoint), robot(endpoint) as client:
        settings = {"chunk_merge": "aligned", "blend_steps": 0, "blend_weight": 0.5, "blend_components": []}
        reply = await client.open(chunk_settings=settings, required_capabilities=["chunk_alignment_v1"])
        assert code_of(reply) == "unsupported"
        assert "chunk_alignment_v2" in reply["body"]["message"]
        others: list[tuple[dict[str, Any], str]] = [
            ({"semantics": "other"}, "incompatible"),
            ({"features": []}, "incompatible"),
            ({"action_interval": 0.01}, "incompatible"),
            ({"mode": "rtc_trained"}, "unsupported"),
        ]
        for changes, code in others:
            assert code_of(await client.open(**changes)) == code
        client.version = 2
        assert code_of(await client.open()) == "unsupported"


async def test_stale_busy_and_unfit_observations_are_refused(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        assert (await client.observe("a"))["message_type"] == "action"
        assert code_of(await client.observe("a")) == "stale"
        assert code_of(await client.observe(sequence=1)) == "stale"
        features = client.observation()["features"] | {"observation.state": tensor(np.zeros(5, np.float32))}
        assert code_of(await client.observe(features=features)) == "incompatible"
        server.load.make().latency = 0.3
        first = asyncio.create_task(client.observe("b"))
        await asyncio.sleep(0.1)
        replies = {reply["request_id"]: reply for reply in (await client.observe("c"), await first)}
        assert (code_of(replies["c"]), replies["b"]["message_type"]) == ("busy", "action")
        client.generation = 1
        assert code_of(await client.observe()) == "stale"
        ack = await client.control("invalidate", "i")
        assert ack["body"] == {"operation": "invalidate", "applied_generation": 1}
        assert await client.control("invalidate", "i") == ack
        assert (await client.observe())["message_type"] == "action"


async def test_a_stop_ends_actions_and_refuses_new_sessions(tmp_path) -> None:
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        rig.expect_ok(await server.call("POST", "/sessions/zenoh-act-1/emergency_stop"))
        assert code_of(await client.observe()) == "execution"
        client.generation = 1
        assert code_of(await client.control("reset")) == "execution"
        assert code_of(await client.open()) == "execution"


async def test_robots_share_a_deployment_until_admission_refuses(tmp_path) -> None:
    async with (
        serve(tmp_path, max_sessions=2) as (_, endpoint),
        robot(endpoint) as first,
        robot(endpoint) as second,
    ):
        await first.start()
        await second.start()
        assert first.session != second.session
        replies = await asyncio.gather(first.observe(), second.observe())
        assert [reply["message_type"] for reply in replies] == ["action", "action"]
        refused = await second.open()
        assert code_of(refused) == "busy"
        assert refused["body"]["details"]["admission_blocker"] == "active_session"


@pytest.mark.timed
async def test_a_lost_robot_may_return_within_the_grace(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(zenoh_server, "IDLE_TIMEOUT", 1.0)
    async with serve(tmp_path) as (server, endpoint), robot(endpoint) as client:
        await client.start()
        client.token.undeclare()
        await asyncio.sleep(0.4)
        client.token = client.zenoh.liveliness().declare_token(f"{client.key}/alive")
        await asyncio.sleep(1.2)
        assert (await client.observe())["message_type"] == "action"
        client.token.undeclare()

        async def is_gone() -> bool:
            return rig.expect_ok(await server.call("GET", "/sessions")) == []

        await until(is_gone)


@pytest.mark.parametrize(("delay", "mode"), [(0, "rtc_guided"), (4, "rtc_trained")])
async def test_policies_that_continue_plans_get_the_rest_of_the_plan(tmp_path, delay, mode) -> None:
    needs = replace(NEEDS, takes_prefix=True, trained_delay=delay)
    async with serve(tmp_path, needs) as (_, endpoint), robot(endpoint) as client:
        await client.start(mode=mode, chunk_settings=None, required_capabilities=[])
        actions = read_array((await client.observe())["body"]["model_actions"])
        rest = tensor(np.ascontiguousarray(actions[5:]))
        reply = await client.observe(delay=2, canonical_continuation=rest, model_continuation=rest)
        assert (reply["message_type"], reply["body"]["execution_steps"]) == ("action", 20)


async def test_deployments_without_names_of_joints_are_refused(tmp_path) -> None:
    with pytest.raises(SettingsError, match="--lerobot-joints"):
        async with serve(tmp_path, replace(NEEDS, joint_names=None)):
            pass


def test_other_machines_need_a_file_with_access_rules() -> None:
    settings = LerobotSettings(lerobot_zenoh="tcp/0.0.0.0:7447", lerobot_deployments={"act": ("policies/act", None)})
    with pytest.raises(CannotListen, match="--lerobot-zenoh-config"):
        make_config(settings)
