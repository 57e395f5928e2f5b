"""Receiver that is killed at random times: every event takes effect exactly once."""

import asyncio
import random
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from hooks.receiver.inbox import EventInbox, EventStatus

SERVER = Path(__file__).with_name("crashing_server.py")
PATHS = ("on_loop", "in_thread", "queued")
PATIENCE = 0.02


class Server:
    """Server process that is killed and restarted on the same port and files."""

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder = folder
        self._process = self._start()

    def _start(self) -> subprocess.Popen:
        with open(self._folder / "server.log", "ab") as log:
            return subprocess.Popen([sys.executable, SERVER, self._folder, str(self.port)], stderr=log)

    async def ready(self) -> None:
        while True:
            assert self._process.poll() is None, (self._folder / "server.log").read_text()[-3000:]
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self._process = self._start()


class Senders:
    """Senders of shuffled deliveries with duplicates, which repeat each delivery until it is acknowledged."""

    def __init__(self, url: str, count: int, chance: random.Random):
        numbers = [*range(count), *chance.sample(range(count), int(0.3 * count))]
        chance.shuffle(numbers)
        self.left = numbers
        self.total = len(numbers)
        self.acknowledged: Counter[int] = Counter()
        self._url = url

    async def run(self, session: aiohttp.ClientSession) -> None:
        while self.left:
            await self._deliver(session, self.left.pop())

    async def _deliver(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "event": {"action": "update", "scope": "repo.content"},
            "repo": {"id": f"r{number % 11}", "owner": {"id": "o"}, "name": f"a/{number % 11}", "type": "model"},
            "webhook": {"id": "w", "version": 3},
            "number": number,
        }
        url = f"{self._url}/webhooks/{PATHS[number % len(PATHS)]}"
        while True:
            try:
                async with session.post(url, json=body, headers={"webhook-id": f"d{number}"}) as answer:
                    await answer.read()
                    if answer.status < 300:
                        self.acknowledged[number] += 1
                        return
            except (aiohttp.ClientError, OSError):
                pass  # The server was killed, so the delivery is repeated.
            await asyncio.sleep(PATIENCE)


async def crash(folder: Path, *, count: int, kills: int, seed: int) -> dict[str, object]:
    chance = random.Random(seed)
    server = Server(folder)
    senders = Senders(f"http://127.0.0.1:{server.port}", count, chance)
    try:
        async with aiohttp.ClientSession() as session:
            await server.ready()
            workers = [asyncio.create_task(senders.run(session)) for _ in range(12)]
            # Each kill follows a random delivery by a random time.
            for at in sorted(chance.sample(range(senders.total), kills)):
                while sum(senders.acknowledged.values()) < at:  # noqa: ASYNC110 (polled on purpose)
                    await asyncio.sleep(0.001)
                await asyncio.sleep(chance.random() * 0.03)
                server.restart()
            await asyncio.gather(*workers)
        with EventInbox(folder / "inbox.sqlite3") as inbox:
            while any(inbox.list(status=status, limit=1) for status in (EventStatus.WAITING, EventStatus.RUNNING)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            ends = Counter(str(event.status) for event in inbox.list(limit=10 * count))
    finally:
        server.kill()
    connection = sqlite3.connect(folder / "outside.sqlite3")
    moves = Counter(number for (number,) in connection.execute("SELECT number FROM moves"))
    connection.close()
    return {
        "effects": sum(moves.values()),
        "effects_twice": sum(number > 1 for number in moves.values()),
        "lost": sum(number not in moves for number in range(count)),
        "not_acknowledged": sum(number not in senders.acknowledged for number in range(count)),
        "ends": dict(ends),
    }


@pytest.mark.timeout(180)
async def test_each_event_takes_effect_once_over_kills(tmp_path: Path) -> None:
    count = 1000
    found = await crash(tmp_path, count=count, kills=20, seed=count)
    expected = {"effects": count, "effects_twice": 0, "lost": 0, "not_acknowledged": 0, "ends": {"done": count}}
    assert found == expected
