"""Chooses where inference runs: in processes of this machine, or in a Ray cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TypeAlias

from service.api.context import App
from service.distributed.cluster import ClusterEngine
from service.engines.launch import Launched
from service.engines.local_engines import LocalEngines
from service.inference.config import PolicySettings
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadPolicy
from service.inference.progress import LoadDurations
from service.setting_types import SettingsError
from service.shared_sessions import front_name


class InProcessEngine:
    """Engine source that runs policies in this process: for programs that bring their own loader of policies."""

    def __init__(self, policies: PolicySettings, load: LoadPolicy):
        self._policies, self.load = policies, load

    @asynccontextmanager
    async def open(self, durations: LoadDurations) -> AsyncIterator[Engine]:
        """Open the engine; it is closed when the context ends."""
        policies = self._policies
        yield Engine(
            stuck_after=policies.stuck_after,
            durations=durations,
            batch_sizes=policies.engine_batch_sizes,
            devices=policies.devices,
            max_load=policies.engine_load,
            load_timeout=policies.load_timeout,
        )


EngineSource: TypeAlias = InProcessEngine | LocalEngines | ClusterEngine


def create_engine_source(app: App, load: LoadPolicy | None, launched: Launched | None) -> EngineSource:
    """Create the engine source that the settings ask for.

    Args:
        load: loads policies into this process; None for engines in other processes.
        launched: process of the first engine, if it was started before.

    Raises:
        SettingsError: the settings ask for a cluster, and Ray is not installed.
    """
    settings = app.ctx.settings
    if settings.cluster.engine == "local":
        if load is not None:
            return InProcessEngine(settings.policies, load)
        local = LocalEngines(settings.policies, settings.cluster.engine_patience, launched)
        app.ctx.engines = local.engines
        return local
    if find_spec("ray") is None:
        raise SettingsError(
            f"engine: {settings.cluster.engine} needs Ray (it is not installed); pip install -e '.[ray]'"
        )
    source = ClusterEngine(settings.policies, settings.cluster, lambda: front_name(app))
    app.ctx.engines = source.cluster.engines
    return source
