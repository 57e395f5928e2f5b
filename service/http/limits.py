"""Connection and rate limits per source address."""

import ipaddress
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from service.errors import TooManyRequests


@dataclass(frozen=True)
class ConnectionLimits:
    """Connections that are open at a time.

    A robot with eight cameras has about twenty: a socket for each of its rooms, and as many calls at a time as its
    client makes.

    Attributes:
        each: of one address; an IPv6 network of 64 bits counts as one, since whoever has it has all of it.
        all: of everybody together, so that descriptors are left for policies and logs.
        is_local_limited: whether this machine is held to ``each``, too. All robots of one machine, and the server's own
            sessions, share its address; but so does everybody behind a proxy on it.
        spare: above all of these, for nothing but an emergency stop: idle connections must not keep anybody from it.
    """

    each: int = 64
    all: int = 4096
    is_local_limited: bool = False
    spare: int = 0


class Connections:
    """Who is connected now."""

    def __init__(self, limits: ConnectionLimits | None = None):
        self.limits = limits or ConnectionLimits()
        self._open: Counter[str] = Counter()
        self._spare: deque[Callable[[], None]] = deque()

    def enter(self, address: str) -> bool:
        """Count a connection of this address; False, and not counted, when there are too many already."""
        who = source_of(address)
        is_limited = self.limits.is_local_limited or not is_local(address)
        if self._open.total() >= self.limits.all or (is_limited and self._open[who] >= self.limits.each):
            return False
        self._open[who] += 1
        return True

    def leave(self, address: str) -> None:
        """A connection that was counted is gone."""
        who = source_of(address)
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def squeeze_in(self, end: Callable[[], None]) -> bool:
        """One that could not enter, for a stop only; ``end`` is called when a newer one needs the place."""
        if not self.limits.spare:
            return False
        if len(self._spare) >= self.limits.spare:
            self._spare.popleft()()
        self._spare.append(end)
        return True

    def squeeze_out(self, end: Callable[[], None]) -> None:
        """One that was squeezed in is gone."""
        if end in self._spare:
            self._spare.remove(end)

    def __len__(self) -> int:
        return self._open.total() + len(self._spare)


class Bucket:
    """A token bucket: so much a second, and so much at once."""

    __slots__ = ("_at", "_clock", "_left", "burst", "rate")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self.burst = rate, burst
        self._left, self._at, self._clock = float(burst), clock(), clock

    def take(self, cost: float = 1.0) -> bool:
        """Whether there was so much left; then it is taken."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self.rate, self.burst)
        self._at = now
        if self._left < cost:
            return False
        self._left -= cost
        return True

    def wait(self) -> float:
        """Seconds until there is one again, after ``take`` found none."""
        return (1 - self._left) / self.rate


class Rates:
    """A bucket of one size for each source; of too many, the one that was silent for longest is forgotten."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic, most: int = 4096):
        self._rate, self._burst, self._clock, self._most = rate, burst, clock, most
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, source: str) -> float:
        """Seconds until this source may go on; 0 when it may now, which is counted."""
        bucket = self._buckets[source] = self._buckets.pop(source, None) or Bucket(self._rate, self._burst, self._clock)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return 0.0 if bucket.take() else bucket.wait()


class Creates:
    """How often a caller may make a session: each loads and compiles a policy, which takes cores from the robots."""

    def __init__(self, rates: Rates, is_local_limited: bool = False):
        self._rates = rates
        self._is_local_limited = is_local_limited

    def take(self, key: str | None, address: str) -> None:
        """Count one.

        Args:
            key: what the caller's key is called; None without one, and then the address counts. Whoever is on this
                machine and needs no key has other ways to take its cores.

        Raises:
            TooManyRequests: not yet.
        """
        if key is None and not self._is_local_limited and is_local(address):
            return
        wait = self._rates.take(f"key {key}" if key is not None else source_of(address))
        if wait > 0:
            raise TooManyRequests(
                f"too many sessions were asked for in the last minute; the next may be made in {wait:.0f} s "
                "(setting creates_per_minute)",
                wait,
            )


def is_local(address: str) -> bool:
    """Whether a peer's address is this machine's loopback; a socket of the file system, which has none, is too."""
    found = _parsed(address)
    return found is None or found.is_loopback


def source_of(address: str) -> str:
    """What counts as one peer."""
    found = _parsed(address)
    if found is None:
        return "here"
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


@lru_cache(maxsize=4096)  # asked a few times for each connection, of which thousands may come and go
def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
