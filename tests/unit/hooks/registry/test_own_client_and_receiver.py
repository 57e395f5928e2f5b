"""The product's own client and receiver together with the registry."""

import asyncio
from pathlib import Path

from hooks import WebhooksClient
from hooks.payload import WebhookPayload
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.receiver import Receiver
from hooks.registry.registry import Registry
from tests.unit.hooks.registry.serving import TOKEN, serve, settings, until_finished

SECRET = "a-secret-of-some-length"
WATCHED = ["model:lab/act"]


async def test_the_receiver_accepts_a_delivery_of_the_registry() -> None:
    sender = Registry(settings())
    got: asyncio.Queue[WebhookPayload] = asyncio.Queue()

    async def act(payload: WebhookPayload) -> str:
        await got.put(payload)
        return "accepted"

    receiver = Receiver(ReceiverSettings(secrets=(SECRET,)))
    path = receiver.add(act)
    async with serve(receiver) as url, sender.running():
        body = {"url": url + path, "watched": [{"type": "model", "name": "lab/act"}], "secret": SECRET}
        webhook = await sender.create_webhook(body)
        await sender.emit_repo("lab/act", "b" * 40, "a" * 40)
        async with asyncio.timeout(30):
            payload = await got.get()
        assert (payload.webhook.id, payload.new_sha("main")) == (webhook.id, "b" * 40)
        entry = await until_finished(sender, webhook.id)
        assert (entry["status"], entry["attempts"][0]["excerpt"]) == ("delivered", '"accepted"')
        assert (await sender.replay(webhook.id, entry["id"])).status == 200
        # The replay is the same event, so the receiver answers without a second run.
        assert got.empty()


async def test_ensure_finds_the_webhook_of_a_job(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[jobs.retrain]\nargv = ["true"]\n')
    async with serve(Registry(settings(jobs_file=jobs))) as url:
        client = WebhooksClient(url, TOKEN)
        first, second = [await asyncio.to_thread(client.ensure, job_id="retrain", watched=WATCHED) for _ in range(2)]
    assert (first.id, first.job_id) == (second.id, "retrain")
