"""Addresses of transport servers, and rules that keep callers from reaching other machines through this server.

Names are resolved once per link, so that only checked addresses are connected to.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from service.errors import InvalidRequest, TransportError

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver

_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


class Kind(StrEnum):
    """The two services of a transport server, by the first part of their paths."""

    ROBOTICS = "robotics"
    VIDEO = "video"


@dataclass(frozen=True)
class Address:
    """A transport server's base URL, http or https, with its path (``/api`` on the public image) and no last slash."""

    base: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Parse the ``transport_server_url`` of a caller.

        Raises:
            InvalidRequest: not an http(s) or ws(s) URL with a host, or one with credentials, query or fragment.
        """

        def wrong(problem: str) -> InvalidRequest:
            return InvalidRequest(
                f"transport_server_url: {problem}; wanted something like http://localhost:8000 or https://host/api, "
                "or direct, without rooms",
                ("body", "transport_server_url"),
            )

        # Libraries parse URLs with these characters differently.
        if any(character.isspace() or ord(character) < 0x21 or character == "\\" for character in url):
            raise wrong("holds a space, a control character or a backslash")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise wrong(f"is not a URL ({error})") from error
        if parts.scheme not in _SCHEMES:
            raise wrong(f"scheme is {parts.scheme!r}" if parts.scheme else "has no scheme")
        if not parts.hostname:
            raise wrong("has no host")
        if parts.username is not None or parts.password is not None:
            raise wrong("holds a user name or password")
        if parts.query or parts.fragment:
            raise wrong("holds a query or a fragment")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        where = host if port is None else f"{host}:{port}"
        return cls(f"{_SCHEMES[parts.scheme]}://{where}{parts.path.rstrip('/')}")

    def rooms_url(self, kind: Kind, workspace: str) -> str:
        """Return the URL of a workspace's rooms."""
        return f"{self.base}/{kind}/workspaces/{workspace}/rooms"

    def room_url(self, kind: Kind, workspace: str, room: str) -> str:
        """Return the URL of one room."""
        return f"{self.rooms_url(kind, workspace)}/{room}"

    def socket_url(self, kind: Kind, workspace: str, room: str) -> str:
        """Return the URL of one room's WebSocket."""
        return f"ws{self.room_url(kind, workspace, room).removeprefix('http')}/ws"


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

SETTING = "transport_hosts"
_PATTERN = re.compile(r"[a-z0-9_.*?-]{1,253}")
_BRACKETS = re.compile(r"\[([^\]]+)\](?::(\d{1,5}))?")


@dataclass(frozen=True)
class AddressRules:
    """Checks of addresses from ``hooks.addresses``, passed in because this package may not import it.

    Attributes:
        forbidden_reason: why an address is never allowed, or None.
        embedded_addresses: an address and the IPv4 address that it embeds.
        resolve: host and port to addresses; raises OSError.
        create_resolver: resolver with fixed addresses for one host.
    """

    forbidden_reason: Callable[[IpAddress], str | None]
    embedded_addresses: Callable[[IpAddress], Sequence[IpAddress]]
    resolve: Callable[[str, int], Awaitable[Sequence[str]]]
    create_resolver: Callable[[str, Sequence[str]], "AbstractResolver"]


@dataclass(frozen=True)
class AllowedHost:
    """One entry of ``transport_hosts``: a name, a pattern of names, an address or a network, with an optional port."""

    pattern: str | None
    network: Network | None
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "AllowedHost":
        """Parse ``host``, ``host:8000``, ``*.lan``, ``192.168.1.0/24`` or ``[fd00::1]:8000``.

        Raises:
            ValueError: the text has another form.
        """
        host, port = text.strip().lower(), None
        if match := _BRACKETS.fullmatch(host):
            host, port = match.groups()
        elif host.count(":") == 1:
            host, _, port = host.partition(":")
        if port is not None and not (port.isdigit() and 0 < int(port) <= 65535):
            raise ValueError(f"{text!r}: wanted a port from 1 to 65535")
        number = None if port is None else int(port)
        try:
            return cls(None, ipaddress.ip_network(host), number)
        except ValueError as error:
            if "/" in host or not _PATTERN.fullmatch(host):
                raise ValueError(
                    f"{text!r}: {error if '/' in host else 'no host'}; wanted a host, host:port, *.lan or a network"
                ) from None
        return cls(host.rstrip("."), None, number)

    def matches_name(self, host: str, port: int) -> bool:
        """Whether this entry allows a host name at a port."""
        return self.pattern is not None and self.port in (None, port) and fnmatchcase(host, self.pattern)

    def matches_address(self, address: IpAddress, port: int, *, exactly: bool = False) -> bool:
        """Whether this entry allows an address and port; ``exactly`` ignores networks."""
        network = self.network
        if network is None or self.port not in (None, port) or network.version != address.version:
            return False
        return address in network and (not exactly or network.num_addresses == 1)


class Destinations:
    """Rules for which transport servers this server connects to.

    Args:
        allowed_hosts: further hosts and networks; loopback and this server are always allowed.

    Attributes:
        own_port: port of this server; None before it listens.
    """

    def __init__(self, allowed_hosts: Iterable[str], rules: AddressRules, own_port: int | None = None) -> None:
        """Raises ValueError if an entry is neither a host nor a network."""
        self._allowed_hosts = tuple(map(AllowedHost.parse, allowed_hosts))
        self._rules = rules
        self.own_port = own_port

    async def resolve_addresses(self, url: str) -> tuple[str, Sequence[str]]:
        """Resolve the host of a transport server's URL and check every address; returns the host and the addresses.

        Raises:
            InvalidRequest: the URL or its host is refused; says which setting allows it.
            TransportError: the host cannot be resolved.
        """
        parts = urlsplit(Address.parse(url).base)
        host, port = (parts.hostname or "").removesuffix("."), parts.port or {"http": 80, "https": 443}[parts.scheme]
        literal = self._parse_literal(host)
        if literal is not None:
            addresses: Sequence[str] = (str(literal),)
        elif not self._may_be_allowed(host, port):
            raise self._not_allowed_error()
        else:
            try:
                addresses = await self._rules.resolve(host, port)
            except (OSError, TimeoutError) as error:
                why = getattr(error, "strerror", None) or "no answer in time"
                raise TransportError(f"transport_server_url: host {host!r} is not known ({why}); correct it") from error
        if not addresses:
            raise TransportError(f"transport_server_url: host {host!r} has no address; correct it")
        for text in addresses:
            self._check(host, port, ipaddress.ip_address(text.partition("%")[0]))
        return host, addresses

    async def create_connector(self, url: str) -> "aiohttp.TCPConnector":
        """Create an aiohttp connector that connects to the checked addresses of a URL and to nothing else.

        Raises:
            InvalidRequest, TransportError: as ``resolve_addresses``.
        """
        import aiohttp

        host, addresses = await self.resolve_addresses(url)
        return aiohttp.TCPConnector(resolver=self._rules.create_resolver(host, addresses), use_dns_cache=False)

    def _parse_literal(self, host: str) -> IpAddress | None:
        """Return the address that a host is written as, None for a name; other spellings of an address are refused."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            if getattr(address, "scope_id", None) is not None:
                raise _host_error("names an interface of this machine; leave the zone out")
            if list(self._rules.embedded_addresses(address)) != [address]:
                raise _host_error(
                    f"is an IPv4 address in disguise; write {self._rules.embedded_addresses(address)[-1]}"
                )
            return address
        try:
            # C libraries also read 2130706433, 0x7f.1, 0177.0.0.1 and 127.1 as addresses.
            odd = ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            if not host.isascii() or not re.fullmatch(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", host):
                raise _host_error("is no name of a host; write names of other scripts as xn--...") from None
            return None
        raise _host_error(f"is an address in disguise; write {odd}")

    def _may_be_allowed(self, host: str, port: int) -> bool:
        """Whether a name may be resolved: some entry could allow it or its addresses."""
        if is_localhost(host) or port == self.own_port:
            return True
        return any(entry.network is not None or entry.matches_name(host, port) for entry in self._allowed_hosts)

    def _check(self, host: str, port: int, address: IpAddress) -> None:
        for inner in self._rules.embedded_addresses(address):
            reason = self._rules.forbidden_reason(inner)
            if reason and not any(entry.matches_address(inner, port, exactly=True) for entry in self._allowed_hosts):
                raise _host_error(f"is {reason}; sessions are never sent there")
            if not (
                (inner.is_loopback and (is_localhost(host) or host == str(inner)))
                or (port == self.own_port and is_own_address(inner))
                or any(
                    entry.matches_name(host, port) or entry.matches_address(inner, port)
                    for entry in self._allowed_hosts
                )
            ):
                raise self._not_allowed_error()

    def _not_allowed_error(self) -> InvalidRequest:
        others = (
            f"this machine and the {len(self._allowed_hosts)} of the setting {SETTING}"
            if self._allowed_hosts
            else "this machine"
        )
        return _host_error(
            f"is none that this server connects to ({others}); --{SETTING.replace('_', '-')} HOST allows it"
        )


def _host_error(why: str) -> InvalidRequest:
    return InvalidRequest(f"transport_server_url: its host {why}", ("body", "transport_server_url"))


def is_localhost(host: str) -> bool:
    """Whether a name always means this machine (RFC 6761)."""
    return host == "localhost" or host.endswith(".localhost")


def is_own_address(address: IpAddress) -> bool:
    """Whether this machine has the address: the system would send from it to itself. Nothing is sent."""
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return str(probe.getsockname()[0]) == str(address)
    except OSError:
        return False
