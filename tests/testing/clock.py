"""An event loop in which waiting takes no time: its clock goes on to whatever is due next, and to nothing else."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Found = TypeVar("Found")


class _Jumping(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing is due: in virtual time this would wait for ever"
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, Found]) -> Found:
    """As ``asyncio.run``, for what takes its time from the loop and waits for no thread and no socket."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
