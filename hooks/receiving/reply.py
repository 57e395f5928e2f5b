"""A sender that waits for its event: told in time, or told that it is accepted."""

import asyncio

from hooks.receiving.event import Answer


class Reply:
    """Between the request, which waits, and the run, which tells.

    A failure that is handed back to the sender is written as such first, so from ``decide`` on the request waits for
    that instead of saying 202: an event must not be both accepted and handed back.
    """

    def __init__(self) -> None:
        self._told: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._is_waited = True
        self._is_decided = False

    def tell(self, told: Answer) -> None:
        """The first one counts."""
        if not self._told.done():
            self._told.set_result(told)

    def decide(self) -> bool:
        """Keep the sender waiting until it is told; False when it does not wait any more."""
        self._is_decided = self._is_waited and not self._told.done()
        return self._is_decided

    async def wait(self, seconds: float) -> Answer | None:
        """What was told in this time; None when nothing was."""
        try:
            done, _ = await asyncio.wait({self._told}, timeout=seconds)
            if not done and self._is_decided:
                await asyncio.wait({self._told})
        finally:
            self._is_waited = False
        return self._told.result() if self._told.done() else None
