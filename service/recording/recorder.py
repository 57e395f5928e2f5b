"""Recorder of one session: a bounded queue, and a thread that writes the file."""

import errno
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from pydantic import Field

from service.control.observers import Tick
from service.recording import mcap_format
from service.recording.mcap_format import RecordingHeader
from service.setting_types import Common, Group, Private
from service.threads import lower_priority

logger = logging.getLogger(__name__)

ON, OFF, DISK_FULL, LIMIT, FAILED = "on", "off", "disk_full", "limit", "failed"
_DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NICENESS = 10
_POLL_INTERVAL = 0.05  # Seconds between polls of the queue.
_FLUSH_INTERVAL = 1.0  # Seconds between flushes, and the longest part that a killed process loses.
_DEFAULT_FREE = 1 << 30

OpenFile = Callable[[Path], BinaryIO]
QueueItem = tuple[Callable[..., None], tuple[Any, ...], int]


def open_new_file(path: Path) -> BinaryIO:
    """Open a new unbuffered file for writing, so that each write raises its own errors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return cast(BinaryIO, path.open("xb", buffering=0))


@dataclass(frozen=True)
class RecorderLimits:
    """Limits of one recording.

    Attributes:
        free: bytes that stay free on the disk. Defaults to 1 GiB, or 5 % of a disk that is smaller than 20 GiB.
        bytes: largest size of one recording.
        queue_bytes, queue_items: limits of the queue; further frames and chunks are dropped and counted.
    """

    free: int | None = None
    bytes: int = 20 << 30
    queue_bytes: int = 64 << 20
    queue_items: int = 20_000


class Recorder:
    """Observer that records a session without waiting; an error only ends the recording.

    Attributes:
        state: ``on``, or the reason of the end: ``off`` (by request), ``disk_full``, ``limit`` or ``failed``.
        reason: text of an error for people, or None.
        dropped: number of items that were not recorded because the disk was too slow.
        is_running: whether an episode is being recorded.
        has_commands: whether a command was recorded, without which there is no dataset.
    """

    def __init__(
        self,
        path: Path,
        header: RecordingHeader,
        limits: RecorderLimits | None = None,
        *,
        open_file: OpenFile = open_new_file,
        disk_usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage,
        get_commit: Callable[[], str | None] = lambda: None,
        get_task: Callable[[], str | None] | None = None,
        on_closed: "Callable[[Recorder], None]" = lambda recorder: None,
    ):
        """Start recording; the file is opened in the thread.

        Args:
            get_commit: returns the commit of the running policy; called on the event loop.
            get_task: returns the instruction of the newest chunk. Defaults to the header's.
            on_closed: called in the thread when the file is closed.
        """
        self.name = path.stem
        self.header = header
        self.state, self.reason = ON, None
        self.dropped = 0
        self._path, self._limits = path, limits or RecorderLimits()
        self._open, self._disk_usage, self._get_commit, self._on_closed = open_file, disk_usage, get_commit, on_closed
        self._commit = header.commit
        self._get_task, self._task = get_task or (lambda: header.task), header.task
        self._queue: deque[QueueItem] = deque()
        self._queued_bytes = self._written_bytes = 0  # Set by the event loop, and by the thread.
        self._newest_frames: dict[str, tuple[np.ndarray, float]] = {}
        self.is_running = self.has_commands = False
        self._is_closing = threading.Event()
        self._bytes, self._seconds = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"record {header.session_id}", daemon=True)
        self._thread.start()

    # On the event loop.

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Record a frame; between two episodes, keep only the newest frame for the next episode."""
        self._newest_frames[camera] = (image, observed_at)
        if self.is_running:
            self._enqueue("frame", camera, image, observed_at, size=image.nbytes)

    def on_chunk(self, chunk: np.ndarray, observed_at: float, at: float) -> None:
        """Record a chunk that joined the plan."""
        if (commit := self._get_commit()) != self._commit:
            self._commit = commit
            self.note_event("policy", f"another policy: {commit}")
        self._note_task()
        self._enqueue("chunk", chunk, observed_at, at, size=chunk.nbytes)

    def on_tick(self, tick: Tick) -> None:
        """Record a tick."""
        self.has_commands |= tick.command is not None
        self._enqueue("tick", tick)

    def begin_episode(self, text: str) -> None:
        """Begin an episode; an earlier one ends."""
        if self.is_running:
            self.end_episode("started again")
        self._note_task()
        self.note_event("start", text)
        self.is_running = True
        for camera, (image, observed_at) in self._newest_frames.items():
            self._enqueue("frame", camera, image, observed_at, size=image.nbytes)

    def end_episode(self, text: str) -> None:
        """End the episode."""
        if self.is_running:
            self.is_running = False
            self.note_event("stop", text)

    def _note_task(self) -> None:
        if (task := self._get_task() or "") != self._task:
            self._task = task
            self.note_event(mcap_format.TASK, task)

    def note_event(self, code: str, text: str) -> None:
        """Record another event."""
        self._enqueue("event", time.monotonic(), mcap_format.INFO, code, text)

    @property
    def is_closing(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closing.is_set()

    def close(self, text: str = "the recording was ended") -> None:
        """End the recording; the rest is written in the background."""
        self.end_episode(text)
        self._is_closing.set()

    def get_stats(self) -> dict[str, object]:
        """Return the recording part of the session's stats."""
        return {
            "state": OFF if self.state == ON and self.is_closing else self.state,
            "file": f"{self.name}.mcap",
            "seconds": round(self._seconds, 1),
            "bytes": self._bytes,
            "dropped": self.dropped,
            "reason": self.reason,
        }

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until the file is closed; return whether it is closed."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _enqueue(self, what: str, *arguments: object, size: int = 0) -> None:
        if self.state != ON:
            return
        limits = self._limits
        if len(self._queue) >= limits.queue_items or (
            size and self._queued_bytes - self._written_bytes + size > limits.queue_bytes
        ):
            self.dropped += 1
            return
        self._queued_bytes += size
        self._queue.append((what, arguments, size))  # type: ignore[arg-type]

    # In the thread.

    def _run(self) -> None:
        lower_priority(NICENESS)
        try:
            self._record()
        except OSError as error:
            is_full = error.errno in _DISK_FULL_ERRORS
            # The text has no path, because every viewer of the session may read it.
            self._end_with_error(DISK_FULL if is_full else FAILED, error.strerror or type(error).__name__)
        except Exception as error:
            logger.exception("recording %s failed", self.name)
            self._end_with_error(FAILED, f"{type(error).__name__}; the server's log says more")
        finally:
            self._queue.clear()
            self._newest_frames.clear()
            if self.reason is not None:
                logger.error("recording %s ended (%s): %s; the robot continues", self.name, self.state, self.reason)
            self._on_closed(self)

    def _record(self) -> None:
        from service.recording.mcap_writer import McapWriter

        self._check_disk()
        if self.state != ON:
            return
        file = self._open(self._path)
        try:
            writer = McapWriter(file, self.header)
            try:
                self._write(writer)
                writer.finish(self.state if self.state != ON else OFF, self.dropped)
            except BaseException:
                writer.truncate()
                raise
            finally:
                self._bytes = writer.sink.position
        finally:
            file.close()
        if self.state == ON:
            self.state = OFF

    def _write(self, writer: Any) -> None:
        flushed = time.monotonic()
        while self.state == ON:
            # Read before the queue is emptied, so that all items from before the end are written.
            is_last = self._is_closing.is_set()
            while self._queue:
                what, arguments, size = self._queue.popleft()
                self._written_bytes += size
                getattr(writer, cast(str, what))(*arguments)
                if writer.sink.position > self._limits.bytes:
                    self._end_with_error(LIMIT, f"it has the {self._limits.bytes} bytes that one recording may have")
                    return
            self._bytes, self._seconds = writer.sink.position, writer.seconds
            if is_last:
                return
            if time.monotonic() - flushed >= _FLUSH_INTERVAL:
                writer.flush()
                flushed = time.monotonic()
                self._check_disk()
            self._is_closing.wait(_POLL_INTERVAL)

    def _check_disk(self) -> None:
        folder = self._path.parent
        while not folder.exists():
            folder = folder.parent
        whole, _, free = self._disk_usage(folder)
        keep = min(_DEFAULT_FREE, whole // 20) if self._limits.free is None else self._limits.free
        if free < keep:
            self._end_with_error(
                DISK_FULL, f"{free >> 20} MiB are free on the disk, and {keep >> 20} MiB are to stay free"
            )

    def _end_with_error(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason


class RecordingSettings(Group):
    """Recordings."""

    recordings: Common[Private[str | None]] = Field(
        default=None, description="Folder of the recordings of sessions; default: recordings in the state folder"
    )
    recording_free: int | None = Field(
        default=None,
        ge=0,
        description="Disk space that a recording leaves free, in bytes; default: 1 GiB, or 5 % of a small disk",
    )
    recording_limit: int = Field(default=20 << 30, ge=1 << 20, description="Largest size of one recording, in bytes")
    recording_datasets: bool = Field(
        default=True, description="Make a LeRobotDataset of every recording when it has ended"
    )
