"""What is done beside a running receiver."""

import asyncio
import sqlite3
import time

from hooks.errors import StoreError
from hooks.queue import QueueRunner
from hooks.receiver import inbox as ledger
from hooks.receiver.endpoint import DAY, ReceiverSettings
from hooks.receiver.inbox import Inbox
from hooks.receiver.intake import Maintenance
from hooks.receiver.receiver import Receiver


async def test_a_webhook_near_the_hubs_daily_limit_is_warned_of_once_a_day(
    serving, make_payload, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("hooks.receiver.intake.HUB_LIMIT", 5)
    receiver = Receiver()
    async with serving(receiver, lambda: None, "x") as sender:
        running = receiver._running
        keeper = Maintenance(running.inbox, running.runner, ReceiverSettings())
        warned = []
        for number in range(5):
            await sender.post("/webhooks/x", make_payload(), headers={"webhook-id": str(number)})
            await keeper.prune(time.time())
            warned.append(caplog.text.count("webhook webhook-1 had"))
        assert warned == [0, 0, 0, 1, 1]
        assert "had 4 deliveries within a day; the Hub stops at 5" in caplog.text
        await keeper.prune(time.time() + 2 * DAY)
        assert caplog.text.count("webhook webhook-1 had") == 1


async def test_what_is_old_is_forgotten_while_it_runs(serving, make_payload) -> None:
    receiver = Receiver(ReceiverSettings(kept=10.0))
    async with serving(receiver, lambda: None, "x") as sender:
        await sender.post("/webhooks/x", make_payload())
        running = receiver._running
        keeper = Maintenance(running.inbox, running.runner, receiver.settings)
        await keeper.prune(time.time() + 5)
        assert len(await receiver.events()) == 1
        await keeper.prune(time.time() + 15)
        assert await receiver.events() == []


async def test_what_keeps_it_from_its_work_is_logged_once_until_it_is_over(monkeypatch, caplog) -> None:
    monkeypatch.setattr("hooks.receiver.intake.POLL_INTERVAL", 0.0)
    troubles, is_over = ["full", "full", "", "full", "locked"], asyncio.Event()

    def version(connection: sqlite3.Connection) -> int:
        if not troubles:
            is_over.set()
        elif trouble := troubles.pop(0):
            raise StoreError(trouble)
        return 1

    async def work(row: sqlite3.Row) -> None:
        pass

    monkeypatch.setattr("hooks.receiver.inbox.get_data_version", version)
    with Inbox(None) as inbox:
        runner = QueueRunner(inbox.database, ledger.QUEUE, work, lambda path: {})
        keeping = asyncio.create_task(Maintenance(inbox, runner, ReceiverSettings()).run())
        async with asyncio.timeout(30):
            await is_over.wait()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == ["full", "full", "locked"]
