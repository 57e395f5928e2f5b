"""What is kept of a session while somebody looks at its plots and pictures; nothing is kept while nobody does."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from service.motion.tap import Tick
from service.sessions.session import Session
from service.sessions.sessions import Listed

# Ticks kept for a viewer that joins, or that falls behind: ten seconds at 50 Hz.
KEPT = 512
# Steps of a chunk that are drawn; a longer one is drawn with fewer points.
DRAWN = 64


@dataclass(frozen=True)
class Plan:
    """A chunk that was taken, thinned out for drawing.

    Attributes:
        number: counted from 1.
        points: (t, a) float32.
        begins, ends: monotonic times that its first and its last action are for.
    """

    number: int
    points: np.ndarray
    begins: float
    ends: float


@dataclass(frozen=True)
class Frame:
    """The newest picture of one camera: uint8 (h, w, 3), and when it was seen (monotonic)."""

    image: np.ndarray
    seen_at: float


class Onlooker:
    """A tap that several viewers share.

    Attributes:
        viewers: how many look through it.
        ticked_in_all: ticks seen, those that are not kept any more too.
        plan: the newest.
        frames: camera to its newest frame.
    """

    def __init__(self, session: Listed):
        self.session = session
        self.viewers = 0
        self.ticked_in_all = 0
        self.plan: Plan | None = None
        self.frames: dict[str, Frame] = {}
        self._ticks: deque[Tick] = deque(maxlen=KEPT)
        # One of a process that ended has nothing to look at, only a status.
        self._detach: Callable[[], None] = session.attach(self) if isinstance(session, Session) else lambda: None

    def saw(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        """Keep the frame in place of the one before; nothing is copied."""
        self.frames[camera] = Frame(image, seen_at)

    def planned(self, chunk: np.ndarray, seen_at: float, at: float) -> None:
        """Keep the chunk in place of the one before."""
        drive = self.session.drive
        rate = drive.control.pace.action_rate if drive is not None else 1.0
        places = np.linspace(0, len(chunk) - 1, min(len(chunk), DRAWN)).round().astype(int)
        number = 1 if self.plan is None else self.plan.number + 1
        self.plan = Plan(number, chunk[places], seen_at, seen_at + (len(chunk) - 1) / rate)

    def ticked(self, tick: Tick) -> None:
        """Keep the tick."""
        self._ticks.append(tick)
        self.ticked_in_all += 1

    def since(self, count: int, now: float, width: int) -> np.ndarray:
        """(n, 3 + 2a) float32: ticks after the first ``count``, of those that are kept.

        Columns: seconds from ``now`` (below 0), whether it was sent, whether the robot was held, the command (a),
        the measured pose (a); what there was none of is NaN.
        """
        new = min(max(self.ticked_in_all - count, 0), len(self._ticks))
        rows = np.full((new, 3 + 2 * width), np.nan, np.float32)
        for row, tick in zip(rows, islice(self._ticks, len(self._ticks) - new, None), strict=True):
            row[:3] = tick.at - now, tick.is_sent, tick.hold is not None
            for start, values in ((3, tick.command), (3 + width, tick.pose)):
                if values is not None and len(values) == width:
                    row[start : start + width] = values
        return rows

    def close(self) -> None:
        """Look on no more."""
        self._detach()
        self.frames.clear()
