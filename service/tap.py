"""Whoever looks on while a session drives its robot: recordings, the page's plots, a second policy."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Tick:
    """One tick of the control loop, or the moment of a stop.

    Attributes:
        at: monotonic time.
        command: (a,) float32, what was given out, or None when nothing was.
        is_sent: whether the link took it (never in a dry run).
        pose: (a,) the measured pose, or None while a joint was never seen.
        hold: stable code of why the robot is held, or None while it may move.
    """

    at: float
    command: np.ndarray | None
    is_sent: bool
    pose: np.ndarray | None
    hold: str | None


class Tap(Protocol):
    """Called on the event loop between two ticks: quick, never waiting, never raising."""

    def saw(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        """A usable frame came: uint8 (h, w, 3), RGB; nobody changes the array any more."""
        ...

    def planned(self, chunk: np.ndarray, seen_at: float, at: float) -> None:
        """A chunk (t, a) was taken, which belongs to what was seen at ``seen_at``."""
        ...

    def ticked(self, tick: Tick) -> None:
        """A tick was done."""
        ...
