"""Chooses where inference runs: here, several hosts, or a Ray cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib.util import find_spec

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.api.context import App
from service.distributed.host_coordinator import HostCoordinator, read_host_options
from service.errors import NoDevice
from service.inference.config import PolicySettings
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadPolicy
from service.inference.policy_sources import allowed_roots, make_policy_loader, set_cache_folders
from service.inference.progress import LoadDurations
from service.inference.sandbox import CheckpointSandbox
from service.sessions.request import CheckRequest, NewSession
from service.setting_types import SettingsError
from service.shared_sessions import front_name
from service.threads import call_in_thread


class OwnEngine:
    """Engine source whose devices belong to this server alone: this machine's, or those of several hosts."""

    def __init__(self, policies: PolicySettings, hosts: HostCoordinator | None, first_device: Callable[[], str | None]):
        """Choose how policies are loaded; nothing is started yet.

        Args:
            hosts: the other hosts, where policies are spread over several.
        """
        self._policies = policies
        self._hosts = hosts
        self.load: LoadPolicy = make_policy_loader(policies, first_device) if hosts is None else hosts.load

    @asynccontextmanager
    async def open(self, durations: LoadDurations) -> AsyncIterator[Engine]:
        """Open the engine; it is closed when the context ends.

        Raises:
            NoDevice: a device of the settings is not there, or another host.
        """
        policies = self._policies
        engine = Engine(
            stuck_after=policies.stuck_after,
            durations=durations,
            batch_sizes=policies.engine_batch_sizes,
            devices=await _name_devices(policies) if self._hosts is None else await _join_hosts(self._hosts, policies),
            max_load=policies.engine_load,
            load_timeout=policies.load_timeout,
        )
        if self._hosts is None:
            yield engine
            return
        try:
            with _report_lost_hosts(self._hosts, engine):
                yield engine
        finally:
            # Last of all: robots are held by then, and nobody asks any more.
            await asyncio.to_thread(self._hosts.close)

    def wrap_check(self, check: CheckRequest) -> CheckRequest:
        """Refuse new sessions after a host is lost: a policy in memory would be ready and never act."""
        if (hosts := self._hosts) is None:
            return check

        async def check_hosts_first(new: NewSession) -> None:
            hosts.check()
            await check(new)

        return check_hosts_first


async def _name_devices(policies: PolicySettings) -> tuple[str, ...]:
    """Return the devices of the settings by name. When any are named, JAX is imported before the server answers."""
    if not policies.devices:
        return ()
    named = partial(jaxmodels.name_devices, policies.devices, together=policies.placement == "shard")
    try:
        return await call_in_thread(named, "import-jax")
    except JaxModelsError as error:
        raise NoDevice(f"devices: {error}") from error


async def _join_hosts(hosts: HostCoordinator, policies: PolicySettings) -> tuple[str, ...]:
    """Wait for all hosts and return the one name under which their devices are used together."""
    set_cache_folders(policies)
    try:
        return (await call_in_thread(hosts.begin, "join-hosts"),)
    except JaxModelsError as error:
        hosts.close()
        raise NoDevice(f"hosts: {error}") from error


@contextmanager
def _report_lost_hosts(hosts: HostCoordinator, engine: Engine) -> Iterator[None]:
    """Take the hosts' device out of the engine when a host is lost."""
    loop = asyncio.get_running_loop()
    device = engine.devices.first or ""

    def retire_device(why: str) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(engine.replica_manager.retire_device, device, why)

    hosts.on_lost = retire_device
    yield


class ClusterEngine:
    """Engine source whose devices are the engines of a Ray cluster.

    Raises:
        SettingsError: Ray is not installed.
    """

    def __init__(self, app: App):
        """Prepare for the cluster of the settings; nothing is connected yet."""
        settings = app.ctx.settings
        try:
            from service.distributed.cluster import ClusterBootstrap
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"engine: {settings.cluster.engine} needs Ray ({error.name} is not installed); pip install -e '.[ray]'"
            ) from error
        self._app = app
        self._bootstrap = ClusterBootstrap(settings.policies, settings.cluster)
        self.load: LoadPolicy = self._bootstrap.load

    @asynccontextmanager
    async def open(self, durations: LoadDurations) -> AsyncIterator[Engine]:
        """Open the engine; it is closed when the context ends.

        Raises:
            NoEngine: the cluster cannot be joined, or has no engine.
        """
        engine = await self._bootstrap.open(durations, front_name(self._app))
        self._app.ctx.cluster = self._bootstrap.cluster
        try:
            yield engine
        finally:
            await self._bootstrap.close()

    def wrap_check(self, check: CheckRequest) -> CheckRequest:
        """Return the check unchanged: a cluster may get an engine at any time."""
        return check


EngineSource = OwnEngine | ClusterEngine


def create_engine_source(app: App, first_device: Callable[[], str | None]) -> EngineSource:
    """Create the engine source that the settings ask for.

    Args:
        first_device: where the engine has policies loaded, once it is open.

    Raises:
        SettingsError: something is missing or makes no sense, or Ray is not installed.
    """
    settings = app.ctx.settings
    policies = settings.policies
    options = read_host_options(settings.hosts, policies)
    if settings.cluster.engine != "here":
        return ClusterEngine(app)
    if options is not None and find_spec("ray") is None:
        raise SettingsError(f"hosts_count: {options.count} needs Ray (it is not installed); pip install -e '.[ray]'")
    hosts = (
        None
        if options is None
        else HostCoordinator(options, CheckpointSandbox(policies.load_memory), allowed_roots(policies))
    )
    return OwnEngine(policies, hosts, first_device)
