"""ICE candidates of a peer: which addresses are tried, and those that come before their offer."""

import ipaddress
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

MAX_CANDIDATES = 32  # addresses tried for one connection; a laptop with two networks and a VPN has a dozen
MAX_CANDIDATE_LENGTH = 512  # characters; one with an IPv6 address and all its extensions has 200
LOWEST_PORT = 1024  # no browser and no library takes a lower one; services that could be pestered have them


class EarlyCandidates:
    """ICE candidates by sender that arrived before their offer.

    An offer takes those of its own generation (``usernameFragment``) and those without one, and clears none.
    """

    def __init__(self, max_senders: int = 16, per_sender: int = 64):
        self._max_senders = max_senders
        self._per_sender = per_sender
        self._by_sender: dict[str, deque[Mapping[str, Any]]] = {}

    def keep(self, sender: str, candidate: Mapping[str, Any]) -> None:
        """Keep a candidate; the oldest go when there are too many."""
        candidates = self._by_sender.pop(sender, None) or deque(maxlen=self._per_sender)
        candidates.append(candidate)
        self._by_sender[sender] = candidates
        while len(self._by_sender) > self._max_senders:
            del self._by_sender[next(iter(self._by_sender))]

    def forget(self, sender: str) -> None:
        """Forget the candidates of a sender that left."""
        self._by_sender.pop(sender, None)

    def for_description(self, sender: str, sdp: str) -> list[Mapping[str, Any]]:
        """Return the candidates that belong to this description of the sender."""
        fragments = {line.partition(":")[2].strip() for line in sdp.splitlines() if line.startswith("a=ice-ufrag:")}
        return [
            candidate
            for candidate in self._by_sender.get(sender, ())
            if not candidate.get("usernameFragment") or candidate["usernameFragment"] in fragments
        ]


def trim_candidate(candidate: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a candidate without superfluous fields; None for an oversized one."""
    fields = {name: value for name in _FIELDS if isinstance(value := candidate.get(name), str | int)}
    return (
        fields
        if sum(len(value) for value in fields.values() if isinstance(value, str)) <= MAX_CANDIDATE_LENGTH
        else None
    )


def explain_refused_address(host: str, port: int) -> str | None:
    """Return why this address is never used, or None.

    Connectivity checks go to any address that the other side names. Without this rule a participant could make this
    server send datagrams to metadata servers, to multicast or to local services. Private addresses are allowed: robots
    use them.
    """
    if not LOWEST_PORT <= port <= 65535:
        return f"port {port} is not from {LOWEST_PORT} to 65535"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None if host.endswith(".local") else "it is neither an address nor a name of mDNS"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_multicast or address.is_unspecified or address == ipaddress.IPv4Address("255.255.255.255"):
        return "it is no address of one machine"
    if (address.version == 4 and address.is_link_local) or address in _METADATA:
        return "it is a link-local or metadata address"
    return None


_FIELDS = ("candidate", "sdpMid", "sdpMLineIndex", "usernameFragment")
_METADATA = frozenset({ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")})


def split_candidates(sdp: str) -> tuple[str, list[Mapping[str, Any]]]:
    """Split an SDP into a description and its mDNS candidates; refused and excess candidates are dropped.

    aiortc would resolve ``.local`` candidates in a description one by one, a second each, and fail without mDNS.
    """
    lines: list[str] = []
    named: list[Mapping[str, Any]] = []
    refused: list[str] = []
    used = 0
    index = -1
    for line in sdp.splitlines():
        if line.startswith("m="):
            index, used = index + 1, 0
        parts = line.split() if line.startswith("a=candidate:") else []
        if len(parts) > 5:
            host, port = parts[4], int(parts[5]) if parts[5].isdecimal() else 0
            why = (
                explain_refused_address(host, port)
                if used < MAX_CANDIDATES
                else f"{MAX_CANDIDATES} others come before it"
            )
            used += why is None
            if why is not None:
                refused.append(f"{line!r}: {why}")
            elif host.endswith(".local"):
                named.append({"candidate": line, "sdpMLineIndex": max(index, 0)})
            else:
                lines.append(line)
        else:
            lines.append(line)
    if refused:
        log.info("%d candidates not used, of them %s", len(refused), refused[0])
    if named:  # they come after it: who has heard the end listens to no more
        lines = [line for line in lines if line != "a=end-of-candidates"]
    return "\r\n".join(lines) + "\r\n", named
