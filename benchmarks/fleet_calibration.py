"""What the simulation of fleets is told of a machine, from results of ``robots_per_device``.

A batch takes longer after the machine stood still for a while, as cores sleep and caches cool: with one robot at 20 Hz
an answer takes nearly twice as long as with sixteen. So three of the measured rows are used up to tell the simulation
how warm batches are, and how fast that fades; all others are predictions.
"""

import math
from collections.abc import Mapping
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
    """The machine of these results; without the rows that are used up for it, one that is always as warm."""
    sizes = {int(size): (t["p50"] / 1e3, t["p90"] / 1e3) for size, t in found["batch_ms"][side].items()}
    rows = {row["robots"]: row["answer_ms"]["p50"] / 1e3 for row in found["growing"][side]}
    if any(robots not in rows for robots in USED) or "32" not in found.get("together_ms", {}):
        return Machine(Times(sizes), max(rows[min(rows)] - sizes[1][0], 0.0))
    few, some, many = (rows[robots] for robots in USED)
    # Of 32 that are asked at one moment, one after the other, the one in the middle waits for sixteen others.
    warm = found["together_ms"]["32"]["one at a time"]["p50"] / 1e3 / 16.5
    # What was measured of one batch at a time was cold, by as much for a large one as for a small one.
    less = max(sizes[1][0] - min(warm, many), 0.0)
    times = Times({size: (median - less, p90 - less) for size, (median, p90) in sizes.items()})
    cold = max(few - many, 0.0)
    left = min(max((some - many) / cold, 0.05), 0.95) if cold else 0.5
    pause = 1 / RATE / USED[1] - some
    return Machine(times, max(many - min(warm, many), 0.0), cold, max(-pause / math.log(1 - left), 1e-4))
