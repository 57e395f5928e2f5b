"""Camera frames as JPEG for the page: away from the event loop, below it, and for a small part of a core at most."""

import asyncio
import io
import logging
import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from service.engine.worker import call_in_thread
from service.ui.onlooker import Frame, Onlooker

logger = logging.getLogger(__name__)

NICENESS = 10


@dataclass(frozen=True)
class Picture:
    """A JPEG, and when what it shows was seen (monotonic)."""

    jpeg: bytes
    seen_at: float


@dataclass(frozen=True)
class PictureSettings:
    """How good and how many.

    Attributes:
        width: pixels; wider frames are made smaller.
        quality: JPEG's, of 100.
        period: the least seconds from one picture of a session to the next.
        share: part of one core that all pictures together may take.
    """

    width: int = 480
    quality: int = 70
    period: float = 0.1
    share: float = 0.05


class Pictures:
    """The newest pictures of sessions that somebody looks at.

    Attributes:
        made: pictures made in all.
        seconds: processor time that they took.
    """

    def __init__(self, settings: PictureSettings | None = None):
        self.made = 0
        self.seconds = 0.0
        self._settings = settings or PictureSettings()
        self._newest: WeakKeyDictionary[Onlooker, dict[str, Picture]] = WeakKeyDictionary()
        self._not_before = 0.0
        self._due: WeakKeyDictionary[Onlooker, float] = WeakKeyDictionary()
        self._making: asyncio.Task[None] | None = None

    def newest(self, onlooker: Onlooker) -> dict[str, Picture]:
        """Camera to the newest picture that is made."""
        return self._newest.get(onlooker, {})

    def want(self, onlooker: Onlooker, now: float) -> None:
        """Somebody would see newer ones: they are made, unless it is too early for that."""
        if self._making is not None or now < max(self._not_before, self._due.get(onlooker, 0.0)):
            return
        known = self.newest(onlooker)
        wanted = {
            camera: frame
            for camera, frame in onlooker.frames.items()
            if camera not in known or known[camera].seen_at < frame.seen_at
        }
        if wanted:
            self._due[onlooker] = now + self._settings.period
            self._making = asyncio.create_task(self._make(onlooker, wanted), name="pictures of the page")

    async def close(self) -> None:
        """Wait for the one under way."""
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)

    async def _make(self, onlooker: Onlooker, frames: dict[str, Frame]) -> None:
        try:
            made, took = await call_in_thread(lambda: self._encode(frames), "ui-pictures", NICENESS)
        except Exception:
            logger.exception("pictures of session %s cannot be made", onlooker.session.id)
            self._not_before = time.monotonic() + 1.0
            return
        finally:
            self._making = None
        self._newest[onlooker] = {**self.newest(onlooker), **made}
        self.made += len(made)
        self.seconds += took
        # What it took is what says how long to wait: pictures that are dear become fewer, ticks do not become late.
        self._not_before = time.monotonic() + took / self._settings.share

    def _encode(self, frames: dict[str, Frame]) -> tuple[dict[str, Picture], float]:
        began = time.thread_time()
        made = {camera: Picture(self._jpeg(frame.image), frame.seen_at) for camera, frame in frames.items()}
        return made, time.thread_time() - began

    def _jpeg(self, image: np.ndarray) -> bytes:
        from PIL import Image

        drawn = Image.fromarray(np.ascontiguousarray(image))
        if drawn.width > self._settings.width:
            size = (self._settings.width, max(round(drawn.height * self._settings.width / drawn.width), 1))
            drawn = drawn.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)
        file = io.BytesIO()
        drawn.save(file, "JPEG", quality=self._settings.quality)
        return file.getvalue()
