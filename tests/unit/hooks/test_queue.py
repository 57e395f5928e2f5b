"""The queue: what may begin and what has to wait, with given times; and what goes on when writing fails."""

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
    ("rows", "begun", "later"),
    [
        (["x a waiting 0", "x a waiting 0", "x b waiting 0", "y a waiting 0"], [1, 3, 4], None),
        (["x - waiting 0", "x - waiting 0"], [1, 2], None),  # without a lane nothing is awaited
        (["x a waiting 5", "x a waiting 0", "x b waiting 9"], [], 5.0),  # its lane waits for what is tried again
        (["x a done 0", "x a dead 0", "x a waiting -1"], [3], None),
        (["x a waiting 0", "x a running 0"], [], None),  # an older one that came again, or is replayed
        (["x a waiting 0", "x b waiting -1"], [2, 1], None),  # what was due first begins first
    ],
)
def test_what_begins_is_due_and_next_in_its_lane(rows, begun, later):
    table = Rows(*rows)
    assert table.take() == (begun, later)
    assert table.take()[0] == []
    assert table.database.run_blocking(QUEUE.release_running) == len(begun) + sum("running" in row for row in rows)


async def test_runner_obeys_limits_and_the_clock_and_repeats_writes(monkeypatch, caplog):
    monkeypatch.setattr("hooks.queue.STORE_RETRY_INTERVAL", 0.01)
    table = Rows(*["x - waiting 0"] * 4, "off - waiting 0", "y - waiting 90")
    began, most, goes_on, wall = [], [], asyncio.Event(), [NOW]
    troubles = [sqlite3.OperationalError("disk is full")] * 3

    def write(connection: sqlite3.Connection, number: int) -> None:
        if number == 2 and troubles:
            raise troubles.pop()
        connection.execute("UPDATE rows SET status = 'done' WHERE number = ?", (number,))

    async def work(row: sqlite3.Row) -> None:
        began.append(row["number"])
        most.append(len(began))
        await goes_on.wait()
        await runner.write(write, row["number"])

    limits = {"x": {"x": 2, "all": 3}, "y": {"all": 3}, "off": {"off": 0}}
    runner = QueueRunner(table.database, QUEUE, work, limits.__getitem__, clock=lambda: wall[0])
    await runner.begin_due()
    await until(lambda: began == [1, 2])
    goes_on.set()
    await run_due(runner)
    assert (began, troubles) == ([1, 2, 3, 4], [])
    assert caplog.text.count("disk is full") == 1
    wall[0] -= 3600
    await runner.begin_due()  # sees that the clock was set back
    wall[0] += 91
    await run_due(runner)
    assert began == [1, 2, 3, 4, 6]
    runner.is_ending = True
    await runner.close(1.0)
