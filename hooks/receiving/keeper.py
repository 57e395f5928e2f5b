"""Looks after a running receiver's inbox: finds what other processes replay, and forgets what is old."""

import asyncio
import logging
import time

from hooks.errors import StoreError
from hooks.queue import Runner
from hooks.receiving import ledger, records
from hooks.receiving.inbox import Inbox
from hooks.receiving.settings import DAY, ReceiverSettings

log = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds between looks for replays by other processes
TIDY_EVERY = 60.0
HUB_LIMIT = 1000  # deliveries of one webhook in a day; the Hub's
WARNED_AT = 0.8  # of it


class Keeper:
    """Runs beside the receiver."""

    def __init__(self, inbox: Inbox, runner: Runner, settings: ReceiverSettings):
        self._inbox = inbox
        self._runner = runner
        self._settings = settings
        self._warned: dict[str, float] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        seen: int | None = None
        tidied, told = 0.0, ""
        while True:
            try:
                before, seen = seen, await self._inbox.database.run(ledger.version)
                if seen != before:
                    self._runner.wake()
                if time.monotonic() - tidied > TIDY_EVERY:
                    tidied = time.monotonic()
                    await self.tidy(time.time())
                told = ""
            except StoreError as error:
                # Once: a disk that is full stays so for long, and a log of it would fill another.
                if str(error) != told:
                    log.error("the inbox cannot be looked after: %s", error)
                told = str(error)
            await asyncio.sleep(LOOK_EVERY)

    async def tidy(self, now: float) -> None:
        """Forget what is old, and warn of webhooks that the Hub will soon hold back.

        Args:
            now: seconds since 1970.
        """
        kept = self._settings
        pruned = 1
        while pruned:
            # A few at a time: deliveries are written in between.
            pruned = await self._inbox.database.run(
                records.prune, now=now, kept=kept.kept, kept_dead=kept.kept_dead, kept_bytes=kept.kept_bytes
            )
        counts = await self._inbox.database.run(records.counts, since=now - DAY)
        for webhook_id, count in counts.items():
            if count >= WARNED_AT * HUB_LIMIT and now - self._warned.get(webhook_id, 0.0) >= DAY:
                self._warned[webhook_id] = now
                log.warning(
                    "webhook %s had %d deliveries within a day; the Hub stops at %d", webhook_id, count, HUB_LIMIT
                )
