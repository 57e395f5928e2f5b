"""What is to be done comes with an observation, by any of its names, and is the session's from then on."""

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
async def reading(serve):
    async with serve(policy=ScriptedPolicy(READS, unreadable="gibberish"), create=False) as server:
        await server.create(language_instruction="wait")
        yield server


def instruction_of(server) -> str | None:
    return server.app.ctx.sessions.get("arm").new.language_instruction


async def test_an_act_says_what_is_to_be_done_and_the_next_one_need_not(reading):
    for message in ({}, {"prompt": "lift"}, {"language_instruction": "turn"}, {"task": "wave"}, {}, {"prompt": " "}):
        await reading.acted(reading.seen(**message))
    assert reading.policy.told == [("wait",), ("lift",), ("turn",), ("wave",), ("wave",), ("wave",)]
    assert instruction_of(reading) == "wave"


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
        answer = await server.acted(server.seen())
        assert any(CUTS[cut] in warning for warning in answer["warnings"])
        async with server.client() as client:
            await client.say("act", **server.seen())
            assert any(CUTS[cut] in warning for warning in (await client.hear("chunk"))["warnings"])
        assert "warnings" not in (await server.act(server.seen(prompt="lift")))[1]
        assert (await stats_of(server))["warnings"] == {}
        status, _ = await server.call("PATCH", "/sessions/arm", json={"language_instruction": LONG})
        assert status == 200
        stats = await stats_of(server)
        assert CUTS[cut] in stats["warnings"]["instruction_cut"]
        assert stats["instruction_tokens_cut"] == 3
    # `None` is an observation without the field: the policy's default.
    assert set(policy.cuts) == ({"task", None} if cut == "task" else {cut})


async def test_a_policy_without_joints_in_its_prompt_gets_no_cut(serve):
    policy = ScriptedPolicy(READS)
    async with serve(policy=policy, create=False) as server:
        await server.create(language_instruction=LONG, prompt_cut="lerobot")
        assert "the last 3 tokens are cut off" in (await stats_of(server))["warnings"]["instruction_cut"]
        assert (await server.act(server.seen()))[0] == 200  # It refuses features that it does not read.


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"prompt": "gibberish"}, "is no instruction"),
        ({"prompt": "lift", "task": "drop"}, "prompt and task differ"),
        ({"language_instruction": 3}, "language_instruction is 3; wanted text"),
        ({"task": "a\nb\x00"}, "task has the control character"),
    ],
)
async def test_what_is_no_instruction_is_refused_and_nothing_changes(reading, message, said: str):
    status, told = await reading.act(reading.seen(**message))
    assert status == 422
    assert said in str(told)
    assert (reading.policy.told, instruction_of(reading)) == ([], "wait")
    assert (await reading.act(reading.seen()))[0] == 200, "and the client goes on"


async def test_http_and_the_python_client_change_the_instruction(reading):
    status, told = await reading.call("PATCH", "/sessions/arm", json={"language_instruction": "drop it"})
    assert (status, told["language_instruction"]) == (200, "drop it")
    status, told = await reading.call("PATCH", "/sessions/arm", json={"language_instruction": "gibberish"})
    assert (status, told["detail"][0]["loc"]) == (422, ["body", "language_instruction"])
    await reading.act(reading.seen())
    async with AsyncClient(reading.url) as client:
        told = await client.session("arm").patch(language_instruction="turn")
        assert told["language_instruction"] == "turn"
        seen = reading.seen()
        await client.session("arm").act(seen["images"], seen["state"], prompt="lift")
    assert reading.policy.told == [("drop it",), ("lift",)]


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_new_instruction_ends_the_plan_of_single_actions(serve, steps):
    needs = replace(READS, chunk=20, action_steps=20, observation_steps=steps, rate=10.0)
    async with serve(policy=ScriptedPolicy(needs), create=False) as server:
        await server.create(language_instruction="wait")

        async def act(**more) -> tuple[float, int]:
            told = await server.acted(server.seen(want="action", **more))
            return round(float(told["action"][0]), 2), told["left"]

        assert [await act(), await act(prompt="wait"), await act(task="wait")] == [(0.1, 19), (0.2, 18), (0.3, 17)]
        assert [await act(prompt="lift"), await act(), await act(prompt="lift")] == [(0.1, 19), (0.2, 18), (0.3, 17)]
        patched = await server.call("PATCH", "/sessions/arm", json={"language_instruction": "turn"})
        assert patched[0] == 200
        assert [await act(), await act()] == [(0.1, 19), (0.2, 18)]
        await server.call("PATCH", "/sessions/arm", json={"language_instruction": "turn"})
        assert await act() == (0.3, 17)
        async with server.client() as client:
            for prompt, left in (("turn", 19), ("turn", 18), ("wave", 19)):
                await client.say("act", **server.seen(want="action", prompt=prompt))
                assert (await client.hear("action"))["left"] == left
        assert server.policy.told == [("wait",), ("lift",), ("turn",), ("turn",), ("wave",)]


async def test_a_policy_without_language_keeps_its_plan_at_a_new_prompt(server):
    for left, prompt in ((19, "lift"), (18, "drop")):
        assert (await server.act(server.seen(want="action", prompt=prompt)))[1]["left"] == left


async def test_a_new_instruction_begins_at_the_pose_and_keeps_the_grip(serve):
    async with serve(policy=ScriptedPolicy(READS, step=5.0), max_relative_target=1.0, create=False) as server:
        await server.create(language_instruction="wait")
        for _ in range(4):
            assert (await server.act(server.seen(want="action")))[0] == 200
        told = (await server.act(server.seen(want="action", prompt="lift")))[1]
        # The arm did not follow its four actions: only the jaw goes on from the last one.
        np.testing.assert_allclose(told["action"], np.add(server.pose, [1, 1, 1, 1, 1, 5]), atol=1e-4)


async def test_the_stream_tells_the_control_loop(reading):
    async with reading.client() as client:
        assert (await client.hear("welcome"))["reads_prompt"] is True
        await reading.call("POST", "/sessions/arm/start")
        await client.say("observation", **reading.seen(language_instruction="lift"))
        await client.hear("command")
        assert set(reading.policy.told) == {("lift",)}
        assert instruction_of(reading) == "lift"
        asked = len(reading.policy.told)
        await reading.call("PATCH", "/sessions/arm", json={"action_steps": 20, "ask_ahead": 0.0})
        await client.say("observation", **reading.seen(prompt="turn"))
        left = 0
        while ("turn",) not in reading.policy.told:
            left = left or reading.app.ctx.sessions.get("arm").robot_io.controller.queue.left
            await client.socket.recv()
        assert left > 5, "the old plan was far from its end"
        assert reading.policy.told[asked:] == [("turn",)]


async def test_openpis_client_is_told_that_its_prompt_is_read(reading):
    async with reading.stream("/sessions/arm/openpi") as socket:
        assert codec.unpack(await socket.recv())["reads_prompt"] is True
        image, state = np.zeros((48, 64, 3), np.uint8), np.array(reading.pose)
        await socket.send(codec.pack_openpi({"observation/image": image, "state": state, "prompt": "lift"}))
        assert codec.unpack(await socket.recv())["actions"].shape == (20, 6)
        await socket.send(codec.pack_openpi({"observation/image": image, "state": state, "prompt": "gibberish"}))
        assert "is no instruction" in str(await socket.recv())
    assert reading.policy.told == [("lift",)]


@pytest.mark.parametrize("reads", [True, False])
async def test_an_instruction_that_no_policy_reads_gives_a_warning(serve, reads: bool):
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


async def test_a_command_that_is_refused_names_the_command_that_helps(serve):
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
            helps = f"robojax reset arm --server {server.url}, then robojax start arm --server {server.url}"
            assert helps in " ".join(refused.stderr.split())
        assert (await asyncio.to_thread(run, sessions.reset, "arm")).exit_code == 0
        assert (await asyncio.to_thread(run, sessions.start, "arm")).exit_code == 0
        refused = await asyncio.to_thread(run, sessions.start, "arm")
        assert f"robojax restart arm --server {server.url} begins again" in " ".join(refused.stderr.split())


@pytest.mark.parametrize("has_cameras", [True, False])
async def test_a_direct_session_that_only_answers_acts_never_times_out(serve, has_cameras: bool):
    cameras = {} if has_cameras else {"cameras": {}}
    policy = ScriptedPolicy(replace(SO100_REQUIREMENTS, **cameras))
    async with serve(policy=policy, input_timeout=0.2, create=False) as server:
        await server.create(**({} if has_cameras else {"camera_names": []}))
        seen = server.seen() if has_cameras else server.seen(images={})
        for _ in range(2):
            assert (await server.act(seen))[0] == 200
            await asyncio.sleep(0.5)
            assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "ready"
