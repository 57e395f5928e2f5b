"""Durable queue in SQLite: rows of one lane run in order, and lanes run in parallel.

Each queue is a table with the columns ``number`` (order of acceptance), ``status``, ``attempt``, ``due`` (seconds since
1970), ``lane``, and a group: an endpoint or a webhook. A ``waiting`` row begins when it is due, its group is below its
limit, and its group and lane have no running row and no older waiting row. It is ``running`` until its worker writes
the outcome.
"""

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from hooks.database import Database
from hooks.errors import StoreError

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

log = logging.getLogger(__name__)

# In exactly this form, SQLite uses the partial indices of these rows.
OPEN = "status IN ('waiting', 'running')"
STORE_RETRY_INTERVAL = 0.5  # seconds between attempts to write while the database cannot be written
CLOCK_STEP = 1.0  # seconds; a smaller difference is a gradual correction of the clock


@dataclass(frozen=True)
class Queue:
    """Queue in one table; ``group`` is a column, ``ready`` and ``ordered`` are SQL conditions of a row."""

    table: str
    group: str
    ready: str = "1"
    ordered: str = "1"

    def begin_due_rows(
        self, connection: sqlite3.Connection, now: float, take_room: Callable[[str], bool]
    ) -> tuple[list[sqlite3.Row], int, float | None]:
        """Mark due rows within the limits as running; return them, the number of blocked rows, the next due time."""
        due = connection.execute(
            f"SELECT number, {self.group}, NOT ({self.ordered} AND EXISTS (SELECT 1 FROM {self.table} AS other "
            f"WHERE other.{self.group} = one.{self.group} AND other.lane = one.lane AND other.{OPEN} "
            "AND other.number <> one.number AND (other.number < one.number OR other.status = 'running'))) AS is_next "
            f"FROM {self.table} AS one WHERE {OPEN} AND status = 'waiting' AND due <= ? AND {self.ready} "
            "ORDER BY due, number",
            (now,),
        ).fetchall()
        begun = [
            connection.execute(
                f"UPDATE {self.table} SET status = 'running', attempt = attempt + 1 WHERE number = ? RETURNING *",
                (row["number"],),
            ).fetchone()
            for row in due
            if row["is_next"] and take_room(row[self.group])
        ]
        (next_due,) = connection.execute(
            f"SELECT min(due) FROM {self.table} WHERE {OPEN} AND status = 'waiting' AND due > ? AND {self.ready}",
            (now,),
        ).fetchone()
        return begun, len(due) - len(begun), next_due

    def release_running(self, connection: sqlite3.Connection) -> int:
        """Set running rows back to waiting, because their process has ended or is ending."""
        return connection.execute(
            f"UPDATE {self.table} SET status = 'waiting' WHERE {OPEN} AND status = 'running'"
        ).rowcount

    def shift_due_times(self, connection: sqlite3.Connection, seconds: float) -> None:
        """Make waiting rows due earlier after the clock was set back, so that they do not wait longer."""
        connection.execute(f"UPDATE {self.table} SET due = due - ? WHERE {OPEN} AND status = 'waiting'", (seconds,))


class QueueRunner:
    """Runs the rows of a queue when they are due and within the limits of their group, until ``is_ending``."""

    def __init__(
        self,
        database: Database,
        queue: Queue,
        work: Callable[[sqlite3.Row], Awaitable[bool | None]],
        limits: Callable[[str], Mapping[str, int]],
        *,
        clock: Callable[[], float] | None = None,
    ):
        """Create a runner, which starts with ``run``.

        Args:
            work: works on a row and writes its outcome; returns True if the row does not have to run again.
            limits: returns the limits of parallel rows of a group, by name; groups with the same name share a limit.
        """
        self.is_ending = False
        self._database = database
        self._queue = queue
        self._work = work
        self._limits = limits
        self._clock = clock or (lambda: time.time())  # Tests replace ``time.time``.
        self._clock_offset = self._clock() - time.monotonic()
        self._wake_event = asyncio.Event()
        self._running: dict[asyncio.Task[bool | None], Collection[str]] = {}
        self._has_blocked_rows = False  # whether rows wait until other rows end
        self._last_error = ""

    def wake(self) -> None:
        """Read the queue now, because its rows have changed."""
        self._wake_event.set()

    async def run(self) -> None:
        """Run rows as they fall due until cancelled; call ``close`` afterwards."""
        while True:
            self._wake_event.clear()
            next_due = await self.begin_due()
            wait = None if next_due is None else max(next_due - self._clock(), 0.0)
            try:
                async with asyncio.timeout(wait):
                    await self._wake_event.wait()
            except TimeoutError:
                pass

    async def begin_due(self) -> float | None:
        """Begin every row that is due and within the limits; return the next due time."""
        busy = Counter(name for names in self._running.values() for name in names)

        def take_room(group: str) -> bool:
            limits = self._limits(group)
            is_free = all(busy[name] < limit for name, limit in limits.items())
            if is_free:
                busy.update(limits.keys())
            return is_free

        # A row that ends during the transaction may unblock others, so assume that there are blocked rows.
        self._has_blocked_rows = True
        try:
            offset = self._clock() - time.monotonic()
            if self._clock_offset - offset > CLOCK_STEP:
                await self._database.run(self._queue.shift_due_times, self._clock_offset - offset)
            self._clock_offset = offset
            rows, left, next_due = await self._database.run(self._queue.begin_due_rows, self._clock(), take_room)
        except StoreError as error:
            self._log_error_once(f"waiting rows cannot begin: {error}")
            return self._clock() + STORE_RETRY_INTERVAL
        self._last_error = ""
        self._has_blocked_rows = left > 0
        for row in rows:
            task = asyncio.ensure_future(self._work(row))
            self._running[task] = self._limits(row[self._queue.group]).keys()
            task.add_done_callback(self._on_row_done)
        return next_due

    def _on_row_done(self, task: "asyncio.Task[bool | None]") -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.is_ending:
            log.critical("the outcome of a row of %s is unknown until a restart", self._queue.table, exc_info=error)
        if self._has_blocked_rows or task.cancelled() or task.exception() is not None or task.result() is not True:
            self.wake()

    async def write(
        self,
        transaction: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Write the outcome of a row, and repeat this while the disk is full; raise ``StoreError`` while ending."""
        while True:
            try:
                return await self._database.run(transaction, *arguments, **named)
            except StoreError as error:
                self._log_error_once(f"the outcome of a row cannot be written yet: {error}")
                if self.is_ending:
                    raise
                await asyncio.sleep(STORE_RETRY_INTERVAL)

    def _log_error_once(self, text: str) -> None:
        """Log an error when it changes, because repeating the error of a full disk would fill the log."""
        if text != self._last_error:
            log.error("%s: %s", self._queue.table, text)
        self._last_error = text

    async def close(self, seconds: float) -> None:
        """Wait ``seconds`` for running rows, then cancel the rest and wait ``seconds`` for them."""
        self.is_ending = True
        unfinished = set(self._running)
        if unfinished:
            _, unfinished = await asyncio.wait(unfinished, timeout=seconds)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=seconds)
