"""Inferences per second that sessions were promised, by what they are measured to take."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import ReferenceType, ref

from service.engine.admission import Admission, dearest, judge, taken
from service.engine.served import Frames, Served, Sizes

# The frames that a session's policy is asked with; None while nobody knows.
Seen = Callable[[], Sizes | None]


@dataclass(frozen=True)
class _Claim:
    """What one session was promised; its policy is not kept by it."""

    served: ReferenceType[Served]
    per_second: float
    seen: Seen


class Claims:
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

    def admit(self, served: Served, per_second: float, *, seen: Seen, who: object = None) -> Admission:
        """See ``Engine.admit``."""
        rates = self._rates(but=who)
        frames = _measured(served, seen)
        if frames is None:
            frames = dearest(served, _shown(served, rates))
        mine = rates.pop((served, frames), [])
        others = sum(taken(other, of, each) for (other, of), each in rates.items())
        return judge(served, per_second, mine, others, limit=self._limit, frames=frames)

    def claim(self, who: object, served: Served, per_second: float, seen: Seen) -> None:
        """See ``Engine.claim``."""
        self._claims[who] = _Claim(ref(served), per_second, seen)

    def move(self, who: object, served: Served) -> None:
        """See ``Engine.move_claim``."""
        if (claim := self._claims.get(who)) is not None:
            self.claim(who, served, claim.per_second, claim.seen)

    def release(self, who: object) -> None:
        """See ``Engine.release``."""
        self._claims.pop(who, None)

    def _rates(self, but: object = None) -> dict[tuple[Served, Frames], list[float]]:
        """Of those who can be answered together: with one policy, and frames of the same sizes."""
        found: dict[tuple[Served, Frames], list[float]] = {}
        hidden: list[tuple[Served, float]] = []
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


def _measured(served: Served, seen: Seen) -> Frames | None:
    """The frames that come, if it is known what they take: a robot with others is held until they are compiled for."""
    sizes = seen()
    frames = None if sizes is None else frozenset(sizes.items())
    return frames if frames is not None and served.replicas[0].costs(frames).is_known else None


def _shown(served: Served, rates: Iterable[tuple[Served, Frames]]) -> list[Frames]:
    return [frames for other, frames in rates if other is served]
