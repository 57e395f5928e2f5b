"""Session store: create, find, move, delete and close all sessions of a process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias
from uuid import uuid4

from service.control.lease import Leases
from service.errors import (
    MoveRefused,
    NotKept,
    RoomsTaken,
    ServiceError,
    SessionExists,
    TooManySessions,
    UnknownSession,
)
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy, LoadPolicy
from service.sessions.interrupted import InterruptedSession
from service.sessions.journal import OrphanCleaner, RecordWriter, SessionJournal, reused_rooms
from service.sessions.records import Latch, SessionRecord, SessionRecords
from service.sessions.request import CheckRequest, NewSession, SessionSettings, describe_shared_room
from service.sessions.session import OnEvent, Session, SessionEvent
from service.stage import MOVING, Stage
from service.transport.link import Orphan, Transport

logger = logging.getLogger(__name__)

AnySession: TypeAlias = Session | InterruptedSession
# Largest number of interrupted sessions, as a multiple of ``max_sessions``; the oldest are forgotten.
MAX_INTERRUPTED = 4
# Seconds that the answer to a stop waits for the shared database. The robot is stopped before.
STOP_PUBLISH_TIMEOUT = 0.1


class Sessions:
    """All sessions of one process. It owns the engine and the records: ``close`` ends them too.

    A method returns when its change is on the disk; robots are stopped before. If the disk fails, no session is made,
    and all other changes take effect with a warning (``get_warning``).
    """

    def __init__(
        self,
        *,
        transport: Transport,
        load: LoadPolicy,
        engine: Engine,
        settings: SessionSettings | None = None,
        listeners: Sequence[OnEvent] = (),
        check_request: CheckRequest | None = None,
        records: SessionRecords | None = None,
    ):
        """List sessions of an earlier process as interrupted.

        Args:
            listeners: receive each event of ``service.sessions.session.EVENTS`` and ``session.deleted``, in this order.
            check_request: refuses requests that this server does not allow.
            records: records of sessions; None keeps them in memory.
        """
        self.engine = engine
        engine.has_running_robot = self.has_running_robot
        self.settings = settings or SessionSettings()
        self._transport = transport
        self._load = load
        self._listeners = (self._record_event, *listeners)
        self._check_request = check_request
        self._leases = Leases()
        self._records = records = records or SessionRecords()
        self._journal = SessionJournal(records)
        self._sessions: dict[str, AnySession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: list[Session] = []
        self._orphans = OrphanCleaner(transport, records)
        self._orphans.clean(records.orphans)
        for record in self._journal.list_interrupted(MAX_INTERRUPTED * self.settings.limits.max_sessions):
            self._sessions[record.new.session_id] = self._make_interrupted(record)

    def _make_interrupted(self, record: SessionRecord, failure: str = "") -> InterruptedSession:
        return InterruptedSession(record, self.engine, self._load, self._journal.describe_latch(record.new), failure)

    async def create(self, new: NewSession) -> Session:
        """Create a session and wait until it is ready; it replaces a failed or interrupted session of its owner.

        Cancellation only ends the waiting.

        Raises:
            InvalidRequest: a field cannot be used.
            SessionExists: the id is taken.
            RoomsTaken: another session uses a room of this session.
            TooManySessions: the settings allow no more sessions.
            NotKept: its record cannot be written; no room was made.
            PolicyError: the policy cannot be loaded or does not fit; no room was made.
            TransportError: the rooms cannot be made or joined.
        """
        self.settings.check(new)
        if self._check_request is not None:
            await self._check_request(new)
        existing = self._sessions.get(new.session_id)
        if existing is not None and existing.new.owner != new.owner:
            raise SessionExists(f"session {new.session_id!r} exists already")
        if existing is not None and not isinstance(existing, InterruptedSession) and not _has_failed(existing):
            state = "being deleted; try again when it is gone" if existing.stage is Stage.DELETED else existing.stage
            raise SessionExists(f"session {new.session_id!r} exists already: it is {state}")
        self._check_capacity()
        self._check_rooms(new)
        before = existing if isinstance(existing, InterruptedSession) else None
        is_ours = new.workspace_id is None
        # Chosen before the rooms are made, so that the next process can find them after a kill.
        record = SessionRecord(replace(new, workspace_id=str(uuid4())) if is_ours else new)
        if existing is not None:
            record = replace(record, claim=existing.claim)  # another server may still know its rooms by the claim
        of_before = () if before is None else reused_rooms(before.record, record)
        self._sessions.pop(new.session_id, None)
        self._forget_old_failures()
        return await self._start_session(replace(record, made=record.new.rooms().ids if is_ours else of_before), before)

    def open_policy(self, path: str, revision: str | None) -> AbstractAsyncContextManager[LoadedPolicy]:
        """Keep a policy in memory for sessions; raises as ``PolicyCache.open_policy``."""
        return self.engine.policy_cache.open_policy(self._load, path, revision, lambda stage: None)

    async def _restart_interrupted(self, before: InterruptedSession) -> Session:
        before.check_restart()
        self.settings.check(before.new)
        if self._check_request is not None:
            await self._check_request(before.new)
        if self._sessions.get(before.id) is not before:
            raise MoveRefused(f"session {before.id!r} was restarted or deleted by another request")
        self._check_capacity()
        self._check_rooms(before.new)
        again = replace(before.record, stage=str(Stage.INITIALIZING), reason=None, is_shut_down=False)
        return await self._start_session(again, before)

    def _check_capacity(self) -> None:
        if self.is_closing:
            raise MoveRefused("the server is shutting down; no session can be made")
        living = sum(not _has_failed(session) for session in self._live_sessions())
        if living >= self.settings.limits.max_sessions:
            raise TooManySessions(f"{living} sessions, and no more are allowed; delete one first")

    def _check_rooms(self, new: NewSession) -> None:
        """Refuse a session with a room of another session, because both policies would use one camera.

        Room ids join two names with a hyphen, which both names may contain. The URL is not compared, because one
        transport server may have several names. No await follows before the new session is listed, so that the second
        of two simultaneous requests is refused.
        """
        paths = new.room_paths()
        for other in self._sessions.values():
            shared = paths & held_rooms(other) if other.id != new.session_id else ()
            if shared:
                raise RoomsTaken(describe_shared_room(new, min(shared), other.id, other.new.owner))

    async def _start_session(self, record: SessionRecord, before: InterruptedSession | None) -> Session:
        writer, orphan = self._journal.begin(record, None if before is None else before.record)
        session = self._sessions[record.new.session_id] = Session(
            record.new,
            transport=self._transport,
            engine=self.engine,
            load=self._load,
            settings=self.settings,
            on_event=self._on_session_event,
            leases=self._leases,
            made=writer,
            latch=self._journal.describe_latch(record.new),
            claim=record.claim,
        )
        # Asked now: it may be ready before the task begins.
        await self._run_shielded(self._wait_until_ready(session, writer, before, orphan, is_promised=record.is_ready))
        return session

    async def _wait_until_ready(
        self,
        session: Session,
        writer: RecordWriter,
        before: InterruptedSession | None,
        orphan: Orphan | None,
        *,
        is_promised: bool,
    ) -> None:
        try:
            if not is_promised:
                await self._records.flush()
            await session.ready()
        except ServiceError as error:
            if isinstance(error, NotKept) and session.stage is not Stage.DELETED:
                session.begin_close()
                await session.wait_closed()
            # The session may have been deleted or replaced while it started.
            if self._journal.is_current(writer):
                self._undo_start(error, session, before)
                if orphan is not None:
                    self._records.remove_orphan(orphan)
            await self._journal.try_flush()
            raise
        await self._journal.try_flush()
        if orphan is not None:
            self._orphans.clean([orphan])

    def _undo_start(self, error: ServiceError, session: Session, before: InterruptedSession | None) -> None:
        if before is not None:
            self._journal.restore(before.record)
            self._sessions[before.id] = self._make_interrupted(before.record, f"it could not be brought back: {error}")
        elif isinstance(error, NotKept):
            self._journal.drop(session.id)
            del self._sessions[session.id]

    def _forget_old_failures(self) -> None:
        failed = [session.id for session in self._live_sessions() if _has_failed(session)]
        for session_id in failed[: max(len(failed) - self.settings.max_failed + 1, 0)]:
            del self._sessions[session_id]
            self._journal.drop(session_id)

    def get(self, session_id: str) -> AnySession:
        """Return the session of this id, or raise UnknownSession."""
        session = self._sessions.get(session_id)
        if session is None or session.stage is Stage.DELETED:
            raise UnknownSession(f"Session {session_id} not found")
        return session

    def get_live(self, session_id: str) -> Session:
        """Return the session of this id, or raise UnknownSession, or MoveRefused if it is interrupted."""
        session = self.get(session_id)
        if isinstance(session, InterruptedSession):
            raise session.make_refusal()
        return session

    def find(self, session_id: str) -> AnySession | None:
        """Return the session of this id, also while it is being deleted; None when there is none."""
        return self._sessions.get(session_id)

    @property
    def is_closing(self) -> bool:
        """Whether the server is shutting down."""
        return self._journal.is_closing

    def list(self) -> list[AnySession]:
        """Return all sessions, oldest first; failed and interrupted ones too."""
        return [session for session in self._sessions.values() if session.stage is not Stage.DELETED]

    def _live_sessions(self) -> "list[Session]":
        return [session for session in self._sessions.values() if isinstance(session, Session)]

    def has_running_robot(self) -> bool:
        """Return whether any session moves its robot, or would if its link came back."""
        return any(session.stage in MOVING for session in self._sessions.values())

    def get_warning(self) -> Mapping[str, str]:
        """Return the warning that answers carry while something is not written down; empty when all is."""
        return self._journal.get_warning()

    async def start(self, session_id: str) -> AnySession:
        """Let a session move its robot."""
        session = self.get(session_id)
        session.start()
        return await self._write_record(session)

    async def stop(self, session_id: str) -> AnySession:
        """Stop a session's robot."""
        session = self.get(session_id)
        session.stop()
        return await self._write_record(session, STOP_PUBLISH_TIMEOUT)

    async def restart(self, session_id: str) -> AnySession:
        """Restart a session. An interrupted session loads its policy, joins its rooms and waits for its start."""
        session = self.get(session_id)
        if isinstance(session, InterruptedSession):
            return await self._restart_interrupted(session)
        session.restart()
        return await self._write_record(session)

    async def adjust(self, session_id: str, changes: Mapping[str, object]) -> Session:
        """Change fields of a session's request; see ``Session.adjust``."""
        session = self.get_live(session_id)
        await session.adjust(changes)
        await self._write_record(session)
        return session

    async def reset(self, session_id: str) -> AnySession:
        """Reset the latch of an emergency stop."""
        session = self.get(session_id)
        session.reset()
        self._records.clear_latch(session_id)
        return await self._write_record(session)

    async def clear_latch(self, session_id: str, sees: Callable[[str | None], bool]) -> bool:
        """Reset the latch of an id without a session if the caller ``sees`` its owner; return whether there was one."""
        latch = self._records.latches.get(session_id)
        if latch is None or not sees(latch.owner) or any(session.id == session_id for session in self.list()):
            return False
        self._records.clear_latch(session_id)
        await self._journal.try_flush()
        return True

    async def delete(self, session_id: str) -> None:
        """Stop a session's robot, leave and remove its rooms; a latched emergency stop stays with the id."""
        session = self.get(session_id)
        session.begin_close()
        orphan = self._journal.delete(session)
        await self._run_shielded(self._finish(session, orphan))

    # Sessions that move between servers which share a database.

    def share(self, publish: Callable[[float | None], Awaitable[None]], read_trouble: Callable[[], str | None]) -> None:
        """Publish changes to other servers from now on, before they are acknowledged; see `SessionJournal`."""
        self._journal.publish, self._journal.read_trouble = publish, read_trouble

    def list_ended(self) -> Mapping[str, Latch | None]:
        """Return the ended sessions that are not published yet, with the emergency stop of their id."""
        return {session_id: self._records.latches.get(session_id) for session_id in self._records.ended}

    def forget_ends(self, session_ids: Iterable[str]) -> None:
        """Forget ended sessions that other servers know of."""
        for session_id in session_ids:
            self._records.forget_end(session_id)

    def get_record(self, session_id: str) -> SessionRecord | None:
        """Return a session's record; None if there is none, or the session was never ready."""
        session = self._sessions.get(session_id)
        if isinstance(session, InterruptedSession):
            return session.record
        return self._journal.get_record(session_id)

    def get_latch(self, session_id: str) -> Latch | None:
        """Return the latched emergency stop of this id, with or without a session."""
        return self._records.latches.get(session_id)

    def sync_latch(self, session_id: str, latch: Latch | None) -> None:
        """Take over the emergency stop that other servers know of this id, or its reset."""
        if latch is None and session_id not in self._sessions:
            self._records.clear_latch(session_id)  # it was reset elsewhere
        elif latch is not None and self._records.latches.get(session_id) is None:
            self._records.set_latch(session_id, latch)

    async def adopt(self, record: SessionRecord, latch: str | None) -> AnySession:
        """List a session of an ended server as interrupted here, or raise SessionExists."""
        if record.new.session_id in self._sessions:
            raise SessionExists(f"session {record.new.session_id!r} exists already")
        self._journal.adopt(record, latch)
        session = self._sessions[record.new.session_id] = self._make_interrupted(record)
        await self._journal.try_flush()
        return session

    async def hand_over(self, session_id: str) -> None:
        """Hold a session's robot at once and forget it: another server has it now, and its rooms."""
        session = self._sessions.get(session_id)
        if session is None or session.stage is Stage.DELETED:
            return
        session.begin_close()
        self._journal.hand_over(session)
        await self._run_shielded(self._finish(session))

    async def emergency_stop(self, reason: str, session_id: str | None = None) -> "list[str]":
        """Latch an emergency stop on one session, or on all of them; returns their ids."""
        # Including sessions that are being deleted, because the latch also holds for their successors.
        stopped = list(self._sessions.values()) if session_id is None else [self.get(session_id)]
        for session in stopped:
            session.emergency_stop(reason)
        for session in stopped:
            self._journal.update(session.new, session.state())
        await self._journal.try_flush(STOP_PUBLISH_TIMEOUT)
        return [session.id for session in stopped if session.stage is not Stage.DELETED]

    # Records and events.

    def _on_session_event(self, event: SessionEvent) -> None:
        """Notify the listeners; raises no error, because a stop of several robots must reach all of them."""
        for notify in self._listeners:
            try:
                notify(event)
            except Exception:
                logger.exception("session %s: a listener failed at %s", event.session.new.session_id, event.name)

    def _record_event(self, event: SessionEvent) -> None:
        """Write the record of a session soon."""
        if self._sessions.get(event.session.new.session_id) is event.session:
            self._journal.update(event.session.new, event.state)

    async def _write_record(self, session: AnySession, publish_timeout: float | None = None) -> AnySession:
        self._journal.update(session.new, session.state())
        await self._journal.try_flush(publish_timeout)
        return session

    # Closing.

    async def _run_shielded(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The exception is retrieved here, because the caller may be gone.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(task)

    async def _finish(self, session: AnySession, orphan: Orphan | None = None) -> None:
        """Wait until a session is closed, and forget it."""
        has_left = isinstance(session, Session) and await session.wait_closed()
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
        payload = {"session_id": session.id, "policy_path": session.new.policy_path}
        self._on_session_event(SessionEvent("session.deleted", session, session.state(), payload))
        if orphan is not None and has_left:
            self._records.remove_orphan(orphan)
        await self._journal.try_flush()
        if orphan is not None and not has_left:
            self._orphans.clean([orphan])

    def begin_close(self) -> None:
        """Stop every robot before this returns, and begin to leave the rooms; ``close`` waits for it."""
        if self.is_closing:
            return
        self._journal.is_closing = True
        self._closing = [session for session in self._live_sessions() if session.stage is not Stage.DELETED]
        for session in self._closing:
            session.begin_close()

    async def close(self) -> None:
        """Stop every robot at once, then leave all rooms and close the engine; takes less than 5 s."""
        self.begin_close()
        self._journal.mark_shut_down()
        await asyncio.gather(*(self._finish(session) for session in self._closing))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._orphans.close()
        await self.engine.close()
        await self._records.close()


def held_rooms(session: AnySession) -> frozenset[str]:
    """Return workspace and id of each room that a session is in, or comes back to; none of a failed session."""
    has_none = isinstance(session, Session) and _has_failed(session)
    return frozenset() if has_none else session.new.room_paths()


def _has_failed(session: Session) -> bool:
    return session.stage is Stage.ERROR and session.is_closed
