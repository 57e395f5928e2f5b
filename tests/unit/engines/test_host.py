"""Conditions under which an engine ends its own process."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

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
