"""How much one source may send: so many at once, and so many per second in the long run."""

from collections import OrderedDict
from dataclasses import dataclass

SOURCES = 10_000  # that are remembered; the one that was silent for longest is forgotten first


@dataclass
class _Bucket:
    left: float
    at: float


class Rates:
    """A bucket of tokens per source."""

    def __init__(self, rate: float, burst: int):
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, source: str, now: float) -> float:
        """Seconds until it may send again; 0 when it may now, which is counted.

        Args:
            now: monotonic.
        """
        bucket = self._buckets.setdefault(source, _Bucket(self._burst, now))
        self._buckets.move_to_end(source)
        if len(self._buckets) > SOURCES:
            self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + (now - bucket.at) * self._rate)
        bucket.at = now
        if bucket.left < 1:
            return (1 - bucket.left) / self._rate
        bucket.left -= 1
        return 0.0
