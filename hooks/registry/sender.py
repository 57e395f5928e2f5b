"""Sender of due deliveries; a slow target delays no other."""

import asyncio
import logging
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress

from hooks.database import Database
from hooks.errors import StoreError
from hooks.queue import QueueRunner
from hooks.registry import delivery_queue
from hooks.registry.delivery import DeliveryRequest, Destination, Outcome, get_wait
from hooks.registry.delivery_queue import DueDelivery, Message
from hooks.registry.settings import RegistrySettings
from hooks.registry.store import WebhookStore

logger = logging.getLogger(__name__)

PRUNE_INTERVAL = 600.0
# An answer that comes this soon after the end is still written down, and not asked for twice.
STOP_TIMEOUT = 0.5


class Sender:
    """Sends the deliveries of one database; ``dropped`` counts those given up because too many waited."""

    def __init__(
        self,
        database: Database,
        store: WebhookStore,
        deliver: Callable[[Destination, DeliveryRequest, float], Awaitable[Outcome]],
        settings: RegistrySettings,
        *,
        clock: Callable[[], float] = time.time,
        random: Callable[[], float] = random.random,
    ):
        """Make a sender; nothing is sent before ``run``. ``deliver`` makes one attempt and never raises."""
        self.dropped = 0
        self._database = database
        self._store = store
        self._deliver_once = deliver
        self._settings = settings
        self._clock = clock
        self._random = random
        self._replays: set[asyncio.Task[object]] = set()
        self.runner = QueueRunner(database, delivery_queue.QUEUE, self._deliver, self._get_limits, clock=clock)

    async def queue_message(self, message: Message, webhooks: Callable[[sqlite3.Connection], Collection[str]]) -> int:
        """Queue an event durably for the webhooks that ``webhooks`` returns; return their number."""

        def transaction(connection: sqlite3.Connection) -> tuple[int, dict[str, int]]:
            limit = self._settings.max_waiting
            return delivery_queue.queue_message(connection, message, webhooks(connection), self._clock(), limit)

        count, dropped = await self._database.run(transaction)
        for webhook_id, number in dropped.items():
            self.dropped += number
            logger.warning(
                "webhook %s: more than %d deliveries wait, the oldest %d dropped (%d since the start); "
                "see its delivery log for why they are not accepted",
                webhook_id,
                self._settings.max_waiting,
                number,
                self.dropped,
            )
        self.runner.wake()
        return count

    async def run(self) -> None:
        """Send until cancelled; what is under way then is sent again at the next start, with the same id."""
        pruning = asyncio.create_task(self._prune(), name="webhooks prune")
        try:
            await self.runner.write(delivery_queue.QUEUE.release_running)  # A killed process left these.
            await self.runner.run()
        finally:
            pruning.cancel()
            await asyncio.gather(self.runner.close(STOP_TIMEOUT), pruning, return_exceptions=True)
            for task in self._replays:
                task.cancel()
            await asyncio.gather(*self._replays, return_exceptions=True)
            with suppress(StoreError):  # they are released at the next start anyway
                await self._database.run(delivery_queue.QUEUE.release_running)

    def _get_limits(self, webhook_id: str) -> Mapping[str, int]:
        return {webhook_id: self._settings.max_parallel}

    async def _deliver(self, row: sqlite3.Row) -> None:
        delivery = await self.runner.write(delivery_queue.get_delivery, row["webhook_id"], row["id"])
        if delivery is not None:
            await self._attempt_delivery(delivery)

    async def _attempt_delivery(self, delivery: DueDelivery, *, is_replay: bool = False) -> Outcome | None:
        destination = await self.runner.write(self._store.find, delivery.webhook_id)
        if destination is None:
            return None
        started_at = self._clock()
        try:
            outcome = await self._deliver_once(destination, delivery.request, started_at)
        except Exception as error:
            # A defect of ours in one delivery must not end the others, nor be repeated without a pause.
            logger.exception("delivery %s failed within", delivery.id)
            outcome = Outcome(error=f"this server failed to send it ({type(error).__name__}); its log says more")
        if outcome.is_interrupted:
            return outcome
        wait = get_wait(self._settings.waits, delivery.failed_attempts + 1, self._random, outcome.retry_after)
        now = self._clock()

        def record(connection: sqlite3.Connection) -> None:
            is_given_up = delivery_queue.record_attempt(
                connection, delivery, outcome, started_at, now, wait, is_replay=is_replay
            )
            if outcome.is_gone or outcome.is_delivered or is_given_up:
                result = "gone" if outcome.is_gone else "delivered" if outcome.is_delivered else "exhausted"
                self._store.record_result(connection, delivery.webhook_id, result, now)

        await self.runner.write(record)
        if not outcome.is_delivered:
            logger.warning(
                "webhook %s, delivery %s, attempt %d: %s; %s",
                delivery.webhook_id,
                delivery.id,
                delivery.failed_attempts + 1,
                outcome.text,
                "it was a replay" if is_replay else "given up" if wait is None else f"next in {wait:.0f} s",
            )
        if is_replay:
            self.runner.wake()  # a delivery that waits for this one may begin, if it was accepted
        return outcome

    async def replay(self, webhook_id: str, delivery_id: str, *, is_awaited: bool = True) -> Outcome | None:
        """Send a logged delivery again now; return the outcome (202 if not awaited), or None without the delivery."""
        delivery = await self._database.run(delivery_queue.get_delivery, webhook_id, delivery_id)
        if delivery is None:
            return None
        if is_awaited:
            return await self._attempt_delivery(delivery, is_replay=True)
        task = asyncio.ensure_future(self._attempt_delivery(delivery, is_replay=True))
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)
        return Outcome(status=202)

    async def _prune(self) -> None:
        while True:
            try:
                await self._database.run(
                    delivery_queue.prune_log, self._clock() - self._settings.retention, self._settings.max_retained
                )
            except StoreError as error:
                logger.error("the delivery log cannot be shortened: %s", error)
            await asyncio.sleep(PRUNE_INTERVAL)
