"""Episodes' frames as mp4, one after another, and out of it again."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from service.recording.steps import MOST_PIXELS, Picture, RecordingError

# Only what datasets come in, so that a stranger's file does not choose among all of FFmpeg's decoders.
_CODECS = frozenset({"h264", "hevc", "av1", "libdav1d", "vp9"})
CODEC = "h264"
_OPTIONS = {
    "crf": "20",
    "preset": "veryfast",
    # A key frame every two frames: training reads single frames anywhere in the file.
    "g": "2",
    # Frames in the order they are shown, from time 0 on.
    "bf": "0",
}


class VideoWriter:
    """Frames of one size into one file, one per tick.

    Attributes:
        count: frames written.
        format: the pixels' format; colours have half the resolution unless a side is odd.
    """

    def __init__(self, path: Path, rate: Fraction, size: tuple[int, int]):
        height, width = size
        self.path, self.size, self.count = path, size, 0
        self.format = "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w", format="mp4")
        self._stream: Any = self._container.add_stream("libx264", rate=rate, options=_OPTIONS)
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, self.format
        self._stream.codec_context.thread_count = 1
        self._time_base = 1 / rate
        self._newest: tuple[Picture, Any] | None = None

    def add(self, picture: Picture) -> None:
        """The next frame; one of another size is scaled to the first one's."""
        if self._newest is None or self._newest[0] is not picture:
            height, width = self.size
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture.pixels), "rgb24")
            self._newest = (picture, frame.reformat(width=width, height=height, format=self.format))
        frame = self._newest[1]
        frame.pts, frame.time_base = self.count, self._time_base
        self._container.mux(self._stream.encode(frame))
        self.count += 1

    def close(self) -> None:
        """Write what is left."""
        self._container.mux(self._stream.encode(None))
        self._container.close()


class Frame:
    """A decoded frame that is converted when somebody looks."""

    def __init__(self, frame: Any):
        self._frame = frame

    @property
    def pixels(self) -> np.ndarray:
        """uint8 (h, w, 3), RGB."""
        return self._frame.to_ndarray(format="rgb24")


class VideoReader:
    """Frames of one file by time, forward; the frame before is kept, so that asking twice costs nothing."""

    def __init__(self, path: Path):
        """Open it.

        Raises:
            RecordingError: it is not there, or no video that is read.
        """
        self.path = path
        try:
            self._container: Any = av.open(str(path), format="mp4", options={"protocol_whitelist": "file"})
            stream = self._container.streams.video[0]
        except (OSError, IndexError) as error:
            raise RecordingError(f"{path.name} cannot be read as a video ({type(error).__name__})") from error
        name, pixels = stream.codec_context.name, stream.codec_context.width * stream.codec_context.height
        if name not in _CODECS or pixels > MOST_PIXELS:
            self._container.close()
            raise RecordingError(f"{path.name} is {name} of {pixels} pixels; wanted {', '.join(sorted(_CODECS))}")
        self._frames: Iterator[Any] = self._container.decode(stream)
        self._newest: Any = None

    def at(self, seconds: float, tolerance: float) -> Frame:
        """The first frame that is shown at this time or up to the tolerance before.

        Raises:
            RecordingError: it ends before.
        """
        while self._newest is None or self._newest.time < seconds - tolerance:
            try:
                self._newest = next(self._frames)
            except (StopIteration, OSError) as error:
                raise RecordingError(f"{self.path.name} has no frame at {seconds:.3f} s") from error
        return Frame(self._newest)

    def is_past(self, seconds: float, tolerance: float) -> bool:
        """Whether that frame is gone by already."""
        return self._newest is not None and self._newest.time > seconds + tolerance

    def close(self) -> None:
        """Let go of the file."""
        self._container.close()
