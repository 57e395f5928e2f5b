"""What the simulation of fleets is told of a machine, from results of ``robots_per_device``.

What batches take is what they take one after the other while their robots' questions are dealt with beside them: alone,
a batch is colder, and has all cores. A batch takes longer after the machine stood still for a while, as cores sleep and
caches cool: with one robot at 20 Hz an answer takes nearly twice as long as with sixteen. So three of the measured rows
are used up to tell the simulation how long, and how fast that fades; all others are predictions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet_forming import Times

# Robots of the rows that are used up: hardly any, some, and as many as keep the machine warm.
USED = (1, 4, 16)
RATE = 20.0  # of the measured robots


@dataclass(frozen=True)
class Machine:
    """One measured machine.

    Attributes:
        times: of batches that follow one another.
        front: seconds of a front for a question and its answer.
        cold: seconds that a batch takes longer after a long pause.
        fading: seconds of pause after which it is 63 % of that.
    """

    times: Times
    front: float
    cold: float = 0.0
    fading: float = 1.0


def calibrated(found: Mapping[str, Any], side: str) -> Machine:
    """The machine of these results; without the rows that are used up for it, one that is always as warm.

    Raises:
        ValueError: it was not measured how batches follow one another.
    """
    if "chained_ms" not in found:
        raise ValueError(
            "these results do not say how batches follow one another (chained_ms): they are of --big, or of an earlier "
            "robots_per_device; run python benchmarks/robots_per_device.py again"
        )
    sizes = {int(size): (t["p50"] / 1e3, t["p90"] / 1e3) for size, t in found["chained_ms"].items()}
    times = Times({size: sizes[size] for size in sorted(sizes) if str(size) in found["batch_ms"][side]})
    warm = sizes[1][0]
    rows = {row["robots"]: row["answer_ms"]["p50"] / 1e3 for row in found["growing"][side]}
    if any(robots not in rows for robots in USED):
        return Machine(times, max(rows[min(rows)] - warm, 0.0))
    always, cold, fading = _cooling([(1 / RATE / robots - rows[robots], rows[robots]) for robots in USED])
    return Machine(times, max(always - warm, 0.0), cold, fading)


def _cooling(rows: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """What three answers after three pauses, the longest first, say of ``always + cold * (1 - exp(-pause / fading))``;
    all in seconds.
    """
    (long, few), (middle, some), (short, many) = rows
    if few <= many:
        return many, 0.0, 1.0

    def gone(fading: float) -> float:
        """The share of the way from the longest pause to the shortest that the one in the middle has gone."""
        far = math.exp(-long / fading)
        return (math.exp(-middle / fading) - far) / (math.exp(-short / fading) - far)

    least, largest = 1e-4, 1.0
    for _ in range(50):
        fading = math.sqrt(least * largest)
        least, largest = (fading, largest) if gone(fading) < (few - some) / (few - many) else (least, fading)
    fading = math.sqrt(least * largest)
    cold = (few - many) / (math.exp(-short / fading) - math.exp(-long / fading))
    return few - cold * (1 - math.exp(-long / fading)), cold, fading
