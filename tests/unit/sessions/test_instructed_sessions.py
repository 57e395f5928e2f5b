"""Instructions of a session, at its creation and while its robot moves."""

import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from jaxmodels.types import TASK
from service.api.schemas import AdjustRequest, NewSessionRequest
from service.errors import InvalidRequest
from service.inference.loaded_policy import MAX_INSTRUCTION_LENGTH, task_input
from tests.testing.doubles import MAX_WORDS, ScriptedPolicy
from tests.testing.rig import POSE
from tests.testing.waiting import until
from tests.unit.sessions.test_sessions import LONG, NEW, Rig, rigged

pytestmark = pytest.mark.timed

READS = replace(LONG, language=True)
RED, BLUE = "pick up the red cube", "pick up the blue cube"


def set_language_policy(rig: Rig, **more: object) -> ScriptedPolicy:
    rig.policy = ScriptedPolicy(READS, unreadable="gibberish", **more)  # type: ignore[arg-type]
    return rig.policy


async def test_a_new_instruction_is_used_from_the_next_chunk_on() -> None:
    async with rigged() as rig:
        policy = set_language_policy(rig)
        await rig.running(replace(NEW, language_instruction=RED))
        assert set(policy.told) == {(RED,)}
        session = await rig.sessions.adjust("s", {"language_instruction": BLUE})
        before = len(policy.told)
        await until(lambda: len(policy.told) > before + 2)
        assert set(policy.told[before + 1 :]) == {(BLUE,)}
        assert session.new.language_instruction == BLUE
        stats = session.status().stats
        assert (stats["language_instruction"], stats["reads_language"]) == (BLUE, True)
        assert stats["starvations"] == stats["instruction_tokens_cut"] == 0
        await rig.sessions.adjust("s", {"language_instruction": "go " * (MAX_WORDS + 3)})
        assert session.status().stats["instruction_tokens_cut"] == 3
        await rig.sessions.adjust("s", {"action_steps": 3})
        assert session.status().stats["instruction_tokens_cut"] == 3


class FollowingPolicy(ScriptedPolicy):
    """Policy that moves up for the red cube and down for all others."""

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        chunk = super().act(observation)
        if observation[TASK].tolist() == [RED]:
            return chunk
        return 2 * observation["observation.state"][:, None, :6] - chunk


@pytest.mark.parametrize("overlap", ["replace", "crossfade", "rtc"])
async def test_a_new_instruction_ends_the_old_plan_early(overlap: str) -> None:
    needs = replace(READS, chunk=400, action_steps=380, takes_prefix=overlap == "rtc")
    async with rigged() as rig:
        rig.policy = policy = FollowingPolicy(needs)
        await rig.running(replace(NEW, language_instruction=RED, overlap=overlap))
        session, robot_io = rig.session, rig.session.robot_io
        requests = len(policy.told)
        for more in ({"language_instruction": RED}, {"action_steps": 390}):
            await rig.sessions.adjust("s", more)
        sent = len(rig.link.sent)
        await until(lambda: len(rig.link.sent) > sent + 5)
        assert len(policy.told) == requests, "an unchanged instruction causes no request"
        assert rig.link.sent[-1].values["Rotation"] > POSE["Rotation"]
        await rig.sessions.adjust("s", {"language_instruction": BLUE})
        sent = len(rig.link.sent)
        await until(lambda: rig.link.sent[-1].values["Rotation"] < POSE["Rotation"])
        assert len(rig.link.sent) < sent + 100, "the change takes effect before the end of the old plan"
        assert policy.told[requests:] == [(BLUE,)]
        assert robot_io.runner.followed == BLUE
        assert session.status().stats["starvations"] == 0
        assert robot_io.controller.holds["starved"] == 0


async def test_an_answer_to_the_old_instruction_is_dropped() -> None:
    async with rigged() as rig:
        rig.policy = policy = FollowingPolicy(replace(READS, chunk=400, action_steps=5))
        await rig.running(replace(NEW, language_instruction=RED))
        robot_io, gate = rig.session.robot_io, threading.Event()
        before = robot_io.controller.scheduler.discarded
        policy.failures.append(gate)
        try:
            await until(lambda: not policy.failures)  # The policy computes an answer to RED now.
            await rig.sessions.adjust("s", {"language_instruction": BLUE})
        finally:
            gate.set()
        requests = len(policy.told)
        await until(lambda: (BLUE,) in policy.told)
        assert (RED,) not in policy.told[requests + 1 :]
        await until(lambda: robot_io.runner.followed == BLUE)
        assert robot_io.controller.scheduler.discarded == before + 1
        assert robot_io.controller.holds["starved"] == 0


@pytest.mark.parametrize("instruction", [None, "  ", "gibberish"])
async def test_a_policy_that_reads_language_needs_an_instruction(instruction: str | None) -> None:
    async with rigged() as rig:
        policy = set_language_policy(rig)
        with pytest.raises(InvalidRequest, match=r"language_instruction") as error:
            await rig.sessions.create(replace(NEW, language_instruction=instruction))
        assert error.value.loc == ("body", "language_instruction")
        assert not policy.told
        assert not rig.transport.existing, "no room was created"


@pytest.mark.parametrize("instruction", [None, "", "gibberish"])
async def test_an_unreadable_instruction_keeps_the_old_instruction(instruction: str | None) -> None:
    async with rigged() as rig:
        policy = set_language_policy(rig)
        await rig.running(replace(NEW, language_instruction=RED))
        with pytest.raises(InvalidRequest, match=r"language_instruction"):
            await rig.sessions.adjust("s", {"language_instruction": instruction, "action_steps": 3})
        before = len(policy.told)
        await until(lambda: len(policy.told) > before + 2)
        assert set(policy.told) == {(RED,)}
        session = rig.sessions.get_live("s")
        assert (session.new.language_instruction, session.new.action_steps) == (RED, None)
        assert session.status().stats["errors"] == 0


async def test_a_policy_without_language_gets_no_instruction() -> None:
    async with rigged() as rig:
        rig.policy = ScriptedPolicy(replace(LONG, action_steps=400))
        await rig.running(replace(NEW, language_instruction=RED))
        requests = rig.policy.acted
        session = await rig.sessions.adjust("s", {"language_instruction": None})
        sent = len(rig.link.sent)
        await until(lambda: len(rig.link.sent) > sent + 5)
        assert rig.policy.acted == requests, "the plan continues"
        assert session.status().stats["language_instruction"] is None
        # The policy refuses observations with features that it does not read.
        assert session.status().stats["errors"] == 0
        assert not rig.policy.told


async def test_a_shadow_policy_gets_the_same_instruction() -> None:
    shadow = ScriptedPolicy(READS)
    async with rigged() as rig:
        rig.policies["shadow"] = shadow
        await rig.running(replace(NEW, shadow_policy_path="shadow", language_instruction=BLUE))
        await until(lambda: bool(shadow.told))
        assert shadow.told[0] == (BLUE,)


def test_no_instruction_that_the_api_accepts_is_cut() -> None:
    for model in (NewSessionRequest, AdjustRequest):
        limits = model.model_json_schema()["properties"]["language_instruction"]["anyOf"][0]
        assert limits["maxLength"] == MAX_INSTRUCTION_LENGTH
    assert task_input("é" * MAX_INSTRUCTION_LENGTH)[TASK].tolist() == ["é" * MAX_INSTRUCTION_LENGTH]
    assert task_input(None) == {}
