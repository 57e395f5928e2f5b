"""Work beside the handlers of a running receiver."""

import asyncio
import sqlite3
import time

from hooks.errors import StoreError
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.receiver import Receiver


async def test_old_events_are_deleted_while_the_receiver_runs(serving, make_payload) -> None:
    receiver = Receiver(ReceiverSettings(kept=10.0))
    async with serving(receiver, lambda: None, "x") as sender:
        await sender.post("/webhooks/x", make_payload())
        await receiver._running.prune(time.time() + 5)
        assert len(await receiver.events()) == 1
        await receiver._running.prune(time.time() + 15)
        assert await receiver.events() == []


async def test_a_trouble_of_the_inbox_is_logged_once_until_it_changes(serving, monkeypatch, caplog) -> None:
    monkeypatch.setattr("hooks.receiver.worker.POLL_INTERVAL", 0.0)
    troubles, is_over = ["full", "full", "", "full", "locked"], asyncio.Event()

    def version(connection: sqlite3.Connection) -> int:
        if not troubles:
            is_over.set()
        elif trouble := troubles.pop(0):
            raise StoreError(trouble)
        return 1

    monkeypatch.setattr("hooks.receiver.inbox.get_data_version", version)
    async with serving(Receiver(), lambda: None, "x"), asyncio.timeout(30):
        await is_over.wait()
    found = [record.message for record in caplog.records if "looked after" in record.message]
    assert [message.rpartition(" ")[2] for message in found] == ["full", "full", "locked"]
