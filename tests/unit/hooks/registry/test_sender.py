"""Delivery queue and sender with explicit times: retries, order, suspension, limits and replay."""

import asyncio
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hooks.database import Database
from hooks.registry import delivery_queue
from hooks.registry.delivery import DeliveryOutcome, DeliveryRequest, Destination
from hooks.registry.delivery_queue import Message
from hooks.registry.registry import RegistrySettings, Sender
from hooks.registry.store import WebhookStore
from tests.testing.waiting import until
from tests.unit.hooks.conftest import run_due

MINUTE = 60.0
SETTINGS = RegistrySettings(tokens=("t" * 16,))


class RecordingStore:
    """Store that finds every webhook and records the results of deliveries."""

    def __init__(self) -> None:
        self.results: list[tuple[str, str]] = []

    def find(self, connection: sqlite3.Connection, webhook_id: str) -> Destination | None:
        return Destination(webhook_id, url=f"http://{webhook_id}")

    def record_result(self, connection: sqlite3.Connection, webhook_id: str, result: str, now: float) -> None:
        self.results.append((webhook_id, result))


class ScriptedDeliverer:
    """Deliverer that returns the answers in turn, then status 200. A webhook with a gate waits for it."""

    def __init__(self) -> None:
        self.answers: list[DeliveryOutcome | Exception] = []
        self.got: list[tuple[str, DeliveryRequest]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.at_once = self.most_at_once = 0

    async def deliver(self, destination: Destination, request: DeliveryRequest, now: float) -> DeliveryOutcome:
        self.got.append((destination.id, request))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if gate := self.gates.get(destination.id):
                await gate.wait()
            answer = self.answers.pop(0) if self.answers else DeliveryOutcome(status=200)
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.at_once -= 1


class Sending:
    def __init__(self, path: Path | None = None, **settings: Any):
        self.database = Database(path, [delivery_queue.SCHEMA])
        self.now, self.store, self.deliverer = 1_700_000_000.0, RecordingStore(), ScriptedDeliverer()
        self.sender = Sender(
            self.database,
            cast(WebhookStore, self.store),
            self.deliverer.deliver,
            replace(SETTINGS, **settings),
            clock=lambda: self.now,
            random=lambda: 0.5,  # This value causes no jitter.
        )

    async def put(self, number: int, *webhooks: str, subject: str = "model:a/b") -> int:
        body = {"number": number}
        message = Message(f"event-{number}", "session.started", subject, body, is_hub=False)
        return await self.sender.queue_message(message, lambda connection: webhooks or ("one",))

    def log(self, webhook_id: str = "one") -> list[dict]:
        return self.database.run_blocking(delivery_queue.list_deliveries, webhook_id, 100)

    async def run(self, *numbers: int, after: float = 0.0, **more: Any) -> None:
        """Queue these events and send all events that are due after ``after`` seconds."""
        for number in numbers:
            await self.put(number, **more)
        self.now += after
        await run_due(self.sender.runner)

    def bodies(self) -> list[bytes]:
        return [request.body for _, request in self.deliverer.got]


@pytest.fixture
def sending() -> Iterator[Sending]:
    made = Sending()
    yield made
    made.database.close()


async def test_a_failed_delivery_is_retried_with_the_same_id_and_body(sending: Sending) -> None:
    sending.deliverer.answers = [
        DeliveryOutcome(status=500),
        DeliveryOutcome(error="no connection"),
        DeliveryOutcome(status=200),
    ]
    await sending.run(1)
    await sending.run(after=4.9)
    assert len(sending.deliverer.got) == 1
    await sending.run(after=0.1)
    await sending.run(after=5 * MINUTE)
    assert len(set(sending.deliverer.got)) == 1
    assert len(sending.deliverer.got) == 3
    [entry] = sending.log()
    assert entry["status"] == "delivered"
    found = [(attempt["status"], attempt["error"]) for attempt in entry["attempts"]]
    assert found == [(500, None), (None, "no connection"), (200, None)]
    assert sending.store.results == [("one", "delivered")]


async def test_an_exhausted_delivery_lets_the_next_of_its_repo_start(sending: Sending) -> None:
    sending.deliverer.answers = [DeliveryOutcome(status=500)] * 7
    await sending.put(1)
    await sending.put(2)
    for wait in (0, 5, 5 * MINUTE, 30 * MINUTE, 120 * MINUTE, 300 * MINUTE, 600 * MINUTE):
        await sending.run(after=wait)
    assert [entry["status"] for entry in sending.log()] == ["delivered", "failed"]
    assert sending.store.results == [("one", "exhausted"), ("one", "delivered")]


async def test_order_is_kept_per_webhook_and_repo(sending: Sending) -> None:
    sending.deliverer.answers = [DeliveryOutcome(status=500)]
    await sending.put(1, subject="model:a/b")
    await sending.run(2, subject="model:a/b")
    await sending.run(3, subject="model:c/d")
    assert sending.bodies() == [b'{"number":1}', b'{"number":3}']
    await sending.run(after=5)
    assert sending.bodies()[2:] == [b'{"number":1}', b'{"number":2}']


async def test_a_slow_target_does_not_delay_other_targets(sending: Sending) -> None:
    sending.deliverer.gates["slow"] = asyncio.Event()
    for number in range(20):
        await sending.put(number, "slow", "quick", subject=f"model:a/{number}")
    running = asyncio.create_task(sending.sender.run())
    await until(lambda: sum(entry["status"] == "delivered" for entry in sending.log("quick")) == 20)
    assert sum(webhook == "slow" for webhook, _ in sending.deliverer.got) == 4
    sending.deliverer.gates["slow"].set()
    await until(lambda: sum(entry["status"] == "delivered" for entry in sending.log("slow")) == 20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sending.deliverer.most_at_once <= 8


async def test_above_the_limit_the_oldest_deliveries_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    sending = Sending(max_waiting=3)
    for number in range(5):
        await sending.put(number)
    assert [entry["status"] for entry in sending.log()] == ["waiting"] * 3 + ["dropped"] * 2
    assert sending.sender.dropped == 2
    assert "more than 3 deliveries wait, the oldest 1 dropped (2 since the start)" in caplog.text
    await sending.run()
    assert sending.bodies() == [b'{"number":%d}' % number for number in (2, 3, 4)]
    sending.database.close()


async def test_a_held_webhook_gets_its_deliveries_after_its_release(sending: Sending) -> None:
    sending.deliverer.answers = [DeliveryOutcome(status=500)]
    await sending.run(1)
    sending.database.run_blocking(delivery_queue.hold_webhook, "one")
    await sending.put(2)
    await sending.run(after=1000)
    assert len(sending.deliverer.got) == 1
    sending.database.run_blocking(delivery_queue.release_webhook, "one", sending.now)
    await sending.run()
    assert sending.bodies()[1:] == [b'{"number":1}', b'{"number":2}']


async def test_a_replay_has_the_same_id_and_its_failure_changes_nothing(sending: Sending) -> None:
    await sending.run(1)
    [entry] = sending.log()
    sending.deliverer.answers = [DeliveryOutcome(status=500)]
    failed = await sending.sender.replay("one", entry["id"])
    again = await sending.sender.replay("one", entry["id"])
    assert failed is not None
    assert again is not None
    assert (failed.status, again.status) == (500, 200)
    assert len({request.id for _, request in sending.deliverer.got}) == 1
    [entry] = sending.log()
    assert entry["status"] == "delivered"
    assert [attempt["isReplay"] for attempt in entry["attempts"]] == [False, True, True]
    assert await sending.sender.replay("one", "unknown") is None
    assert await sending.sender.replay("other", entry["id"]) is None


async def test_an_exception_is_a_failed_attempt_without_its_text(sending: Sending) -> None:
    sending.deliverer.answers = [KeyError("/root/secret")]
    await sending.put(1)
    await sending.put(2, "two")
    await sending.run()
    [entry] = sending.log()
    assert entry["attempts"][0]["error"] == "this server failed to send it (KeyError); its log says more"
    assert sending.log("two")[0]["status"] == "delivered"


async def test_old_log_entries_are_deleted_but_never_waiting_entries(sending: Sending) -> None:
    for number in range(6):
        sending.deliverer.answers = [DeliveryOutcome(status=500, retry_after=1000.0)] if number == 0 else []
        await sending.run(number, subject=f"model:a/{number}")
        sending.now += 1
    assert sending.database.run_blocking(delivery_queue.prune_log, sending.now - 3.5, 100) == 2
    assert sending.database.run_blocking(delivery_queue.prune_log, 0.0, 1) == 2
    assert [entry["status"] for entry in sending.log()] == ["delivered", "waiting"]
    messages = sending.database.run_blocking(lambda connection: connection.execute("SELECT * FROM messages").fetchall())
    assert len(messages) == 2


async def test_the_log_is_paged(sending: Sending) -> None:
    for number in range(5):
        await sending.put(number)
    newest = sending.database.run_blocking(delivery_queue.list_deliveries, "one", 2)
    older = sending.database.run_blocking(delivery_queue.list_deliveries, "one", 2, newest[-1]["id"])
    assert [entry["id"] for entry in newest + older] == [entry["id"] for entry in sending.log()][:4]
    assert sending.database.run_blocking(delivery_queue.list_deliveries, "one", 2, "unknown") == []
    # Only the oldest delivery of a lane has a time. The other deliveries wait for it.
    assert [entry["nextAttemptAt"] is None for entry in sending.log()] == [True] * 4 + [False]
