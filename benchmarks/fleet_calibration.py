"""What the simulation of fleets is told of a machine, from results of ``robots_per_device``.

What batches take is what they take one after the other while their robots' questions are dealt with beside them: alone,
a batch is colder, and has all cores. A batch takes longer after the machine stood still for a while, as cores sleep and
caches cool: with one robot at 20 Hz an answer takes nearly twice as long as with sixteen. So three of the measured rows
are used up to tell the simulation how long, and how fast that fades; all others are predictions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

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
    pauses = [1 / RATE / robots - rows[robots] for robots in USED]
    return Machine(times, *_cooling(warm, np.array(pauses), np.array([rows[robots] for robots in USED])))


def _cooling(warm: float, pauses: np.ndarray, rows: np.ndarray) -> tuple[float, float, float]:
    """What comes nearest to answers after pauses that take ``front + warm + cold * (1 - exp(-pause / fading))``; all in
    seconds, and none of them negative.
    """
    found = (math.inf, 0.0, 0.0, 1.0)
    for fading in np.geomspace(5e-4, 5e-2, 200):
        kinds = np.stack([np.ones_like(rows), 1 - np.exp(-pauses / fading)], axis=1)
        (front, cold), error = nnls(kinds / rows[:, None], (rows - warm) / rows)
        found = min(found, (float(error), float(front), float(cold), float(fading)))
    return found[1:]
