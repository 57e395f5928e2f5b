"""Replacement of a policy: fades between chunks, and the policy that a failure counts against."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from service.control.chunk_scheduler import ChunkRequest
from service.control.controller import TickResult
from service.control.observation_buffer import Snapshot
from service.control.policy_runner import PolicyRunner
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy
from tests.testing.doubles import ScriptedPolicy

SIZE = (48, 64)


def request() -> ChunkRequest:
    frames = {"front": np.zeros((*SIZE, 3), np.uint8)}
    return ChunkRequest(Snapshot(frames, np.zeros(6, np.float32), 0.0, {"front": SIZE}), 0.0)


def loaded(**options: Any) -> LoadedPolicy:
    policy = ScriptedPolicy(**options)
    policy.compile(1, {"front": SIZE})
    return LoadedPolicy(policy)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    await engine.close()


async def test_answers_fade_from_the_old_plan_until_one_is_accepted(engine: Engine) -> None:
    runner = PolicyRunner(loaded(), engine=engine)
    assert (await runner.ask(request())).fade is None
    assert runner.take_over(loaded(), 3, at_once=True).done()
    dropped = await runner.ask(request())
    runner.follow_up(dropped, TickResult())  # The answer belongs to an earlier motion.
    again = await runner.ask(request())
    runner.follow_up(again, TickResult(is_accepted=True))
    after = await runner.ask(request())
    assert (dropped.fade, again.fade, after.fade) == (3, 3, None)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_failure_counts_against_the_policy_that_was_asked(engine: Engine, is_replaced: bool) -> None:
    runner = PolicyRunner(loaded(failures=[ValueError("x")]), engine=engine)
    answer = await runner.ask(request())
    if is_replaced:
        runner.take_over(loaded(), at_once=True)
    trouble = runner.begin_probation()
    runner.follow_up(answer, TickResult(failure=answer.error))
    assert trouble.done() is not is_replaced
    runner.end_probation()
