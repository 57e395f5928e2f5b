"""A delivery from its POST to the handler's effect, over HTTP."""

import asyncio

from hooks.payload import WebhookPayload
from hooks.receiving.receiver import Receiver
from hooks.receiving.settings import ReceiverSettings

SECRET = "a-secret-of-sixteen"
SIGNED = {"x-webhook-secret": SECRET}


async def test_a_handler_gets_the_payload_and_its_value_is_the_answer(serving, make_payload) -> None:
    receiver = Receiver(ReceiverSettings(secrets=(SECRET,)))

    async def pushed(payload: WebhookPayload) -> dict:
        return {"sha": payload.repo.head_sha, "also": payload.repo.headSha}

    assert receiver.add(pushed) == "/webhooks/pushed"
    assert receiver.registered == {"/webhooks/pushed": pushed}
    async with serving(receiver) as sender:
        told = await sender.post("/webhooks/pushed", make_payload(sha="c" * 40), headers=SIGNED)
        assert (told.status, told.json) == (200, {"sha": "c" * 40, "also": "c" * 40})
        missing = await sender.post("/webhooks/pushed", make_payload())
        assert (missing.status, missing.json) == (401, {"error": "x-webhook-secret header not set."})
        wrong = await sender.post("/webhooks/pushed", make_payload(), headers={"x-webhook-secret": "x"})
        assert (wrong.status, wrong.json) == (403, {"error": "Invalid webhook secret."})
        await asyncio.sleep(0)
