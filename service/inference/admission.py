"""Whether devices have time for one more robot; reservations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

from service.inference.latency_model import LatencyModel
from service.inference.loaded_policy import Frames, LoadedPolicy, Sizes, in_words


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


def each(costs: LatencyModel, sizes: Iterable[int], rates: Sequence[float], devices: int = 1) -> tuple[float, int]:
    """Seconds of a device that one inference takes when robots of these rates share it, and the batch size for that.

    Batches are no larger than there are robots for a device, and twice one's time (a request may come when one has
    just begun) is no longer than the quickest robot leaves between its requests.
    """
    robots, fastest = -(-len(rates) // devices), max(rates)
    usable = [size for size in sizes if size <= max(robots, 1) and 2 * costs.slow(size) * fastest <= 1]
    best = min(usable, key=lambda size: costs.usual(size) / size, default=1)
    return costs.usual(best) / best, best


def taken(served: LoadedPolicy, frames: Frames, rates: Sequence[float]) -> float:
    """Share of one device's time that robots of these rates take, whose pictures are all of these sizes."""
    first, devices = served.replicas[0], len(served.replicas)
    return sum(rates) * each(first.costs(frames), first.can(frames), rates, devices)[0] / devices


def dearest(served: LoadedPolicy, shown: Iterable[Frames]) -> Frames:
    """What a robot is expected to come with of which nothing is known: what it is promised should hold then, too.

    Args:
        shown: by others with the same policy.
    """
    first = served.replicas[0]
    return max((first.trained, *shown), key=lambda frames: first.costs(frames).usual(1))


def judge(
    served: LoadedPolicy,
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


# The frames that a session's policy is asked with; None while nobody knows.
FrameSizes = Callable[[], Sizes | None]


@dataclass(frozen=True)
class _Claim:
    """What one session was promised; its policy is not kept by it."""

    served: ReferenceType[LoadedPolicy]
    per_second: float
    seen: FrameSizes


class Reservations:
    """Of all sessions, each by whatever stands for it.

    What they take is reckoned when somebody asks: robots show their frames after they were let in, and what those take
    is measured later still.
    """

    def __init__(self, load: float | None):
        """Nothing is promised yet.

        Args:
            load: share of the devices' time that may be promised; no end of it when None.
        """
        self._limit = float("inf") if load is None else load
        self._claims: dict[object, _Claim] = {}

    @property
    def per_second(self) -> float:
        """Inferences that are promised to all together."""
        return sum(claim.per_second for claim in self._claims.values())

    @property
    def share(self) -> float:
        """Share of a device's time that they take."""
        return sum(taken(served, frames, rates) for (served, frames), rates in self._rates().items())

    def admit(self, served: LoadedPolicy, per_second: float, *, seen: FrameSizes, who: object = None) -> Admission:
        """See ``Engine.admit``."""
        rates = self._rates(but=who)
        frames = _measured(served, seen)
        if frames is None:
            frames = dearest(served, _shown(served, rates))
        mine = rates.pop((served, frames), [])
        others = sum(taken(other, of, each) for (other, of), each in rates.items())
        return judge(served, per_second, mine, others, limit=self._limit, frames=frames)

    def claim(self, who: object, served: LoadedPolicy, per_second: float, seen: FrameSizes) -> None:
        """See ``Engine.claim``."""
        self._claims[who] = _Claim(ref(served), per_second, seen)

    def move(self, who: object, served: LoadedPolicy) -> None:
        """See ``Engine.move_claim``."""
        if (claim := self._claims.get(who)) is not None:
            self.claim(who, served, claim.per_second, claim.seen)

    def release(self, who: object) -> None:
        """See ``Engine.release``."""
        self._claims.pop(who, None)

    def _rates(self, but: object = None) -> dict[tuple[LoadedPolicy, Frames], list[float]]:
        """Of those who can be answered together: with one policy, and frames of the same sizes."""
        found: dict[tuple[LoadedPolicy, Frames], list[float]] = {}
        hidden: list[tuple[LoadedPolicy, float]] = []
        for who, claim in tuple(self._claims.items()):
            served = claim.served()
            if served is None or who is but:
                continue
            frames = _measured(served, claim.seen)
            if frames is None:
                hidden.append((served, claim.per_second))
            else:
                found.setdefault((served, frames), []).append(claim.per_second)
        for served, per_second in hidden:
            found.setdefault((served, dearest(served, _shown(served, found))), []).append(per_second)
        return found


def _measured(served: LoadedPolicy, seen: FrameSizes) -> Frames | None:
    """The frames that come, if it is known what they take: a robot with others is held until they are compiled for."""
    sizes = seen()
    frames = None if sizes is None else frozenset(sizes.items())
    return frames if frames is not None and served.replicas[0].costs(frames).is_known else None


def _shown(served: LoadedPolicy, rates: Iterable[tuple[LoadedPolicy, Frames]]) -> list[Frames]:
    return [frames for other, frames in rates if other is served]
