"""When something that failed may be tried again by itself. Pure: times are given, in seconds."""

from collections.abc import Hashable


class Retries:
    """Waits that double with every failure, up to a longest one."""

    def __init__(self, first: float, longest: float):
        self.first = first
        self.longest = longest
        self._failed: dict[Hashable, tuple[int, float]] = {}

    def failed(self, key: Hashable, now: float) -> None:
        """Wait, longer than the last time."""
        count = self._failed.get(key, (0, 0.0))[0]
        self._failed[key] = (count + 1, now + min(self.first * 2.0 ** min(count, 60), self.longest))

    def may(self, key: Hashable, now: float) -> bool:
        """Whether the wait is over, if there was any."""
        return self._failed.get(key, (0, now))[1] <= now

    def forget(self, key: Hashable) -> None:
        """It went well."""
        self._failed.pop(key, None)
