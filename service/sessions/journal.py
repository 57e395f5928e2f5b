"""Keeps records of living, interrupted and orphaned sessions current."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol
from uuid import uuid4

from service.errors import NotKept, ServiceError
from service.sessions.interrupted import Interrupted
from service.sessions.records import LAST_PATIENCE, PATIENCE, Latch, Orphan, SessionRecord, SessionRecords
from service.sessions.request import NewSession
from service.sessions.session import Session
from service.stage import Stage
from service.transport.link import Transport


class RecordWriter:
    """The record of one session, as it changes. Nothing here waits for the disk but ``add``."""

    def __init__(self, records: SessionRecords, record: SessionRecord):
        self.record = record
        self._records = records
        self._is_dropped = self._is_given_up = False
        records.put(record)

    def __contains__(self, room: object) -> bool:
        """Whether this server made this room, now or before it was killed."""
        return room in self.record.made

    async def add(self, room: str) -> None:
        """This room is about to be made: whoever comes after a kill has to know whose it is."""
        if room not in self.record.made and not self._is_given_up:
            self.record = replace(self.record, made=(*self.record.made, room))
            if not self._is_dropped:
                self._records.put(self.record)
        # Rooms that are made again when a link comes back must not wait for a disk to be repaired.
        with suppress(NotKept):
            await self._records.written()

    def note(self, session: Session) -> None:
        """Write down how it stands. One that failed before it was ready was never promised to anybody: it goes."""
        if self._is_dropped or session.stage is Stage.DELETED:
            return
        is_ready = self.record.is_ready or session.stage not in (Stage.INITIALIZING, Stage.ERROR)
        if not is_ready and session.stage is Stage.ERROR:
            self.drop()
            return
        reason = None if session.is_latched else session.reason
        stage = str(session.stage)
        self.record = replace(self.record, new=session.new, stage=stage, reason=reason, is_ready=is_ready)
        self._records.put(self.record)

    def shut_down(self) -> None:
        """The server ends in order; it stood as it was noted last. One that never was ready goes: its maker is told."""
        if not self.record.is_ready:
            self.drop()
        elif not self._is_dropped:
            self.record = replace(self.record, is_shut_down=True)
            self._records.put(self.record)

    def give_up(self) -> None:
        """Forget it, and leave its rooms as they are: they are another server's now."""
        self.drop()
        self._is_given_up = True
        self.record = replace(self.record, made=())

    def drop(self) -> None:
        """Forget it."""
        self._is_dropped = True
        self._records.drop(self.record.new.session_id)


def rooms_in(record: SessionRecord) -> tuple[str, ...]:
    """The ids of all its rooms, whoever made them."""
    rooms = record.rooms()
    return tuple(filter(None, (*rooms.cameras.values(), rooms.joint_input, rooms.joint_output)))


def made_before(before: SessionRecord, now: SessionRecord) -> tuple[str, ...]:
    """Rooms of the session now that were made by this server for the one before it."""
    old, new = before.new, now.new
    if (old.transport_server_url, old.workspace_id) != (new.transport_server_url, new.workspace_id):
        return ()
    return tuple(room for room in rooms_in(now) if room in before.made)


def orphan_of(record: SessionRecord) -> Orphan | None:
    """The rooms that this server made for a session, which are to go; None when it made none."""
    if not record.made:
        return None
    cameras = set(record.rooms().cameras.values())
    return Orphan(
        id=uuid4().hex,
        url=record.new.transport_server_url,
        workspace_id=record.rooms().workspace_id,
        rooms=record.made,
        cameras=tuple(room for room in record.made if room in cameras),
        claim=record.claim,
    )


def orphan_between(before: SessionRecord, now: SessionRecord) -> Orphan | None:
    """Likewise, of a session that is replaced: those that the new one does not use."""
    used = made_before(before, now)
    return orphan_of(replace(before, made=tuple(room for room in before.made if room not in used)))


logger = logging.getLogger(__name__)


class SharedSessions(Protocol):
    """The database in which several servers tell each other of their sessions (`service.distributed.peers`).

    Attributes:
        trouble: why it cannot be told anything now, or None.
    """

    trouble: str | None

    async def tell(self) -> None:
        """Return when it knows what was noted until now, or cannot be told; never raises."""
        ...


class SessionJournal:
    """Notes what happens to sessions; only `written` and `try_written` wait, for the disk and the shared database."""

    def __init__(self, records: SessionRecords):
        self._records = records
        self._shared: SharedSessions | None = None
        self._kept: dict[str, RecordWriter] = {}
        self._is_closing = False

    def left(self, most: int) -> list[SessionRecord]:
        """Sessions that the process before left, the newest of them, oldest first; the others are forgotten."""
        found = self._records.found
        listed = found[-most:]
        for record in found[: len(found) - len(listed)]:
            logger.warning("session %s, which nobody restarted or deleted, is forgotten", record.new.session_id)
            self._records.drop(record.new.session_id)
        return list(listed)

    def begin(self, record: SessionRecord, before: SessionRecord | None) -> tuple[RecordWriter, Orphan | None]:
        """A session begins, in the place of one from before or of none.

        Returns:
            What keeps its record, and the rooms of the one before that it does not use.
        """
        # In one transaction with the record that takes the place of the one that knew of these rooms.
        orphan = None if before is None else orphan_between(before, record)
        if orphan is not None:
            self._records.leave(orphan)
        kept = self._kept[record.new.session_id] = RecordWriter(self._records, record)
        return kept, orphan

    def has(self, kept: RecordWriter) -> bool:
        """Whether nobody deleted its session, or made another one of its id."""
        return self._kept.get(kept.record.new.session_id) is kept

    def drop(self, session_id: str) -> None:
        """A session goes that leaves no rooms."""
        if (kept := self._kept.pop(session_id, None)) is not None:
            kept.drop()

    def go_back(self, before: SessionRecord) -> None:
        """A session from before could not be brought back: it is what it was."""
        self.drop(before.new.session_id)
        self._records.put(before)

    def record_of(self, session_id: str) -> SessionRecord | None:
        """Of a session of this process that was ready once."""
        kept = self._kept.get(session_id)
        return kept.record if kept is not None and kept.record.is_ready else None

    def take_in(self, record: SessionRecord, latch: str | None) -> None:
        """A session of another server is this one's from now on."""
        self._records.put(record)
        if latch is None:
            self.unlatch(record.new.session_id)  # of one that was here before, and was reset elsewhere
        else:
            self.take_latch(record.new.session_id, Latch(latch, record.new.owner))

    def take_latch(self, session_id: str, latch: Latch) -> None:
        """The next session of this id begins with an emergency stop."""
        self._records.latch(session_id, latch)

    def give_up(self, session: Session | Interrupted) -> None:
        """A session is another server's from now on, and its rooms with it."""
        if isinstance(session, Interrupted):
            self._records.drop(session.id)
        else:
            self._kept.pop(session.id).give_up()
        self._records.unlatch(session.id)

    def delete(self, session: Session | Interrupted) -> Orphan | None:
        """A session goes, and with it the rooms that this server made for it, which are returned."""
        if isinstance(session, Interrupted):
            record = session.record
            self._records.drop(session.id)
        else:
            kept = self._kept.pop(session.id)
            record = kept.record
            kept.drop()
        orphan = orphan_of(record)
        if orphan is not None:
            self._records.leave(orphan)
        return orphan

    def swept(self, orphan: Orphan) -> None:
        """Its rooms are gone."""
        self._records.swept(orphan)

    def note(self, session: Session | Interrupted) -> None:
        """How a session stands."""
        if session.latch is not None and session.id not in self._records.latches:
            self._records.latch(session.id, Latch(session.latch, session.new.owner))
        if isinstance(session, Session) and (kept := self._kept.get(session.id)) is not None:
            kept.note(session)

    def latch_of(self, new: NewSession) -> str | None:
        """The text of an emergency stop that waits for its reset, as the owner of this session may read it."""
        latch = self.latch(new.session_id)
        if latch is None or latch.owner == new.owner:
            return latch.reason if latch else None
        return "an emergency stop of a session of this id"  # whose it was, and why, is not this one's business

    def latch(self, session_id: str) -> Latch | None:
        """The emergency stop of this id that waits for its reset."""
        return self._records.latches.get(session_id)

    def unlatch(self, session_id: str) -> None:
        """It was reset."""
        self._records.unlatch(session_id)

    def caveat(self) -> Mapping[str, str]:
        """What an answer has to say beside: that something is not written down. Empty when all is."""
        if self._records.trouble is not None:
            return {"warning": f"not written down, so it is lost if the server is killed: {self._records.trouble}"}
        if self._shared is not None and self._shared.trouble is not None:
            return {"warning": f"kept by this server, but other servers do not know of it yet: {self._shared.trouble}"}
        return {}

    def share(self, shared: SharedSessions) -> None:
        """From now on whatever is acknowledged is told to other servers, too."""
        self._shared = shared

    def ended(self) -> Mapping[str, Latch | None]:
        """Sessions that went and of which other servers do not know it yet, with the emergency stop of their id."""
        return {session_id: self._records.latches.get(session_id) for session_id in self._records.ended}

    def forget_ends(self, session_ids: Iterable[str]) -> None:
        """They know of these."""
        for session_id in session_ids:
            self._records.forget_end(session_id)

    async def written(self) -> None:
        """Return when all that was noted is on the disk.

        Raises:
            NotKept: it is not, and why.
        """
        await self._records.written()

    async def try_written(self) -> None:
        """Likewise, but where it is not, the next answer's `caveat` says it."""
        with suppress(NotKept):  # logged there
            await self._records.written(LAST_PATIENCE if self._is_closing else PATIENCE)
        if self._shared is not None and not self._is_closing:
            await self._shared.tell()

    def begin_close(self) -> None:
        """The server is about to end: nothing waits long for the disk any more."""
        self._is_closing = True

    def shut_down(self) -> None:
        """The server ends in order."""
        for kept in self._kept.values():
            kept.shut_down()

    async def close(self) -> None:
        """Write what is noted and let go of the file."""
        await self._records.close()


# Seconds for the rooms of one session.
REMOVAL_TIMEOUT = 10.0
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
            async with self._places, asyncio.timeout(REMOVAL_TIMEOUT):
                left = await self._transport.remove_empty_rooms(
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
