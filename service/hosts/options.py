"""What the settings say of several hosts, read for the front and for followers."""

import stat
from dataclasses import dataclass
from pathlib import Path

from service.settings import Settings, SettingsError

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


def host_options(settings: Settings) -> HostOptions | None:
    """None where this server is alone.

    Raises:
        SettingsError: something is missing or makes no sense.
    """
    if settings.hosts_count == 1:
        return None
    if settings.engine != "here":
        raise SettingsError(
            f"hosts_count: found {settings.hosts_count} with engine {settings.engine}; wanted one of the two"
        )
    host, port = read_address("hosts_address", settings.hosts_address)
    if host in ANYWHERE and settings.hosts_coordinator is None:
        raise SettingsError(f"hosts_address: found {settings.hosts_address}; wanted an address that other hosts reach")
    coordinator = settings.hosts_coordinator or f"{host}:{port + 1}"
    if coordinator != AUTO:
        read_address("hosts_coordinator", coordinator)
    return HostOptions(
        count=settings.hosts_count,
        host=host.strip("[]"),
        port=port,
        coordinator=None if coordinator == AUTO else coordinator,
        secret=read_secret(settings.hosts_secret_file),
        patience=settings.hosts_wait,
        dtype=settings.dtype,
        policy_bytes=settings.policy_bytes,
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
