"""Where a server's engine comes from: it is its own, on this machine or on several, or that of a cluster."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import Protocol

from service.composition.cluster_engine import ClusterEngine
from service.composition.own_engine import OwnEngine
from service.edge.allowance import Admit
from service.edge.policy_places import opened_in
from service.engine.engine import Engine, LoadPolicy
from service.engine.loading import Inspection
from service.engine.progress import Durations
from service.hosts.front import Front
from service.hosts.options import host_options
from service.routes.context import App
from service.settings import SettingsError


class EngineSource(Protocol):
    """What a server does to have an engine."""

    @property
    def load(self) -> LoadPolicy:
        """How policies come to where that engine runs them."""
        ...

    def opened(self, durations: Durations) -> AbstractAsyncContextManager[Engine]:
        """The engine; whoever enters this closes it before the context ends."""
        ...

    def admit(self, admit: Admit) -> Admit:
        """The same, and what this engine has to say to a new session."""
        ...


def engine_source(app: App, first_device: Callable[[], str | None]) -> EngineSource:
    """What the settings want.

    Args:
        first_device: where the engine has policies loaded, once it is open.

    Raises:
        SettingsError: something is missing or makes no sense, or Ray is not installed.
    """
    settings = app.ctx.settings
    options = host_options(settings)
    if settings.engine != "here":
        return ClusterEngine(app)
    if options is not None and find_spec("ray") is None:
        raise SettingsError(f"hosts_count: {options.count} needs Ray (it is not installed); pip install 'robojax[ray]'")
    hosts = None if options is None else Front(options, Inspection(settings.load_memory), opened_in(settings))
    return OwnEngine(settings, hosts, first_device)
