"""Autoscaling: how many engines there should be, and which resource the cluster lacks for one. Pure; imports no Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.distributed.engine_actor import EngineFacts

# Seconds after which it is said that there is none, where engines that run leave too little; and that Ray does not
# start one, where it is not known who has what is missing.
NO_PLACE = 20.0
SLOW = 90.0


def lack(
    wanted: Mapping[str, float],
    there: Mapping[str, float],
    free: Mapping[str, float],
    *,
    running: int,
    waiting: int,
    seconds: float,
) -> str:
    """Explain why engines have not started; empty as long as they still may.

    What an engine wants is taken from `free` as soon as Ray has chosen its place, long before its process answers: too
    little that is free says nothing by itself.

    Args:
        wanted: what one engine takes.
        there, free: all that the cluster has, and what of it nobody has.
        running, waiting: engines that have answered, and that have not.
        seconds: how long one has been waited for.
    """
    names = [*wanted]
    has = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in names)
    takes = ", ".join(f"{value:g} {name}" for name, value in wanted.items())
    figures = f"an engine wants {takes} (engine_resources), and free in the cluster are {has}"
    if seconds > NO_PLACE and any(there.get(name, 0) < (running + waiting) * wanted[name] for name in names):
        return f"Ray has had no place for an engine for {NO_PLACE:g} s; {figures}"
    if seconds > SLOW:
        is_enough = all(free.get(name, 0) >= wanted[name] for name in names)
        why = "though not all on one node" if is_enough else "which others may have, or an engine that does not answer"
        return f"Ray has not started an engine for {SLOW:g} s; {figures}, {why}"
    return ""


@dataclass(frozen=True)
class Bounds:
    """Bounds and thresholds for the number of engines.

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
    """Decides how many engines there should be; called again and again.

    Attributes:
        why: the reason for the newest change, for logs.
    """

    bounds: Bounds
    why: str = ""
    _since: dict[str, float] = field(default_factory=dict)

    def wanted(self, now: float, engines: Sequence[EngineFacts], coming: int = 0) -> int:
        """Return how many engines there should be.

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
