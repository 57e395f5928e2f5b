"""Conditions under which an engine ends its own process, and what it remembers of polls."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

import jaxmodels
from service.engines import host as host_module
from service.engines.host import EngineHost, _CachedPolicy
from service.engines.messages import EngineOptions, Refusal
from service.inference.engine import Engine
from tests.testing.doubles import ScriptedLoader, ScriptedPolicy, ignore
from tests.testing.rig import OBSERVATION
from tests.testing.waiting import until


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the exit codes with which the process would end."""
    codes = list[int]()
    monkeypatch.setattr(host_module.os, "_exit", codes.append)
    monkeypatch.setattr(host_module, "LOG_SECONDS", 0.0)
    return codes


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(stuck_after=0.2)
    yield engine
    await engine.close()


@pytest.mark.timed
async def test_engine_with_a_stuck_inference_ends(engine: Engine, ends: list[int]) -> None:
    host, never = EngineHost("cpu:0", EngineOptions()), threading.Event()
    host._engine = engine
    opening = engine.policy_cache.open_policy(
        ScriptedLoader(lambda: ScriptedPolicy(failures=[never])), "p", None, ignore
    )
    async with opening as served:
        host._policies["p"] = _CachedPolicy(served, AsyncExitStack())
        answer = await host.act("p", OBSERVATION, None)
        assert isinstance(answer, Refusal)
        assert answer.kind == "stuck"
        await until(lambda: ends == [1])
        never.set()


async def test_engine_with_an_endless_build_ends_when_no_robot_moves(
    engine: Engine, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "UNUSED_TIMEOUT", 0.06)
    host, has_running_robot = EngineHost("cpu:0", EngineOptions()), True
    engine.policy_cache.has_lost_thread = True
    checks = list[bool]()
    engine.has_running_robot = lambda: checks.append(True) or has_running_robot
    watching = asyncio.create_task(host._watch(engine))
    await until(lambda: len(checks) > 3)
    assert ends == []
    has_running_robot = False
    await until(lambda: ends)
    watching.cancel()


async def test_robots_and_needed_batches_are_remembered_between_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((os, "nice"), (sys, "setswitchinterval"), (jaxmodels, "isolate_tokenizers")):
        monkeypatch.setattr(owner, name, lambda *arguments: 0)
    monkeypatch.setattr(host_module, "_open_devices", lambda options: ("cuda:0",))
    host = EngineHost("cuda:0", EngineOptions(batch_sizes=(1, 2)))
    await host.begin()
    engine = host._opened_engine()
    assert (await host.facts()).to_compile == 0
    assert (engine.has_running_robot(), engine.needs_batches()) == (False, False)
    await host.facts([], True, True)
    await host.facts()  # Another poll of the same engine, which knows no robots.
    assert (engine.has_running_robot(), engine.needs_batches()) == (True, True)
    monkeypatch.setattr(host_module, "ROBOT_MEMORY", 0.0)
    assert (engine.has_running_robot(), engine.needs_batches()) == (False, False)
    assert host._watch_task is not None
    host._watch_task.cancel()
    await engine.close()
