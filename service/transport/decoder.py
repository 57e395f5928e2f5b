"""Compressed pictures of one peer to pictures, on a thread of its own: bounded in size, number and rate."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import av
import av.error
from aiortc import RTCRtpReceiver
from aiortc.jitterbuffer import JitterFrame
from aiortc.rtcrtpparameters import RTCRtpCodecParameters
from av.video.codeccontext import VideoCodecContext

from service.edge.limits import Bucket
from service.transport.h264 import h264_pixels
from service.transport.jitter import is_keyframe, vp8_pixels

# What a stream may declare: H.264 counts in blocks of 16, of which 1080 lines are 68.
MAX_DECLARED = 1920 * 1088
MAX_PENDING = 64  # compressed pictures that wait: two seconds at 30 fps, of which all but the last are too old to show
MAX_PENDING_BYTES = 8 << 20
# Pictures of the largest size that are decoded, a second and at once: a black keyframe of 1080 lines is three packets,
# and 7 ms of a decoder. Smaller ones are charged by their size, but never less than half: beyond 120 a second it is
# their number that counts, as each takes the interpreter's lock from the event loop a few times.
PICTURES = (60, 30)
# FFmpeg's names, and whose pictures they are; aiortc offers and answers with no others.
CODECS: dict[str, tuple[str, Callable[[bytes], int]]] = {"VP8": ("libvpx", vp8_pixels), "H264": ("h264", h264_pixels)}
END_TIMEOUT = 2.0
# Where aiortc 1.16 keeps its thread.
THREAD = "_RTCRtpReceiver__decoder_thread"

Task = tuple[RTCRtpCodecParameters, JitterFrame]


class Decoder:
    """Takes the place of the queue between a receiver and its decoder thread, and of that thread.

    aiortc's thread decodes whatever waits, with as many threads as the machine has cores, dies of any error that is not
    FFmpeg's, and is joined on the event loop when a BYE arrives: for 1.8 s with 118 pictures of 1080 lines waiting.

    Args:
        show: takes a picture on the decoder's thread, and returns what is then run on the event loop, if anything is.
        failed: called on the decoder's thread for each picture that could not be decoded.
        skipped: called on the event loop for each picture that is not decoded: what follows is built on it, so that the
            stream goes on at a keyframe.

    Attributes:
        overrun: pictures dropped because there were more than ``PICTURES`` or too many waited.
        oversize: pictures dropped for the size they declare.
    """

    def __init__(
        self,
        receiver: RTCRtpReceiver,
        show: Callable[[av.VideoFrame], Coroutine[Any, Any, None] | None],
        failed: Callable[[], None],
        skipped: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.overrun = self.oversize = 0
        self._receiver = receiver
        self._show = show
        self._failed = failed
        self._skipped = skipped
        self._pixels = float(MAX_DECLARED)  # of a picture, as its stream declared
        self._rate = Bucket(PICTURES[0] * MAX_DECLARED, PICTURES[1] * MAX_DECLARED, clock)
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._pending: deque[tuple[str, JitterFrame]] = deque()
        self._bytes = 0
        self._is_over = False
        self._wants_keyframe = False
        self._thread: threading.Thread | None = None
        self._contexts: dict[str, VideoCodecContext] = {}

    def qsize(self) -> int:
        """Compressed pictures that wait."""
        return len(self._pending)

    def put(self, task: Task | None) -> None:
        """Called on the event loop with a compressed picture, or None when there will be no more."""
        if task is None:
            self._end()
            return
        name, frame = task[0].name.upper(), task[1]
        if self._wants_keyframe and not is_keyframe(frame.data):
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
            self._wants_keyframe = False
            with self._changed:
                self._pending.append((name, frame))
                self._bytes += len(frame.data)
                self._changed.notify()

    def get(self) -> None:
        """Called by aiortc's decoder thread: starts ours in its place, and by returning None ends aiortc's."""
        self._thread = threading.Thread(target=self._run, name="video-decoder")
        self._thread.start()
        setattr(self._receiver, THREAD, _Unjoined(self._thread))

    async def ended(self) -> None:
        """Wait until the thread is done with the picture it is at; afterwards it shows nothing more."""
        self._end()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, END_TIMEOUT)

    def _end(self) -> None:
        self._is_over = True
        self._clear()

    def _drop(self, count: int) -> None:
        self.overrun += count
        self._wants_keyframe = True
        self._skipped()

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
        while (task := self._next()) is not None:
            try:
                frames = self._decode(*task)
            except Exception:  # FFmpeg's errors, and whatever PyAV makes of an odd picture
                self._failed()
                continue
            for frame in frames:
                if (work := self._show(frame)) is not None:
                    self._schedule(work)
        self._contexts.clear()

    def _next(self) -> tuple[str, JitterFrame] | None:
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
            self._contexts[name] = make_context(CODECS[name][0])
        return self._contexts[name].decode(av.Packet(frame.data))


class _Unjoined:
    """Our thread, for aiortc, which joins it on the event loop; ``Decoder.ended`` does that off the loop."""

    def __init__(self, thread: threading.Thread):
        self.is_alive = thread.is_alive

    def join(self) -> None:
        """Wait for nothing."""


def make_context(codec: str) -> VideoCodecContext:
    """A decoder for camera pictures, of one thread, that refuses larger ones by itself too."""
    context = av.CodecContext.create(codec, "r")
    assert isinstance(context, VideoCodecContext)
    context.thread_count = 1
    context.options = {"max_pixels": str(MAX_DECLARED)}
    return context
