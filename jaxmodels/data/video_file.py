"""Frames of an mp4 by the time they are shown at, anywhere in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import VideoReformatter

from jaxmodels.data import layout
from jaxmodels.data.parquet_file import check_regular
from jaxmodels.errors import DatasetError

# Of the time of a frame: two that are nearer are the same, whatever the file's clock and float32 made of it.
NEAR = 0.1


class VideoFile:
    """One open file; for one thread at a time."""

    def __init__(self, path: Path, size: tuple[int, int], fps: float, where: str):
        """Open it.

        Raises:
            DatasetError: it is missing, no video of a known codec, or its frames are not of this height and width.
        """
        self._size, self._period, self._where = size, 1 / fps, where
        # Checked before FFmpeg looks inside, which it does with whatever decoder fits.
        options = {"protocol_whitelist": "file", "codec_whitelist": ",".join(layout.CODECS)}
        try:
            check_regular(path)
            self._container: Any = av.open(str(path), format="mp4", options=options)
        except FileNotFoundError as error:
            raise DatasetError(f"{where} is missing; fetch or copy the dataset anew") from error
        except (OSError, FFmpegError) as error:
            raise DatasetError(f"{where} cannot be read as a video ({type(error).__name__})") from error
        try:
            self._stream = self._open_stream()
        except BaseException:
            self._container.close()
            raise
        self._reformatter = VideoReformatter()
        self._frames: Iterator[Any] = iter(())
        # The frame that was decoded last, and the one before it.
        self._newest: Any = None
        self._before: Any = None

    def _open_stream(self) -> Any:
        streams = self._container.streams.video
        if not streams:
            raise DatasetError(f"{self._where} has no video in it")
        context = streams[0].codec_context
        found = (context.height, context.width)
        if context.name not in layout.CODECS:
            raise DatasetError(f"{self._where} is {context.name}; wanted one of {', '.join(layout.CODECS)}")
        if found != self._size:
            raise DatasetError(
                f"{self._where} has frames of {found[0]}x{found[1]}; the dataset speaks of "
                f"{self._size[0]}x{self._size[1]}"
            )
        context.thread_count = 1  # several files are decoded at once instead
        context.options = {"max_pixels": str(layout.MOST_PIXELS)}  # frames may claim another size later on
        return streams[0]

    def at(self, seconds: float) -> np.ndarray:
        """The frame that is shown nearest to this time, uint8 (h, w, 3); later times are cheap, earlier ones a jump.

        Raises:
            DatasetError: no frame is shown within half a period, or it cannot be decoded.
        """
        try:
            frame = self._find(seconds)
            if (frame.height, frame.width) != self._size:
                raise DatasetError(f"{self._where} changes its size at {seconds:.3f} s")
            return self._reformatter.reformat(frame, format="rgb24").to_ndarray()
        except (OSError, FFmpegError) as error:
            raise DatasetError(
                f"{self._where} cannot be decoded at {seconds:.3f} s ({type(error).__name__}); fetch or copy it anew"
            ) from error

    def close(self) -> None:
        """Let go of the file."""
        self._container.close()

    def _find(self, seconds: float) -> Any:
        earliest = seconds - NEAR * self._period
        if not self._leads_to(earliest):
            self._seek(earliest)
        while self._newest is not None and self._newest.time < earliest:
            self._before, self._newest = self._newest, next(self._frames, None)
        shown = [frame for frame in (self._newest, self._before) if frame is not None]
        best = min(shown, key=lambda frame: abs(frame.time - seconds), default=None)
        if best is None or abs(best.time - seconds) > self._period / 2:
            raise DatasetError(
                f"{self._where} has no frame at {seconds:.3f} s"
                + (f"; the nearest is at {best.time:.3f} s" if best is not None else "; it has none")
                + ". It is shorter than its rows, or has another rate"
            )
        return best

    def _leads_to(self, seconds: float) -> bool:
        """Whether decoding on is the shortest way there."""
        if self._newest is None:
            return False
        if seconds <= self._newest.time:
            return self._before is not None and self._before.time < seconds
        return self._key_frame(seconds) <= self._newest.pts

    def _key_frame(self, seconds: float) -> int:
        """When decoding must begin to see this time, in the file's own units; as MP4 lists it, without reading."""
        entries = self._stream.index_entries
        found = entries.search_timestamp(self._ticks(seconds), backward=True)
        return entries[found].timestamp if found >= 0 else 0

    def _ticks(self, seconds: float) -> int:
        return max(int(seconds / self._stream.time_base), 0)

    def _seek(self, seconds: float) -> None:
        """Before this time, at a key frame: that of the time itself may be shown later, when frames are reordered."""
        for back in (0.0, 1.0, seconds):
            self._container.seek(self._ticks(seconds - back), stream=self._stream)
            self._frames = self._container.decode(self._stream)
            self._before, self._newest = None, next(self._frames, None)
            if self._newest is None or self._newest.time <= seconds + NEAR * self._period:
                return
