"""The only loop that sleeps: what control decides at each tick is done at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from service.motion.control import Control
from service.motion.step import Step

# Rounds of the event loop from a readable socket to the session that hears what came: reading, waking, parsing.
_ROUNDS = 8
# Seconds from a tick's moment to its decision after which that is worth nothing: it takes less than a millisecond.
_OVERTAKEN = 0.1


async def sleep_until(deadline: float) -> None:
    """Sleep on the running loop; never wakes early by more than the grid forgives."""
    # A loop because timers are coarse: uvloop's count in whole milliseconds of a cached clock and may be early.
    while (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left)


class ControlLoop:
    """Absolute deadlines, and what a tick decides is done at once."""

    def __init__(
        self,
        control: Control,
        act: Callable[[Step], None],
        *,
        watch: Callable[[float], None] = lambda now: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = sleep_until,
    ):
        """``watch`` is given the time before each tick: what it finds counts for that tick already."""
        self._control = control
        self._act = act
        self._watch = watch
        self._clock = clock
        self._sleep = sleep
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    def wake(self) -> None:
        """There is something to do again."""
        self._idle.clear()
        self._wake.set()

    async def idle(self) -> None:
        """Wait until there is nothing more to send."""
        await self._idle.wait()

    async def run(self) -> None:
        """Tick until cancelled."""
        before = None
        while True:
            if self._control.is_idle:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                before = None
                continue
            await self._sleep(self._control.next_deadline(self._clock()))
            now = self._clock()
            if before is not None and now - before > 2 * self._control.period:
                # The loop was blocked: what came meanwhile, a stop above all, is heard before anything is sent.
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)
                now = self._clock()
            before = now
            self._watch(now)
            step = self._control.tick(now)
            if self._clock() - now > _OVERTAKEN:
                step = replace(step, is_overtaken=True)
            self._act(step)
