"""Session records and latches in SQLite."""

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from service.errors import NotKept
from service.sessions.base_session import new_claim
from service.sessions.request import NewSession
from service.stage import Stage
from service.transport.link import Orphan

# Ids that are remembered, at most.
MAX_LATCHES = 10_000


@dataclass(frozen=True)
class Latch:
    """A latched emergency stop of a session id, and the owner of its session."""

    reason: str
    owner: str | None


# Version of a record. Records of a newer version are listed and can be deleted; their unknown fields are kept.
VERSION = 1


@dataclass(frozen=True)
class SessionRecord:
    """A session in the database. Times are seconds since 1970, for display only.

    Attributes:
        new: the request, with the workspace of its rooms.
        is_ready: whether the session was ready once, so that a client knows it.
        made: ids of the rooms that this server made, or was about to make.
        is_shut_down: whether its server ended in order.
        claim: secret by which the server of its rooms recognizes the session.
        more, wishes: unknown fields of the record, and of the request, that a newer version wrote.
    """

    new: NewSession
    stage: str = str(Stage.INITIALIZING)
    reason: str | None = None
    is_ready: bool = False
    made: tuple[str, ...] = ()
    is_shut_down: bool = False
    created_at: float = field(default_factory=time.time)
    changed_at: float = field(default_factory=time.time)
    version: int = VERSION
    claim: str = field(default_factory=new_claim, repr=False)
    more: Mapping[str, Any] = field(default_factory=dict)
    wishes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_newer(self) -> bool:
        """Whether a newer version wrote it, with unknown content."""
        return self.version > VERSION or bool(self.wishes)

    def as_json(self) -> str:
        """Return the record as JSON text."""
        document = asdict(self)
        document |= document.pop("more")
        document["new"] |= document.pop("wishes")
        return json.dumps(document)


def from_json(text: str) -> SessionRecord:
    """Parse a record that ``as_json`` of any version wrote.

    Raises:
        ValueError: the text is not a record.
    """
    try:
        document = json.loads(text)
        request = document.pop("new")
        known, more = _split_known(document, SessionRecord)
        new, wishes = _split_known(request, NewSession)
        new |= {name: tuple(value) for name, value in new.items() if isinstance(value, list)}
        known["made"] = tuple(known.get("made", ()))
        return SessionRecord(new=NewSession(**new), more=more, wishes=wishes, **known)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a record that cannot be read ({type(error).__name__}: {error})") from error


def _split_known(document: Mapping[str, Any], kind: type[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {one.name for one in fields(kind)} - {"more", "wishes"}
    missing = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    if absent := missing - set(document) - {"new"}:
        raise ValueError(f"no {', '.join(sorted(absent))}")
    known = {name: value for name, value in document.items() if name in names}
    return known, {name: value for name, value in document.items() if name not in names}


logger = logging.getLogger(__name__)

SCHEMA = (
    """CREATE TABLE sessions (id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
CREATE TABLE latches (id TEXT PRIMARY KEY, reason TEXT NOT NULL, owner TEXT) STRICT;
CREATE TABLE orphans (id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT""",
    "CREATE TABLE ended (id TEXT PRIMARY KEY, ended_at REAL NOT NULL) STRICT",
)
# Seconds that an answer waits for the disk; a robot was stopped before.
WRITE_TIMEOUT = 2.0
# The same while the server ends.
CLOSE_TIMEOUT = 0.5
# Seconds until what could not be written is tried again by itself.
RETRY_DELAY = 1.0


class RecordsDatabase(Protocol):
    """Database that runs transactions on its own thread; each is on the disk when ``run`` returns, or undone."""

    def run_blocking(self, transaction: Callable[..., Any], *arguments: Any) -> Any: ...
    async def run(self, transaction: Callable[..., Any], *arguments: Any) -> Any: ...
    def close(self) -> None: ...


class SessionRecords:
    """The session records of one server. Without a database, records and latches end with the process.

    Changes that arrive during a transaction share the next one. Changes that cannot be written are kept and tried
    again.

    Attributes:
        interrupted: sessions that an earlier process left, oldest first.
        orphans: rooms that an earlier process did not remove.
        latches: emergency stops by session id; they outlive their sessions.
        ended: time of the end by session id, until the shared database has received it.
        trouble: why nothing can be written now, or None.
    """

    def __init__(
        self,
        database: RecordsDatabase | None = None,
        write_errors: type[Exception] = OSError,
        *,
        is_shared: bool = False,
    ):
        """Read all records.

        Args:
            write_errors: error of the database when it cannot write.
            is_shared: whether ended sessions are remembered for other servers.
        """
        self.interrupted: Sequence[SessionRecord] = ()
        self.orphans: Sequence[Orphan] = ()
        self.latches: dict[str, Latch] = {}
        self.ended: dict[str, float] = {}
        self.is_shared = is_shared
        self.trouble: str | None = None
        self._database = database
        self._write_errors = write_errors
        # (table, id) -> what is written there, or None: its row goes.
        self._pending: dict[tuple[str, str], tuple[Any, ...] | None] = {}
        self._noted_count = self._written_count = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._has_pending = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        if database is not None:
            self.interrupted, self.latches, self.orphans, self.ended = database.run_blocking(_read_all)

    def put(self, record: SessionRecord) -> None:
        """Write a session's record, soon."""
        self.forget_end(record.new.session_id)
        self._note("sessions", record.new.session_id, (replace(record, changed_at=time.time()).as_json(),))

    def drop(self, session_id: str) -> None:
        """Delete a session's record; its latch stays."""
        self._note("sessions", session_id, None)
        if self.is_shared:
            self.ended[session_id] = time.time()
            self._note("ended", session_id, (self.ended[session_id],))

    def forget_end(self, session_id: str) -> None:
        """Forget an ended session, because it was published, or there is a session of this id again."""
        if self.ended.pop(session_id, None) is not None:
            self._note("ended", session_id, None)

    def set_latch(self, session_id: str, latch: Latch) -> None:
        """Keep an emergency stop until it is reset."""
        if self.latches.get(session_id) == latch:
            return
        self.latches[session_id] = latch
        self._note("latches", session_id, (latch.reason, latch.owner))
        if len(self.latches) > MAX_LATCHES:
            oldest = next(iter(self.latches))
            logger.error("the emergency stop of session %s is forgotten: more than %d are latched", oldest, MAX_LATCHES)
            self.clear_latch(oldest)

    def clear_latch(self, session_id: str) -> None:
        """Delete an emergency stop that was reset."""
        if self.latches.pop(session_id, None) is not None:
            self._note("latches", session_id, None)

    def add_orphan(self, orphan: Orphan) -> None:
        """Keep rooms that are to be removed."""
        self._note("orphans", orphan.id, (json.dumps(asdict(orphan)),))

    def remove_orphan(self, orphan: Orphan) -> None:
        """Delete rooms that are removed."""
        self._note("orphans", orphan.id, None)

    async def flush(self, timeout: float = WRITE_TIMEOUT) -> None:
        """Wait until all changes are on the disk, for at most ``timeout`` seconds; else raise NotKept."""
        if self._database is None or self._written_count == self._noted_count:
            return
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((self._noted_count, written))
        self._has_pending.set()  # when the last try failed, this one does not wait for the next
        try:
            await asyncio.wait_for(written, timeout)
        except TimeoutError:
            self.trouble = self.trouble or f"the disk of the server's state folder has not answered for {timeout:g} s"
            raise NotKept(f"{self.trouble}; try again when it does") from None

    async def close(self) -> None:
        """Write all changes and close the database."""
        if self._database is None:
            return
        try:
            await self.flush(CLOSE_TIMEOUT)
        except NotKept as error:
            logger.error("the last of the sessions is not written down: %s", error)
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        if self._written_count == self._noted_count:
            self._database.close()

    def _note(self, table: str, id: str, row: tuple[Any, ...] | None) -> None:
        if self._database is None:
            return
        self._pending.pop((table, id), None)
        self._pending[table, id] = row
        self._noted_count += 1
        self._has_pending.set()
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write(), name="session records")

    async def _write(self) -> None:
        assert self._database is not None
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            batch, self._pending, number = self._pending, {}, self._noted_count
            try:
                if batch:
                    await self._database.run(_write_batch, batch)
            except self._write_errors as error:
                # What was noted since is newer.
                self._pending = {**batch, **self._pending}
                if self.trouble is None:
                    logger.error("what happens to sessions is not written down: %s", error)
                # Clients must not see the file's path.
                why = str(error.__cause__) if isinstance(error.__cause__, sqlite3.Error) else "its log says why"
                self.trouble = f"the server cannot write its state folder ({why})"
                self._resolve_waiting(
                    number, NotKept(f"{self.trouble}; free its disk, or restart it with another folder for --state")
                )
                asyncio.get_running_loop().call_later(RETRY_DELAY, self._has_pending.set)
            else:
                if self.trouble is not None:
                    logger.warning("what happened to sessions is written down again")
                self.trouble, self._written_count = None, number
                self._resolve_waiting(number, None)

    def _resolve_waiting(self, number: int, error: NotKept | None) -> None:
        waiting, self._waiting = self._waiting, []
        for asked, future in waiting:
            if asked > number:
                self._waiting.append((asked, future))
            elif not future.done():
                future.set_result(None) if error is None else future.set_exception(error)


_COLUMNS = {"sessions": ("record",), "latches": ("reason", "owner"), "orphans": ("record",), "ended": ("ended_at",)}


def _write_batch(connection: sqlite3.Connection, batch: Mapping[tuple[str, str], tuple[Any, ...] | None]) -> None:
    for (table, id), row in batch.items():
        if row is None:
            connection.execute(f"DELETE FROM {table} WHERE id = ?", (id,))
            continue
        names = _COLUMNS[table]
        connection.execute(
            f"INSERT INTO {table} (id, {', '.join(names)}) VALUES (?{', ?' * len(names)}) "
            f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in names)}",
            (id, *row),
        )


def _read_all(
    connection: sqlite3.Connection,
) -> tuple[list[SessionRecord], dict[str, Latch], list[Orphan], dict[str, float]]:
    sessions, orphans = [], []
    for row in connection.execute("SELECT id, record FROM sessions ORDER BY rowid"):
        try:
            sessions.append(from_json(row["record"]))
        except ValueError as error:
            # The record stays in the database for a newer version.
            logger.error("session %s is not listed: %s", row["id"], error)
    latches = {
        row["id"]: Latch(row["reason"], row["owner"])
        for row in connection.execute("SELECT * FROM latches ORDER BY rowid")
    }
    for row in connection.execute("SELECT id, record FROM orphans ORDER BY rowid"):
        try:
            document = json.loads(row["record"])
            document["rooms"], document["cameras"] = tuple(document["rooms"]), tuple(document["cameras"])
            orphans.append(Orphan(**document))
        except (ValueError, TypeError, KeyError) as error:
            logger.error("rooms %s are left as they are: %s", row["id"], error)
    ended = {row["id"]: row["ended_at"] for row in connection.execute("SELECT * FROM ended ORDER BY rowid")}
    return sessions, latches, orphans, ended
