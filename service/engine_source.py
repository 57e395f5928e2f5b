"""Chooses where inference runs: here, several hosts, or a Ray cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.api.context import App
from service.distributed.host_coordinator import HostCoordinator, host_options
from service.errors import NoDevice
from service.inference.engine import Engine, LoadPolicy
from service.inference.policy_sources import name_caches, opened_in, policy_loader
from service.inference.progress import Durations
from service.inference.sandbox import CheckpointSandbox
from service.sessions.request import Admit, NewSession
from service.settings import Settings, SettingsError
from service.shared_sessions import front_name
from service.threads import call_in_thread


class OwnEngine:
    """An `EngineSource` whose devices no other server has."""

    def __init__(self, settings: Settings, hosts: HostCoordinator | None, first_device: Callable[[], str | None]):
        """Nothing is begun yet.

        Args:
            hosts: the other hosts, where policies are spread over several.
        """
        self._settings = settings
        self._hosts = hosts
        self.load: LoadPolicy = policy_loader(settings, first_device) if hosts is None else hosts.load

    @asynccontextmanager
    async def opened(self, durations: Durations) -> AsyncIterator[Engine]:
        """See `EngineSource.opened`.

        Raises:
            NoDevice: a device of the settings is not there, or another host.
        """
        settings = self._settings
        engine = Engine(
            stuck_after=settings.stuck_after,
            durations=durations,
            batch_sizes=settings.engine_batch_sizes,
            devices=await _devices(settings) if self._hosts is None else await _join(self._hosts, settings),
            load=settings.engine_load,
            load_timeout=settings.load_timeout,
        )
        if self._hosts is None:
            yield engine
            return
        try:
            with _together(self._hosts, engine):
                yield engine
        finally:
            # Last of all: robots are held by then, and nobody asks any more.
            await asyncio.to_thread(self._hosts.close)

    def admit(self, admit: Admit) -> Admit:
        """No session is made after a host is lost: a policy that is in memory would be ready and never act."""
        if (hosts := self._hosts) is None:
            return admit

        async def admit_together(new: NewSession) -> None:
            hosts.check()
            await admit(new)

        return admit_together


async def _devices(settings: Settings) -> tuple[str, ...]:
    """Places for policies, when some are named: then JAX is imported before the server answers."""
    if not settings.devices:
        return ()
    named = partial(jaxmodels.name_devices, settings.devices, together=settings.placement == "shard")
    try:
        return await call_in_thread(named, "import-jax")
    except JaxModelsError as error:
        raise NoDevice(f"devices: {error}") from error


async def _join(hosts: HostCoordinator, settings: Settings) -> tuple[str, ...]:
    """The one place of all hosts' devices, when all are there."""
    name_caches(settings)
    try:
        return (await call_in_thread(hosts.begin, "join-hosts"),)
    except JaxModelsError as error:
        hosts.close()
        raise NoDevice(f"hosts: {error}") from error


@contextmanager
def _together(hosts: HostCoordinator, engine: Engine) -> Iterator[None]:
    """The engine is told when a host is lost."""
    loop = asyncio.get_running_loop()
    place = engine.first_device or ""

    def leave(why: str) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(engine.leave, place, why)

    hosts.told = leave
    yield


class ClusterEngine:
    """An `EngineSource` whose devices are the engines of a cluster.

    Raises:
        SettingsError: Ray is not installed.
    """

    def __init__(self, app: App):
        """Nothing is connected yet."""
        settings = app.ctx.settings
        try:
            from service.distributed.bootstrap import ClusterBootstrap
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"engine: {settings.engine} needs Ray ({error.name} is not installed); pip install 'robojax[ray]'"
            ) from error
        self._app = app
        self._joining = ClusterBootstrap(settings, settings)
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
    options = host_options(settings, settings, settings.engine)
    if settings.engine != "here":
        return ClusterEngine(app)
    if options is not None and find_spec("ray") is None:
        raise SettingsError(f"hosts_count: {options.count} needs Ray (it is not installed); pip install 'robojax[ray]'")
    hosts = (
        None
        if options is None
        else HostCoordinator(options, CheckpointSandbox(settings.load_memory), opened_in(settings))
    )
    return OwnEngine(settings, hosts, first_device)
