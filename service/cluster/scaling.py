"""How many engines there should be, from how busy they were: reads no clock and asks nobody."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from service.cluster.messages import EngineFacts


@dataclass(frozen=True)
class Bounds:
    """Of the number of engines.

    Attributes:
        least, most: how many there may be.
        wait: seconds that nine of ten requests may wait for a device.
        busy: share of the time above which a device has no room for bursts.
        idle: share that the engines that stay may have at most when one goes.
        grow_after, shrink_after: seconds for which a reason must hold. Growing is quick, as robots wait; shrinking is
            slow, as an engine takes seconds to be made and its policies to be compiled.
    """

    least: int = 1
    most: int = 1
    wait: float = 0.05
    busy: float = 0.75
    idle: float = 0.4
    grow_after: float = 3.0
    shrink_after: float = 60.0


@dataclass
class Scaling:
    """Asked again and again what to do.

    Attributes:
        why: the reason for the newest change, for logs.
    """

    bounds: Bounds
    why: str = ""
    _since: dict[str, float] = field(default_factory=dict)

    def wanted(self, now: float, engines: Sequence[EngineFacts], coming: int = 0) -> int:
        """How many there should be.

        Args:
            engines: those that answer.
            coming: those that are being made; while there are any, nothing more is decided.
        """
        bounds, there = self.bounds, len(engines) + coming
        if there < bounds.least or there > bounds.most:
            self._since.clear()
            self.why = f"there are {there}, wanted are {bounds.least} to {bounds.most}"
            return min(max(there, bounds.least), bounds.most)
        if coming or not engines:
            self._since.clear()
            return there
        load = sum(one.load for one in engines) / len(engines)
        queue = max(one.queue for one in engines)
        after = load * len(engines) / max(len(engines) - 1, 1)
        is_late, is_busy = queue > bounds.wait, load > bounds.busy
        # An engine that waits without being busy is slowed down by something that another engine would not mend.
        if there < bounds.most and self._held(
            "grow", is_busy or (is_late and load > bounds.idle), now, bounds.grow_after
        ):
            self.why = f"devices are {load:.0%} busy and requests wait {queue * 1e3:.0f} ms"
            return there + 1
        if there > bounds.least and self._held("shrink", after < bounds.idle and not is_late, now, bounds.shrink_after):
            self.why = f"devices are {load:.0%} busy, and one less would be {after:.0%}"
            return there - 1
        return there

    def _held(self, what: str, is_so: bool, now: float, long_enough: float) -> bool:
        if not is_so:
            self._since.pop(what, None)
            return False
        if now - self._since.setdefault(what, now) < long_enough:
            return False
        self._since.clear()  # the next one after it has shown what this one did
        return True
