"""Sessions shared by servers of one `--database`: claims, redirects, adoption, tied to the app."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from yarl import URL

from service.api.context import App
from service.errors import NoDatabase
from service.http.config import format_url
from service.http.origins import Origins
from service.sessions.request import CheckRequest, NewSession
from service.sessions.store import Sessions
from service.setting_types import SettingsError

# Any address outside of this machine. Nothing is sent; the route shows this machine's own address.
_OUTSIDE_ADDRESS = ("192.0.2.1", 9)


class SharedDatabase:
    """Shared database of sessions, if one is configured; redirects requests for sessions of other servers.

    Raises:
        SettingsError: its driver is not installed.
    """

    def __init__(self, app: App):
        self._app = app
        self.is_configured = app.ctx.settings.cluster.database is not None
        if not self.is_configured:
            return
        try:
            from service.api.redirects import Redirects
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"database: PostgreSQL needs {error.name}, which is not installed; pip install -e '.[postgres]'"
            ) from error
        self._redirects = Redirects(Origins(app.ctx.settings.server.origins))
        self._redirects.install(app)

    def wrap_check(self, check: CheckRequest) -> CheckRequest:
        """Return a check of new sessions that also claims the session's id among all servers."""
        if not self.is_configured:
            return check

        async def check_and_claim(new: NewSession) -> None:
            await check(new)
            if self._app.ctx.peer_sessions is not None:
                await self._app.ctx.peer_sessions.claim(new)

        return check_and_claim

    @asynccontextmanager
    async def open(self, sessions: Sessions) -> AsyncIterator[None]:
        """Publish these sessions to the other servers until the context ends, after their robots are held.

        Raises:
            NoDatabase: the database cannot be used, or does not answer.
            ServerNameTaken: another server has the name of this one.
        """
        if not self.is_configured:
            yield
            return
        from service.distributed import session_table
        from service.distributed.peers import START_TIMEOUT, PeerSessions
        from service.distributed.postgres import DatabaseUnavailable, DatabaseUnusable, Postgres

        context = self._app.ctx
        url = context.settings.cluster.database or ""
        database, lookups = (Postgres(url, session_table.SCHEMA, session_table.PREFIX) for _ in range(2))
        peer_sessions = PeerSessions(server_name(self._app), server_url(self._app), sessions, database, lookups)
        try:
            try:
                await peer_sessions.open()
            except DatabaseUnusable as error:
                raise NoDatabase(f"database: {error}") from None
            except DatabaseUnavailable as error:
                raise NoDatabase(f"database: it has not answered for {START_TIMEOUT:g} s ({error})") from None
            context.peer_sessions = self._redirects.peer_sessions = peer_sessions
            context.stop_elsewhere = self._redirects.stop_all
            yield
        finally:
            await self._redirects.close()
            await peer_sessions.close()
            await database.close()
            await lookups.close()


def server_name(app: App) -> str:
    """Return the name under which other servers know this one."""
    return app.ctx.settings.cluster.front_name or f"{socket.gethostname()}:{_own_address(app)[1]}"


def server_url(app: App) -> str:
    """Return the URL at which other servers, and redirected clients, reach this one."""
    if app.ctx.settings.cluster.front_url is not None:
        return app.ctx.settings.cluster.front_url
    host, port = _own_address(app)
    if host in ("0.0.0.0", "::"):
        host = _find_own_host(app.ctx.settings.cluster.database)
    return format_url(host, port)


def _own_address(app: App) -> tuple[str, int]:
    own = app.config.get("OWN_ADDRESS") or ("127.0.0.1", app.ctx.settings.server.port)
    return str(own[0]), int(own[1])


def _find_own_host(database: str | None) -> str:
    """Find this machine's address on the route to its database: other servers can reach it there."""
    url = URL(database or "")
    for host, port in ((url.host or "", url.port or 5432), _OUTSIDE_ADDRESS):
        if not host or host == "localhost" or host.startswith("127."):
            continue
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as towards:
                towards.connect(address)
                return str(towards.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
