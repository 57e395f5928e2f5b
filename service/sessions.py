"""The store of sessions: create, look up, move, delete, and leave all of them in time."""

import asyncio
from collections.abc import Awaitable, Callable

from service.engine import Engine, LoadPolicy
from service.errors import MoveRefused, SessionExists, TooManySessions, UnknownSession
from service.request import NewSession, SessionSettings
from service.session import Session, Tell
from service.stage import MOVING, Stage
from service.status import SessionStatus
from service.transport.base import Transport

__all__ = ["Admit", "NewSession", "Session", "SessionSettings", "SessionStatus", "Sessions"]

Admit = Callable[[NewSession], Awaitable[None]]


class Sessions:
    """All sessions of one process. It owns the engine from here on: ``close`` ends it too."""

    def __init__(
        self,
        *,
        transport: Transport,
        load: LoadPolicy,
        engine: Engine,
        settings: SessionSettings | None = None,
        tell: Tell = lambda event, about: None,
        admit: Admit | None = None,
    ):
        """``tell`` hears of every session what ``service.session.EVENTS`` lists, and when one is gone.

        ``admit`` refuses what this server does for nobody (``service.allowance``), before anything is done.
        """
        self.engine = engine
        self.settings = settings or SessionSettings()
        self._transport = transport
        self._load = load
        self._tell = tell
        self._admit = admit
        self._sessions: dict[str, Session] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def create(self, new: NewSession) -> Session:
        """Make a session and wait until it is ready.

        Cancelling this only ends the waiting: the session goes on and is listed.

        Raises:
            InvalidRequest: a field cannot be used.
            SessionExists: the id is taken (by anything but a session that failed).
            TooManySessions: there are as many as the settings allow.
            PolicyError: the policy cannot be loaded or does not fit; no room was made.
            TransportError: the rooms cannot be made or joined; those made were removed.
        """
        self.settings.check(new)
        if self._admit is not None:
            await self._admit(new)
        if self._is_closing:
            raise MoveRefused("the server is shutting down; no session can be made")
        existing = self._sessions.get(new.session_id)
        if existing is not None and not _has_failed(existing):
            state = "being deleted; try again when it is gone" if existing.stage is Stage.DELETED else existing.stage
            raise SessionExists(f"session {new.session_id!r} exists already: it is {state}")
        living = sum(not _has_failed(session) for session in self._sessions.values())
        if living >= self.settings.max_sessions:
            raise TooManySessions(f"{living} sessions, and no more are allowed; delete one first")
        self._sessions.pop(new.session_id, None)
        self._forget_old_failures()
        session = Session(
            new,
            transport=self._transport,
            engine=self.engine,
            load=self._load,
            settings=self.settings,
            tell=self._tell,
        )
        self._sessions[new.session_id] = session
        await session.ready()
        return session

    def _forget_old_failures(self) -> None:
        failed = [session.id for session in self._sessions.values() if _has_failed(session)]
        for session_id in failed[: max(len(failed) - self.settings.failed_kept + 1, 0)]:
            del self._sessions[session_id]

    def get(self, session_id: str) -> Session:
        """The session of this id.

        Raises:
            UnknownSession: there is none.
        """
        session = self._sessions.get(session_id)
        if session is None or session.stage is Stage.DELETED:
            raise UnknownSession(f"Session {session_id} not found")
        return session

    @property
    def is_closing(self) -> bool:
        """Whether the server is shutting down."""
        return self._is_closing

    def list(self) -> list[Session]:
        """All sessions, oldest first; failed ones too."""
        return [session for session in self._sessions.values() if session.stage is not Stage.DELETED]

    def has_running_robot(self) -> bool:
        """Whether any session moves its robot, or would if its link came back."""
        return any(session.stage in MOVING for session in self._sessions.values())

    async def start(self, session_id: str) -> Session:
        """Let a session move its robot."""
        session = self.get(session_id)
        session.start()
        return session

    async def stop(self, session_id: str) -> Session:
        """Stop a session's robot."""
        session = self.get(session_id)
        session.stop()
        return session

    async def restart(self, session_id: str) -> Session:
        """Start a session anew."""
        session = self.get(session_id)
        session.restart()
        return session

    async def reset(self, session_id: str) -> Session:
        """Take the latch of an emergency stop off."""
        session = self.get(session_id)
        session.reset()
        return session

    async def delete(self, session_id: str) -> None:
        """Stop a session's robot, leave and remove its rooms. Cancelling this only ends the waiting."""
        session = self.get(session_id)
        session.begin_end()
        task = asyncio.create_task(self._end(session))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        await asyncio.shield(task)

    async def _end(self, session: Session) -> None:
        await session.end()
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
        self._tell("session.deleted", {"session_id": session.id, "policy_path": session.new.policy_path})

    async def emergency_stop(self, reason: str, session_id: str | None = None) -> "list[str]":
        """Latch an emergency stop on one session, or on all of them; returns their ids."""
        stopped = self.list() if session_id is None else [self.get(session_id)]
        for session in stopped:
            session.emergency_stop(reason)
        return [session.id for session in stopped]

    async def close(self) -> None:
        """Stop every robot at once, then leave all rooms and end the engine; takes less than 5 s."""
        self._is_closing = True
        for session in self.list():
            session.begin_end()
        await asyncio.gather(*(self._end(session) for session in list(self._sessions.values())))
        await self.engine.close()


def _has_failed(session: Session) -> bool:
    return session.stage is Stage.ERROR and session.is_over
