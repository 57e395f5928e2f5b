"""Video packets to the newest decoded picture, off the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import av
import av.error
import numpy as np
from aiortc import RTCRtpReceiver
from aiortc.jitterbuffer import JitterFrame
from aiortc.rtcrtpparameters import RTCRtpCodecParameters
from aiortc.rtp import RtpPacket
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import Interpolation

from service.errors import TransportError
from service.http.limits import Bucket
from service.transport.webrtc.jitter_buffer import BoundedNacks, EagerJitterBuffer, h264_pixels, is_keyframe, vp8_pixels

# What a stream may declare: H.264 counts in blocks of 16, of which 1080 lines are 68.
MAX_DECLARED = 1920 * 1088
MAX_PENDING = 64  # compressed pictures that wait: two seconds at 30 fps, of which all but the last are too old to show
MAX_PENDING_BYTES = 8 << 20
# Decoded pictures of the largest size, a second and at once. Smaller ones count by size, but at least half, because
# beyond 120 a second their number matters: each takes the interpreter's lock.
DECODE_RATE = (60, 30)
# FFmpeg's names, and whose pictures they are; aiortc offers and answers with no others.
CODECS: dict[str, tuple[str, Callable[[bytes], int]]] = {"VP8": ("libvpx", vp8_pixels), "H264": ("h264", h264_pixels)}
END_TIMEOUT = 2.0
# Where aiortc 1.16 keeps its thread.
_THREAD = "_RTCRtpReceiver__decoder_thread"

Task = tuple[RTCRtpCodecParameters, JitterFrame]


class DecoderThread:
    """Decoder thread with a bounded queue, in place of aiortc's.

    aiortc's thread decodes without a limit, dies of errors that are not FFmpeg's, and blocks the event loop at a BYE.

    Args:
        on_frame: takes a picture on the decoder's thread; returns a callback for the event loop, or None.
        on_error: called on the decoder's thread for each undecodable picture.
        on_skip: called on the event loop for each skipped picture, because the stream must restart at a keyframe.

    Attributes:
        overrun: pictures dropped over ``DECODE_RATE`` or a full queue.
        oversize: pictures dropped for their declared size.
    """

    def __init__(
        self,
        receiver: RTCRtpReceiver,
        on_frame: Callable[[av.VideoFrame], Coroutine[Any, Any, None] | None],
        on_error: Callable[[], None],
        on_skip: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.overrun = self.oversize = 0
        self._receiver = receiver
        self._on_frame = on_frame
        self._on_error = on_error
        self._on_skip = on_skip
        self._pixels = float(MAX_DECLARED)  # of a picture, as its stream declared
        self._rate = Bucket(DECODE_RATE[0] * MAX_DECLARED, DECODE_RATE[1] * MAX_DECLARED, clock)
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._pending: deque[tuple[str, JitterFrame]] = deque()
        self._bytes = 0
        self._is_over = False
        self._needs_keyframe = False
        self._thread: threading.Thread | None = None
        self._contexts: dict[str, VideoCodecContext] = {}

    def qsize(self) -> int:
        """Return how many compressed pictures wait."""
        return len(self._pending)

    def put(self, task: Task | None) -> None:
        """Queue a compressed picture, or end with None; aiortc calls it on the event loop."""
        if task is None:
            self._end()
            return
        name, frame = task[0].name.upper(), task[1]
        if self._needs_keyframe and not is_keyframe(frame.data):
            self.overrun += 1
        elif not self._rate.take(max(self._pixels, MAX_DECLARED / 2)):
            self._drop(1)
        elif name not in CODECS or (declared := CODECS[name][1](frame.data)) > MAX_DECLARED:
            self.oversize += 1
            self._drop(0)
        elif len(self._pending) >= MAX_PENDING or self._bytes + len(frame.data) > MAX_PENDING_BYTES:
            self._drop(len(self._pending) + 1)
            self._clear()
        else:
            self._pixels = declared or self._pixels
            self._needs_keyframe = False
            with self._changed:
                self._pending.append((name, frame))
                self._bytes += len(frame.data)
                self._changed.notify()

    def get(self) -> None:
        """Start our thread in place of aiortc's, which calls this and ends by the None it gets."""
        self._thread = threading.Thread(target=self._run, name="video-decoder")
        self._thread.start()
        setattr(self._receiver, _THREAD, _DetachedThread(self._thread))

    async def wait_ended(self) -> None:
        """Wait until the thread is done with the picture it is at; afterwards it shows nothing more."""
        self._end()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, END_TIMEOUT)

    def _end(self) -> None:
        self._is_over = True
        self._clear()

    def _drop(self, count: int) -> None:
        self.overrun += count
        self._needs_keyframe = True
        self._on_skip()

    def _clear(self) -> None:
        with self._changed:
            self._pending.clear()
            self._bytes = 0
            self._changed.notify()

    def _schedule(self, work: Coroutine[Any, Any, None]) -> None:
        with self._changed:  # not between `_end` and the end of the loop, where nothing would run it
            if not self._is_over:
                asyncio.run_coroutine_threadsafe(work, self._loop)
                return
        work.close()

    def _run(self) -> None:
        while (task := self._wait_next()) is not None:
            try:
                frames = self._decode(*task)
            except Exception:  # errors of FFmpeg and PyAV
                self._on_error()
                continue
            for frame in frames:
                if (work := self._on_frame(frame)) is not None:
                    self._schedule(work)
        self._contexts.clear()

    def _wait_next(self) -> tuple[str, JitterFrame] | None:
        with self._changed:
            while not self._pending and not self._is_over:
                self._changed.wait()
            if self._is_over:
                return None
            task = self._pending.popleft()
            self._bytes -= len(task[1].data)
            return task

    def _decode(self, name: str, frame: JitterFrame) -> list[av.VideoFrame]:
        if name not in self._contexts:
            self._contexts[name] = create_decoder(CODECS[name][0])
        return self._contexts[name].decode(av.Packet(frame.data))


class _DetachedThread:
    """Thread that aiortc may join on the event loop without blocking; ``DecoderThread.wait_ended`` really waits."""

    def __init__(self, thread: threading.Thread):
        self.is_alive = thread.is_alive

    def join(self) -> None:
        """Return at once."""


def create_decoder(codec: str) -> VideoCodecContext:
    """Create a decoder for camera pictures, of one thread, that refuses larger ones by itself too."""
    context = av.CodecContext.create(codec, "r")
    assert isinstance(context, VideoCodecContext)
    context.thread_count = 1
    context.options = {"max_pixels": str(MAX_DECLARED)}
    return context


MAX_PIXELS = 1920 * 1080
# Pictures that may wait for the decoder; those behind a longer queue are too old (8 are 270 ms at 30 fps).
MAX_BACKLOG = 8
# swscale's default yuv420p -> rgb24 is too dark by 1.1 of 255; these flags remove that for 1 ms at 640x480.
EXACT_COLORS = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT

# Where aiortc 1.16 keeps what ``FrameDecoder.install`` replaces; it has no public way to do any of it.
_BUFFER = "_RTCRtpReceiver__jitter_buffer"
_DECODER_QUEUE = "_RTCRtpReceiver__decoder_queue"
_DECODE_ERROR = "_RTCRtpReceiver__decoder_error"
_CODECS = "_RTCRtpReceiver__codecs"
_NACKS = "_RTCRtpReceiver__nack_generator"
_PARTS = (_BUFFER, _DECODER_QUEUE, _DECODE_ERROR, _CODECS, _NACKS, _THREAD)


class _CountingEvent(threading.Event):
    """Event that counts how often the decoder thread sets it: once for each picture that cannot be decoded."""

    count = 0

    def set(self) -> None:
        self.count += 1
        super().set()


class FrameDecoder:
    """Converts the decoded pictures of one peer connection and delivers the newest on the event loop.

    ``put`` runs on the decoder's thread; at most one picture waits.

    Args:
        on_frame: takes (picture, monotonic time it was decoded) on the event loop.
        on_error: called if ``on_frame`` raised.

    Attributes:
        frames: delivered pictures.
        oversize, late, broken, superseded: pictures dropped for their size, a backlog or rate, a failed conversion, and
            a newer picture.
        size: (height, width) of the last picture.
        decoded_at: time of the last decode, or None.
        is_muted: delivery has ended.
    """

    def __init__(self, on_frame: Callable[[np.ndarray, float], None], on_error: Callable[[BaseException], None]):
        self.frames = self.oversize = self.late = self.broken = self.superseded = 0
        self.size: tuple[int, int] | None = None
        self.decoded_at: float | None = None
        self.is_muted = self._is_delivering = False
        self._on_frame = on_frame
        self._on_error = on_error
        self._newest: tuple[np.ndarray, float] | None = None
        self._backlog: Callable[[], int] = lambda: 0
        self._errors = _CountingEvent()
        self._buffer: EagerJitterBuffer | None = None
        self._decoder: DecoderThread | None = None

    def get_counts(self) -> dict[str, int]:
        """Count what happened to the pictures."""
        buffer, decoder = self._buffer, self._decoder
        return {
            "frames": self.frames,
            "oversize": self.oversize + (buffer.oversize if buffer else 0) + (decoder.oversize if decoder else 0),
            "late": self.late + (decoder.overrun if decoder else 0),
            "superseded": self.superseded,
            "decode_errors": self._errors.count + self.broken,
            "packets_lost": 0 if buffer is None else buffer.lost,
        }

    def install(self, receiver: RTCRtpReceiver) -> None:
        """Put this decoder and our jitter buffer into a receiver before its start; TransportError for an unknown
        aiortc.
        """
        missing = [name for name in _PARTS if not hasattr(receiver, name)]
        if missing or not hasattr(receiver.track, "_queue"):
            raise TransportError(f"this aiortc has no {', '.join(missing) or 'track queue'}; install aiortc 1.16")
        codecs = getattr(receiver, _CODECS)

        def put_frame(packet: RtpPacket, frame: JitterFrame) -> None:
            decoder.put((codecs[packet.payload_type], frame))

        buffer = self._buffer = EagerJitterBuffer(put_frame, MAX_DECLARED)
        decoder = self._decoder = DecoderThread(receiver, self.put, self._errors.set, buffer.require_keyframe)
        self._backlog = decoder.qsize
        setattr(receiver, _BUFFER, self._buffer)
        setattr(receiver, _DECODER_QUEUE, decoder)
        setattr(receiver, _DECODE_ERROR, self._errors)
        setattr(receiver, _NACKS, BoundedNacks())
        setattr(receiver.track, "_queue", self)  # noqa: B010 - the attribute is none of RTCRtpReceiver's declared ones

    async def wait_ended(self) -> None:
        """Wait for the decoder's thread, which shows nothing afterwards."""
        if self._decoder is not None:
            await self._decoder.wait_ended()

    def put(self, frame: Any) -> Any:
        """Take a picture (None: the end) on the decoder's thread; returns a loop callback unless one is pending."""
        if isinstance(frame, av.VideoFrame):
            self._convert(frame, time.monotonic())
            if self._is_delivering:
                return None
            self._is_delivering = True
        return self._deliver()

    def _convert(self, frame: av.VideoFrame, now: float) -> None:
        if frame.width * frame.height > MAX_PIXELS:
            self.oversize += 1
        elif self._backlog() > MAX_BACKLOG:
            self.late += 1
        else:
            try:
                image = frame.to_ndarray(format="rgb24", interpolation=EXACT_COLORS)
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
        image, self.decoded_at = newest
        self.frames += 1
        self.size = (image.shape[0], image.shape[1])
        try:
            self._on_frame(image, self.decoded_at)
        except Exception as error:  # passed to the owner, because aiortc would swallow it
            self._on_error(error)
