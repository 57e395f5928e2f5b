"""A policy that takes over: whose chunks lead over from the plan of the one before, and whose failures are whose."""

import numpy as np
import pytest

from service.control.chunk_scheduler import PolicyRequest
from service.control.controller import TickResult
from service.control.observation_buffer import Snapshot
from service.control.policy_runner import PolicyRunner
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy
from tests.testing.doubles import ScriptedPolicy

SIZE = (48, 64)


def request() -> PolicyRequest:
    frames = {"front": np.zeros((*SIZE, 3), np.uint8)}
    return PolicyRequest(Snapshot(frames, np.zeros(6, np.float32), 0.0, {"front": SIZE}), 0.0)


def loaded(policy: ScriptedPolicy) -> LoadedPolicy:
    policy.compile(1, {"front": SIZE})
    return LoadedPolicy(policy)


async def test_every_answer_leads_over_from_the_old_plan_until_one_is_accepted() -> None:
    engine = Engine(switch_interval=None)
    runner = PolicyRunner(loaded(ScriptedPolicy()), engine=engine)
    assert (await runner.ask(request())).fade is None
    assert runner.take_over(loaded(ScriptedPolicy()), 3, at_once=True).done()
    dropped = await runner.ask(request())
    runner.follow_up(dropped, TickResult())  # of an earlier motion
    again = await runner.ask(request())
    runner.follow_up(again, TickResult(is_accepted=True))
    after = await runner.ask(request())
    assert (dropped.fade, again.fade, after.fade) == (3, 3, None)
    await engine.close()


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_failure_is_held_against_the_policy_that_was_asked(is_replaced: bool) -> None:
    engine = Engine(switch_interval=None)
    runner = PolicyRunner(loaded(ScriptedPolicy(failures=[ValueError("x")])), engine=engine)
    answer = await runner.ask(request())
    if is_replaced:
        runner.take_over(loaded(ScriptedPolicy()), at_once=True)
    trouble = runner.begin_probation()
    runner.follow_up(answer, TickResult(failure=answer.error))
    assert trouble.done() is not is_replaced
    runner.end_probation()
    await engine.close()
