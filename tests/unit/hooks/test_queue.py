"""Queue with explicit times: rows that begin, rows that wait, and repeated writes."""

import asyncio
import sqlite3

import pytest

from hooks.database import Database, insert_row
from hooks.queue import Queue, QueueRunner
from tests.testing.waiting import until
from tests.unit.hooks.conftest import run_due

TABLE = """CREATE TABLE rows (number INTEGER PRIMARY KEY, topic TEXT NOT NULL, lane TEXT NOT NULL, status TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL) STRICT"""
QUEUE = Queue("rows", group="topic", ordered="one.lane <> ''")
NOW = 1000.0


class Rows:
    """A database with rows of ``topic lane status due``."""

    def __init__(self, *rows: str):
        self.database = Database(None, [TABLE])
        for row in rows:
            self.add(row)

    def add(self, row: str) -> None:
        topic, lane, status, due = row.split()
        values = {"topic": topic, "lane": lane.strip("-"), "status": status, "due": NOW + float(due)}
        self.database.run_blocking(lambda connection: insert_row(connection, "rows", **values))

    def take(self, room: int = 9) -> tuple[list[int], float | None]:
        left = [room]

        def has_room(topic: str) -> bool:
            left[0] -= 1
            return left[0] >= 0

        rows, _, later = self.database.run_blocking(QUEUE.begin_due_rows, NOW, has_room)
        return [row["number"] for row in rows], None if later is None else later - NOW


@pytest.mark.parametrize(
    ("rows", "started", "later"),
    [
        (["x a waiting 0", "x a waiting 0", "x b waiting 0", "y a waiting 0"], [1, 3, 4], None),
        (["x - waiting 0", "x - waiting 0"], [1, 2], None),  # Rows without a lane do not wait.
        (["x a waiting 5", "x a waiting 0", "x b waiting 9"], [], 5.0),  # The lane waits for its retried row.
        (["x a done 0", "x a dead 0", "x a waiting -1"], [3], None),
        (["x a waiting 0", "x a running 0"], [], None),  # The older row waits for the running row.
        (["x a waiting 0", "x b waiting -1"], [2, 1], None),  # The row with the earlier due time begins first.
    ],
)
def test_a_row_begins_if_it_is_due_and_next_in_its_lane(rows, started, later):
    table = Rows(*rows)
    assert table.take() == (started, later)
    assert table.take()[0] == []
    assert table.database.run_blocking(QUEUE.release_running) == len(started) + sum("running" in row for row in rows)


async def test_runner_obeys_limits_and_the_clock_and_repeats_writes(monkeypatch, caplog):
    monkeypatch.setattr("hooks.queue.STORE_RETRY_INTERVAL", 0.01)
    table = Rows(*["x - waiting 0"] * 4, "off - waiting 0", "y - waiting 90")
    began, most, release, wall = [], [], asyncio.Event(), [NOW]
    troubles = [sqlite3.OperationalError("disk is full")] * 3

    def write(connection: sqlite3.Connection, number: int) -> None:
        if number == 2 and troubles:
            raise troubles.pop()
        connection.execute("UPDATE rows SET status = 'done' WHERE number = ?", (number,))

    async def work(row: sqlite3.Row) -> None:
        began.append(row["number"])
        most.append(len(began))
        await release.wait()
        await runner.write(write, row["number"])

    limits = {"x": {"x": 2, "all": 3}, "y": {"all": 3}, "off": {"off": 0}}
    runner = QueueRunner(table.database, QUEUE, work, limits.__getitem__, clock=lambda: wall[0])
    await runner.begin_due()
    await until(lambda: began == [1, 2])
    release.set()
    await run_due(runner)
    assert (began, troubles) == ([1, 2, 3, 4], [])
    assert caplog.text.count("disk is full") == 1
    wall[0] -= 3600
    await runner.begin_due()  # The runner sees that the clock was set back.
    wall[0] += 91
    await run_due(runner)
    assert began == [1, 2, 3, 4, 6]
    runner.is_ending = True
    await runner.close(1.0)
