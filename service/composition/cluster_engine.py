"""What a server of a cluster shares with others: engines, and the directory of sessions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.edge.allowance import Admit
from service.engine.engine import Engine, LoadPolicy
from service.engine.progress import Durations
from service.routes.context import App
from service.sessions.request import NewSession
from service.sessions.sessions import Sessions
from service.settings import SettingsError


class ClusterEngine:
    """An `EngineSource` whose devices are the engines of a cluster.

    Raises:
        SettingsError: Ray is not installed.
    """

    def __init__(self, app: App):
        """Nothing is connected yet; requests for sessions of other fronts are forwarded from now on."""
        settings = app.ctx.settings
        try:
            from service.cluster.joining import Joining
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"engine: {settings.engine} needs Ray ({error.name} is not installed); pip install 'robojax[ray]'"
            ) from error
        self._app = app
        self._joining = Joining(settings)
        self.load: LoadPolicy = self._joining.load
        self._joining.forwarding.watch(app)

    @asynccontextmanager
    async def opened(self, durations: Durations) -> AsyncIterator[Engine]:
        """See `EngineSource.opened`.

        Raises:
            NoEngine: the cluster cannot be joined, or has no engine.
        """
        engine = await self._joining.open(durations, self._app.config.get("OWN_ADDRESS"))
        self._app.ctx.engines = self._joining.cluster
        try:
            yield engine
        finally:
            await self._joining.close()

    async def share(self, sessions: Sessions) -> None:
        """Other fronts see these sessions.

        Raises:
            NoEngine: the directory does not answer, or another server has the name of this front.
        """
        self._app.ctx.front = await self._joining.share(sessions)
        self._app.ctx.others = self._joining.forwarding

    def admit(self, admit: Admit) -> Admit:
        """The same, and a session's id is taken in the whole cluster."""

        async def admit_and_claim(new: NewSession) -> None:
            await admit(new)
            await self._joining.claim(new)

        return admit_and_claim
