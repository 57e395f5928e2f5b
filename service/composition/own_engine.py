"""The engine of a server that has it to itself: on the devices of this machine, or on those of several hosts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.composition.loaders import name_caches, policy_loader
from service.edge.allowance import Admit
from service.engine.engine import Engine, LoadPolicy
from service.engine.progress import Durations
from service.engine.worker import call_in_thread
from service.errors import NoDevice
from service.hosts.front import Front
from service.sessions.request import NewSession
from service.settings import Settings


class OwnEngine:
    """An `EngineSource` whose devices no other server has."""

    def __init__(self, settings: Settings, hosts: Front | None, first_device: Callable[[], str | None]):
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


async def _join(hosts: Front, settings: Settings) -> tuple[str, ...]:
    """The one place of all hosts' devices, when all are there."""
    name_caches(settings)
    try:
        return (await call_in_thread(hosts.begin, "join-hosts"),)
    except JaxModelsError as error:
        hosts.close()
        raise NoDevice(f"hosts: {error}") from error


@contextmanager
def _together(hosts: Front, engine: Engine) -> Iterator[None]:
    """The engine is told when a host is lost."""
    loop = asyncio.get_running_loop()
    place = engine.first_device or ""

    def leave(why: str) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(engine.leave, place, why)

    hosts.told = leave
    yield
