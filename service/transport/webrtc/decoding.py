"""Decoding of video packets to the newest picture, in a thread."""

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

MAX_DECLARED = 1920 * 1088  # Pixels that a stream may declare; H.264 counts 1080 lines as 68 blocks of 16.
MAX_PENDING = 64  # Compressed pictures that wait.
MAX_PENDING_BYTES = 8 << 20
# Decoded pictures of the largest size, per second and at once. Smaller pictures count by size, but at least half,
# because each picture takes the interpreter's lock.
DECODE_RATE = (60, 30)
# Codecs that aiortc negotiates: FFmpeg's name, and the function that reads a picture's declared pixels.
CODECS: dict[str, tuple[str, Callable[[bytes], int]]] = {"VP8": ("libvpx", vp8_pixels), "H264": ("h264", h264_pixels)}
END_TIMEOUT = 2.0
# Attribute of aiortc 1.16 with its decoder thread.
_THREAD = "_RTCRtpReceiver__decoder_thread"

Task = tuple[RTCRtpCodecParameters, JitterFrame]


class DecoderThread:
    """Decoder thread with a bounded queue, in place of aiortc's unbounded thread.

    Args:
        on_frame: takes a picture on the decoder's thread; returns a coroutine for the event loop, or None.
        on_error: called on the decoder's thread for each undecodable picture.
        on_skip: called on the event loop for each skipped picture, because the stream must restart at a keyframe.

    Attributes:
        overrun: number of pictures dropped because of ``DECODE_RATE`` or a full queue.
        oversize: number of pictures dropped because of their declared size.
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
        self._pixels = float(MAX_DECLARED)  # Declared pixels of the newest picture.
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
        """Return the number of compressed pictures that wait."""
        return len(self._pending)

    def put(self, task: Task | None) -> None:
        """Queue a compressed picture, or end with None; called by aiortc on the event loop."""
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
        """Start the thread; aiortc's own thread calls this, and ends because it gets None."""
        self._thread = threading.Thread(target=self._run, name="video-decoder")
        self._thread.start()
        setattr(self._receiver, _THREAD, _DetachedThread(self._thread))

    async def wait_ended(self) -> None:
        """End the thread, and wait for its present picture."""
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
        with self._changed:  # After `_end`, the event loop may not run the coroutine.
            if not self._is_over:
                asyncio.run_coroutine_threadsafe(work, self._loop)
                return
        work.close()

    def _run(self) -> None:
        while (task := self._wait_next()) is not None:
            try:
                frames = self._decode(*task)
            except Exception:  # FFmpeg and PyAV raise many exceptions.
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
    """Thread that aiortc may join without blocking the event loop; ``DecoderThread.wait_ended`` waits instead."""

    def __init__(self, thread: threading.Thread):
        self.is_alive = thread.is_alive

    def join(self) -> None:
        """Return at once."""


def create_decoder(codec: str) -> VideoCodecContext:
    """Create a decoder with one thread that refuses pictures of more than ``MAX_DECLARED`` pixels."""
    context = av.CodecContext.create(codec, "r")
    assert isinstance(context, VideoCodecContext)
    context.thread_count = 1
    context.options = {"max_pixels": str(MAX_DECLARED)}
    return context


MAX_PIXELS = 1920 * 1080
MAX_BACKLOG = 8  # Pictures behind a longer queue are outdated (8 pictures are 270 ms at 30 fps).
# The default conversion of swscale is too dark by 1.1 of 255.
EXACT_COLORS = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT

# Private attributes of aiortc 1.16 that ``FrameDecoder.install`` replaces.
_BUFFER = "_RTCRtpReceiver__jitter_buffer"
_DECODER_QUEUE = "_RTCRtpReceiver__decoder_queue"
_DECODE_ERROR = "_RTCRtpReceiver__decoder_error"
_CODECS = "_RTCRtpReceiver__codecs"
_NACKS = "_RTCRtpReceiver__nack_generator"
_PARTS = (_BUFFER, _DECODER_QUEUE, _DECODE_ERROR, _CODECS, _NACKS, _THREAD)


class _CountingEvent(threading.Event):
    """Event that counts undecodable pictures: the decoder thread sets it once for each."""

    count = 0

    def set(self) -> None:
        self.count += 1
        super().set()


class FrameDecoder:
    """Converts the decoded pictures of one peer connection and delivers the newest on the event loop.

    Args:
        on_frame: takes (picture, monotonic decode time) on the event loop.
        on_error: called if ``on_frame`` raised.

    Attributes:
        frames: number of delivered pictures.
        oversize, late, broken, superseded: number of pictures dropped because of their size, a backlog or rate, a
            failed conversion, and a newer picture.
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
        """Return the number of delivered and of dropped pictures by reason, and of lost packets."""
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
        """Replace the decoder and jitter buffer of a receiver before its start; raises TransportError."""
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
        setattr(receiver.track, "_queue", self)  # noqa: B010 - the attribute is not declared

    async def wait_ended(self) -> None:
        """Wait for the end of the decoder's thread."""
        if self._decoder is not None:
            await self._decoder.wait_ended()

    def put(self, frame: Any) -> Any:
        """Take a picture (None at the end) on the decoder's thread; returns a coroutine unless one is pending."""
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
        self._is_delivering = False  # From here on, a new picture gets another delivery.
        newest, self._newest = self._newest, None
        if newest is None or self.is_muted:
            return
        image, self.decoded_at = newest
        self.frames += 1
        self.size = (image.shape[0], image.shape[1])
        try:
            self._on_frame(image, self.decoded_at)
        except Exception as error:  # Passed to the owner, because aiortc would ignore it.
            self._on_error(error)
