"""Calls of an engine set to its engines."""

import asyncio
from typing import Any

import pytest

from service.engines.engine_set import EngineMember, EngineSet
from service.engines.messages import Begun


async def test_engine_that_does_not_answer_a_short_call_is_stuck() -> None:
    loop, stuck = asyncio.get_running_loop(), list[str]()

    def call(method: str, *arguments: Any) -> asyncio.Future[Any]:
        return loop.create_future()

    def note(member: EngineMember, why: str) -> None:
        stuck.append(member.name)

    engines: Any = EngineSet()
    engines._loop = loop
    begun = Begun("0", "here", 1)
    engines.members["one"] = EngineMember("one", begun, call, stuck_after=0.05, on_stuck=note, on_silent=note)
    with pytest.raises(TimeoutError, match=r"engine one did not answer within 0\.05 s"):
        await asyncio.to_thread(engines.ask_briefly, "one", "prepare_task", "handle", "lift it", None)
    await asyncio.sleep(0)
    assert stuck == ["one"]
