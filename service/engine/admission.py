"""Whether a device has the time for one more robot, by what its batches were measured to take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.engine.costs import Costs
from service.engine.served import Frames, Served, in_words


@dataclass(frozen=True)
class Admission:
    """What a policy's device says to so many more inferences per second.

    Attributes:
        fits: whether it has the time.
        share: of one device's time that they take.
        per_second: how many it has the time for.
        text: the figures, for whoever is refused.
    """

    fits: bool
    share: float
    per_second: float
    text: str


def each(costs: Costs, sizes: Iterable[int], rates: Sequence[float], devices: int = 1) -> tuple[float, int]:
    """Seconds of a device that one inference takes when robots of these rates share it, and the batch size for that.

    Batches are no larger than there are robots for a device, and twice one's time (a request may come when one has
    just begun) is no longer than the quickest robot leaves between its requests.
    """
    robots, fastest = -(-len(rates) // devices), max(rates)
    usable = [size for size in sizes if size <= max(robots, 1) and 2 * costs.slow(size) * fastest <= 1]
    best = min(usable, key=lambda size: costs.usual(size) / size, default=1)
    return costs.usual(best) / best, best


def taken(served: Served, frames: Frames, rates: Sequence[float]) -> float:
    """Share of one device's time that robots of these rates take, whose pictures are all of these sizes."""
    first, devices = served.replicas[0], len(served.replicas)
    return sum(rates) * each(first.costs(frames), first.can(frames), rates, devices)[0] / devices


def dearest(served: Served, shown: Iterable[Frames]) -> Frames:
    """What a robot is expected to come with of which nothing is known: what it is promised should hold then, too.

    Args:
        shown: by others with the same policy.
    """
    first = served.replicas[0]
    return max((first.trained, *shown), key=lambda frames: first.costs(frames).usual(1))


def judge(
    served: Served,
    per_second: float,
    mine: Sequence[float],
    others: float,
    *,
    limit: float,
    frames: Frames | None = None,
) -> Admission:
    """Whether so many more inferences fit.

    Args:
        mine: rates of those who share the policy already, with frames of the same sizes.
        others: share of a device that all others take.
        limit: share that all together may take.
        frames: what the policy is asked with; what it was trained with when None.
    """
    first, devices = served.replicas[0], len(served.replicas)
    frames = first.trained if frames is None else frames
    costs = first.costs(frames)
    seconds, batch = each(costs, first.can(frames), (*mine, per_second), devices)
    before = others + sum(mine) * seconds / devices
    share = per_second * seconds / devices
    left = max(limit - before, 0.0) * devices / seconds if seconds else per_second
    # One at a time there is no more than what one inference leaves, whatever the others do.
    alone = 1 / costs.slow(1) if costs.slow(1) else per_second
    possible = min(left, alone, per_second)
    shown = "" if frames == first.trained else f"{in_words(dict(frames))}, "
    text = (
        f"an inference takes {seconds * 1e3:.1f} ms here ({shown}in batches of {batch}), {len(mine)} other sessions "
        f"like it and {before:.0%} of the device's time are promised (engine_load allows {limit:.0%}); this session "
        f"asks for {per_second:.1f} inferences per second and there is time for {possible:.1f}"
    )
    return Admission(before + share <= limit + 1e-9 and per_second <= alone, share, possible, text)
