"""Start and stop of the registry: refused settings, recovery after kills, and a stop in time."""

import asyncio
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hooks.errors import InvalidSettings, StoreError
from hooks.registry.delivery import resolve_host
from hooks.registry.registry import Registry, RegistrySettings
from tests.testing.pauses import Pauses
from tests.testing.target import Delivery, target_server
from tests.testing.waiting import until
from tests.unit.hooks.registry.serving import TOKEN, serve, settings

# Creates the webhook at the first start, emits numbered events, and prints each number when its event is queued.
SERVER = """
import asyncio, sys
from pathlib import Path
from hooks.registry.registry import Registry
from hooks.registry.registry import RegistrySettings

async def main(database, url, first, last):
    settings = RegistrySettings(tokens=("t" * 32,), database=Path(database), allowed_networks=("127.0.0.0/8",))
    async with Registry(settings).running() as registry:
        if not await registry.list_webhooks():
            await registry.create_webhook({"url": url, "watched": [], "domains": ["session"]})
        for number in range(int(first), int(last)):
            await registry.emit_session("session.started", {"session_id": str(number % 7), "number": number})
            print(number, flush=True)
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


class Process:
    def __init__(self, database: Path, url: str, first: int, last: int):
        command = [sys.executable, "-c", textwrap.dedent(SERVER), str(database), url, str(first), str(last)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.queued = first - 1
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.queued = int(line)

    async def until_queued(self, number: int) -> None:
        await until(lambda: self.queued >= number or self._process.poll() is not None, within=60)

    def kill(self) -> int:
        """Kill the process; return the number of the last event that is certainly queued."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self.queued


def numbers(got: Sequence[Delivery]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for delivery in got:
        found.setdefault(delivery.json["data"]["number"], set()).add(delivery.id)
    return found


async def test_a_killed_server_repeats_the_delivery_with_the_same_id(tmp_path: Path) -> None:
    async with target_server() as target:
        target.gate.clear()
        first = Process(tmp_path / "registry.sqlite3", target.url, 0, 1)
        await target.wait_for(1, within=60)
        first.kill()
        target.gate.set()
        second = Process(tmp_path / "registry.sqlite3", target.url, 0, 0)
        await target.wait_for(2, within=60)
        second.kill()
        assert len({(delivery.id, delivery.body) for delivery in target.got}) == 1
        assert target.got[0].headers["webhook-timestamp"] <= target.got[1].headers["webhook-timestamp"]


async def test_random_kills_lose_no_event_and_keep_the_ids(tmp_path: Path) -> None:
    chance = random.Random(7)
    count, emitted = 150, 0
    async with target_server() as target:
        for kill in range(1, 5):
            process = Process(tmp_path / "registry.sqlite3", target.url, emitted, count)
            await process.until_queued(min(emitted + chance.randrange(10, 60), count - 1))
            await asyncio.sleep(chance.random() * 0.05)
            # An event that is queued but not printed before the kill is emitted again as another event.
            emitted = process.kill() + 1
            assert emitted > 0, f"kill {kill}"
        process = Process(tmp_path / "registry.sqlite3", target.url, emitted, count)
        await until(lambda: len(numbers(target.got)) >= count, within=90)
        process.kill()
        found = numbers(target.got)
        assert sorted(found) == list(range(count))
        assert sum(len(ids) > 1 for ids in found.values()) <= 4
        for session in range(7):
            order = [d.json["data"]["number"] for d in target.got if d.json["data"]["session_id"] == str(session)]
            firsts = list(dict.fromkeys(order))
            assert firsts == sorted(firsts)


async def test_the_registry_stops_in_time_while_a_target_hangs(tmp_path: Path, pauses: Pauses) -> None:
    made = settings(database=tmp_path / "registry.sqlite3")
    async with target_server() as target:
        target.gate.clear()
        async with serve(registry := Registry(made)):
            await registry.create_webhook({"url": target.url, "watched": [], "domains": ["session"]})
            await registry.emit_session("session.started", {})
            await target.wait_for(1)
            began = time.monotonic()
        assert pauses.running(began) < 2


async def test_a_silent_name_server_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: hang.wait(30) and [])
    monkeypatch.setattr("hooks.registry.delivery.RESOLVE_TIMEOUT", 0.05)
    with pytest.raises(TimeoutError):
        await resolve_host("robot.example", 80)
    hang.set()


async def test_an_unresolvable_host_may_be_registered(tmp_path: Path) -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such host")

    async def inside(host: str, port: int) -> list[str]:
        return ["10.0.0.1"]

    body = {"url": "http://robot.example/hook", "watched": [], "domains": ["session"]}
    async with Registry(settings(), resolve=unknown).running() as registry:
        assert (await registry.create_webhook(body)).url == body["url"]
    async with Registry(settings(), resolve=inside).running() as registry:
        with pytest.raises(Exception, match=r"'robot.example' is 10.0.0.1, which is private"):
            await registry.create_webhook(body)


async def test_two_processes_do_not_send_from_one_database(tmp_path: Path) -> None:
    made = settings(database=tmp_path / "registry.sqlite3")
    async with Registry(made).running():
        with pytest.raises(StoreError, match="another process sends from it"):
            async with Registry(made).running():
                pass
    async with Registry(made).running():
        pass


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"tokens": ()}, "no token is configured, so any client could .* `openssl rand -hex 32`"),
        ({"tokens": ("short",)}, "shorter than 16 characters"),
        ({"allowed_networks": ("10.0.0.1/8",)}, "allowed network '10.0.0.1/8'"),
        ({"suspend_after": 0}, "suspend_after: 0, wanted more than 0"),
        *(({"waits": waits}, "waits: .* none below 0") for waits in ((), (-1.0,))),
    ],
)
def test_invalid_settings_are_refused(named: dict, reason: str) -> None:
    with pytest.raises(InvalidSettings, match=reason):
        RegistrySettings(**{"tokens": (TOKEN,), **named})
    assert TOKEN not in repr(RegistrySettings(tokens=(TOKEN,)))
