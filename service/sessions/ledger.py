"""All that is written down of the sessions of this process, and of those that the process before it left."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from service.errors import NotKept
from service.sessions.interrupted import Interrupted
from service.sessions.kept import Kept
from service.sessions.latch import Latch
from service.sessions.made_rooms import orphan_between, orphan_of
from service.sessions.records import LAST_PATIENCE, PATIENCE, Orphan, SessionRecords
from service.sessions.request import NewSession
from service.sessions.session import Session
from service.sessions.session_record import SessionRecord

logger = logging.getLogger(__name__)


class SharedSessions(Protocol):
    """The database in which several servers tell each other of their sessions (`service.cluster.front`).

    Attributes:
        trouble: why it cannot be told anything now, or None.
    """

    trouble: str | None

    async def tell(self) -> None:
        """Return when it knows what was noted until now, or cannot be told; never raises."""
        ...


class Ledger:
    """Notes what happens to sessions; only `written` and `try_written` wait, for the disk and the shared database."""

    def __init__(self, records: SessionRecords):
        self._records = records
        self._shared: SharedSessions | None = None
        self._kept: dict[str, Kept] = {}
        self._is_closing = False

    def left(self, most: int) -> list[SessionRecord]:
        """Sessions that the process before left, the newest of them, oldest first; the others are forgotten."""
        found = self._records.found
        listed = found[-most:]
        for record in found[: len(found) - len(listed)]:
            logger.warning("session %s, which nobody restarted or deleted, is forgotten", record.new.session_id)
            self._records.drop(record.new.session_id)
        return list(listed)

    def begin(self, record: SessionRecord, before: SessionRecord | None) -> tuple[Kept, Orphan | None]:
        """A session begins, in the place of one from before or of none.

        Returns:
            What keeps its record, and the rooms of the one before that it does not use.
        """
        # In one transaction with the record that takes the place of the one that knew of these rooms.
        orphan = None if before is None else orphan_between(before, record)
        if orphan is not None:
            self._records.leave(orphan)
        kept = self._kept[record.new.session_id] = Kept(self._records, record)
        return kept, orphan

    def has(self, kept: Kept) -> bool:
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
