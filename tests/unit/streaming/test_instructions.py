"""What is to be done comes with an observation, by any of its names, and is the session's from then on."""

import asyncio
import json
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
from service.testing import MAX_WORDS, SO100_REQUIREMENTS, ScriptedPolicy

READS = replace(SO100_REQUIREMENTS, language=True)


@pytest.fixture
async def reading(serve):
    async with serve(policy=ScriptedPolicy(READS, unreadable="gibberish")) as server:
        await server.create(language_instruction="wait")
        yield server


def instruction_of(server) -> str | None:
    return server.app.ctx.sessions.get("arm").new.language_instruction


async def test_an_act_says_what_is_to_be_done_and_the_next_one_need_not(reading):
    for message in ({}, {"prompt": "lift"}, {"language_instruction": "turn"}, {"task": "wave"}, {}, {"prompt": " "}):
        status, told = await reading.act(reading.seen(**message))
        assert status == 200, told
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
    async with serve(policy=policy) as server:
        await server.create(language_instruction=LONG, **({} if cut == "task" else {"prompt_cut": cut}))
        assert CUTS[cut] in (await stats_of(server))["warnings"]["instruction_cut"]
        status, answer = await server.act(server.seen())
        assert status == 200
        assert any(CUTS[cut] in warning for warning in answer["warnings"])
        async with server.stream() as socket:
            await socket.send(codec.pack({"kind": "act", **server.seen()}))
            while (answer := codec.unpack(await socket.recv()))["kind"] != "chunk":
                assert answer["kind"] != "error", answer
            assert any(CUTS[cut] in warning for warning in answer["warnings"])
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
    async with serve(policy=policy) as server:
        await server.create(language_instruction=LONG, prompt_cut="lerobot")
        assert "the last 3 tokens are cut off" in (await stats_of(server))["warnings"]["instruction_cut"]
        assert (await server.act(server.seen()))[0] == 200  # It refuses features that it does not read.


async def test_an_unknown_prompt_cut_is_refused(serve):
    async with serve() as server:
        body = {
            "session_id": "arm",
            "policy_path": "policies/act",
            "transport_server_url": "direct",
            "prompt_cut": "end",
        }
        status, answer = await server.call("POST", "/sessions", json=body)
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", "prompt_cut"])
        assert "'task' or 'lerobot'" in answer["detail"][0]["msg"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"prompt": "gibberish"}, "is no instruction"),
        ({"prompt": "lift", "task": "drop"}, "prompt and task say different things"),
        ({"language_instruction": 3}, "language_instruction: wanted text"),
        ({"task": "a\nb\x00"}, "task: wanted text"),
    ],
)
async def test_what_is_no_instruction_is_refused_and_nothing_changes(reading, message, said: str):
    status, told = await reading.act(reading.seen(**message))
    assert status == 422
    assert said in str(told)
    assert (reading.policy.told, instruction_of(reading)) == ([], "wait")
    assert (await reading.act(reading.seen()))[0] == 200, "and the client goes on"


async def test_a_session_is_told_something_else_over_http_too(reading):
    status, told = await reading.call("PATCH", "/sessions/arm", json={"language_instruction": "drop it"})
    assert (status, told["language_instruction"]) == (200, "drop it")
    status, told = await reading.call("PATCH", "/sessions/arm", json={"language_instruction": "gibberish"})
    assert (status, told["detail"][0]["loc"]) == (422, ["body", "language_instruction"])
    await reading.act(reading.seen())
    assert reading.policy.told == [("drop it",)]


async def test_the_command_tells_it_too(reading):
    def run(*arguments: str):
        app = typer.Typer()
        app.command()(sessions.adjust)
        return CliRunner().invoke(app, [*arguments, "--url", reading.url, "--json"])

    told = await asyncio.to_thread(run, "arm", "--language-instruction", "turn it round")
    assert (told.exit_code, json.loads(told.stdout)["language_instruction"]) == (0, "turn it round")
    refused = await asyncio.to_thread(run, "arm", "--language-instruction", "gibberish")
    assert refused.exit_code != 0
    assert instruction_of(reading) == "turn it round"


async def test_a_client_in_python_tells_it_too(reading):
    async with AsyncClient(reading.url) as client:
        told = await client.session("arm").patch(language_instruction="turn")
        assert told["language_instruction"] == "turn"
        seen = reading.seen()
        await client.session("arm").act(seen["images"], seen["state"], prompt="lift")
    assert reading.policy.told == [("lift",)]


async def test_the_stream_tells_the_control_loop(reading):
    async with reading.stream() as socket:
        assert codec.unpack(await socket.recv())["reads_prompt"] is True
        await reading.call("POST", "/sessions/arm/start")
        await socket.send(codec.pack({"kind": "observation"} | reading.seen(language_instruction="lift")))
        kinds = []
        while "command" not in kinds:
            kinds.append(codec.unpack(await socket.recv())["kind"])
        assert set(reading.policy.told) == {("lift",)}
        assert instruction_of(reading) == "lift"


async def test_openpis_client_is_told_that_its_prompt_is_read(reading):
    async with reading.stream("/sessions/arm/openpi") as socket:
        assert codec.unpack(await socket.recv())["reads_prompt"] is True
        image, state = np.zeros((48, 64, 3), np.uint8), np.array(reading.pose)
        await socket.send(codec.pack_openpi({"observation/image": image, "state": state, "prompt": "lift"}))
        assert codec.unpack(await socket.recv())["actions"].shape == (20, 6)
        await socket.send(codec.pack_openpi({"observation/image": image, "state": state, "prompt": "gibberish"}))
        assert "is no instruction" in str(await socket.recv())
    assert reading.policy.told == [("lift",)]
