"""Rooms that a server made and, killed or cut off, did not remove: they are removed when that harms nobody."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from service.errors import ServiceError
from service.sessions.records import Orphan, SessionRecords
from service.transport.base import Transport

logger = logging.getLogger(__name__)

# Seconds for the rooms of one session.
PATIENCE = 10.0
AT_A_TIME = 4
# Starts of a server, or deletions, after which rooms are left to whoever keeps the transport server.
TRIES = 5


class Orphans:
    """Cleans up in the background; nothing waits for it, and what it does not manage is tried at the next start.

    Only rooms of sessions that are to be gone (deleted, or replaced by one with other rooms) come here. Those of an
    interrupted one stay: its robot may wait in them for the restart. And a room that anybody is in is left alone.
    """

    def __init__(self, transport: Transport, records: SessionRecords):
        self._transport = transport
        self._records = records
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._tasks: set[asyncio.Task[None]] = set()

    def clean(self, orphans: Iterable[Orphan]) -> None:
        """Begin."""
        for orphan in orphans:
            task = asyncio.create_task(self._clean(orphan), name=f"orphan rooms {orphan.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop where it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _clean(self, orphan: Orphan) -> None:
        where = f"rooms {', '.join(orphan.rooms)} in workspace {orphan.workspace_id}"
        try:
            async with self._places, asyncio.timeout(PATIENCE):
                left = await self._transport.clear(
                    orphan.url,
                    workspace_id=orphan.workspace_id,
                    rooms=orphan.rooms,
                    cameras=orphan.cameras,
                    claim=orphan.claim,
                )
        except (ServiceError, TimeoutError) as error:
            left, trouble = orphan.rooms, str(error) or "no answer in time"
        else:
            trouble = f"somebody is in {', '.join(left)}"
        if not left:
            logger.info("%s are gone", where)
            self._records.swept(orphan)
        elif orphan.tries + 1 >= TRIES:
            logger.warning("%s are left behind: %s", where, trouble)
            self._records.swept(orphan)
        else:
            logger.info("%s are left until the next start: %s", where, trouble)
            cameras = tuple(room for room in left if room in orphan.cameras)
            self._records.leave(replace(orphan, rooms=tuple(left), cameras=cameras, tries=orphan.tries + 1))
