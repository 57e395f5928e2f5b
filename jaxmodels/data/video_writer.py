"""Frames as mp4, one after another: files of many episodes, as LeRobotDataset v3 keeps them."""

from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError

from jaxmodels.data import layout
from jaxmodels.data.statistics import FRAMES, Colours, Stats

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
        self._has_failed = False
        self.format = "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w", format="mp4")
        self._stream: Any = self._container.add_stream("libx264", rate=rate, options=_OPTIONS)
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, self.format
        self._stream.codec_context.thread_count = 1
        self._time_base = 1 / rate
        self._newest: tuple[np.ndarray, Any] | None = None

    def add(self, pixels: np.ndarray) -> None:
        """The next frame; one of another size is scaled to the first one's, the same array again is not converted."""
        if self._newest is None or self._newest[0] is not pixels:
            height, width = self.size
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")
            self._newest = (pixels, frame.reformat(width=width, height=height, format=self.format))
        frame = self._newest[1]
        frame.pts, frame.time_base = self.count, self._time_base
        self._write(frame)
        self.count += 1

    def close(self) -> None:
        """Write what is left; a file that could not be written to is only let go of.

        Raises:
            OSError: the disk does not take it.
        """
        if self._has_failed:
            self.discard()
            return
        try:
            self._write(None)
        except BaseException:
            self.discard()
            raise
        self._container.close()

    def discard(self) -> None:
        """Let go of a file that nobody wants."""
        with suppress(FFmpegError, OSError):
            self._container.close()

    def _write(self, frame: Any) -> None:
        try:
            self._container.mux(self._stream.encode(frame))
        except BaseException:
            # FFmpeg ends the process (SIGSEGV) when it is to begin a file again whose head the disk did not take.
            self._has_failed = True
            raise


class CameraFiles:
    """One camera's frames: files of about 200 MB, each with whole episodes.

    Attributes:
        colours: of all frames that were looked at.
        size: height and width.
    """

    def __init__(self, folder: Path, key: str, rate: Fraction):
        self.colours = Colours()
        self.size = (0, 0)
        self.format = ""
        self._folder, self._key, self._rate = folder, key, rate
        self._number, self._file, self._from = -1, None, 0
        self._episode = Colours()
        self._looked_at: np.ndarray | None = None

    def add(self, pixels: np.ndarray) -> None:
        """The next frame; the same array as before is the same frame."""
        if self._file is None:
            self.size = self.size if any(self.size) else (pixels.shape[0], pixels.shape[1])
            self._number += 1
            chunk, file = divmod(self._number, layout.CHUNK_FILES)
            path = layout.VIDEO.format(video_key=self._key, chunk_index=chunk, file_index=file)
            self._file, self._from = VideoWriter(self._folder / path, self._rate, self.size), 0
            self.format = self._file.format
        if pixels is not self._looked_at and self._episode.frames < FRAMES:
            self._episode.add(pixels)
            self._looked_at = pixels
        self._file.add(pixels)

    def end_episode(self) -> tuple[dict[str, Any], Stats]:
        """Where the episode's frames are, and what they look like."""
        assert self._file is not None, "an episode has frames"
        chunk, file = divmod(self._number, layout.CHUNK_FILES)
        prefix, count = f"videos/{self._key}/", self._file.count
        row = {
            f"{prefix}chunk_index": chunk,
            f"{prefix}file_index": file,
            f"{prefix}from_timestamp": float(self._from / self._rate),
            f"{prefix}to_timestamp": float(count / self._rate),
        }
        self._from = count
        stats = self._episode.stats()
        self.colours += self._episode
        self._episode, self._looked_at = Colours(), None
        # There is no file yet while the encoder still holds all frames.
        if self._file.path.is_file() and self._file.path.stat().st_size > layout.VIDEO_MEGABYTES << 20:
            self.close()
        return row, stats

    def close(self) -> None:
        """End the file, once: what could not be written is not tried again.

        Raises:
            OSError: the disk does not take it.
        """
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Let go of a file that nobody wants."""
        file, self._file = self._file, None
        if file is not None:
            file.discard()
