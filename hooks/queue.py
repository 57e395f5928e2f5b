"""Durable queue in SQLite: rows of one lane run in order, those of different lanes in parallel.

Each queue is a table with the columns ``number`` (order of acceptance), ``status``, ``attempt``, ``due`` (seconds since
1970), ``lane``, and a group: an endpoint or a webhook. A ``waiting`` row begins when it is due, its group has room, and
no row of its group and lane runs or is older and waiting. It is ``running`` until its worker writes the outcome.
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

# As SQLite has to read it to find the indices of these rows.
OPEN = "status IN ('waiting', 'running')"
STORE_RETRY_INTERVAL = 0.5  # seconds between attempts to write while the database cannot be written
CLOCK_STEP = 1.0  # seconds; less is a clock that is corrected slowly


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
        """Mark due rows with room as running; return them, the number of blocked rows, and when the next row is due."""
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
        """Set running rows back to waiting, because the process that worked on them has ended or is ending."""
        return connection.execute(
            f"UPDATE {self.table} SET status = 'waiting' WHERE {OPEN} AND status = 'running'"
        ).rowcount

    def shift_due_times(self, connection: sqlite3.Connection, seconds: float) -> None:
        """Make waiting rows due earlier after the clock was set back, so that none waits longer."""
        connection.execute(f"UPDATE {self.table} SET due = due - ? WHERE {OPEN} AND status = 'waiting'", (seconds,))


class QueueRunner:
    """Runs the rows of a queue when they are due and their group has room, until ``is_ending``."""

    def __init__(
        self,
        database: Database,
        queue: Queue,
        work: Callable[[sqlite3.Row], Awaitable[bool | None]],
        limits: Callable[[str], Mapping[str, int]],
        *,
        clock: Callable[[], float] | None = None,
    ):
        """Make a runner; nothing begins before ``run``.

        Args:
            work: works on a row and writes its outcome; returns True when the row does not wait again.
            limits: returns how many rows of a group may run at once, by the names of the limits that they share.
        """
        self.is_ending = False
        self._database = database
        self._queue = queue
        self._work = work
        self._limits = limits
        self._clock = clock or (lambda: time.time())  # looked up when it is called
        self._clock_offset = self._clock() - time.monotonic()
        self._wake_event = asyncio.Event()
        self._running: dict[asyncio.Task[bool | None], Collection[str]] = {}
        self._has_blocked_rows = False  # rows that wait for others to end
        self._last_error = ""

    def wake(self) -> None:
        """Look at the queue again now, because its rows have changed."""
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
        """Begin every row that is due and has room; return when the next one is due."""
        busy = Counter(name for names in self._running.values() for name in names)

        def take_room(group: str) -> bool:
            limits = self._limits(group)
            is_free = all(busy[name] < limit for name, limit in limits.items())
            if is_free:
                busy.update(limits.keys())
            return is_free

        self._has_blocked_rows = True  # until it is known: what ends meanwhile may be what they wait for
        try:
            offset = self._clock() - time.monotonic()
            if self._clock_offset - offset > CLOCK_STEP:
                await self._database.run(self._queue.shift_due_times, self._clock_offset - offset)
            self._clock_offset = offset
            rows, left, next_due = await self._database.run(self._queue.begin_due_rows, self._clock(), take_room)
        except StoreError as error:
            self._log_error_once(f"what waits cannot begin: {error}")
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
            log.critical("what became of a row of %s is unknown until a restart", self._queue.table, exc_info=error)
        if self._has_blocked_rows or task.cancelled() or task.exception() is not None or task.result() is not True:
            self.wake()

    async def write(
        self,
        transaction: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Write the outcome of a row, again and again while the disk is full; raise ``StoreError`` at the end."""
        while True:
            try:
                return await self._database.run(transaction, *arguments, **named)
            except StoreError as error:
                self._log_error_once(f"what became of it cannot be written yet: {error}")
                if self.is_ending:
                    raise
                await asyncio.sleep(STORE_RETRY_INTERVAL)

    def _log_error_once(self, text: str) -> None:
        """Log an error when it changes; a full disk lasts long, and repeating it would fill another."""
        if text != self._last_error:
            log.error("%s: %s", self._queue.table, text)
        self._last_error = text

    async def close(self, seconds: float) -> None:
        """Give running rows some time to end, then cancel the rest and wait as long again."""
        self.is_ending = True
        unfinished = set(self._running)
        if unfinished:
            _, unfinished = await asyncio.wait(unfinished, timeout=seconds)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=seconds)
