"""View of one session for the dashboard: its newest pictures, ticks and plan."""

import asyncio
import io
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np

from service.control.observers import Tick
from service.sessions.session import Session
from service.sessions.store import AnySession
from service.threads import call_in_thread

# Ticks kept for a viewer that joins, or that falls behind: ten seconds at 50 Hz.
MAX_TICKS = 512
# Steps of a chunk that are drawn; a longer one is drawn with fewer points.
MAX_POINTS = 64


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk that joined the plan, thinned out for drawing.

    Attributes:
        number: counted from 1.
        points: (t, a) float32.
        begins, ends: due times of its first and last action, monotonic.
    """

    number: int
    points: np.ndarray
    begins: float
    ends: float


@dataclass(frozen=True)
class NewestFrame:
    """The newest picture of one camera: uint8 (h, w, 3), and when it was seen (monotonic)."""

    image: np.ndarray
    received_at: float


class LiveView:
    """Observer of a session that several viewers share; ``tick_count`` counts all ticks."""

    def __init__(self, session: AnySession):
        self.session = session
        self.viewers = 0
        self.tick_count = 0
        self.plan: PlannedChunk | None = None
        self.frames: dict[str, NewestFrame] = {}
        self._ticks: deque[Tick] = deque(maxlen=MAX_TICKS)
        self._detach: Callable[[], None] = session.attach(self) if isinstance(session, Session) else lambda: None

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Keep the frame in place of the one before; nothing is copied."""
        self.frames[camera] = NewestFrame(image, observed_at)

    def on_chunk(self, chunk: np.ndarray, observed_at: float, at: float) -> None:
        """Keep the chunk in place of the one before."""
        robot_io = self.session.robot_io
        rate, begins = 1.0, observed_at
        if robot_io is not None:
            rate = robot_io.controller.config.action_rate
            # The plan of a robot that rested begins later than its frames. A client without rooms has no queue.
            begins = max(observed_at, robot_io.controller.queue.due(0))
        indices = np.linspace(0, len(chunk) - 1, min(len(chunk), MAX_POINTS)).round().astype(int)
        number = 1 if self.plan is None else self.plan.number + 1
        self.plan = PlannedChunk(number, chunk[indices], begins, begins + (len(chunk) - 1) / rate)

    def on_tick(self, tick: Tick) -> None:
        """Keep the tick."""
        self._ticks.append(tick)
        self.tick_count += 1

    def ticks_since(self, count: int, now: float, width: int) -> np.ndarray:
        """Return (n, 3 + 2a) float32: the kept ticks after the first ``count``.

        Columns: seconds from ``now`` (below 0), is sent, is held, the command (a), the measured pose (a); NaN if
        missing.
        """
        new = min(max(self.tick_count - count, 0), len(self._ticks))
        rows = np.full((new, 3 + 2 * width), np.nan, np.float32)
        for row, tick in zip(rows, islice(self._ticks, len(self._ticks) - new, None), strict=True):
            row[:3] = tick.at - now, tick.is_sent, tick.hold is not None
            for start, values in ((3, tick.command), (3 + width, tick.pose)):
                if values is not None and len(values) == width:
                    row[start : start + width] = values
        return rows

    def close(self) -> None:
        """Stop observing the session."""
        self._detach()
        self.frames.clear()


logger = logging.getLogger(__name__)

NICENESS = 10


@dataclass(frozen=True)
class Picture:
    """JPEG of a frame, and when the frame was seen (monotonic)."""

    jpeg: bytes
    received_at: float


@dataclass(frozen=True)
class PictureSettings:
    """Size, quality and rate of pictures.

    Attributes:
        width: largest width in pixels.
        quality: of JPEG, up to 100.
        period: seconds between two pictures of a session.
        share: part of one core that all pictures together may take.
    """

    width: int = 480
    quality: int = 70
    period: float = 0.1
    share: float = 0.05


class PictureEncoder:
    """Encodes the newest pictures of sessions that viewers have open; ``encoded`` counts them."""

    def __init__(self, settings: PictureSettings):
        self.encoded = 0
        self._settings = settings
        self._newest: WeakKeyDictionary[LiveView, dict[str, Picture]] = WeakKeyDictionary()
        self._not_before = 0.0
        self._due: WeakKeyDictionary[LiveView, float] = WeakKeyDictionary()
        self._encoding: asyncio.Task[None] | None = None

    def get_newest(self, view: LiveView) -> dict[str, Picture]:
        """Return camera to its newest picture."""
        return self._newest.get(view, {})

    def request(self, view: LiveView, now: float) -> None:
        """Start to encode newer pictures of a view, if it is time for them."""
        if self._encoding is not None or now < max(self._not_before, self._due.get(view, 0.0)):
            return
        known = self.get_newest(view)
        newer = {
            camera: frame
            for camera, frame in view.frames.items()
            if camera not in known or known[camera].received_at < frame.received_at
        }
        if newer:
            self._due[view] = now + self._settings.period
            self._encoding = asyncio.create_task(self._encode_frames(view, newer), name="pictures of the page")

    async def _encode_frames(self, view: LiveView, frames: dict[str, NewestFrame]) -> None:
        try:
            encoded, took = await call_in_thread(lambda: self._encode(frames), "ui-pictures", NICENESS)
        except Exception:
            logger.exception("pictures of session %s cannot be made", view.session.id)
            self._not_before = time.monotonic() + 1.0
            return
        finally:
            self._encoding = None
        self._newest[view] = {**self.get_newest(view), **encoded}
        self.encoded += len(encoded)
        # Expensive pictures become fewer, so that no tick is late.
        self._not_before = time.monotonic() + took / self._settings.share

    def _encode(self, frames: dict[str, NewestFrame]) -> tuple[dict[str, Picture], float]:
        began = time.thread_time()
        made = {camera: Picture(self._encode_jpeg(frame.image), frame.received_at) for camera, frame in frames.items()}
        return made, time.thread_time() - began

    def _encode_jpeg(self, image: np.ndarray) -> bytes:
        from PIL import Image

        drawn = Image.fromarray(np.ascontiguousarray(image))
        if drawn.width > self._settings.width:
            size = (self._settings.width, max(round(drawn.height * self._settings.width / drawn.width), 1))
            drawn = drawn.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)
        file = io.BytesIO()
        drawn.save(file, "JPEG", quality=self._settings.quality)
        return file.getvalue()
