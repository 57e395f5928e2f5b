"""Watchdog of the event loop: a thread that logs and counts when the loop is blocked.

All control loops, links and requests share one event loop, so that a block is always a bug.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

BLOCKED_AFTER = 0.25  # seconds without a heartbeat; service.control.watchdog holds moving robots after the same time
HEARTBEAT_INTERVAL = 0.05  # between heartbeats of the event loop
CHECK_INTERVAL = 0.1  # between checks of the thread
# If neither the loop nor the thread ran, but the process computed for at least this share of the time, something kept
# the interpreter's lock; below it, the process was paused.
BUSY_SHARE = 0.1
MAX_FRAMES = 10  # logged frames of a stack, innermost first

logger = logging.getLogger(__name__)


@dataclass
class Stalls:
    """How often the loop stalled, and for how many seconds in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one stall."""
        self.count += 1
        self.seconds += seconds


class LoopWatchdog:
    """Watchdog of the event loop that it is started on.

    Attributes:
        blocked: stalls of the loop longer than ``BLOCKED_AFTER`` while its process ran.
        paused: stalls of the whole process (SIGSTOP, a suspended machine, no processor for it).
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.process_time,
    ) -> None:
        """Create a watchdog; ``computed`` returns the processor seconds of the whole process."""
        self.blocked, self.paused = Stalls(), Stalls()
        self._clock, self._computed = clock, computed
        self._stopped = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def start(self) -> None:
        """Watch the running loop."""
        self._begin()
        self._stopped.clear()
        self._beat_again()
        threading.Thread(target=self._run, name="loop watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        self._beat_at = self._checked_at = self._resumed_at = self._clock()
        self._computed_at_beat = self._computed_at_check = self._computed()
        self._missed: float | None = None  # the heartbeat after which the next was missed, once that was logged

    # On the thread of the loop.

    def _beat_again(self) -> None:
        self.beat()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL, self._beat_again)

    def beat(self) -> None:
        """Note that the loop runs, and judge the time since it last did."""
        now, computed, before = self._clock(), self._computed(), self._beat_at
        gap, busy = now - before, computed - self._computed_at_beat
        self._beat_at, self._computed_at_beat = now, computed
        if gap <= BLOCKED_AFTER:
            return
        # If the thread did not run either, the process was paused, or its lock was kept.
        has_run = self._missed == before or now - self._checked_at <= BLOCKED_AFTER or busy >= BUSY_SHARE * gap
        blocked = now - max(before, self._resumed_at) if has_run else 0.0
        if blocked > BLOCKED_AFTER:
            self.blocked.add(blocked)
            logger.warning("the event loop was blocked for %.2f s; this process computed for %.2f s", blocked, busy)
        if gap - blocked > BLOCKED_AFTER:
            self.paused.add(gap - blocked)
            logger.warning("this process was paused for %.2f s; its event loop was not blocked", gap - blocked)

    # On the watchdog's thread.

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_INTERVAL):
            self.check()

    def check(self) -> None:
        """Log where the loop is when its heartbeat is late; the watchdog's thread calls this."""
        now, computed, before = self._clock(), self._computed(), self._beat_at
        slept, busy = now - self._checked_at, computed - self._computed_at_check
        self._checked_at, self._computed_at_check = now, computed
        if slept > CHECK_INTERVAL + BLOCKED_AFTER and busy < BUSY_SHARE * slept:
            self._resumed_at = now  # this thread was kept from running too, and by nothing that computed
        late = now - max(before, self._resumed_at)
        if late > BLOCKED_AFTER and self._missed != before:
            self._missed = before
            where = _format_stack(sys._current_frames().get(self._thread))
            logger.warning("the event loop has been blocked for %.2f s, in %s", late, where)


def _format_stack(frame: FrameType | None) -> str:
    """Format a thread's stack, innermost call first, without values."""
    calls: list[str] = []
    while frame is not None and len(calls) < MAX_FRAMES:
        source = "/".join(frame.f_code.co_filename.split("/")[-2:])
        calls.append(f"{frame.f_code.co_name} ({source}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(calls) or "an unknown place"
