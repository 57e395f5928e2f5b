"""Durable queue in SQLite: rows in order within a lane, side by side otherwise.

Received events and deliveries to be sent are both of it. Each is a table with the columns ``number`` (in the order of
acceptance), ``status``, ``attempt``, ``due`` (seconds since 1970), ``lane``, and one that names the row's group: an
endpoint or a webhook. A row that is ``waiting`` begins when it is due, nothing else of its group and lane is running or
older and waiting, and its group has room; it is ``running`` then, until whoever works on it writes what became of it.
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
STORE_PAUSE = 0.5  # seconds between attempts to write while the database cannot be written
SET_BACK = 1.0  # seconds; less is a clock that is corrected slowly


@dataclass(frozen=True)
class Queue:
    """The rows of one table.

    Attributes:
        group: the column of the group.
        ready: SQL that holds for a row of which nothing else has to be awaited.
        ordered: SQL that holds for a row which has to keep to the order of its lane.
    """

    table: str
    group: str
    ready: str = "1"
    ordered: str = "1"

    def take(
        self, connection: sqlite3.Connection, now: float, has_room: Callable[[str], bool]
    ) -> tuple[list[sqlite3.Row], int, float | None]:
        """Mark the rows that begin now.

        Args:
            has_room: whether one more of a group may run; asked once for each that would begin, and it does then.

        Returns:
            Those rows in order; how many more are due, and wait for others to end; and when the next one is due.
        """
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
            if row["is_next"] and has_room(row[self.group])
        ]
        (later,) = connection.execute(
            f"SELECT min(due) FROM {self.table} WHERE {OPEN} AND status = 'waiting' AND due > ? AND {self.ready}",
            (now,),
        ).fetchone()
        return begun, len(due) - len(begun), later

    def release(self, connection: sqlite3.Connection) -> int:
        """What runs waits again, because the process that worked on it has ended or ends."""
        return connection.execute(
            f"UPDATE {self.table} SET status = 'waiting' WHERE {OPEN} AND status = 'running'"
        ).rowcount

    def set_back(self, connection: sqlite3.Connection, seconds: float) -> None:
        """The clock was set back by so much: what waits does not wait longer."""
        connection.execute(f"UPDATE {self.table} SET due = due - ? WHERE {OPEN} AND status = 'waiting'", (seconds,))


class Runner:
    """Begins what is due, and waits for the rest.

    Attributes:
        is_ending: nothing is begun any more, and nothing is waited for.
    """

    def __init__(
        self,
        database: Database,
        queue: Queue,
        work: Callable[[sqlite3.Row], Awaitable[bool | None]],
        limits: Callable[[str], Mapping[str, int]],
        *,
        clock: Callable[[], float] | None = None,
    ):
        """Make one; nothing begins before ``run``.

        Args:
            work: works on a row, and writes down what became of it; True when the row is not waiting again.
            limits: for a group, how many may run at once by the names of what they share; 0 for none at all.
            clock: seconds since 1970.
        """
        self.is_ending = False
        self._database = database
        self._queue = queue
        self._work = work
        self._limits = limits
        self._clock = clock or (lambda: time.time())  # looked up when it is called
        self._ahead = self._clock() - time.monotonic()
        self._woken = asyncio.Event()
        self._under_way: dict[asyncio.Task[bool | None], Collection[str]] = {}
        self._are_left = False  # rows that wait for others to end
        self._trouble = ""

    def wake(self) -> None:
        """Look at the queue again: something of it was changed."""
        self._woken.set()

    async def run(self) -> None:
        """Work until cancelled; then ``close``."""
        while True:
            self._woken.clear()
            later = await self.begin_due()
            wait = None if later is None else max(later - self._clock(), 0.0)
            try:
                async with asyncio.timeout(wait):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def begin_due(self) -> float | None:
        """Begin every row that is due and for which there is room; when the next one is due."""
        busy = Counter(name for names in self._under_way.values() for name in names)

        def has_room(group: str) -> bool:
            limits = self._limits(group)
            is_free = all(busy[name] < most for name, most in limits.items())
            if is_free:
                busy.update(limits.keys())
            return is_free

        self._are_left = True  # until it is known: what ends meanwhile may be what they wait for
        try:
            ahead = self._clock() - time.monotonic()
            if self._ahead - ahead > SET_BACK:
                await self._database.run(self._queue.set_back, self._ahead - ahead)
            self._ahead = ahead
            rows, left, later = await self._database.run(self._queue.take, self._clock(), has_room)
        except StoreError as error:
            self._complain(f"what waits cannot begin: {error}")
            return self._clock() + STORE_PAUSE
        self._trouble = ""
        self._are_left = left > 0
        for row in rows:
            task = asyncio.ensure_future(self._work(row))
            self._under_way[task] = self._limits(row[self._queue.group]).keys()
            task.add_done_callback(self._end)
        return later

    def _end(self, task: "asyncio.Task[bool | None]") -> None:
        self._under_way.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.is_ending:
            log.critical("what became of a row of %s is unknown until a restart", self._queue.table, exc_info=error)
        if self._are_left or task.cancelled() or task.exception() is not None or task.result() is not True:
            self.wake()

    async def run_due(self) -> None:
        """Begin what is due and wait until it has ended, until nothing is due any more."""
        while True:
            await self.begin_due()
            if not self._under_way:
                return
            await asyncio.wait(list(self._under_way))
            await asyncio.sleep(0)  # the callbacks that take them off the list

    async def write(
        self,
        transaction: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Write what became of a row, for as long as that takes: a disk may be full for a while.

        Raises:
            StoreError: everything ends; the row is begun again at the next start.
        """
        while True:
            try:
                return await self._database.run(transaction, *arguments, **named)
            except StoreError as error:
                self._complain(f"what became of it cannot be written yet: {error}")
                if self.is_ending:
                    raise
                await asyncio.sleep(STORE_PAUSE)

    def _complain(self, trouble: str) -> None:
        """Once: a disk that is full stays so for long, and a log of it would fill another."""
        if trouble != self._trouble:
            log.error("%s: %s", self._queue.table, trouble)
        self._trouble = trouble

    async def close(self, seconds: float) -> None:
        """Let what runs end for a while, and cancel the rest, which may refuse that for as long again."""
        self.is_ending = True
        late = set(self._under_way)
        if late:
            _, late = await asyncio.wait(late, timeout=seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=seconds)
