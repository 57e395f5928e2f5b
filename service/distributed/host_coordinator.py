"""Coordinator host: gathers workers, loads policies everywhere."""

import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import RayActorError, RayError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.util import placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.distributed.artifacts import listing_of, pack
from service.distributed.config import HostSettings
from service.distributed.host_group import (
    Arrays,
    Asked,
    HostFailed,
    HostGone,
    HostGroup,
    HostsLost,
    SharedPolicy,
    Words,
)
from service.distributed.host_worker import GROUPS, MISSING, HostActor, versions
from service.distributed.ray_node import FOR_EVER, RESOURCE, Credentials, RayNode, join_address, own_credentials
from service.inference.config import PolicySettings
from service.inference.policy_sources import copies_in
from service.setting_types import SettingsError

if TYPE_CHECKING:
    pass

LEAST = 16
# JAX finds out by itself who is there: on TPU pods, under Slurm and Open MPI.
AUTO = "auto"
# To listen on all addresses of a machine; nobody can be sent there.
ANYWHERE = ("0.0.0.0", "[::]", "*")


@dataclass(frozen=True)
class HostOptions:
    """What hosts have to know.

    Attributes:
        count: of all hosts, the front included.
        host, port: where the front listens, as the others reach it.
        coordinator: ``address:port`` for JAX's own connections; None where JAX finds out by itself.
        secret: that all of them know.
        patience: seconds in which the others have to come.
        dtype, policy_bytes: as the settings of these names.
    """

    count: int
    host: str
    port: int
    coordinator: str | None
    secret: bytes
    patience: float = 300.0
    dtype: str | None = None
    policy_bytes: int | None = None


def host_options(hosts: HostSettings, policies: PolicySettings, engine: str) -> HostOptions | None:
    """None where this server is alone.

    Raises:
        SettingsError: something is missing or makes no sense.
    """
    if hosts.hosts_count == 1:
        return None
    if engine != "here":
        raise SettingsError(f"hosts_count: found {hosts.hosts_count} with engine {engine}; wanted one of the two")
    host, port = read_address("hosts_address", hosts.hosts_address)
    if host in ANYWHERE and hosts.hosts_coordinator is None:
        raise SettingsError(f"hosts_address: found {hosts.hosts_address}; wanted an address that other hosts reach")
    coordinator = hosts.hosts_coordinator or f"{host}:{port + 1}"
    if coordinator != AUTO:
        read_address("hosts_coordinator", coordinator)
    return HostOptions(
        count=hosts.hosts_count,
        host=host.strip("[]"),
        port=port,
        coordinator=None if coordinator == AUTO else coordinator,
        secret=read_secret(hosts.hosts_secret_file),
        patience=hosts.hosts_wait,
        dtype=policies.dtype,
        policy_bytes=policies.policy_bytes,
    )


def read_address(name: str, said: str | None) -> tuple[str, int]:
    """An address as ``10.0.0.1:8470`` or ``[fd00::1]:8470``.

    Raises:
        SettingsError: it is none.
    """
    host, _, port = (said or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise SettingsError(f"{name}: found {said!r}; wanted ADDRESS:PORT, as 10.0.0.1:8470")
    return host, int(port)


def read_secret(path: str | None) -> bytes:
    """The secret that all hosts know.

    Raises:
        SettingsError: there is none, it is too short, or others may read it.
    """
    if path is None:
        raise SettingsError("hosts_secret_file: found none; wanted a file: openssl rand -hex 32 > FILE; chmod 600 FILE")
    file = Path(path).expanduser()
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SettingsError(f"hosts_secret_file: others may read or change {path!r}; chmod 600 it")
        secret = file.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"hosts_secret_file: {path!r} cannot be read: {error.strerror}") from error
    if len(secret) < LEAST:
        raise SettingsError(f"hosts_secret_file: {path!r} has {len(secret)} characters; wanted {LEAST} or more")
    return secret


logger = logging.getLogger(__name__)

# Seconds between looks for hosts that have to come; that an actor has to begin once its machine is there.
LOOK = 0.2
BEGINNING = 120.0


@dataclass(eq=False)
class RayHost:
    """A `Host`.

    Args:
        folder: of the policy that is loaded, for a host that does not have its files.
    """

    name: str
    actor: Any
    folder: Callable[[str], Path]
    heard_at: float = field(default_factory=time.monotonic)
    _is_asked: bool = False

    def beat(self) -> None:
        """See `Host`."""
        if not self._is_asked:
            self._is_asked = True
            self.actor.beat.remote().future().add_done_callback(self._hear)

    def stay(self) -> "Future[None]":
        """See `Host`."""
        return _outcome(self.actor.stay.remote())

    def run(self, number: int, words: Words, arrays: Arrays) -> "Future[list[tuple[int, str]]]":
        """See `Host`."""
        return _outcome(self.actor.run.remote(number, words, arrays))

    def build(self, words: Words) -> "Future[str | None]":
        """See `Host`; files are sent to a host that does not have them."""
        outcome: Future[str | None] = Future()

        def send() -> None:
            try:
                parcel = pack(self.folder(words["sha"]), ray.put)  # kept in the store until it has arrived
                outcome.set_result(_outcome(self.actor.build.remote(words, parcel)).result())
            except OSError as error:
                outcome.set_result(f"its files cannot be read on the server: {error.strerror}")
            except Exception as error:
                outcome.set_exception(error)

        def hear(asked: "Future[str | None]") -> None:
            if (error := asked.exception()) is not None:
                outcome.set_exception(error)
            elif asked.result() == MISSING:
                threading.Thread(target=send, name="policy-files", daemon=True).start()
            else:
                outcome.set_result(asked.result())

        _outcome(self.actor.build.remote(words)).add_done_callback(hear)
        return outcome

    def end(self, why: str | None) -> "Future[None]":
        """See `Host`."""
        return _outcome(self.actor.end.remote(why))

    def _hear(self, answer: "Future[Any]") -> None:
        if answer.exception() is None:
            self.heard_at = time.monotonic()
        self._is_asked = False


class RayHosts:
    """The cluster of one server and its followers: begun once, and closed.

    Args:
        on_end: called in a thread with the reason, should Ray end on this machine.
        folder: of a policy, by its sha.
    """

    def __init__(
        self,
        options: HostOptions,
        credentials: Credentials,
        folder: Callable[[str], Path],
        on_end: Callable[[str], None],
    ):
        self._options, self._credentials = options, credentials
        self._folder, self._on_end = folder, on_end
        self._node: RayNode | None = None
        self._ended: str | None = None

    def gather(self) -> Sequence[RayHost]:
        """All of them, when they are there; blocks.

        Raises:
            HostsLost: they did not come, or Ray cannot be begun here.
        """
        options, environment = self._options, self._credentials.environment
        until = time.monotonic() + options.patience
        address = join_address(options.host, options.port)
        head = ["--head", f"--port={options.port}", f"--node-ip-address={options.host}", "--num-cpus=0"]
        head += ["--include-dashboard=false", "--include-log-monitor=false", f"--ray-client-server-port={_free_port()}"]
        self._node = RayNode([*head, f"--temp-dir={self._credentials.folder}"], environment, self._hear_end)
        _connect(options, until, self._check)
        logger.info("waiting for %d more hosts at %s", options.count - 1, address)
        group = placement_group([{RESOURCE: 1.0}] * (options.count - 1), strategy="STRICT_SPREAD")
        while not group.wait(LOOK):
            self._check()
            if time.monotonic() > until:
                came = sum(node["Alive"] and RESOURCE in node["Resources"] for node in ray.nodes())
                came_of = f"{came} of {options.count - 1} other hosts came"
                raise HostsLost(f"{came_of} within {options.patience:g} s; start robojax follow on them")
        remote: Any = ray.remote
        kind = remote(concurrency_groups=GROUPS)(HostActor)
        actors = [
            kind.options(
                num_cpus=0,
                resources={RESOURCE: 1.0},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(index + 1, options.count)
            for index in range(options.count - 1)
        ]
        return [self._welcome(number, actor) for number, actor in enumerate(actors, 1)]

    def close(self) -> None:
        """End Ray on this machine."""
        self._on_end = lambda why: None
        if ray.is_initialized():
            ray.shutdown()
        if self._node is not None:
            self._node.kill()
        self._credentials.remove()

    def _welcome(self, number: int, actor: Any) -> RayHost:
        try:
            address, theirs = ray.get(actor.introduce.remote(), timeout=BEGINNING)
        except RayError as error:
            raise HostsLost(f"host {number} is gone: {_in_short(error)}") from error
        name = f"host {number} ({address})"
        if theirs != versions():
            raise HostsLost(f"{name} has other versions: {theirs}; this one has {versions()}")
        return RayHost(name, actor, self._folder)

    def _check(self) -> None:
        if self._ended is not None:
            address = join_address(self._options.host, self._options.port)
            raise HostsLost(f"{address} cannot be listened on, or Ray cannot begin there: {self._ended}")

    def _hear_end(self, last: str) -> None:
        self._ended = last or "it wrote no reason"
        self._on_end(f"Ray ended on this machine: {self._ended}")


def _connect(options: HostOptions, until: float, check: Callable[[], None]) -> None:
    """Make this process one of the cluster's, as soon as its head listens; without one Ray would wait for ever."""
    os.environ.update(FOR_EVER)
    address = join_address(options.host, options.port)
    while True:
        check()
        try:
            socket.create_connection((options.host, options.port), LOOK).close()
            ray.init(
                address,
                namespace="hosts",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=options.host,
            )
            return
        except (RayError, OSError, ValueError, RuntimeError) as error:
            if time.monotonic() > until:
                raise HostsLost(f"Ray does not answer at {address}: {error}") from error
            time.sleep(LOOK)


def _free_port() -> int:
    """For Ray's client server, which cannot be left out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _outcome(asked: Any) -> "Future[Any]":
    """What an actor answers; its end and its errors as those of hosts."""
    outcome: Future[Any] = Future()

    def settle(answer: "Future[Any]") -> None:
        error: Any = answer.exception()
        if error is None:
            outcome.set_result(answer.result())
        elif isinstance(error, RayTaskError):
            outcome.set_exception(HostFailed(f"{type(error.cause).__name__}; its log says more"))
        else:
            outcome.set_exception(HostGone(_in_short(error)))

    asked.future().add_done_callback(settle)
    return outcome


def _in_short(error: BaseException) -> str:
    return "its process ended, or its connection" if isinstance(error, RayActorError) else type(error).__name__


class HostCoordinator:
    """Begun and closed by whoever made it; policies are loaded in between.

    Args:
        inspect: given the folder of a policy before it is read, or sent.
        roots: as of `jaxmodels.load_policy`.

    Attributes:
        told: called once, in some thread, with why nothing can be computed any more.
    """

    def __init__(
        self,
        options: HostOptions,
        inspect: Callable[[jaxmodels.PolicyFolder], None],
        roots: Sequence[Path] | None = None,
    ):
        self.told: Callable[[str], None] = lambda why: None
        self._options = options
        self._inspect = inspect
        self._roots = roots
        self._hosts: RayHosts | None = None
        self._crew: HostGroup | None = None
        self._place = ""
        self._numbers = count(1)
        self._folders: dict[str, Path] = {}

    def begin(self) -> str:
        """Wait for the others, in a thread; the place of all devices, as policies call it.

        Raises:
            HostsLost: they did not come, or one of them is gone again.
            ConfigError: JAX cannot bring them together.
        """
        options = self._options
        credentials = own_credentials(options.secret, options.host, options.port)
        os.environ.update(credentials.environment)
        # Ray reads its environment when it is imported, and once only.
        pass

        self._hosts = RayHosts(options, credentials, self._folders.__getitem__, self._hear_end)
        crew = self._crew = HostGroup(self._hosts.gather(), lambda why: self.told(why))
        words = {
            "do": "join",
            "count": options.count,
            "coordinator": options.coordinator,
            "patience": options.patience,
        }
        number = None if options.coordinator is None else 0

        def join() -> tuple[str, int]:
            return jaxmodels.join_hosts(options.count, number, options.coordinator, patience=options.patience)

        self._place, devices = crew.run(words, join, limit=math.inf)  # it has a patience of its own
        logger.info("%d hosts with %d devices have joined", options.count, devices)
        return self._place

    def load(
        self, path: str, revision: str | None = None, /, *, like: Any = None, on_progress: Any = None
    ) -> SharedPolicy:
        """As `jaxmodels.load_policy`, on all hosts.

        Raises:
            JaxModelsError: this host cannot load it, or another one (`HostRefused`), or one is gone (`HostsLost`).
        """
        assert self._crew is not None, "begun before"
        crew, number = self._crew, next(self._numbers)
        loading = _Loading()

        def share(opened: jaxmodels.PolicyFolder) -> None:
            self._inspect(opened)
            folder = opened.path
            listing = listing_of(folder)
            self._folders[listing.sha] = folder
            loading.asked = crew.ask(
                {
                    "do": "load",
                    "policy": number,
                    "like": like.number if isinstance(like, SharedPolicy) else 0,
                    "sha": listing.sha,
                    "files": [list(file) for file in listing.files],
                    "folder": str(folder.absolute()),
                    "dtype": self._options.dtype,
                }
            )

        try:
            local = jaxmodels.load_policy(
                path,
                revision,
                self._options.dtype,
                self._place,
                like=like.local if isinstance(like, SharedPolicy) else None,
                on_progress=on_progress,
                inspect=share,
                largest=self._options.policy_bytes,
                roots=self._roots if like is None else copies_in(path),
            )
            if loading.asked is not None:
                loading.asked.wait()
        except BaseException:
            if loading.asked is not None:
                with suppress(JaxModelsError):
                    loading.asked.wait()  # what is being loaded cannot be dropped yet
            crew.tell({"do": "drop", "policy": number})
            raise
        return SharedPolicy(crew, local, number)

    def check(self) -> None:
        """
        Raises:
            HostsLost: nothing can be computed any more.
        """
        if self._crew is not None:
            self._crew.check()

    def close(self) -> None:
        """Send the followers home, and end Ray here."""
        if self._crew is not None:
            self._crew.close()
        if self._hosts is not None:
            self._hosts.close()

    def _hear_end(self, why: str) -> None:
        if self._crew is not None:
            self._crew.lose(why)


@dataclass
class _Loading:
    asked: Asked | None = None
