"""Receiver in a separate process that a test kills: python crashing_server.py FOLDER PORT."""

import asyncio
import random
import sqlite3
import sys
import threading
from pathlib import Path

from hooks.errors import RetryableError
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.inbox import Event
from hooks.receiver.receiver import Receiver
from hooks.server.serving import build_app, open_listener, serve_app


class Outside:
    """Store of effects outside the inbox, with at most one effect per event id."""

    def __init__(self, path: Path):
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS moves (event_id TEXT UNIQUE, number INTEGER)")
        self._lock = threading.Lock()

    def move(self, event: Event, number: int) -> None:
        with self._lock:
            self._connection.execute("INSERT OR IGNORE INTO moves VALUES (?, ?)", (event.id, number))


def receiver(folder: Path) -> Receiver:
    database = folder / "inbox.sqlite3"
    settings = ReceiverSettings(database=database, answer_within=0.05, backoff=0.01, longest_backoff=0.1, attempts=50)
    made = Receiver(settings)
    outside = Outside(folder / "outside.sqlite3")

    def act(event: Event, number: int) -> int:
        outside.move(event, number)
        chance = random.random()
        if chance < 0.03:
            raise RuntimeError("it slipped")
        if chance < 0.06:
            raise RetryableError("not yet", after=0.02)
        return number

    async def on_loop(payload: dict, event: Event) -> int:
        await asyncio.sleep(random.random() * 0.02)
        return act(event, payload["number"])

    def in_thread(payload: dict, event: Event) -> int:
        threading.Event().wait(random.random() * 0.06)
        return act(event, payload["number"])

    made.add(on_loop)
    made.add(in_thread)
    made.add(on_loop, "queued", mode="queue")
    return made


async def serve(folder: Path, port: int) -> None:
    app = build_app(max_body=1 << 20)
    app.blueprint(receiver(folder).blueprint())
    async with serve_app(app, open_listener("127.0.0.1", (port,))):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
