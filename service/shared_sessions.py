"""Sessions shared by servers of one `--database`: claims, redirects, adoption, tied to the app."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from yarl import URL

from service.api.context import App
from service.errors import NoDatabase
from service.http.origins import Origins
from service.sessions.request import Admit, NewSession
from service.sessions.store import Sessions
from service.settings import SettingsError

# Any address that is not of this machine: nothing is sent there, but which way it would go says which address is ours.
_ELSEWHERE = ("192.0.2.1", 9)


class SharedDatabase:
    """A database of the sessions of several servers, or none; requests for sessions of others are sent on from now on.

    Raises:
        SettingsError: its driver is not installed.
    """

    def __init__(self, app: App):
        """Nothing is connected yet."""
        self._app = app
        self.is_there = app.ctx.settings.database is not None
        if not self.is_there:
            return
        try:
            from service.api.redirects import Redirects
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"database: PostgreSQL needs {error.name}, which is not installed; pip install 'robojax[postgres]'"
            ) from error
        self._redirects = Redirects(Origins(app.ctx.settings.origins))
        self._redirects.watch(app)

    def admit(self, admit: Admit) -> Admit:
        """The same, and a session's id is taken for all servers."""
        if not self.is_there:
            return admit

        async def admit_and_claim(new: NewSession) -> None:
            await admit(new)
            if self._app.ctx.front is not None:
                await self._app.ctx.front.claim(new)

        return admit_and_claim

    def opened(self, sessions: Callable[[], Sessions]) -> AbstractAsyncContextManager[None]:
        """The other servers see these sessions; left when their robots are held.

        Raises:
            NoDatabase: the database cannot be used, or does not answer.
            FrontNameTaken: another server has the name of this one.
        """
        return self._opened(sessions()) if self.is_there else nullcontext()

    @asynccontextmanager
    async def _opened(self, sessions: Sessions) -> AsyncIterator[None]:
        from service.distributed import session_table
        from service.distributed.peers import FINDING, PeerSessions
        from service.distributed.postgres import DatabaseAway, DatabaseUnusable, Postgres

        context = self._app.ctx
        url = context.settings.database or ""
        database, lookups = (Postgres(url, session_table.SCHEMA, session_table.PREFIX) for _ in range(2))
        front = PeerSessions(front_name(self._app), front_url(self._app), sessions, database, lookups)
        try:
            try:
                await front.open()
            except DatabaseUnusable as error:
                raise NoDatabase(f"database: {error}") from None
            except DatabaseAway as error:
                raise NoDatabase(f"database: it has not answered for {FINDING:g} s ({error})") from None
            context.front = self._redirects.front = front
            context.others = self._redirects
            yield
        finally:
            await self._redirects.close()
            await front.close()
            await database.close()
            await lookups.close()


def front_name(app: App) -> str:
    """What other servers call this one."""
    return app.ctx.settings.front_name or f"{socket.gethostname()}:{_own(app)[1]}"


def front_url(app: App) -> str:
    """Where other servers, and clients that are sent on, reach this one."""
    if app.ctx.settings.front_url is not None:
        return app.ctx.settings.front_url
    host, port = _own(app)
    if host in ("0.0.0.0", "::"):
        host = _address_towards(app.ctx.settings.database)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own(app: App) -> tuple[str, int]:
    own = app.config.get("OWN_ADDRESS") or ("127.0.0.1", app.ctx.settings.port)
    return str(own[0]), int(own[1])


def _address_towards(database: str | None) -> str:
    """This machine's address on the way to its database: there others are, too."""
    url = URL(database or "")
    for host, port in ((url.host or "", url.port or 5432), _ELSEWHERE):
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
