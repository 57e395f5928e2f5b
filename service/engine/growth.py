"""Larger batches are compiled when a policy is there and no robot runs, smallest first; until then smaller ones do."""

import asyncio
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.engine.served import Served, Sizes
from service.engine.worker import call_in_thread

logger = logging.getLogger(__name__)

# Seconds between looks whether robots stand still.
PAUSE = 0.5
# Seconds for learning what a batch size takes, where no robot waits for the device meanwhile.
REHEARSING = 0.25


@dataclass(frozen=True)
class _Wanted:
    served: "weakref.ref[Served]"
    sizes: Sizes
    batch: int


class Growth:
    """What has to be compiled yet, one batch size after the other.

    Args:
        batches: sizes besides 1.
        may: whether it may begin now: no robot runs, and nothing else is being loaded.
    """

    def __init__(self, batches: Sequence[int], may: Callable[[], bool], niceness: int):
        self._batches = sorted(set(batches) - {1})
        self._may = may
        self._niceness = niceness
        self._wanted: list[_Wanted] = []
        self._task: asyncio.Task[None] | None = None
        self._rest = asyncio.Event()
        self._rest.set()

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is being compiled; not even what was begun before a robot was started."""
        return self._rest.is_set()

    async def rest(self) -> None:
        """Wait until what is being compiled is."""
        await self._rest.wait()

    @property
    def left(self) -> int:
        """Programs that are still to be compiled."""
        return len(self._wanted)

    def want(self, served: Served, sizes: Sizes) -> None:
        """Compile all batch sizes for frames of these sizes, in time."""
        known = [(wanted.served(), wanted.sizes, wanted.batch) for wanted in self._wanted]
        place = weakref.ref(served)
        self._wanted += [_Wanted(place, sizes, batch) for batch in self._batches if (served, sizes, batch) not in known]
        if self._wanted and self._task is None:
            self._task = asyncio.create_task(self._grow(), name="batch sizes")

    async def _grow(self) -> None:
        while self._wanted:
            self._wanted = [wanted for wanted in self._wanted if wanted.served() is not None]
            may = self._may()
            wanted = next((wanted for wanted in self._wanted if may or _is_shared(wanted)), None)
            if wanted is None:
                await asyncio.sleep(PAUSE)
                continue
            if may:  # a trial alone keeps nobody waiting
                self._rest.clear()
            try:
                await self._compile(wanted, REHEARSING if may else 0.0)
            finally:
                self._rest.set()
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        self._task = None

    async def _compile(self, wanted: _Wanted, rehearsing: float) -> None:
        def compile_all() -> None:
            served = wanted.served()
            for replica in served.replicas if served is not None else ():
                replica.prepare(wanted.batch, wanted.sizes, rehearsing)

        try:
            await call_in_thread(compile_all, "policy-compiler", self._niceness)
        except Exception as error:
            # Smaller batches do; larger ones would hardly be better.
            logger.warning("batches of %d and more are not used: %s", wanted.batch, type(error).__name__)
            self._wanted = [
                other
                for other in self._wanted
                if (other.served, other.sizes) != (wanted.served, wanted.sizes) or other.batch < wanted.batch
            ]

    def close(self) -> None:
        """Nothing more is begun; what runs in its thread is left to itself."""
        if self._task is not None:
            self._task.cancel()


def _is_shared(wanted: _Wanted) -> bool:
    """Whether another policy's programs will do, so that nothing but a trial is left: a push changes only weights."""
    served = wanted.served()
    return served is not None and all(
        replica.policy.is_compiled(wanted.batch, wanted.sizes) for replica in served.replicas
    )
