"""Autoscaling: how many engines there should be, and which resource the cluster lacks for one. Pure; imports no Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.engines.messages import EngineFacts

# Seconds after which a shortage is reported: the first if running engines leave too few resources, the second if the
# cause is unknown.
PLACEMENT_TIMEOUT = 20.0
START_TIMEOUT = 90.0


def explain_shortage(
    required: Mapping[str, float],
    total: Mapping[str, float],
    free: Mapping[str, float],
    *,
    running: int,
    waiting: int,
    seconds: float,
) -> str:
    """Explain why engines have not started; return an empty text while they may still start.

    Ray subtracts an engine's resources from `free` before its process answers, so a low value alone means nothing.

    Args:
        required: resources of one engine by name.
        total, free: all resources of the cluster, and the unused resources.
        running, waiting: number of engines that have answered, and that have not.
        seconds: time since the oldest waiting engine was created.
    """
    names = [*required]
    has = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in names)
    takes = ", ".join(f"{value:g} {name}" for name, value in required.items())
    figures = f"an engine wants {takes} (engine_resources), and free in the cluster are {has}"
    if seconds > PLACEMENT_TIMEOUT and any(total.get(name, 0) < (running + waiting) * required[name] for name in names):
        return f"Ray has had no place for an engine for {PLACEMENT_TIMEOUT:g} s; {figures}"
    if seconds > START_TIMEOUT:
        is_enough = all(free.get(name, 0) >= required[name] for name in names)
        why = "though not all on one node" if is_enough else "which others may have, or an engine that does not answer"
        return f"Ray has not started an engine for {START_TIMEOUT:g} s; {figures}, {why}"
    return ""


# Share of the time above which a device has no room for bursts, and share that the remaining engines may have at most
# when one is removed.
BUSY, IDLE = 0.75, 0.4
# Seconds for which a reason must hold. Adding is quick, because robots wait. Removing is slow, because an engine takes
# seconds to start and to compile its policies.
GROW_AFTER, SHRINK_AFTER = 3.0, 60.0


@dataclass(frozen=True)
class Bounds:
    """Bounds for the number of engines.

    Attributes:
        least, most: smallest and largest number of engines.
        wait: seconds that nine of ten requests may wait for a device.
    """

    least: int = 1
    most: int = 1
    wait: float = 0.05


@dataclass
class Scaling:
    """Decides how many engines there should be; called again and again.

    Attributes:
        why: the reason for the newest change, for logs.
    """

    bounds: Bounds
    why: str = ""
    _since: dict[str, float] = field(default_factory=dict)

    def decide(self, now: float, engines: Sequence[EngineFacts], coming: int = 0) -> int:
        """Decide how many engines there should be.

        Args:
            engines: facts of the engines that answer.
            coming: number of engines that are starting; they prevent other changes.
        """
        bounds, current = self.bounds, len(engines) + coming
        if current < bounds.least or current > bounds.most:
            self._since.clear()
            self.why = f"there are {current}, wanted are {bounds.least} to {bounds.most}"
            return min(max(current, bounds.least), bounds.most)
        if coming or not engines:
            self._since.clear()
            return current
        load = sum(one.load for one in engines) / len(engines)
        queue = max(one.queue for one in engines)
        after = load * len(engines) / max(len(engines) - 1, 1)
        is_late, is_busy = queue > bounds.wait, load > BUSY
        # An engine that waits without being busy is slowed down by something that another engine would not mend.
        if current < bounds.most and self._holds("grow", is_busy or (is_late and load > IDLE), now, GROW_AFTER):
            self.why = f"devices are {load:.0%} busy and requests wait {queue * 1e3:.0f} ms"
            return current + 1
        if current > bounds.least and self._holds("shrink", after < IDLE and not is_late, now, SHRINK_AFTER):
            self.why = f"devices are {load:.0%} busy, and one less would be {after:.0%}"
            return current - 1
        return current

    def _holds(self, what: str, is_so: bool, now: float, long_enough: float) -> bool:
        if not is_so:
            self._since.pop(what, None)
            return False
        if now - self._since.setdefault(what, now) < long_enough:
            return False
        self._since.clear()  # Scale one engine at a time: measure the effect before the next change.
        return True
