"""How one session of this process is written down, and which of its rooms were made for it."""

from contextlib import suppress
from dataclasses import replace

from service.errors import NotKept
from service.sessions.records import SessionRecords
from service.sessions.session import Session
from service.sessions.session_record import SessionRecord
from service.stage import Stage


class Kept:
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
