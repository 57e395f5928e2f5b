"""A receiver in a process of its own, to be killed: python crashing_server.py FOLDER PORT."""

import asyncio
import random
import socket
import sqlite3
import sys
import threading
from pathlib import Path

from sanic import Sanic

from hooks.errors import RetryableError
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.inbox import Event
from hooks.receiver.receiver import Receiver


class Outside:
    """Effects outside the inbox, each made once by the id of its event."""

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
    made = Receiver(
        ReceiverSettings(
            database=folder / "inbox.sqlite3",
            answer_within=0.05,
            backoff=0.01,
            longest_backoff=0.1,
            attempts=50,
        )
    )
    outside = Outside(folder / "outside.sqlite3")

    def act(event: Event, number: int) -> None:
        outside.move(event, number)
        chance = random.random()
        if chance < 0.03:
            raise RuntimeError("it slipped")
        if chance < 0.06:
            raise RetryableError("not yet", after=0.02)

    async def on_loop(payload: dict, event: Event) -> int:
        await asyncio.sleep(random.random() * 0.02)
        act(event, payload["number"])
        return payload["number"]

    def in_thread(payload: dict, event: Event) -> int:
        threading.Event().wait(random.random() * 0.06)
        act(event, payload["number"])
        return payload["number"]

    made.add(on_loop)
    made.add(in_thread)
    made.add(on_loop, "queued", mode="queue")
    return made


async def serve(folder: Path, port: int) -> None:
    app = Sanic("crashing", configure_logging=False)
    app.config.update(TOUCHUP=False, MOTD=False, AUTO_EXTEND=False)
    app.blueprint(receiver(folder).blueprint())
    server = await app.create_server(
        sock=socket.create_server(("127.0.0.1", port)), return_asyncio_server=True, access_log=False
    )
    assert server is not None
    await server.startup()
    await server.before_start()
    await server.after_start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
