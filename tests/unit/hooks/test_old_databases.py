"""Files that the first version of the schemas wrote: they open, and what waited in them goes on."""

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from hooks.errors import StoreError
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.inbox import Inbox
from hooks.receiver.receiver import Receiver
from hooks.registry.registry import Registry, RegistrySettings
from hooks.registry.sender import SenderSettings
from tests.testing.target import target_server
from tests.testing.waiting import until
from tests.unit.hooks.receiver.conftest import serve

FOREVER = 1e12  # seconds: nothing is old enough to be forgotten
DATA = Path(__file__).parent / "data"


def restore(name: str, folder: Path, **replaced: str) -> Path:
    """A database from the SQL of an old one."""
    path = folder / f"{name}.sqlite3"
    text = (DATA / f"{name}.sql").read_text()
    for old, new in replaced.items():
        text = text.replace(old, new)
    with sqlite3.connect(path) as connection:
        connection.executescript(text)
    connection.close()
    return path


async def test_an_inbox_of_the_first_version_goes_on_where_it_was(tmp_path: Path) -> None:
    path = restore("inbox-1", tmp_path)
    ran: list[tuple[str, int]] = []
    ran_all = asyncio.Event()
    receiver = Receiver(ReceiverSettings(database=path, kept=FOREVER, kept_dead=FOREVER))

    async def note(payload: dict) -> None:
        ran.append((payload["repo"]["id"], payload["number"]))
        if len(ran) == 4:
            ran_all.set()

    receiver.add(note, "note")
    async with serve(receiver) as sender:
        async with asyncio.timeout(30):
            await ran_all.wait()
        before = (await receiver.event(f"{1:024x}")).body
        again = await sender.post("/webhooks/note", data=before, headers={"webhook-id": "d1"})
    assert [number for repo, number in ran if repo == "repo-b"] == [5, 6, 7]  # 5 ran when the process ended
    assert sorted(number for _, number in ran) == [5, 6, 7, 8]
    assert (again.json, again.headers["x-webhook-duplicate"]) == ("noted", "true")
    with Inbox(path) as inbox:
        statuses = {event.number: str(event.status) for event in inbox.list()}
    assert statuses == {
        1: "done",
        2: "dead",
        3: "failed",
        4: "ignored",
        **dict.fromkeys((5, 6, 7, 8), "done"),
        9: "waiting",
    }


async def test_a_registry_of_the_first_version_sends_what_waits_in_order(tmp_path: Path) -> None:
    async with target_server() as target:
        path = restore("registry-1", tmp_path, **{"http://127.0.0.1:9": target.url})
        settings = RegistrySettings(
            tokens=("a-token-of-the-registry",),
            database=path,
            allowed_networks=("127.0.0.0/8",),
            sender=SenderSettings(retention=FOREVER),
        )
        registry = Registry(settings)
        async with registry.running():
            one, held, job = await registry.list_webhooks()
            assert (one.secret, held.disabled, job.secrets) == (
                "a-secret-of-some-length",
                "suspended-after-failure",
                {"HF_TOKEN": "hf_of_the_job"},
            )
            await target.wait_for(3)
            numbers = [delivery.json["repo"]["number"] for delivery in target.got]
            assert sorted(numbers) == [3, 4, 5]
            assert numbers.index(3) < numbers.index(4)
            ids = {delivery.id for delivery in target.got}
            log = await registry.list_deliveries(one.id, 10, None)
            assert ids == {entry["webhookDeliveryId"] for entry in log[:3]}
            assert [entry["status"] for entry in log[3:]] == ["failed", "delivered"]
            target.got.clear()
            await registry.enable_webhook(held.id)
            await target.wait_for(1)
            assert [delivery.json["repo"]["number"] for delivery in target.got] == [7]  # 6 was dropped
            await until(lambda: len(target.got) == 1)
        assert json.loads(target.got[0].body)["webhook"] == {"id": held.id, "version": 3}


@pytest.mark.parametrize("name", ["inbox-1", "registry-1"])
def test_a_file_of_a_later_version_is_refused(tmp_path: Path, name: str) -> None:
    path = restore(name, tmp_path, **{"PRAGMA user_version=1": "PRAGMA user_version=99"})
    with pytest.raises(StoreError, match="version 99"):
        Inbox(path)
