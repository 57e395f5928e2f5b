"""Inferences per second that sessions were promised, by what they were measured to take."""

from dataclasses import dataclass
from weakref import ReferenceType, ref

from service.engine.admission import Admission, judge
from service.engine.served import Served


@dataclass(frozen=True)
class _Claim:
    """What one session was promised; its policy is not kept by it."""

    served: ReferenceType[Served]
    per_second: float
    share: float


class Claims:
    """Of all sessions, each by whatever stands for it."""

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
        return sum(claim.share for claim in self._claims.values())

    def admit(self, served: Served, per_second: float, *, who: object = None) -> Admission:
        """See ``Engine.admit``."""
        mine, others = [], 0.0
        for holder, claim in self._claims.items():
            if holder is who:
                continue
            if claim.served() is served:
                mine.append(claim.per_second)
            else:
                others += claim.share
        return judge(served, per_second, mine, others, limit=self._limit)

    def claim(self, who: object, served: Served, per_second: float) -> None:
        """See ``Engine.claim``."""
        share = self.admit(served, per_second, who=who).share
        self._claims[who] = _Claim(ref(served), per_second, share)

    def move(self, who: object, served: Served) -> None:
        """See ``Engine.move_claim``."""
        if who in self._claims:
            self.claim(who, served, self._claims[who].per_second)

    def release(self, who: object) -> None:
        """See ``Engine.release``."""
        self._claims.pop(who, None)
