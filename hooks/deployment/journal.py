"""What happened: kept, logged, told to whoever listens, and what must not happen again."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hooks.database import Database
from hooks.deployment.quarantine import Quarantine
from hooks.deployment.records import Record, Records
from hooks.errors import StoreError

OnEvent = Callable[[str, Mapping[str, Any]], Awaitable[None] | None]

EVENTS = {
    "swapped": "policy.swapped",
    "staged": "policy.staged",
    "rejected": "policy.rejected",
    "rolled_back": "policy.rolled_back",
    "failed": "policy.failed",
    "alert": "policy.alert",
}

logger = logging.getLogger(__name__)


class Journal:
    """Records and quarantine of one database. A disk that is full is said in the log and stops no robot."""

    def __init__(self, database: Database, kept: int, on_event: OnEvent | None):
        """Read what there is; ``on_event`` is told ``EVENTS`` with the record as JSON."""
        self.records = Records(database, kept)
        self.quarantine = Quarantine(database)
        self._on_event = on_event

    async def save(self, record: Record) -> None:
        """Keep one as it is now."""
        try:
            await self.records.save(record)
        except StoreError as error:
            logger.error("deployment %s is not written down: %s", record.id, error)

    def save_now(self, record: Record) -> None:
        """The same, for who cannot await."""
        try:
            self.records.save_now(record)
        except StoreError as error:
            logger.error("deployment %s is not written down: %s", record.id, error)

    async def isolate(self, record: Record) -> None:
        """Put its commit into quarantine."""
        if record.sha is None:
            return
        try:
            await self.quarantine.add(record.repo, record.sha, record.reason or "", record.text, record.id)
        except StoreError as error:
            logger.error("the quarantine of %s ends with this process: %s", record.sha, error)

    async def finish(self, record: Record) -> None:
        """Keep one that has ended, and tell of it."""
        level = logging.INFO if record.result in ("swapped", "staged", "noop", "superseded") else logging.WARNING
        logger.log(level, "%s", record.in_words())
        await self.save(record)
        event = EVENTS.get(record.result or "")
        if event is None or self._on_event is None:
            return
        try:
            answer = self._on_event(event, record.as_json())
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            logger.exception("deployment %s: telling of %s crashed", record.id, event)
