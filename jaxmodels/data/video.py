"""Readers and writers of mp4 files, by timestamp."""

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import VideoReformatter

from jaxmodels.data import metadata
from jaxmodels.data.statistics import FRAMES, ColourStats, Stats
from jaxmodels.data.table_files import check_regular
from jaxmodels.errors import DatasetError

# Share of a frame's duration within which times are equal, because of rounding in the file and float32.
NEAR = 0.1


class VideoFile:
    """An open mp4 file, for one thread at a time."""

    def __init__(self, path: Path, size: tuple[int, int], fps: float, where: str):
        """Open it; raises DatasetError if it is missing or has another codec, height or width."""
        self._size, self._period, self._where = size, 1 / fps, where
        # Limit the decoders that FFmpeg may use while it opens the file.
        options = {"protocol_whitelist": "file", "codec_whitelist": ",".join(metadata.CODECS)}
        try:
            check_regular(path)
            self._container: Any = av.open(str(path), format="mp4", options=options)
        except FileNotFoundError as error:
            raise DatasetError(f"{where} is missing; fetch or copy the dataset again") from error
        except (OSError, FFmpegError) as error:
            raise DatasetError(f"{where} cannot be read as a video ({type(error).__name__})") from error
        try:
            self._stream = self._open_stream()
        except BaseException:
            self._container.close()
            raise
        self._reformatter = VideoReformatter()
        self._frames: Iterator[Any] = iter(())
        # The last decoded frame, and its predecessor.
        self._newest: Any = None
        self._before: Any = None

    def _open_stream(self) -> Any:
        streams = self._container.streams.video
        if not streams:
            raise DatasetError(f"{self._where} has no video in it")
        context = streams[0].codec_context
        size = (context.height, context.width)
        if context.name not in metadata.CODECS:
            raise DatasetError(f"{self._where} is {context.name}; wanted one of {', '.join(metadata.CODECS)}")
        if size != self._size:
            raise DatasetError(
                f"{self._where} has frames of {size[0]}x{size[1]}; the dataset has {self._size[0]}x{self._size[1]}"
            )
        context.thread_count = 1  # Several files are decoded at once instead.
        context.options = {"max_pixels": str(metadata.MAX_PIXELS)}  # Later frames may claim another size.
        return streams[0]

    def at(self, seconds: float) -> np.ndarray:
        """Decode the frame nearest to a time, uint8 (h, w, 3); later times are cheap, earlier ones need a seek.

        Raises:
            DatasetError: no frame is within `metadata.NEAREST_FRAME`, or the file cannot be decoded.
        """
        try:
            frame = self._find(seconds)
            if (frame.height, frame.width) != self._size:
                raise DatasetError(f"{self._where} changes its size at {seconds:.3f} s")
            return self._reformatter.reformat(frame, format="rgb24").to_ndarray()
        except (OSError, FFmpegError) as error:
            raise DatasetError(
                f"{self._where} cannot be decoded at {seconds:.3f} s ({type(error).__name__}); fetch or copy it again"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def _find(self, seconds: float) -> Any:
        earliest = seconds - NEAR * self._period
        if not self._is_ahead(earliest):
            self._seek(earliest)
        while self._newest is not None and self._newest.time < earliest:
            self._before, self._newest = self._newest, next(self._frames, None)
        candidates = [frame for frame in (self._newest, self._before) if frame is not None]
        best = min(candidates, key=lambda frame: abs(frame.time - seconds), default=None)
        if best is None or abs(best.time - seconds) > metadata.NEAREST_FRAME * self._period:
            raise DatasetError(
                f"{self._where} has no frame at {seconds:.3f} s"
                + (f"; the nearest is at {best.time:.3f} s" if best is not None else "; it has none")
                + ". It is shorter than its rows, has another rate, or its span is shifted"
            )
        return best

    def _is_ahead(self, seconds: float) -> bool:
        """Return whether decoding further frames is faster than a seek."""
        if self._newest is None:
            return False
        if seconds <= self._newest.time:
            return self._before is not None and self._before.time < seconds
        # The last key frame before this time, from the index of the file.
        entries = self._stream.index_entries
        index = entries.search_timestamp(self._ticks(seconds), backward=True)
        return (entries[index].timestamp if index >= 0 else 0) <= self._newest.pts

    def _ticks(self, seconds: float) -> int:
        return max(int(seconds / self._stream.time_base), 0)

    def _seek(self, seconds: float) -> None:
        """Seek to a key frame before this time; the nearest key frame may be shown later."""
        for back in (0.0, 1.0, seconds):
            self._container.seek(self._ticks(seconds - back), stream=self._stream)
            self._frames = self._container.decode(self._stream)
            self._before, self._newest = None, next(self._frames, None)
            if self._newest is None or self._newest.time <= seconds + NEAR * self._period:
                return


CODEC = "h264"
_OPTIONS = {
    "crf": "20",
    "preset": "veryfast",
    # A key frame every two frames, because training reads single frames anywhere in the file.
    "g": "2",
    # Frames in the order they are shown, from time 0 on.
    "bf": "0",
}


class VideoWriter:
    """Encoder of frames of one size into an mp4 file, one per tick; `count` frames are written.

    Colours have half the resolution (`format`) unless a side is odd.
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
        """Encode the next frame, scaled to the first frame's size; the same array again is converted once."""
        if self._newest is None or self._newest[0] is not pixels:
            height, width = self.size
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")
            self._newest = (pixels, frame.reformat(width=width, height=height, format=self.format))
        frame = self._newest[1]
        frame.pts, frame.time_base = self.count, self._time_base
        self._write(frame)
        self.count += 1

    def close(self) -> None:
        """Write the remaining frames, unless a write failed, and close; raises OSError if the disk is full."""
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
        """Close the file without writing what is left."""
        with suppress(FFmpegError, OSError):
            self._container.close()

    def _write(self, frame: Any) -> None:
        try:
            self._container.mux(self._stream.encode(frame))
        except BaseException:
            # FFmpeg crashes (SIGSEGV) if it writes again after the header of a file could not be written.
            self._has_failed = True
            raise


class CameraFiles:
    """Video files of one camera in a dataset, about 200 MB each, with whole episodes; `size` is (height, width)."""

    def __init__(self, folder: Path, key: str, rate: Fraction):
        self.colours = ColourStats()
        self.size = (0, 0)
        self.format = ""
        self._folder, self._key, self._rate = folder, key, rate
        self._number, self._file, self._from = -1, None, 0
        self._episode = ColourStats()
        self._sampled_frames: np.ndarray | None = None

    def add(self, pixels: np.ndarray) -> None:
        """Encode the next frame; the same array as before is the same frame."""
        if self._file is None:
            self.size = self.size if any(self.size) else (pixels.shape[0], pixels.shape[1])
            self._number += 1
            chunk, file = divmod(self._number, metadata.CHUNK_FILES)
            path = metadata.VIDEO.format(video_key=self._key, chunk_index=chunk, file_index=file)
            self._file, self._from = VideoWriter(self._folder / path, self._rate, self.size), 0
            self.format = self._file.format
        if pixels is not self._sampled_frames and self._episode.frames < FRAMES:
            self._episode.add(pixels)
            self._sampled_frames = pixels
        self._file.add(pixels)

    def end_episode(self) -> tuple[dict[str, Any], Stats]:
        """Return the location of the episode's frames, and their statistics."""
        assert self._file is not None, "an episode has frames"
        chunk, file = divmod(self._number, metadata.CHUNK_FILES)
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
        self._episode, self._sampled_frames = ColourStats(), None
        # The file does not exist while the encoder still has all frames.
        if self._file.path.is_file() and self._file.path.stat().st_size > metadata.VIDEO_MEGABYTES << 20:
            self.close()
        return row, stats

    def close(self) -> None:
        """Finish the last file; raises OSError if it cannot be written. A failed write is not repeated."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Close the last file without writing what is left."""
        file, self._file = self._file, None
        if file is not None:
            file.discard()
