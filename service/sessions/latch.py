"""An emergency stop that outlives its session."""

from dataclasses import dataclass

# Ids that are remembered, at most.
LATCHES = 10_000


@dataclass(frozen=True)
class Latch:
    """An emergency stop of a session id that nobody has reset yet, and whose session it was."""

    reason: str
    owner: str | None
