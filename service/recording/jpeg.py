"""Pictures to JPEG, without keeping Python's lock: the control loop of the same process goes on meanwhile."""

from fractions import Fraction
from typing import cast

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import VideoReformatter

# FFmpeg's scale: 2 is the best, 31 the worst; at 3 pixels are off by one level of 255 on average.
QUALITY = 3
_LAMBDA = 118


class JpegEncoder:
    """Encodes frames of one size."""

    def __init__(self, height: int, width: int, quality: int = QUALITY):
        self.size = (height, width)
        context = cast(VideoCodecContext, av.CodecContext.create("mjpeg", "w"))
        context.width, context.height = width, height
        context.pix_fmt = "yuvj420p"
        context.time_base = Fraction(1, 25)
        # One thread: a second one would keep a frame back until the next comes.
        context.thread_count = 1
        context.options = {
            "qmin": str(quality),
            "qmax": str(quality),
            "flags": "+qscale",
            "global_quality": str(_LAMBDA * quality),
            "huffman": "default",
        }
        self._context, self._reformatter = context, VideoReformatter()

    def encode(self, image: np.ndarray) -> bytes:
        """uint8 (h, w, 3), RGB -> JPEG."""
        # Without a copy: copying would hold the lock for about a millisecond per VGA frame.
        frame = av.VideoFrame.from_numpy_buffer(np.ascontiguousarray(image), "rgb24")
        frame = self._reformatter.reformat(frame, format="yuvj420p")
        frame.pts = None
        return b"".join(bytes(packet) for packet in self._context.encode(frame))
