"""Calls of an engine set to its engines."""

import asyncio
import threading
from typing import Any

import pytest

from service.engines.engine_set import EngineMember, EngineSet
from service.engines.messages import Begun


class SilentMember(EngineMember):
    """Engine that answers no call."""

    def __init__(self) -> None:
        super().__init__("one", Begun("0", "here", 1), stuck_after=0.05)
        self.stuck = threading.Event()

    def _call(self, method: str, arguments: tuple[Any, ...], deliver: Any) -> None:
        pass

    def act(self, outcome: asyncio.Future[Any], *arguments: Any) -> None:
        pass

    def on_stuck(self) -> None:
        self.stuck.set()


async def test_engine_that_does_not_answer_a_short_call_is_stuck() -> None:
    engines: Any = EngineSet()
    engines._loop = asyncio.get_running_loop()
    member = engines.members["one"] = SilentMember()
    with pytest.raises(TimeoutError, match=r"engine one did not answer within 0\.05 s"):
        await asyncio.to_thread(engines.ask_briefly, "one", "prepare_task", "handle", "lift it", None)
    await asyncio.sleep(0)
    assert member.stuck.is_set()
