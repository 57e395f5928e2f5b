"""Journal of sessions: keeps records of living, interrupted and orphaned ones current."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

from service.errors import NotKept, ServiceError
from service.sessions.base_session import SessionState
from service.sessions.interrupted import InterruptedSession
from service.sessions.records import CLOSE_TIMEOUT, WRITE_TIMEOUT, Latch, SessionRecord, SessionRecords
from service.sessions.request import NewSession
from service.sessions.session import Session
from service.stage import Stage
from service.transport.link import Orphan, Transport


class RecordWriter:
    """Writes the record of one session as it changes; only ``add`` waits for the disk."""

    def __init__(self, records: SessionRecords, record: SessionRecord):
        self.record = record
        self._records = records
        self._is_dropped = self._is_handed_over = False
        records.put(record)

    def __contains__(self, room: object) -> bool:
        """Return whether this server made this room, now or before it was killed."""
        return room in self.record.made

    async def add(self, room: str) -> None:
        """Record a room before it is made, for the case that the process is killed."""
        if room not in self.record.made and not self._is_handed_over:
            self.record = replace(self.record, made=(*self.record.made, room))
            if not self._is_dropped:
                self._records.put(self.record)
        # A returning link must not wait for the repair of a disk.
        with suppress(NotKept):
            await self._records.flush()

    def update(self, new: NewSession, state: SessionState) -> None:
        """Write the session's request and stage. A session that failed before it was ready is dropped."""
        if self._is_dropped or state.stage is Stage.DELETED:
            return
        is_ready = self.record.is_ready or state.stage not in (Stage.INITIALIZING, Stage.ERROR)
        if not is_ready and state.stage is Stage.ERROR:
            self.drop()
            return
        reason = None if state.latch is not None else state.reason
        self.record = replace(self.record, new=new, stage=str(state.stage), reason=reason, is_ready=is_ready)
        self._records.put(self.record)

    def mark_shut_down(self) -> None:
        """Mark an orderly end of the server. A session that never was ready is dropped."""
        if not self.record.is_ready:
            self.drop()
        elif not self._is_dropped:
            self.record = replace(self.record, is_shut_down=True)
            self._records.put(self.record)

    def hand_over(self) -> None:
        """Drop the record but leave the rooms: they are another server's now."""
        self.drop()
        self._is_handed_over = True
        self.record = replace(self.record, made=())

    def drop(self) -> None:
        """Delete the record."""
        self._is_dropped = True
        self._records.drop(self.record.new.session_id)


def reused_rooms(before: SessionRecord, now: SessionRecord) -> tuple[str, ...]:
    """Return the rooms of the new session that this server made for the one before it."""
    old, new = before.new, now.new
    if (old.transport_server_url, old.workspace_id) != (new.transport_server_url, new.workspace_id):
        return ()
    return tuple(room for room in new.rooms().ids if room in before.made)


def make_orphan(record: SessionRecord) -> Orphan | None:
    """Return the rooms that this server made for a session, to be removed; None when it made none."""
    if not record.made:
        return None
    rooms = record.new.rooms()
    cameras = set(rooms.cameras.values())
    return Orphan(
        id=uuid4().hex,
        url=record.new.transport_server_url,
        workspace_id=rooms.workspace_id,
        rooms=record.made,
        cameras=tuple(room for room in record.made if room in cameras),
        claim=record.claim,
    )


logger = logging.getLogger(__name__)


class SessionJournal:
    """Journal of all sessions; only `try_flush` waits, for the disk and the shared database.

    Attributes:
        publish: publishes all changes to the other servers within this number of seconds, or fails without an error;
            None without other servers.
        read_trouble: returns why changes cannot be published, or None.
        is_closing: whether the server ends, so that waits for the disk are short.
    """

    def __init__(self, records: SessionRecords):
        self._records = records
        self.publish: Callable[[float | None], Awaitable[None]] | None = None
        self.read_trouble: Callable[[], str | None] = lambda: None
        self._writers: dict[str, RecordWriter] = {}
        self.is_closing = False

    def list_interrupted(self, limit: int) -> list[SessionRecord]:
        """Return the newest sessions that an earlier process left, oldest first; the others are dropped."""
        records = self._records.interrupted
        listed = records[-limit:]
        for record in records[: len(records) - len(listed)]:
            logger.warning("session %s, which was neither restarted nor deleted, is forgotten", record.new.session_id)
            self._records.drop(record.new.session_id)
        return list(listed)

    def begin(self, record: SessionRecord, before: SessionRecord | None) -> tuple[RecordWriter, Orphan | None]:
        """Begin the record of a session; return its writer, and the rooms of ``before`` that it does not use."""
        orphan = None
        if before is not None:
            used = reused_rooms(before, record)
            orphan = make_orphan(replace(before, made=tuple(room for room in before.made if room not in used)))
        if orphan is not None:
            self._records.add_orphan(orphan)  # the new record shares its transaction
        writer = self._writers[record.new.session_id] = RecordWriter(self._records, record)
        return writer, orphan

    def is_current(self, writer: RecordWriter) -> bool:
        """Return whether a session was neither deleted nor replaced by another session with its id."""
        return self._writers.get(writer.record.new.session_id) is writer

    def drop(self, session_id: str) -> None:
        """Drop a session that leaves no rooms."""
        if (writer := self._writers.pop(session_id, None)) is not None:
            writer.drop()

    def restore(self, before: SessionRecord) -> None:
        """Restore the record of a session whose restart failed."""
        self.drop(before.new.session_id)
        self._records.put(before)

    def get_record(self, session_id: str) -> SessionRecord | None:
        """Return the record of a session of this process that was ready once, or None."""
        writer = self._writers.get(session_id)
        return writer.record if writer is not None and writer.record.is_ready else None

    def adopt(self, record: SessionRecord, latch: str | None) -> None:
        """Record a session that this server took over from another server."""
        self._records.put(record)
        if latch is None:
            self._records.clear_latch(record.new.session_id)  # another server has reset it
        else:
            self._records.set_latch(record.new.session_id, Latch(latch, record.new.owner))

    def hand_over(self, session: Session | InterruptedSession) -> None:
        """Drop a session that is another server's from now on, with its rooms."""
        if isinstance(session, InterruptedSession):
            self._records.drop(session.id)
        else:
            self._writers.pop(session.id).hand_over()
        self._records.clear_latch(session.id)

    def delete(self, session: Session | InterruptedSession) -> Orphan | None:
        """Drop a session, and return the rooms that this server made for it, which are to be removed."""
        if isinstance(session, InterruptedSession):
            record = session.record
            self._records.drop(session.id)
        else:
            writer = self._writers.pop(session.id)
            record = writer.record
            writer.drop()
        orphan = make_orphan(record)
        if orphan is not None:
            self._records.add_orphan(orphan)
        return orphan

    def update(self, new: NewSession, state: SessionState) -> None:
        """Write a session's request, stage and latch."""
        if state.latch is not None and new.session_id not in self._records.latches:
            self._records.set_latch(new.session_id, Latch(state.latch, new.owner))
        # An interrupted session has no writer.
        if (writer := self._writers.get(new.session_id)) is not None:
            writer.update(new, state)

    def describe_latch(self, new: NewSession) -> str | None:
        """Return the text of a latched emergency stop of this id; another owner's text is not shown."""
        latch = self._records.latches.get(new.session_id)
        if latch is None or latch.owner == new.owner:
            return latch.reason if latch else None
        return "an emergency stop of a session of this id"

    def get_warning(self) -> Mapping[str, str]:
        """Return the warning that answers carry while something is not written down; empty when all is."""
        if self._records.trouble is not None:
            return {"warning": f"not written down, so it is lost if the server is killed: {self._records.trouble}"}
        if (trouble := self.read_trouble()) is not None:
            return {"warning": f"kept by this server, but other servers do not know of it yet: {trouble}"}
        return {}

    async def try_flush(self, publish_timeout: float | None = None) -> None:
        """Wait until all changes are on the disk and published; after a failure the next answer carries a warning.

        Args:
            publish_timeout: seconds that the shared database may take to answer; None for its own limit.
        """
        with suppress(NotKept):  # The records log it.
            await self._records.flush(CLOSE_TIMEOUT if self.is_closing else WRITE_TIMEOUT)
        if self.publish is not None and not self.is_closing:
            await self.publish(publish_timeout)

    def mark_shut_down(self) -> None:
        """Mark all sessions as ended in order."""
        for writer in self._writers.values():
            writer.mark_shut_down()


# Seconds for the rooms of one session.
REMOVAL_TIMEOUT = 10.0
MAX_CONCURRENT_REMOVALS = 4
# Failed removals after which rooms are left behind.
MAX_TRIES = 5


class OrphanCleaner:
    """Removes empty rooms of deleted or replaced sessions in the background; failures are tried at the next start.

    Rooms of an interrupted session stay, because its robot may wait in them for the restart.
    """

    def __init__(self, transport: Transport, records: SessionRecords):
        self._transport = transport
        self._records = records
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REMOVALS)
        self._tasks: set[asyncio.Task[None]] = set()

    def clean(self, orphans: Iterable[Orphan]) -> None:
        """Begin to remove rooms."""
        for orphan in orphans:
            task = asyncio.create_task(self._clean(orphan), name=f"orphan rooms {orphan.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all removals."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _clean(self, orphan: Orphan) -> None:
        where = f"rooms {', '.join(orphan.rooms)} in workspace {orphan.workspace_id}"
        try:
            async with self._slots, asyncio.timeout(REMOVAL_TIMEOUT):
                left = await self._transport.remove_empty_rooms(orphan)
        except (ServiceError, TimeoutError) as error:
            left, trouble = orphan.rooms, str(error) or "no answer in time"
        else:
            trouble = f"there are participants in {', '.join(left)}"
        if not left:
            logger.info("%s are gone", where)
            self._records.remove_orphan(orphan)
        elif orphan.tries + 1 >= MAX_TRIES:
            logger.warning("%s are left behind: %s", where, trouble)
            self._records.remove_orphan(orphan)
        else:
            logger.info("%s are left until the next start: %s", where, trouble)
            cameras = tuple(room for room in left if room in orphan.cameras)
            self._records.add_orphan(replace(orphan, rooms=tuple(left), cameras=cameras, tries=orphan.tries + 1))
