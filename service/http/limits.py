"""Connection and rate limits per source address."""

import ipaddress
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache

from service.errors import TooManyRequests


class Connections:
    """Counts of open connections by address, and their limits.

    Args:
        per_address: connections of one address, or of one IPv6 /64 network.
        total: connections of all addresses.
        is_local_limited: whether ``per_address`` applies to this machine, e.g. behind a local proxy.
        spare: additional connections that accept emergency stops only.
    """

    def __init__(self, per_address: int = 64, total: int = 4096, is_local_limited: bool = False, spare: int = 0):
        self._per_address, self._total = per_address, total
        self._is_local_limited, self._most_spare = is_local_limited, spare
        self._open: Counter[str] = Counter()
        self._spare: deque[Callable[[], None]] = deque()

    def enter(self, address: str) -> bool:
        """Count a connection from this address, and return True; return False if there are too many already."""
        who = source_key(address)
        is_limited = self._is_local_limited or not is_local(address)
        if self._open.total() >= self._total or (is_limited and self._open[who] >= self._per_address):
            return False
        self._open[who] += 1
        return True

    def leave(self, address: str) -> None:
        """Uncount a connection that has closed."""
        who = source_key(address)
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def enter_spare(self, end: Callable[[], None]) -> bool:
        """Count a connection above the limit, for an emergency stop only; ``end`` closes it for a newer one."""
        if not self._most_spare:
            return False
        if len(self._spare) >= self._most_spare:
            self._spare.popleft()()
        self._spare.append(end)
        return True

    def leave_spare(self, end: Callable[[], None]) -> None:
        """Uncount a connection that was above the limit."""
        if end in self._spare:
            self._spare.remove(end)

    def __len__(self) -> int:
        return self._open.total() + len(self._spare)


class Bucket:
    """Token bucket: ``rate`` tokens per second, and at most ``burst`` at once."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self.burst = rate, burst
        self._left, self._at, self._clock = float(burst), clock(), clock

    def take(self, cost: float = 1.0) -> bool:
        """Take tokens if there are enough; returns whether there were."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self.rate, self.burst)
        self._at = now
        if self._left < cost:
            return False
        self._left -= cost
        return True

    def seconds_until_next(self) -> float:
        """Return seconds until the next token, after ``take`` returned False."""
        return (1 - self._left) / self.rate


class Rates:
    """Token buckets by source; beyond ``max_sources`` the least recently used bucket is dropped."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic, max_sources: int = 4096):
        self._rate, self._burst, self._clock, self._most = rate, burst, clock, max_sources
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, source: str) -> float:
        """Take a token of this source; returns 0, or the seconds until the next token."""
        bucket = self._buckets[source] = self._buckets.pop(source, None) or Bucket(self._rate, self._burst, self._clock)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return 0.0 if bucket.take() else bucket.seconds_until_next()


class CreateLimiter:
    """Limits how often a caller may create a session, because each session loads and compiles a policy."""

    def __init__(self, rates: Rates, is_local_limited: bool = False):
        self._rates = rates
        self._is_local_limited = is_local_limited

    def take(self, key: str | None, address: str) -> None:
        """Count one new session of a caller.

        Args:
            key: name of the caller's key. Without a key the address counts, and local callers are not limited.

        Raises:
            TooManyRequests: the limit is reached.
        """
        if key is None and not self._is_local_limited and is_local(address):
            return
        wait = self._rates.take(f"key {key}" if key is not None else source_key(address))
        if wait > 0:
            raise TooManyRequests(
                f"too many sessions were requested in the last minute; the next may be made in {wait:.0f} s "
                "(setting creates_per_minute)",
                wait,
            )


@lru_cache(maxsize=4096)
def is_local(address: str) -> bool:
    """Return whether a peer's address is this machine's loopback; a Unix socket counts too."""
    parsed = _parse_address(address)
    return parsed is None or parsed.is_loopback


@lru_cache(maxsize=4096)
def source_key(address: str) -> str:
    """Return the key that a peer's connections are counted by: its IPv4 address, or its IPv6 /64 network."""
    parsed = _parse_address(address)
    if parsed is None:
        return "here"
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


def _parse_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed
