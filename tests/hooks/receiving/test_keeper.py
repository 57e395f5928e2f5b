"""What is done beside a running receiver."""

import time

from hooks.receiving.keeper import Keeper
from hooks.receiving.receiver import Receiver
from hooks.receiving.settings import DAY, ReceiverSettings


async def test_a_webhook_near_the_hubs_daily_limit_is_warned_of_once_a_day(
    serving, make_payload, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("hooks.receiving.keeper.HUB_LIMIT", 5)
    receiver = Receiver()
    receiver.add(lambda: None, "x")
    async with serving(receiver) as sender:
        running = receiver._running
        keeper = Keeper(running.inbox, running.dispatch, ReceiverSettings())
        warned = []
        for number in range(5):
            await sender.post("/webhooks/x", make_payload(), headers={"webhook-id": str(number)})
            await keeper.tidy(time.time())
            warned.append(caplog.text.count("webhook webhook-1 had"))
        assert warned == [0, 0, 0, 1, 1]
        assert "had 4 deliveries within a day; the Hub stops at 5" in caplog.text
        await keeper.tidy(time.time() + 2 * DAY)
        assert caplog.text.count("webhook webhook-1 had") == 1


async def test_what_is_old_is_forgotten_while_it_runs(serving, make_payload) -> None:
    receiver = Receiver(ReceiverSettings(kept=10.0))
    receiver.add(lambda: None, "x")
    async with serving(receiver) as sender:
        await sender.post("/webhooks/x", make_payload())
        running = receiver._running
        keeper = Keeper(running.inbox, running.dispatch, receiver.settings)
        await keeper.tidy(time.time() + 5)
        assert len(await receiver.events()) == 1
        await keeper.tidy(time.time() + 15)
        assert await receiver.events() == []
