"""How patient continuous delivery is, and how much it may use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeploymentSettings:
    """All times in seconds.

    Attributes:
        quiet: nothing further was pushed for so long before a push counts as complete; a LeRobot publish is 4 commits.
        longest: after so long it is deployed even when pushes go on.
        poll: how often heads are looked at, for webhooks that were lost; None for never.
        jitter: part of ``poll`` that each may be early or late, so that a fleet does not ask at once.
        transfers: how often a commit is fetched before bad bytes are taken for the commit's own fault.
        transfer_pause: before the second; doubled for each further one.
        superseded: so many in a row are given up for a newer commit; the next is brought to its end, or pushes that
            come faster than one is prepared would keep all of them from arriving.
        preparing: for loading, compiling and the gates, per session.
        swapping: until the session took the new policy over.
        retry: after a failure that was not the commit's; doubled for each further one, up to ``retry_longest``.
        kept: records.
    """

    quiet: float = 20.0
    longest: float = 300.0
    poll: float | None = 180.0
    jitter: float = 0.2
    transfers: int = 3
    transfer_pause: float = 2.0
    superseded: int = 3
    preparing: float = 900.0
    swapping: float = 120.0
    retry: float = 120.0
    retry_longest: float = 3600.0
    kept: int = 500

    def __post_init__(self) -> None:
        times = {name: getattr(self, name) for name in ("quiet", "transfer_pause", "retry", "retry_longest")}
        limits = {name: getattr(self, name) for name in ("longest", "preparing", "swapping")}
        limits |= {} if self.poll is None else {"poll": self.poll}
        counts = {name: getattr(self, name) for name in ("transfers", "superseded", "kept")}
        wrong = [f"{name} {value}: wanted 0 seconds or more" for name, value in times.items() if value < 0]
        wrong += [f"{name} {value}: wanted more than 0 seconds" for name, value in limits.items() if value <= 0]
        wrong += [f"{name} {value}: wanted 1 or more" for name, value in counts.items() if value < 1]
        if not 0 <= self.jitter < 1:
            wrong.append(f"jitter {self.jitter}: wanted a part from 0 to below 1")
        if wrong:
            raise ValueError("; ".join(wrong))
