"""PostgreSQL connection on its own thread, so that no event loop waits for it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import asyncpg

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
# asyncpg's own type includes connections of a pool.
Sql: TypeAlias = Any

# A paused or unreachable server must not block others by its locks.
_CONNECTION_LIMITS = (
    "SET idle_in_transaction_session_timeout = '5s'; SET lock_timeout = '2s'; SET statement_timeout = '5s'"
)
# Of migrations, among all users of advisory locks in this database.
_MIGRATION_LOCK = 0x726F626F
# What no waiting changes: the name, password or database of the URL is wrong.
_PERMANENT_ERRORS = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ClientConfigurationError,
)


class DatabaseUnavailable(Exception):
    """The database does not answer, or a transaction failed; the text says why, for this server's log."""


class DatabaseUnusable(DatabaseUnavailable):
    """The database can never be used like this; the text says what to do, without the URL and its password."""


class Postgres:
    """Runs transactions one after the other, and reconnects when needed.

    Args:
        url: as libpq has it; what it does not say comes from PGPASSFILE, PGSSLROOTCERT and the like.
        schema: scripts; a database that has run the first n of them is of version n. All objects begin with `prefix`.
    """

    def __init__(self, url: str, schema: Sequence[str], prefix: str):
        self._url, self._schema, self._prefix = url, schema, prefix
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres", daemon=True)
        self._thread.start()
        # Made and used on that loop only.
        self._lock = asyncio.Lock()
        self._connection: asyncpg.Connection | None = None

    async def run(
        self,
        timeout: float,
        transaction: Callable[[Sql, *Arguments], Awaitable[Result]],
        *arguments: *Arguments,
    ) -> Result:
        """Run a transaction; all of it is on the database's disk when this returns.

        Args:
            timeout: seconds, including those in which others are run first.

        Raises:
            DatabaseUnavailable: it is not known to be done.
            DatabaseUnusable: the database is another version's, or the URL is wrong.
        """
        # It is done whole though the caller is cancelled.
        running = asyncio.run_coroutine_threadsafe(self._run(timeout, transaction, arguments), self._loop)
        return await asyncio.shield(asyncio.wrap_future(running))

    async def _run(self, timeout: float, transaction: Any, arguments: tuple[Any, ...]) -> Any:
        deadline = self._loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            raise DatabaseUnavailable(f"no answer for {timeout:g} s") from None
        # Not cancelled: what asyncpg does then waits for the database, too.
        timer = self._loop.call_at(deadline, self._drop)
        try:
            connection = await self._connect(max(deadline - self._loop.time(), 0.1))
            async with connection.transaction():
                return await transaction(connection, *arguments)
        except _PERMANENT_ERRORS as error:
            self._drop()
            raise DatabaseUnusable(f"{type(error).__name__}: {error}") from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            self._drop()
            is_late = self._loop.time() >= deadline
            raise DatabaseUnavailable(
                f"no answer for {timeout:g} s" if is_late else f"{type(error).__name__}: {error}"
            ) from error
        finally:
            timer.cancel()
            self._lock.release()

    async def _connect(self, timeout_left: float) -> asyncpg.Connection:
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        connection = await asyncpg.connect(
            self._url,
            timeout=timeout_left,  # pyright: ignore[reportArgumentType] - seconds with a fraction, too
            server_settings={"application_name": "robojax"},
        )
        self._connection = connection
        try:
            await connection.execute(_CONNECTION_LIMITS)
            await self._migrate(connection)
        except BaseException:
            self._drop()
            raise
        return connection

    async def _migrate(self, connection: asyncpg.Connection) -> None:
        table = f"{self._prefix}schema"
        async with connection.transaction():
            # A user without the right to create tables can use existing tables.
            if await connection.fetchval("SELECT to_regclass($1)", table) is None:
                await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
                await connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (version integer NOT NULL)")
            version = await connection.fetchval(f"SELECT max(version) FROM {table}") or 0
            if version < len(self._schema):
                await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
                version = await connection.fetchval(f"SELECT max(version) FROM {table}") or 0
            if version > len(self._schema):
                raise DatabaseUnusable(
                    f"it is of version {version}, this robojax knows {len(self._schema)}; use the robojax that wrote "
                    "it, or another database"
                )
            for number, script in enumerate(self._schema[version:], version + 1):
                await connection.execute(script)
                await connection.execute(f"INSERT INTO {table} VALUES ($1)", number)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Close the connection at once."""

        async def close() -> None:
            connection, self._connection = self._connection, None
            if connection is not None:
                with suppress(Exception):  # it is gone, then
                    await connection.close(timeout=0.5)

        with suppress(Exception):
            await asyncio.wait_for(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(close(), self._loop)), 1.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 1.0)
        if not self._thread.is_alive():
            self._loop.close()
