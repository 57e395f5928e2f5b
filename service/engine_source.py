"""Chooses where inference runs: in this process, or in a Ray cluster."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.api.context import App
from service.errors import NoDevice
from service.inference.config import PolicySettings
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadPolicy
from service.inference.policy_sources import make_policy_loader
from service.inference.progress import LoadDurations
from service.setting_types import SettingsError
from service.shared_sessions import front_name
from service.threads import call_in_thread

if TYPE_CHECKING:
    from service.distributed.cluster import ClusterEngine  # It imports Ray, which only some servers need.


class OwnEngine:
    """Engine source with the devices of this machine."""

    def __init__(self, policies: PolicySettings, first_device: Callable[[], str | None]):
        self._policies = policies
        self.load: LoadPolicy = make_policy_loader(policies, first_device)

    @asynccontextmanager
    async def open(self, durations: LoadDurations) -> AsyncIterator[Engine]:
        """Open the engine; it is closed when the context ends.

        Raises:
            NoDevice: the machine does not have a device of the settings.
        """
        policies, devices = self._policies, ()
        if policies.devices:
            named = partial(jaxmodels.name_devices, policies.devices, together=policies.placement == "shard")
            try:
                devices = await call_in_thread(named, "import-jax")  # JAX is imported before the server answers
            except JaxModelsError as error:
                raise NoDevice(f"devices: {error}") from error
        yield Engine(
            stuck_after=policies.stuck_after,
            durations=durations,
            batch_sizes=policies.engine_batch_sizes,
            devices=devices,
            max_load=policies.engine_load,
            load_timeout=policies.load_timeout,
        )


EngineSource: TypeAlias = "OwnEngine | ClusterEngine"


def create_engine_source(app: App, first_device: Callable[[], str | None]) -> EngineSource:
    """Create the engine source that the settings ask for.

    Args:
        first_device: returns the device to which the engine loads policies first, once the engine is open.

    Raises:
        SettingsError: the settings ask for a cluster, and Ray is not installed.
    """
    settings = app.ctx.settings
    if settings.cluster.engine == "here":
        return OwnEngine(settings.policies, first_device)
    try:
        from service.distributed.cluster import ClusterEngine
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"engine: {settings.cluster.engine} needs Ray ({error.name} is not installed); pip install -e '.[ray]'"
        ) from error
    source = ClusterEngine(settings.policies, settings.cluster, lambda: front_name(app))
    app.ctx.cluster = source.cluster
    return source
