"""Instructions with an observation: accepted names, and their effect on the session."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from jaxmodels.types import PROMPT_CUTS
from robojax.cli import sessions
from robojax.client import AsyncClient
from service.streaming import codec
from tests.testing.doubles import MAX_WORDS, SO100_REQUIREMENTS, ScriptedPolicy

READS = replace(SO100_REQUIREMENTS, language=True)


@pytest.fixture
async def server(serve):
    async with serve(policy=ScriptedPolicy(READS, unreadable="gibberish"), create=False) as server:
        await server.create(language_instruction="wait")
        yield server


def instruction_of(server) -> str | None:
    return server.app.ctx.sessions.get("arm").new.language_instruction


async def test_the_instruction_of_an_act_stays_for_later_acts(server):
    for message in ({}, {"prompt": "lift"}, {"language_instruction": "turn"}, {"task": "wave"}, {}, {"prompt": " "}):
        await server.acted(server.observe(**message))
    assert server.policy.told == [("wait",), ("lift",), ("turn",), ("wave",), ("wave",), ("wave",)]
    assert instruction_of(server) == "wave"


LONG = "go " * (MAX_WORDS + 3)
CUTS = {
    "task": "its last 3 tokens are left out, so that the prompt has room for the joints",
    "lerobot": "the last 3 tokens of the prompt are cut off, and with them joints that the policy does not see",
}


async def stats_of(server) -> dict[str, Any]:
    return (await server.call("GET", "/sessions/arm"))[1]["stats"]


@pytest.mark.parametrize("cut", CUTS)
async def test_a_long_instruction_is_reported_in_answers_and_the_status(serve, cut: str):
    policy = ScriptedPolicy(replace(READS, prompt_cuts=PROMPT_CUTS))
    async with serve(policy=policy, create=False) as server:
        await server.create(language_instruction=LONG, **({} if cut == "task" else {"prompt_cut": cut}))
        assert CUTS[cut] in (await stats_of(server))["warnings"]["instruction_cut"]
        answer = await server.acted(server.observe())
        assert any(CUTS[cut] in warning for warning in answer["warnings"])
        async with server.client() as client:
            await client.send("act", **server.observe())
            assert any(CUTS[cut] in warning for warning in (await client.receive("chunk"))["warnings"])
        assert "warnings" not in (await server.act(server.observe(prompt="lift")))[1]
        assert (await stats_of(server))["warnings"] == {}
        status, _ = await server.call("PATCH", "/sessions/arm", json={"language_instruction": LONG})
        assert status == 200
        stats = await stats_of(server)
        assert CUTS[cut] in stats["warnings"]["instruction_cut"]
        assert stats["instruction_tokens_cut"] == 3
    # `None` means an observation without the field, which is the default of the policy.
    assert set(policy.cuts) == ({"task", None} if cut == "task" else {cut})


async def test_a_policy_without_joints_in_its_prompt_gets_no_cut(serve):
    policy = ScriptedPolicy(READS)
    async with serve(policy=policy, create=False) as server:
        await server.create(language_instruction=LONG, prompt_cut="lerobot")
        assert "the last 3 tokens are cut off" in (await stats_of(server))["warnings"]["instruction_cut"]
        # The policy refuses features that it does not read.


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"prompt": "gibberish"}, "is no instruction"),
        ({"prompt": "lift", "task": "drop"}, "prompt and task differ"),
        ({"language_instruction": 3}, "language_instruction is 3; wanted text"),
        ({"task": "a\nb\x00"}, "task has the control character"),
    ],
)
async def test_an_invalid_instruction_is_refused_and_changes_nothing(server, message, text: str):
    status, answer = await server.act(server.observe(**message))
    assert status == 422
    assert text in str(answer)
    assert (server.policy.told, instruction_of(server)) == ([], "wait")
    assert (await server.act(server.observe()))[0] == 200, "later acts are accepted"


async def test_http_and_the_python_client_change_the_instruction(server):
    status, answer = await server.call("PATCH", "/sessions/arm", json={"language_instruction": "drop it"})
    assert (status, answer["language_instruction"]) == (200, "drop it")
    status, answer = await server.call("PATCH", "/sessions/arm", json={"language_instruction": "gibberish"})
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", "language_instruction"])
    await server.act(server.observe())
    async with AsyncClient(server.url) as client:
        answer = await client.session("arm").patch(language_instruction="turn")
        assert answer["language_instruction"] == "turn"
        observation = server.observe()
        await client.session("arm").act(observation["images"], observation["state"], prompt="lift")
    assert server.policy.told == [("drop it",), ("lift",)]


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_new_instruction_ends_the_plan_of_single_actions(serve, steps):
    needs = replace(READS, chunk=20, action_steps=20, observation_steps=steps, rate=10.0)
    async with serve(policy=ScriptedPolicy(needs), create=False) as server:
        await server.create(language_instruction="wait")

        async def act(**more) -> tuple[float, int]:
            answer = await server.acted(server.observe(want="action", **more))
            return round(float(answer["action"][0]), 2), answer["left"]

        assert [await act(), await act(prompt="wait"), await act(task="wait")] == [(0.1, 19), (0.2, 18), (0.3, 17)]
        assert [await act(prompt="lift"), await act(), await act(prompt="lift")] == [(0.1, 19), (0.2, 18), (0.3, 17)]
        patched = await server.call("PATCH", "/sessions/arm", json={"language_instruction": "turn"})
        assert patched[0] == 200
        assert [await act(), await act()] == [(0.1, 19), (0.2, 18)]
        await server.call("PATCH", "/sessions/arm", json={"language_instruction": "turn"})
        assert await act() == (0.3, 17)
        async with server.client() as client:
            for prompt, left in (("turn", 19), ("turn", 18), ("wave", 19)):
                await client.send("act", **server.observe(want="action", prompt=prompt))
                assert (await client.receive("action"))["left"] == left
        assert server.policy.told == [("wait",), ("lift",), ("turn",), ("turn",), ("wave",)]


async def test_a_policy_without_language_keeps_its_plan_at_a_new_prompt(serve):
    async with serve() as server:
        for left, prompt in ((19, "lift"), (18, "drop")):
            assert (await server.act(server.observe(want="action", prompt=prompt)))[1]["left"] == left


async def test_a_new_instruction_begins_at_the_pose_and_keeps_the_grip(serve):
    async with serve(policy=ScriptedPolicy(READS, step=5.0), max_relative_target=1.0, create=False) as server:
        await server.create(language_instruction="wait")
        for _ in range(4):
            assert (await server.act(server.observe(want="action")))[0] == 200
        answer = (await server.act(server.observe(want="action", prompt="lift")))[1]
        # The arm has not followed its four actions, so only the jaw continues from the last action.
        np.testing.assert_allclose(answer["action"], np.add(server.pose, [1, 1, 1, 1, 1, 5]), atol=1e-4)


async def test_an_instruction_on_the_stream_reaches_the_control_loop(server):
    async with server.client() as client:
        assert (await client.receive("welcome"))["reads_prompt"] is True
        await server.call("POST", "/sessions/arm/start")
        await client.send("observation", **server.observe(language_instruction="lift"))
        await client.receive("command")
        assert set(server.policy.told) == {("lift",)}
        assert instruction_of(server) == "lift"
        before = len(server.policy.told)
        await server.call("PATCH", "/sessions/arm", json={"action_steps": 20, "ask_ahead": 0.0})
        await client.send("observation", **server.observe(prompt="turn"))
        left = 0
        while ("turn",) not in server.policy.told:
            left = left or server.app.ctx.sessions.get("arm").robot_io.controller.queue.left
            await client.socket.recv()
        assert left > 5, "the old plan is far from its end"
        assert server.policy.told[before:] == [("turn",)]


async def test_the_metadata_for_openpi_states_that_the_prompt_is_read(server):
    async with server.stream("/sessions/arm/openpi") as socket:
        assert codec.unpack(await socket.recv())["reads_prompt"] is True
        image, state = np.zeros((48, 64, 3), np.uint8), np.array(server.pose)
        await socket.send(codec.pack_openpi({"observation/image": image, "state": state, "prompt": "lift"}))
        assert codec.unpack(await socket.recv())["actions"].shape == (20, 6)
        await socket.send(codec.pack_openpi({"observation/image": image, "state": state, "prompt": "gibberish"}))
        assert "is no instruction" in str(await socket.recv())
    assert server.policy.told == [("lift",)]


@pytest.mark.parametrize("reads", [True, False])
async def test_an_instruction_that_no_policy_reads_causes_a_warning(serve, reads: bool):
    async with serve(policy=ScriptedPolicy(READS if reads else SO100_REQUIREMENTS), create=False) as server:
        created = await server.create(language_instruction="lift")
        assert set(created) == {"workspace_id", "camera_room_ids", "joint_input_room_id", "joint_output_room_id"}
        expected = set() if reads else {"instruction_unread"}
        assert set((await server.call("GET", "/sessions/arm"))[1]["stats"]["warnings"]) == expected
        status, adjusted = await server.call("PATCH", "/sessions/arm", json={"language_instruction": "turn it round"})
        assert (status, set(adjusted["warnings"])) == (200, expected)

        def adjust():
            app = typer.Typer()
            app.command()(sessions.adjust)
            return CliRunner().invoke(app, ["arm", "--language-instruction", "lift", "--server", server.url])

        found = await asyncio.to_thread(adjust)
        assert (found.exit_code, instruction_of(server)) == (0, "lift")
        assert ("warning: the policy reads no language" in found.stderr) is not reads


async def test_a_refused_command_names_the_command_to_use(serve):
    async with serve() as server:

        def run(command, *arguments: str):
            app = typer.Typer()
            app.command()(command)
            return CliRunner().invoke(app, [*arguments, "--server", server.url])

        stopped = await asyncio.to_thread(run, sessions.stop, "arm", "--emergency")
        assert stopped.exit_code == 0, stopped.stderr
        for command in (sessions.start, sessions.restart):
            refused = await asyncio.to_thread(run, command, "arm")
            assert refused.exit_code == 4
            assert "POST /debug/sessions/arm/reset" in refused.stderr
            remedy = f"robojax reset arm --server {server.url}, then robojax start arm --server {server.url}"
            assert remedy in " ".join(refused.stderr.split())
        assert (await asyncio.to_thread(run, sessions.reset, "arm")).exit_code == 0
        assert (await asyncio.to_thread(run, sessions.start, "arm")).exit_code == 0
        refused = await asyncio.to_thread(run, sessions.start, "arm")
        assert f"robojax restart arm --server {server.url} begins again" in " ".join(refused.stderr.split())


@pytest.mark.parametrize("has_cameras", [True, False])
async def test_a_direct_session_with_only_acts_never_times_out(serve, has_cameras: bool):
    cameras = {} if has_cameras else {"cameras": {}}
    policy = ScriptedPolicy(replace(SO100_REQUIREMENTS, **cameras))
    async with serve(policy=policy, input_timeout=0.2, create=False) as server:
        await server.create(**({} if has_cameras else {"camera_names": []}))
        observation = server.observe() if has_cameras else server.observe(images={})
        for _ in range(2):
            assert (await server.act(observation))[0] == 200
            await asyncio.sleep(0.5)
            assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "ready"
