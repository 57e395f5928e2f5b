"""All sessions: create, find, move, delete, close."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias
from uuid import uuid4

from service.control.lease import Leases
from service.errors import MoveRefused, NotKept, ServiceError, SessionExists, TooManySessions, UnknownSession
from service.inference.engine import Engine, LoadPolicy
from service.sessions.base_session import SessionStatus
from service.sessions.interrupted import Interrupted
from service.sessions.journal import Orphans, RecordWriter, SessionJournal, SharedSessions, made_before, rooms_in
from service.sessions.records import Latch, Orphan, SessionRecord, SessionRecords
from service.sessions.request import NewSession, SessionSettings
from service.sessions.session import Session, Tell
from service.stage import MOVING, Stage
from service.transport.link import Transport

__all__ = ["Admit", "Listed", "NewSession", "Session", "SessionSettings", "SessionStatus", "Sessions"]

logger = logging.getLogger(__name__)

Listed: TypeAlias = Session | Interrupted
Admit: TypeAlias = Callable[[NewSession], Awaitable[None]]
# Interrupted ones that nobody restarts or deletes, per session that the settings allow; the oldest are forgotten.
INTERRUPTED_KEPT = 4


class Sessions:
    """All sessions of one process. It owns the engine and the records from here on: ``close`` ends them too.

    Whatever is asked of it is on the disk before it returns, robots are stopped before that is waited for. When it
    cannot be written, no session is made, and everything else is done and said by ``caveat``.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        load: LoadPolicy,
        engine: Engine,
        settings: SessionSettings | None = None,
        tell: Tell = lambda event, about: None,
        admit: Admit | None = None,
        records: SessionRecords | None = None,
    ):
        """Those that a process before this one left are listed as interrupted.

        Args:
            tell: hears of every session what ``service.sessions.session.EVENTS`` lists, and when one is gone.
            admit: refuses what this server does for nobody (``service.sessions.request``), before anything is done.
            records: nothing outlives the process without.
        """
        self.engine = engine
        engine.has_running_robot = self.has_running_robot
        self.settings = settings or SessionSettings()
        self._transport = transport
        self._load = load
        self._tell = tell
        self._admit = admit
        self._leases = Leases()
        records = records or SessionRecords()
        self._ledger = SessionJournal(records)
        self._sessions: dict[str, Listed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._leaving: list[Session] = []
        self._orphans = Orphans(transport, records)
        self._orphans.clean(records.orphans)
        for record in self._ledger.left(INTERRUPTED_KEPT * self.settings.limits.max_sessions):
            self._sessions[record.new.session_id] = self._interrupted(record)

    def _interrupted(self, record: SessionRecord, failure: str = "") -> Interrupted:
        return Interrupted(record, self.engine, self._load, self._ledger.latch_of(record.new), failure)

    async def create(self, new: NewSession) -> Session:
        """Make a session and wait until it is ready; it takes the place of a failed or interrupted one of its owner.

        Cancelling this only ends the waiting: the session goes on and is listed.

        Raises:
            InvalidRequest: a field cannot be used.
            SessionExists: the id is taken.
            TooManySessions: there are as many as the settings allow.
            NotKept: it cannot be written down; no room was made.
            PolicyError: the policy cannot be loaded or does not fit; no room was made.
            TransportError: the rooms cannot be made or joined; those made were removed.
        """
        self.settings.check(new)
        if self._admit is not None:
            await self._admit(new)
        existing = self._sessions.get(new.session_id)
        if existing is not None and existing.new.owner != new.owner:
            raise SessionExists(f"session {new.session_id!r} exists already")
        if existing is not None and not isinstance(existing, Interrupted) and not _has_failed(existing):
            state = "being deleted; try again when it is gone" if existing.stage is Stage.DELETED else existing.stage
            raise SessionExists(f"session {new.session_id!r} exists already: it is {state}")
        self._check_place()
        before = existing if isinstance(existing, Interrupted) else None
        is_ours = new.workspace_id is None
        # Named here, so that whoever comes after a kill knows where its rooms are.
        record = SessionRecord(replace(new, workspace_id=str(uuid4())) if is_ours else new)
        if existing is not None:
            record = replace(record, claim=existing.claim)  # its rooms elsewhere may still know it by that
        of_before = () if before is None else made_before(before.record, record)
        self._sessions.pop(new.session_id, None)
        self._forget_old_failures()
        return await self._begin(replace(record, made=rooms_in(record) if is_ours else of_before), before)

    async def _revive(self, before: Interrupted) -> Session:
        before.check_restart()
        self.settings.check(before.new)
        if self._admit is not None:
            await self._admit(before.new)
        if self._sessions.get(before.id) is not before:
            raise MoveRefused(f"session {before.id!r} was restarted or deleted meanwhile")
        self._check_place()
        again = replace(before.record, stage=str(Stage.INITIALIZING), reason=None, is_shut_down=False)
        return await self._begin(again, before)

    def _check_place(self) -> None:
        if self._is_closing:
            raise MoveRefused("the server is shutting down; no session can be made")
        living = sum(not _has_failed(session) for session in self._living())
        if living >= self.settings.limits.max_sessions:
            raise TooManySessions(f"{living} sessions, and no more are allowed; delete one first")

    async def _begin(self, record: SessionRecord, before: Interrupted | None) -> Session:
        kept, orphan = self._ledger.begin(record, None if before is None else before.record)
        session = self._sessions[record.new.session_id] = Session(
            record.new,
            transport=self._transport,
            engine=self.engine,
            load=self._load,
            settings=self.settings,
            tell=self._heard,
            leases=self._leases,
            made=kept,
            latch=self._ledger.latch_of(record.new),
            claim=record.claim,
        )
        # Asked now: it may be ready before the task begins.
        await self._see_through(self._settle(session, kept, before, orphan, is_promised=record.is_ready))
        return session

    async def _settle(
        self,
        session: Session,
        kept: RecordWriter,
        before: Interrupted | None,
        orphan: Orphan | None,
        *,
        is_promised: bool,
    ) -> None:
        try:
            if not is_promised:
                await self._ledger.written()
            await session.ready()
        except ServiceError as error:
            if isinstance(error, NotKept) and session.stage is not Stage.DELETED:
                session.begin_end()
                await session.end()
            # Unless somebody deleted it, or made another one, meanwhile.
            if self._ledger.has(kept):
                self._could_not(error, session, before)
                if orphan is not None:
                    self._ledger.swept(orphan)
            await self._ledger.try_written()
            raise
        await self._ledger.try_written()
        if orphan is not None:
            self._orphans.clean([orphan])

    def _could_not(self, error: ServiceError, session: Session, before: Interrupted | None) -> None:
        if before is not None:
            self._ledger.go_back(before.record)
            self._sessions[before.id] = self._interrupted(before.record, f"it could not be brought back: {error}")
        elif isinstance(error, NotKept):
            self._ledger.drop(session.id)
            del self._sessions[session.id]

    def _forget_old_failures(self) -> None:
        failed = [session.id for session in self._living() if _has_failed(session)]
        for session_id in failed[: max(len(failed) - self.settings.failed_kept + 1, 0)]:
            del self._sessions[session_id]
            self._ledger.drop(session_id)

    def get(self, session_id: str) -> Listed:
        """The session of this id.

        Raises:
            UnknownSession: there is none.
        """
        session = self._sessions.get(session_id)
        if session is None or session.stage is Stage.DELETED:
            raise UnknownSession(f"Session {session_id} not found")
        return session

    def live(self, session_id: str) -> Session:
        """The session of this id, with its policy and rooms.

        Raises:
            UnknownSession: there is none.
            MoveRefused: it is interrupted.
        """
        session = self.get(session_id)
        if isinstance(session, Interrupted):
            raise session.refusal()
        return session

    def find(self, session_id: str) -> Listed | None:
        """The session of this id, also while it is being deleted: its robot is its own until it has let go."""
        return self._sessions.get(session_id)

    @property
    def is_closing(self) -> bool:
        """Whether the server is shutting down."""
        return self._is_closing

    def list(self) -> list[Listed]:
        """All sessions, oldest first; failed and interrupted ones too."""
        return [session for session in self._sessions.values() if session.stage is not Stage.DELETED]

    def _living(self) -> "list[Session]":
        return [session for session in self._sessions.values() if isinstance(session, Session)]

    def has_running_robot(self) -> bool:
        """Whether any session moves its robot, or would if its link came back."""
        return any(session.stage in MOVING for session in self._sessions.values())

    def caveat(self) -> Mapping[str, str]:
        """What an answer has to say beside: that something is not written down. Empty when all is."""
        return self._ledger.caveat()

    # What is asked of one.

    async def start(self, session_id: str) -> Listed:
        """Let a session move its robot."""
        session = self.get(session_id)
        session.start()
        return await self._noted(session)

    async def stop(self, session_id: str) -> Listed:
        """Stop a session's robot."""
        session = self.get(session_id)
        session.stop()
        return await self._noted(session)

    async def restart(self, session_id: str) -> Listed:
        """Start a session anew. An interrupted one is loaded and joins its rooms, and then waits for its start."""
        session = self.get(session_id)
        if isinstance(session, Interrupted):
            return await self._revive(session)
        session.restart()
        return await self._noted(session)

    async def adjust(self, session_id: str, changes: Mapping[str, object]) -> Session:
        """Join a session's chunks, or ask for them, in another way from the next chunk on; see ``Session.adjust``."""
        session = self.live(session_id)
        await session.adjust(changes)
        await self._noted(session)
        return session

    async def reset(self, session_id: str) -> Listed:
        """Take the latch of an emergency stop off."""
        session = self.get(session_id)
        session.reset()
        self._ledger.unlatch(session_id)
        return await self._noted(session)

    async def forget_latch(self, session_id: str, sees: Callable[[str | None], bool]) -> bool:
        """Take the latch off an id whose session is gone; False when there is none to take off, or a session.

        Args:
            sees: whether the caller may see what belongs to this owner.
        """
        latch = self._ledger.latch(session_id)
        if latch is None or not sees(latch.owner) or any(session.id == session_id for session in self.list()):
            return False
        self._ledger.unlatch(session_id)
        await self._ledger.try_written()
        return True

    async def delete(self, session_id: str) -> None:
        """Stop a session's robot, leave and remove its rooms. Cancelling this only ends the waiting.

        The latch of an emergency stop stays with the id.
        """
        session = self.get(session_id)
        session.begin_end()
        orphan = self._ledger.delete(session)
        await self._see_through(self._end(session, orphan))

    # Sessions that move between servers which share a database.

    def share(self, shared: SharedSessions) -> None:
        """From now on other servers are told of what happens here, before it is acknowledged."""
        self._ledger.share(shared)

    def ended(self) -> Mapping[str, Latch | None]:
        """Sessions that went and of which other servers do not know it yet, with the emergency stop of their id."""
        return self._ledger.ended()

    def forget_ends(self, session_ids: Iterable[str]) -> None:
        """Other servers know of these."""
        self._ledger.forget_ends(session_ids)

    def record_of(self, session_id: str) -> SessionRecord | None:
        """How a session is written down; None for one that is not, or not yet promised to anybody."""
        session = self._sessions.get(session_id)
        if isinstance(session, Interrupted):
            return session.record
        return self._ledger.record_of(session_id)

    def latch_of(self, session_id: str) -> Latch | None:
        """The emergency stop of this id that nobody has reset, also when its session is gone."""
        return self._ledger.latch(session_id)

    def take_latch(self, session_id: str, latch: Latch | None) -> None:
        """The next session of this id begins with the emergency stop that other servers know of, or without one."""
        if latch is None and session_id not in self._sessions:
            self._ledger.unlatch(session_id)  # it was reset elsewhere
        elif latch is not None and self._ledger.latch(session_id) is None:
            self._ledger.take_latch(session_id, latch)

    async def take_in(self, record: SessionRecord, latch: str | None) -> Listed:
        """List a session of another server, which ended, as interrupted here.

        Raises:
            SessionExists: there is one of its id.
        """
        if record.new.session_id in self._sessions:
            raise SessionExists(f"session {record.new.session_id!r} exists already")
        self._ledger.take_in(record, latch)
        session = self._sessions[record.new.session_id] = self._interrupted(record)
        await self._ledger.try_written()
        return session

    async def give_up(self, session_id: str) -> None:
        """Another server has this session now: hold its robot at once and forget it; its rooms are the other's."""
        session = self._sessions.get(session_id)
        if session is None or session.stage is Stage.DELETED:
            return
        session.begin_end()
        self._ledger.give_up(session)
        await self._see_through(self._end(session))

    async def emergency_stop(self, reason: str, session_id: str | None = None) -> "list[str]":
        """Latch an emergency stop on one session, or on all of them; returns their ids."""
        # Those that are being deleted, too: the latch is their successors'.
        stopped = list(self._sessions.values()) if session_id is None else [self.get(session_id)]
        for session in stopped:
            session.emergency_stop(reason)
        for session in stopped:
            self._ledger.note(session)
        await self._ledger.try_written()
        return [session.id for session in stopped if session.stage is not Stage.DELETED]

    # Writing down.

    def _heard(self, event: str, about: dict[str, object]) -> None:
        """Something happened to a session: whoever has to hear of it does, and it is written down soon."""
        session = self._sessions.get(str(about["session_id"]))
        if session is not None:
            self._ledger.note(session)
        self._tell(event, about)

    async def _noted(self, session: Listed) -> Listed:
        self._ledger.note(session)
        await self._ledger.try_written()
        return session

    # The end.

    async def _see_through(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Looked at here: whoever asked for it may be gone, and what became of it says the session.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(task)

    async def _end(self, session: Listed, orphan: Orphan | None = None) -> None:
        """Wait until it has let go of everything."""
        has_left = isinstance(session, Session) and await session.end()
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
        self._tell("session.deleted", {"session_id": session.id, "policy_path": session.new.policy_path})
        if orphan is not None and has_left:
            self._ledger.swept(orphan)
        await self._ledger.try_written()
        if orphan is not None and not has_left:
            self._orphans.clean([orphan])

    def begin_close(self) -> None:
        """Stop every robot before this returns, and begin to leave; ``close`` waits for it."""
        if self._is_closing:
            return
        self._is_closing = True
        self._ledger.begin_close()
        self._leaving = [session for session in self._living() if session.stage is not Stage.DELETED]
        for session in self._leaving:
            session.begin_end()

    async def close(self) -> None:
        """Stop every robot at once, then leave all rooms and end the engine; takes less than 5 s.

        Sessions that nobody deleted are interrupted ones of the next start.
        """
        self.begin_close()
        self._ledger.shut_down()
        await asyncio.gather(*(self._end(session) for session in self._leaving))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._orphans.close()
        await self.engine.close()
        await self._ledger.close()


def _has_failed(session: Session) -> bool:
    return session.stage is Stage.ERROR and session.is_over
