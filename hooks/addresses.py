"""Rules for the addresses that webhooks may be sent to; host names are resolved once and then pinned.

Without these rules, webhooks could be sent to services on loopback, metadata servers and machines behind a firewall.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from hooks.errors import UnsafeTarget

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# host, port -> addresses as text
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_URL = 2048
# These servers return a machine's credentials. Only a network of one address (/32, /128) allows them.
METADATA_SERVERS: tuple[Address, ...] = (
    ipaddress.ip_address("169.254.169.254"),
    ipaddress.ip_address("169.254.170.2"),
    ipaddress.ip_address("100.100.100.200"),
    ipaddress.ip_address("fd00:ec2::254"),
)
# Python's tables lack some non-public networks, such as fec0::/10 and 64:ff9b:1::/48, and differ between versions.
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20")))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """Parts of a webhook's URL; ``addresses`` is empty if the host is a name."""

    url: str
    host: str
    port: int
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetRules:
    """Rules for delivery targets: public addresses, and networks that the operator allows (such as 192.168.1.0/24)."""

    allowed: tuple[Network, ...] = ()

    def parse_url(self, url: str) -> Target:
        """Split an http or https URL into host and port; raise ``UnsafeTarget`` for others and refused addresses."""
        if len(url) > MAX_URL:
            raise UnsafeTarget(f"url: {len(url)} characters, wanted at most {MAX_URL}")
        if not url.isascii() or re.search(r"[\x00-\x20\x7f\\]", url):
            raise UnsafeTarget("url: only ASCII without spaces and backslashes; write other letters as %.. and xn--..")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UnsafeTarget(f"url: {error}") from None
        if parts.scheme not in ("http", "https"):
            raise UnsafeTarget(f"url: scheme {parts.scheme!r}, wanted http or https")
        if "@" in parts.netloc:
            raise UnsafeTarget("url: it contains a user name or password; use the webhook's secret instead")
        if not host:
            raise UnsafeTarget("url: it has no host; wanted https://host/path")
        if port == 0:
            raise UnsafeTarget("url: port 0, wanted 1 to 65535")
        return Target(url, host, port or {"http": 80, "https": 443}[parts.scheme], self._parse_host_address(host))

    def _parse_host_address(self, host: str) -> tuple[str, ...]:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
                raise UnsafeTarget(f"url: host {host!r} names an interface of this machine")
            self.check_address(host, address)
            return (str(address),)
        try:
            # C libraries accept more forms of an address: 2130706433, 0x7f.1, 0177.0.0.1, 127.1.
            disguised = ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            if not _HOST_NAME.fullmatch(host):
                raise UnsafeTarget(f"url: {host!r} is not a host name") from None
            return ()
        if not self._is_allowed(disguised):
            raise UnsafeTarget(f"url: host {host!r} is the address {disguised} in disguise; write it as {disguised}")
        return (str(disguised),)

    async def resolve_target(self, target: Target, resolve: Resolve) -> tuple[str, ...]:
        """Resolve and check a target's addresses before each attempt; raise ``UnsafeTarget`` or ``OSError``."""
        if target.addresses:
            return target.addresses
        addresses = await resolve(target.host, target.port)
        for text in addresses:
            try:
                address = ipaddress.ip_address(text)
            except ValueError:
                raise UnsafeTarget(f"host {target.host!r} has the invalid address {text!r}") from None
            self.check_address(target.host, address)
        return tuple(addresses)

    def check_address(self, host: str, address: Address) -> None:
        """Raise ``UnsafeTarget`` for an address that is neither public nor in an allowed network."""
        for inner in unwrap_ipv4(address):
            kind = _describe_non_public(inner)
            if kind and not self._is_allowed(inner):
                named = str(inner) if host == str(inner) else f"{host!r} is {inner},"
                raise UnsafeTarget(
                    f"url: {named} {'which ' if host != str(inner) else ''}is {kind}; nothing is sent there unless the "
                    f"operator allows its network (allowed_networks, or --registry-allow {_suggest_network(inner)})"
                )

    def _is_allowed(self, address: Address) -> bool:
        if address in METADATA_SERVERS:
            return any(network.num_addresses == 1 and address in network for network in self.allowed)
        return any(network.version == address.version and address in network for network in self.allowed)


def unwrap_ipv4(address: Address) -> list[Address]:
    """Return the IPv4 address inside an IPv6 one (mapped, 6to4, NAT64), else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    # Only the inner address of 6to4 counts, because Python 3.13 calls all of 2002::/16 "private".
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address in _NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return [inner or address]


def describe_danger(address: Address) -> str | None:
    """Describe an address that no list of networks should allow (metadata servers, link-local); None for others."""
    is_dangerous = (
        address in METADATA_SERVERS or address.is_unspecified or address.is_link_local or address.is_multicast
    ) and not address.is_loopback
    return _describe_non_public(address) if is_dangerous else None


def _describe_non_public(address: Address) -> str | None:
    """Return why an address is not public; None for a public address."""
    kinds = (
        (address in METADATA_SERVERS, "the metadata server of a cloud"),
        (address.is_unspecified, "this machine (unspecified)"),
        (address.is_loopback, "this machine (loopback)"),
        (address.is_link_local, "link-local"),
        (address.is_multicast, "multicast"),
        (address.is_private, "private"),
        (not address.is_global or address.is_reserved, "not public"),
        (address.version == 6 and address not in _PUBLIC_V6, "not public"),
        (any(address in network for network in _SPECIAL), "not public"),
    )
    return next((name for is_so, name in kinds if is_so), None)


def _suggest_network(address: Address) -> str:
    if address in METADATA_SERVERS:
        return f"{address}/{address.max_prefixlen}"
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 64), strict=False))
