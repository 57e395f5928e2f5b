"""Coordinator of a host group: gathers the worker hosts and loads policies on all of them."""

import logging
import math
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.distributed.artifacts import make_listing
from service.distributed.config import HostSettings
from service.distributed.host_group import (
    BuildRequest,
    HostGroup,
    SharedPolicy,
)
from service.distributed.ray_node import make_credentials
from service.inference.config import PolicySettings
from service.inference.policy_sources import copy_roots
from service.setting_types import SettingsError

if TYPE_CHECKING:
    from service.distributed.ray_hosts import RayHosts

MIN_SECRET_SIZE = 16
# JAX finds out by itself who is there: on TPU pods, under Slurm and Open MPI.
AUTO = "auto"
# To listen on all addresses of a machine; nobody can be sent there.
ALL_ADDRESSES = ("0.0.0.0", "[::]", "*")


@dataclass(frozen=True)
class HostOptions:
    """Options that all hosts of a group must agree on.

    Attributes:
        count: of all hosts, the front included.
        host, port: where the front listens, as the others reach it.
        coordinator: ``address:port`` for JAX's own connections; None where JAX finds out by itself.
        secret: that all of them know.
        timeout: seconds in which the others have to come.
        dtype, policy_bytes: as the settings of these names.
    """

    count: int
    host: str
    port: int
    coordinator: str | None
    secret: bytes
    timeout: float = 300.0
    dtype: str | None = None
    policy_bytes: int | None = None


def read_host_options(hosts: HostSettings, policies: PolicySettings) -> HostOptions | None:
    """Read the options of a host group from the settings; None where this server is alone.

    Raises:
        SettingsError: something is missing or makes no sense.
    """
    if hosts.hosts_count == 1:
        return None
    host, port = read_address("hosts_address", hosts.hosts_address)
    if host in ALL_ADDRESSES and hosts.hosts_coordinator is None:
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
        timeout=hosts.hosts_wait,
        dtype=policies.dtype,
        policy_bytes=policies.policy_bytes,
    )


def read_address(name: str, text: str | None) -> tuple[str, int]:
    """Parse an address such as ``10.0.0.1:8470`` or ``[fd00::1]:8470``.

    Raises:
        SettingsError: it is none.
    """
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise SettingsError(f"{name}: found {text!r}; wanted ADDRESS:PORT, as 10.0.0.1:8470")
    return host, int(port)


def read_secret(path: str | None) -> bytes:
    """Read the secret that all hosts know.

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
    if len(secret) < MIN_SECRET_SIZE:
        raise SettingsError(
            f"hosts_secret_file: {path!r} has {len(secret)} characters; wanted {MIN_SECRET_SIZE} or more"
        )
    return secret


logger = logging.getLogger(__name__)


class HostCoordinator:
    """Coordinator of a host group; it is begun and closed by its maker, and loads policies in between.

    Args:
        inspect: given the folder of a policy before it is read, or sent.
        roots: as of `jaxmodels.load_policy`.

    Attributes:
        on_lost: called once, in some thread, with why nothing can be computed any more.
    """

    def __init__(
        self,
        options: HostOptions,
        inspect: Callable[[jaxmodels.PolicyFolder], None],
        roots: Sequence[Path] | None = None,
    ):
        self.on_lost: Callable[[str], None] = lambda why: None
        self._options = options
        self._inspect = inspect
        self._roots = roots
        self._hosts: RayHosts | None = None
        self._group: HostGroup | None = None
        self._device = ""
        self._numbers = count(1)
        self._folders: dict[str, Path] = {}

    def begin(self) -> str:
        """Wait for the worker hosts and join their devices; returns their common device name. Blocks.

        Raises:
            HostsLost: they did not come, or one of them is gone again.
            ConfigError: JAX cannot bring them together.
        """
        options = self._options
        credentials = make_credentials(options.secret, options.host, options.port)
        os.environ.update(credentials.environment)
        # Ray reads its environment when it is imported, and once only: by now `make_credentials` is in it.
        from service.distributed.ray_hosts import RayHosts

        self._hosts = RayHosts(options, credentials, self._folders.__getitem__, self._on_node_end)
        group = self._group = HostGroup(self._hosts.gather(), lambda why: self.on_lost(why))
        command = {
            "do": "join",
            "count": options.count,
            "coordinator": options.coordinator,
            "patience": options.timeout,
        }
        number = None if options.coordinator is None else 0

        def join() -> tuple[str, int]:
            return jaxmodels.join_hosts(options.count, number, options.coordinator, patience=options.timeout)

        self._device, devices = group.run(command, join, limit=math.inf)  # joining has a time limit of its own
        logger.info("%d hosts with %d devices have joined", options.count, devices)
        return self._device

    def load(
        self, path: str, revision: str | None = None, /, *, like: Any = None, on_progress: Any = None
    ) -> SharedPolicy:
        """Load a policy on all hosts, as `jaxmodels.load_policy`.

        Raises:
            JaxModelsError: this host cannot load it, or another one (`HostRefused`), or one is gone (`HostsLost`).
        """
        assert self._group is not None, "begun before"
        group, number = self._group, next(self._numbers)
        loading = _Loading()

        def send_files(opened: jaxmodels.PolicyFolder) -> None:
            self._inspect(opened)
            folder = opened.path
            listing = make_listing(folder)
            self._folders[listing.sha] = folder
            loading.request = group.request_build(
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
                self._device,
                like=like.local if isinstance(like, SharedPolicy) else None,
                on_progress=on_progress,
                inspect=send_files,
                largest=self._options.policy_bytes,
                roots=self._roots if like is None else copy_roots(path),
            )
            if loading.request is not None:
                loading.request.wait()
        except BaseException:
            if loading.request is not None:
                with suppress(JaxModelsError):
                    loading.request.wait()  # what is being loaded cannot be dropped yet
            group.queue_command({"do": "drop", "policy": number})
            raise
        return SharedPolicy(group, local, number)

    def check(self) -> None:
        """Raise when a host is gone."""
        if self._group is not None:
            self._group.check()

    def close(self) -> None:
        """End the worker hosts, and Ray on this machine."""
        if self._group is not None:
            self._group.close()
        if self._hosts is not None:
            self._hosts.close()

    def _on_node_end(self, why: str) -> None:
        if self._group is not None:
            self._group.mark_lost(why)


@dataclass
class _Loading:
    request: BuildRequest | None = None
