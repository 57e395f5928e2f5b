"""Parameters of the fleet simulation for a machine, from results of ``robots_per_device``.

What batches take is what they take one after the other while their robots' questions are dealt with beside them: alone,
a batch is colder, and has all cores. How fast the machine was is simulated as it was measured, between the tries of
what is foretold: a machine that is 30 % slower for a tenth of a second is late with all batches of that time, not
with some of them. A batch takes longer after the machine stood still for a while, as cores sleep and
caches cool: with one robot at 20 Hz an answer takes nearly twice as long as with sixteen. So three of the measured rows
are used up to tell the simulation how long, and how fast that fades; all others are predictions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.fleet_forming import Times
from benchmarks.fleet_model import Link
from benchmarks.fleet_pace import Pace, growing_with

# Robots of the rows that are used up: hardly any, some, and as many as keep the machine warm.
USED = (1, 4, 16)
RATE = 20.0  # of the measured robots


@dataclass(frozen=True)
class Machine:
    """One measured machine.

    Attributes:
        times: of batches that follow one another, at the usual pace.
        paces: during each of what was measured, by its name.
        wake: how late robots ask, median and 99th percentile in seconds.
        front: seconds of a front for a question and its answer.
        cold: seconds that a batch takes longer after a long pause.
        fading: seconds of pause after which it is 63 % of that.
    """

    times: Times
    paces: Mapping[str, Pace]
    wake: Link
    front: float
    cold: float = 0.0
    fading: float = 1.0

    @property
    def pace(self) -> Pace:
        """All of it."""
        return Pace([factor for pace in self.paces.values() for factor in pace.factors])


def calibrated(found: Mapping[str, Any], side: str) -> Machine:
    """The machine of these results; without the rows that are used up for it, one that is always as warm.

    Raises:
        ValueError: it was not measured how batches follow one another.
    """
    if "pace" not in found or "beside" not in found["chained_ms"]["1"]:
        raise ValueError(
            "these results do not say how batches follow one another (chained_ms, pace): they are of --big, or of an "
            "earlier robots_per_device; run python benchmarks/robots_per_device.py again"
        )
    chained = {int(size): found["chained_ms"][size] for size in found["chained_ms"] if size in found["batch_ms"][side]}
    times = Times(
        {size: took["p50"] / 1e3 for size, took in chained.items()},
        {size: took["beside"] for size, took in chained.items()},
    )
    paces = {name: Pace(factors) for name, factors in found["pace"].items()}
    growing = found["growing"][side]
    late = growing[-1]["late_ms"]
    machine = Machine(times, paces, Link(late["p50"] / 1e3, late["p99"] / 1e3), 0.0)
    # All at the usual pace, as the times are.
    rows = {row["robots"]: row["answer_ms"]["p50"] / 1e3 / paces[growing_with(row["robots"])].usual for row in growing}
    warm = times.usual[1]
    if any(robots not in rows for robots in USED):
        return replace(machine, front=max(rows[min(rows)] - warm, 0.0))
    pauses = [1 / RATE / robots - rows[robots] for robots in USED]
    front, cold, fading = _cooling(warm, np.array(pauses), np.array([rows[robots] for robots in USED]))
    return replace(machine, front=front, cold=cold, fading=fading)


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
