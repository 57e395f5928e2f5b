"""Addresses of transport servers, and which are allowed.

``transport_server_url`` comes over the wire. Without these rules whoever may make a session could have this server
talk to whatever it can reach: metadata servers, machines behind its firewall. What a name stands for is asked once and
kept for the life of the session's link, so that a name server cannot answer one thing to the check and another to the
connection.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver

from service.errors import InvalidRequest, TransportError

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
        """Read what a caller gave as ``transport_server_url``.

        Raises:
            InvalidRequest: not an http(s) or ws(s) URL with a host, or one with credentials, query or fragment.
        """

        def wrong(found: str) -> InvalidRequest:
            return InvalidRequest(
                f"transport_server_url: {found}; wanted something like http://localhost:8000 or https://host/api, "
                "or direct, without rooms",
                ("body", "transport_server_url"),
            )

        # URLs with these parse differently in different libraries, so none is guessed at.
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

    def rooms(self, kind: Kind, workspace: str) -> str:
        """The collection that rooms are created in."""
        return f"{self.base}/{kind}/workspaces/{workspace}/rooms"

    def room(self, kind: Kind, workspace: str, room: str) -> str:
        """One room."""
        return f"{self.rooms(kind, workspace)}/{room}"

    def socket(self, kind: Kind, workspace: str, room: str) -> str:
        """One room's WebSocket. The base path stays: the public image has everything under ``/api``."""
        return f"ws{self.room(kind, workspace, room).removeprefix('http')}/ws"


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

SETTING = "transport_hosts"
_PATTERN = re.compile(r"[a-z0-9_.*?-]{1,253}")
_BRACKETS = re.compile(r"\[([^\]]+)\](?::(\d{1,5}))?")


@dataclass(frozen=True)
class AddressRules:
    """What is known of addresses and names elsewhere (``hooks.addresses``), and asked here.

    Attributes:
        danger: what an address is that is never meant (metadata server, link-local...), None for others.
        layers: an address and the IPv4 address that it stands for, if it does.
        resolve: host and port -> addresses; raises OSError.
        pinned: a resolver that knows this one host by these addresses.
    """

    danger: Callable[[IpAddress], str | None]
    layers: Callable[[IpAddress], Sequence[IpAddress]]
    resolve: Callable[[str, int], Awaitable[Sequence[str]]]
    pinned: Callable[[str, Sequence[str]], AbstractResolver]


@dataclass(frozen=True)
class Listed:
    """One entry of the list: a name, a pattern of names, an address or a network; at one port, or at any.

    Attributes:
        pattern: of names, None when it is a network.
    """

    pattern: str | None
    network: Network | None
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "Listed":
        """``host``, ``host:8000``, ``*.lan``, ``192.168.1.0/24``, ``[fd00::1]:8000``.

        Raises:
            ValueError: none of them.
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

    def names(self, host: str, port: int) -> bool:
        """Whether it lets this name pass."""
        return self.pattern is not None and self.port in (None, port) and fnmatchcase(host, self.pattern)

    def holds(self, address: IpAddress, port: int, *, exactly: bool = False) -> bool:
        """Whether it lets this address pass; ``exactly`` when it is the one that was listed, not one of a network."""
        network = self.network
        if network is None or self.port not in (None, port) or network.version != address.version:
            return False
        return address in network and (not exactly or network.num_addresses == 1)


class Destinations:
    """The rules of one server.

    Args:
        listed: hosts and networks besides this machine's loopback and this server itself.
        own_port: that this server listens on, None before it does; its own address is allowed, whatever it is called.
    """

    def __init__(
        self, listed: Iterable[str], rules: AddressRules, own_port: Callable[[], int | None] = lambda: None
    ) -> None:
        """
        Raises:
            ValueError: an entry is neither a host nor a network.
        """
        self._listed = tuple(map(Listed.parse, listed))
        self._rules = rules
        self._own_port = own_port

    async def addresses(self, url: str) -> tuple[str, Sequence[str]]:
        """The host of a transport server's URL and the addresses to connect to, every one of them checked.

        Raises:
            InvalidRequest: the URL or its host is refused; says which setting allows it.
            TransportError: nobody knows the host.
        """
        parts = urlsplit(Address.parse(url).base)
        host, port = (parts.hostname or "").removesuffix("."), parts.port or {"http": 80, "https": 443}[parts.scheme]
        literal = self._literal(host)
        if literal is not None:
            found: Sequence[str] = (str(literal),)
        elif not self._may_be_allowed(host, port):
            raise self._not_listed()
        else:
            try:
                found = await self._rules.resolve(host, port)
            except (OSError, TimeoutError) as error:
                why = getattr(error, "strerror", None) or "no answer in time"
                raise TransportError(f"transport_server_url: host {host!r} is not known ({why}); correct it") from error
        if not found:
            raise TransportError(f"transport_server_url: host {host!r} has no address; correct it")
        for text in found:
            self._check(host, port, ipaddress.ip_address(text.partition("%")[0]))
        return host, found

    async def connector(self, url: str) -> aiohttp.TCPConnector:
        """What connects to the addresses that were checked and nowhere else, as often as it is asked to.

        Raises:
            InvalidRequest, TransportError: as ``addresses``.
        """
        host, found = await self.addresses(url)
        return aiohttp.TCPConnector(resolver=self._rules.pinned(host, found), use_dns_cache=False)

    def _literal(self, host: str) -> IpAddress | None:
        """The address that a host is itself, if it is written as one, and plainly."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            if getattr(address, "scope_id", None) is not None:
                raise _refused("names an interface of this machine; leave the zone out")
            if list(self._rules.layers(address)) != [address]:
                raise _refused(f"is an IPv4 address in disguise; write {self._rules.layers(address)[-1]}")
            return address
        try:
            # What C libraries take for an address: 2130706433, 0x7f.1, 0177.0.0.1, 127.1.
            odd = ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            if not host.isascii() or not re.fullmatch(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", host):
                raise _refused("is no name of a host; write names of other scripts as xn--...") from None
            return None
        raise _refused(f"is an address in disguise; write {odd}")

    def _may_be_allowed(self, host: str, port: int) -> bool:
        """Whether it is worth asking what a name stands for."""
        if is_localhost(host) or port == self._own_port():
            return True
        return any(entry.network is not None or entry.names(host, port) for entry in self._listed)

    def _check(self, host: str, port: int, address: IpAddress) -> None:
        for inner in self._rules.layers(address):
            found = self._rules.danger(inner)
            if found and not any(entry.holds(inner, port, exactly=True) for entry in self._listed):
                raise _refused(f"is {found}; sessions are never sent there")
            if not (
                (inner.is_loopback and (is_localhost(host) or host == str(inner)))
                or (port == self._own_port() and _is_here(inner))
                or any(entry.names(host, port) or entry.holds(inner, port) for entry in self._listed)
            ):
                raise self._not_listed()

    def _not_listed(self) -> InvalidRequest:
        others = (
            f"this machine and the {len(self._listed)} of the setting {SETTING}" if self._listed else "this machine"
        )
        return _refused(
            f"is none that this server connects to ({others}); --{SETTING.replace('_', '-')} HOST allows it"
        )


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"transport_server_url: its host {why}", ("body", "transport_server_url"))


def is_localhost(host: str) -> bool:
    """Whether a name is of this machine wherever it is asked for (RFC 6761); its addresses are none."""
    return host == "localhost" or host.endswith(".localhost")


def _is_here(address: IpAddress) -> bool:
    """Whether an address is one of this machine's: only then the system would answer from it. Nothing is sent."""
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return str(probe.getsockname()[0]) == str(address)
    except OSError:
        return False
