"""Pictures from a video receiver, decoded and converted off the loop: the newest wins, a late one never looks fresh."""

import threading
import time
from collections.abc import Callable
from typing import Any

import av
import av.error
import numpy as np
from aiortc import RTCRtpReceiver
from aiortc.jitterbuffer import JitterFrame
from aiortc.rtp import RtpPacket
from av.video.reformatter import Interpolation

from service.errors import TransportError
from service.transport.decoder import MAX_DECLARED, THREAD, Decoder
from service.transport.jitter import BoundedNacks, PromptBuffer

MAX_PIXELS = 1920 * 1080
# Pictures that may wait for the decoder. What comes out behind more of them was seen too long ago (8 are
# 270 ms at 30 fps), and is not delivered as if it were new.
MAX_BACKLOG = 8
# swscale's default yuv420p -> rgb24 is a level too dark on average (-1.1 of 255, 1.3 mean absolute error);
# with these flags the bias is 0 and the error 0.5, for 1.0 instead of 0.1 ms at 640x480 on the decoder's thread.
EXACT = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT

# Where aiortc 1.16 keeps what ``Screen.fit`` replaces; it has no public way to do any of it.
_BUFFER = "_RTCRtpReceiver__jitter_buffer"
_DECODER_QUEUE = "_RTCRtpReceiver__decoder_queue"
_DECODE_ERROR = "_RTCRtpReceiver__decoder_error"
_CODECS = "_RTCRtpReceiver__codecs"
_NACKS = "_RTCRtpReceiver__nack_generator"
_PARTS = (_BUFFER, _DECODER_QUEUE, _DECODE_ERROR, _CODECS, _NACKS, THREAD)


class _CountingEvent(threading.Event):
    """The decoder thread sets it at each picture that cannot be decoded."""

    count = 0

    def set(self) -> None:
        self.count += 1
        super().set()


class Screen:
    """Where the pictures of one peer connection arrive.

    ``put`` runs on the decoder's thread, so converting costs the event loop nothing, and there is never more than one
    picture waiting.

    Args:
        show: takes (picture, monotonic time it was decoded) on the event loop.
        failed: told when ``show`` raised, since nobody awaits what aiortc schedules.

    Attributes:
        frames: pictures given to ``show``.
        oversize, late, broken, superseded: pictures dropped for their size, behind a backlog or because there were more
            than are decoded, because they could not be converted, and because a newer one came before the loop took
            them.
        size: (height, width) of the last picture.
        shown_at: when the last one was decoded, None before the first.
        is_muted: nothing is delivered any more.
    """

    def __init__(self, show: Callable[[np.ndarray, float], None], failed: Callable[[BaseException], None]):
        self.frames = self.oversize = self.late = self.broken = self.superseded = 0
        self.size: tuple[int, int] | None = None
        self.shown_at: float | None = None
        self.is_muted = self._is_delivering = False
        self._show = show
        self._failed = failed
        self._newest: tuple[np.ndarray, float] | None = None
        self._backlog: Callable[[], int] = lambda: 0
        self._errors = _CountingEvent()
        self._buffer: PromptBuffer | None = None
        self._decoder: Decoder | None = None

    def counts(self) -> dict[str, int]:
        """What happened to the pictures."""
        buffer, decoder = self._buffer, self._decoder
        return {
            "frames": self.frames,
            "oversize": self.oversize + (buffer.oversize if buffer else 0) + (decoder.oversize if decoder else 0),
            "late": self.late + (decoder.overrun if decoder else 0),
            "superseded": self.superseded,
            "decode_errors": self._errors.count + self.broken,
            "packets_lost": 0 if buffer is None else buffer.lost,
        }

    def fit(self, receiver: RTCRtpReceiver) -> None:
        """Put this screen, our decoder and a prompt jitter buffer into a receiver that has not started yet.

        Raises:
            TransportError: this aiortc keeps its parts elsewhere.
        """
        missing = [name for name in _PARTS if not hasattr(receiver, name)]
        if missing or not hasattr(receiver.track, "_queue"):
            raise TransportError(f"this aiortc has no {', '.join(missing) or 'track queue'}; install aiortc 1.16")
        codecs = getattr(receiver, _CODECS)

        def extra(packet: RtpPacket, frame: JitterFrame) -> None:
            decoder.put((codecs[packet.payload_type], frame))

        buffer = self._buffer = PromptBuffer(extra, MAX_DECLARED)
        decoder = self._decoder = Decoder(receiver, self.put, self._errors.set, buffer.want_keyframe)
        self._backlog = decoder.qsize
        setattr(receiver, _BUFFER, self._buffer)
        setattr(receiver, _DECODER_QUEUE, decoder)
        setattr(receiver, _DECODE_ERROR, self._errors)
        setattr(receiver, _NACKS, BoundedNacks())
        setattr(receiver.track, "_queue", self)  # noqa: B010 - the attribute is none of RTCRtpReceiver's declared ones

    async def ended(self) -> None:
        """Wait for the decoder's thread, which shows nothing afterwards."""
        if self._decoder is not None:
            await self._decoder.ended()

    def put(self, frame: Any) -> Any:
        """Called on the decoder's thread with a picture, or None at the end; returns what it runs on the loop.

        None when that is on its way already, for the picture before.
        """
        if isinstance(frame, av.VideoFrame):
            self._take(frame, time.monotonic())
            if self._is_delivering:
                return None
            self._is_delivering = True
        return self._deliver()

    def _take(self, frame: av.VideoFrame, now: float) -> None:
        if frame.width * frame.height > MAX_PIXELS:
            self.oversize += 1
        elif self._backlog() > MAX_BACKLOG:
            self.late += 1
        else:
            try:
                image = frame.to_ndarray(format="rgb24", interpolation=EXACT)
            except (av.error.FFmpegError, ValueError, MemoryError):
                self.broken += 1
                return
            if self._newest is not None:
                self.superseded += 1
            self._newest = (image, now)

    async def _deliver(self) -> None:
        # First of all: what is taken from now on has a delivery of its own.
        self._is_delivering = False
        newest, self._newest = self._newest, None
        if newest is None or self.is_muted:
            return
        image, seen_at = newest
        self.frames += 1
        self.size = (image.shape[0], image.shape[1])
        self.shown_at = seen_at
        try:
            self._show(image, seen_at)
        except Exception as error:  # whatever it is, it goes to the owner: aiortc would swallow it
            self._failed(error)
