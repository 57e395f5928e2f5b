"""SQLite database that survives a kill at any moment; one thread owns its connection.

A commit is on the disk before ``run`` returns (WAL, ``synchronous=FULL``), so acknowledged events survive a power loss.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from filelock import FileLock, Timeout

from hooks.errors import StoreError

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

LOCK_TIMEOUT = 10.0  # seconds to wait for the transaction of another process
LONGEST_LOG = 16 << 20  # bytes to which SQLite truncates the write-ahead log, which never shrinks by itself


@contextmanager
def alone(database: Path | None, taken_message: str) -> Iterator[None]:
    """Hold the database's lock file; raise ``StoreError`` with ``taken_message`` if another process holds it."""
    if database is None:
        yield
        return
    path = database.with_name(database.name + ".lock")
    # Another thread may close the inbox, and a soft lock would outlive a kill.
    lock = FileLock(path, mode=0o600, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        held = lock.acquire()
    except Timeout:
        raise StoreError(f"database {str(database)!r}: {taken_message}") from None
    except OSError as error:
        raise StoreError(f"database {str(database)!r}: its lock file cannot be made ({error.strerror})") from error
    with held:
        yield


def insert_row(connection: sqlite3.Connection, table: str, **values: Any) -> None:
    """Insert a row into a table; keywords are the names of columns."""
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", values)


class Database:
    """SQLite database in a file, or in memory when ``path`` is None.

    A transaction is a function of the connection (and of arguments); its writes are atomic.

    Raises:
        StoreError: the file cannot be opened, is not a database, or was written by a newer version.
    """

    def __init__(self, path: str | Path | None, schema: Sequence[str]):
        """Open the database; ``schema`` has one SQL script per version, and the scripts of newer versions are run."""
        self.path = None if path is None else Path(path)
        self._thread = ThreadPoolExecutor(1, "database")
        try:
            self._connection = self._thread.submit(self._open, list(schema)).result()
            self._file = self._identify_file()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise StoreError(f"database {self._name}: {error}; wanted a SQLite file that can be written") from error
        except BaseException:
            self._thread.shutdown()
            raise

    @property
    def _name(self) -> str:
        return "in memory" if self.path is None else repr(str(self.path))

    def _open(self, schema: list[str]) -> sqlite3.Connection:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path or ":memory:", timeout=LOCK_TIMEOUT, isolation_level=None)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute(f"PRAGMA journal_size_limit={LONGEST_LOG}")
            if self.path is not None:
                # The database contains payloads, which may be private, and secrets of webhooks.
                self.path.chmod(0o600)
            connection.execute("BEGIN IMMEDIATE")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > len(schema):
                raise StoreError(
                    f"database {self._name}: version {version}, this robojax knows {len(schema)}; "
                    "use the robojax that wrote it, or another file"
                )
            for script in schema[version:]:
                for statement in filter(str.strip, script.split(";\n")):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version={len(schema)}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _identify_file(self) -> tuple[int, int] | None:
        """Return device and inode of the database's file; None if the file is missing."""
        try:
            status = None if self.path is None else os.stat(self.path)
        except OSError:
            return None
        return None if status is None else (status.st_dev, status.st_ino)

    def run_blocking(
        self,
        transaction: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Run a transaction as ``run`` does, but block; for threads without an event loop."""
        return self._submit(transaction, arguments, named).result()

    async def run(
        self,
        transaction: Callable[Concatenate[sqlite3.Connection, Arguments], Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Run a transaction; a cancelled call stops waiting, and the transaction still runs to its end.

        Raises:
            StoreError: the database cannot be written (disk full, locked for too long, damaged).
        """
        return await asyncio.wrap_future(self._submit(transaction, arguments, named))

    def _submit(self, transaction: Callable[..., Result], arguments: tuple, named: dict) -> Future[Result]:
        try:
            return self._thread.submit(self._transact, transaction, arguments, named)
        except RuntimeError as error:
            raise StoreError(f"database {self._name} is closed") from error

    def _transact(self, transaction: Callable[..., Result], arguments: tuple, named: dict) -> Result:
        connection = self._connection
        if self._identify_file() != self._file:
            # A write would go to the deleted file and be lost.
            raise StoreError(f"database {self._name}: it was deleted or replaced while it was in use; restart")
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = transaction(connection, *arguments, **named)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"database {self._name}: {error}") from error
        return result

    def close(self) -> None:
        """Close the database after the queued transactions."""
        with suppress(RuntimeError):  # The database is already closed.
            self._thread.submit(self._connection.close)
        self._thread.shutdown()
