"""The engines that a server of a Ray cluster shares with others."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.composition.shared_sessions import front_name
from service.edge.allowance import Admit
from service.engine.engine import Engine, LoadPolicy
from service.engine.progress import Durations
from service.routes.context import App
from service.settings import SettingsError


class ClusterEngine:
    """An `EngineSource` whose devices are the engines of a cluster.

    Raises:
        SettingsError: Ray is not installed.
    """

    def __init__(self, app: App):
        """Nothing is connected yet."""
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

    @asynccontextmanager
    async def opened(self, durations: Durations) -> AsyncIterator[Engine]:
        """See `EngineSource.opened`.

        Raises:
            NoEngine: the cluster cannot be joined, or has no engine.
        """
        engine = await self._joining.open(durations, front_name(self._app))
        self._app.ctx.engines = self._joining.cluster
        try:
            yield engine
        finally:
            await self._joining.close()

    def admit(self, admit: Admit) -> Admit:
        """The same."""
        return admit
