"""Records one session through a bounded queue and a thread."""

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
from service.recording.mcap_format import Subject
from service.setting_types import Common, Group, Private
from service.threads import lower_priority

logger = logging.getLogger(__name__)

ON, OFF, DISK_FULL, LIMIT, FAILED = "on", "off", "disk_full", "limit", "failed"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NICENESS = 10
# Seconds between looks at the queue: the control loop never has to wake the thread.
_NAP = 0.05
# Seconds between flushes: a process that is killed loses no more than this.
_FLUSH = 1.0
_USUAL_FREE = 1 << 30

Opener = Callable[[Path], BinaryIO]
Item = tuple[Callable[..., None], tuple[Any, ...], int]


def open_new(path: Path) -> BinaryIO:
    """A new file for writing, without a buffer: an error belongs to the write that caused it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return cast(BinaryIO, path.open("xb", buffering=0))


@dataclass(frozen=True)
class RecorderLimits:
    """What a recording may take.

    Attributes:
        free: bytes that stay free on the disk; None for 1 GiB, or 5 % of a disk that is smaller than 20 GiB.
        bytes: of one recording.
        queue_bytes: of frames and chunks that wait to be written; more are dropped and counted.
        queue_items: of everything that waits.
    """

    free: int | None = None
    bytes: int = 20 << 30
    queue_bytes: int = 64 << 20
    queue_items: int = 20_000


class Recorder:
    """A tap whose calls take microseconds and never wait. Whatever happens to the file, the control goes on.

    Attributes:
        name: of the recording.
        state: ``on`` while it goes on, else why it ended: ``off`` by request, ``disk_full``, ``limit`` or ``failed``.
        reason: the same for people, None while it goes on and when it was asked for.
        dropped: frames (and all else) that were not recorded because the disk is slower than they come.
    """

    def __init__(
        self,
        path: Path,
        subject: Subject,
        limits: RecorderLimits | None = None,
        *,
        open_file: Opener = open_new,
        disk: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage,
        commit: Callable[[], str | None] = lambda: None,
        followed: Callable[[], str | None] | None = None,
        ended: "Callable[[Recorder], None]" = lambda recorder: None,
    ):
        """Begin; the file is opened in the thread.

        Args:
            open_file: a new, unbuffered file; OSError when there is none.
            disk: bytes in all, used and free, of the disk that a folder is on.
            commit: which policy runs now, asked on the event loop.
            followed: which instruction the newest chunk follows, likewise; always the subject's when None.
            ended: told in the thread when the file is closed.
        """
        self.name = path.stem
        self.subject = subject
        self.state, self.reason = ON, None
        self.dropped = 0
        self._path, self._limits = path, limits or RecorderLimits()
        self._open, self._disk, self._commit_now, self._ended = open_file, disk, commit, ended
        self._commit = subject.commit
        self._followed_now, self._task = followed or (lambda: subject.task), subject.task
        self._queue: deque[Item] = deque()
        self._put = self._taken = 0  # bytes; one is the loop's, the other the thread's
        self._newest: dict[str, tuple[np.ndarray, float]] = {}
        self._is_running = False
        self._is_closing = threading.Event()
        self._bytes, self._seconds = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"record {subject.session_id}", daemon=True)
        self._thread.start()

    # On the event loop.

    def saw(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        """A frame came; between two episodes only the newest is kept, since the next one begins with it."""
        self._newest[camera] = (image, seen_at)
        if self._is_running:
            self._hand_over("frame", camera, image, seen_at, size=image.nbytes)

    def planned(self, chunk: np.ndarray, seen_at: float, at: float) -> None:
        """A chunk was taken."""
        if (commit := self._commit_now()) != self._commit:
            self._commit = commit
            self.note("policy", f"another policy: {commit}")
        self._note_task()
        self._hand_over("chunk", chunk, seen_at, at, size=chunk.nbytes)

    def ticked(self, tick: Tick) -> None:
        """A tick was done."""
        self._hand_over("tick", tick)

    def begin(self, text: str) -> None:
        """The robot may move: an episode begins (the one before ends)."""
        if self._is_running:
            self.end("started anew")
        self._note_task()
        self._hand_over("event", time.monotonic(), mcap_format.INFO, "start", text)
        self._is_running = True
        for camera, (image, seen_at) in self._newest.items():
            self._hand_over("frame", camera, image, seen_at, size=image.nbytes)

    def end(self, text: str) -> None:
        """The robot was stopped: the episode ends."""
        if self._is_running:
            self._is_running = False
            self._hand_over("event", time.monotonic(), mcap_format.INFO, "stop", text)

    def _note_task(self) -> None:
        if (task := self._followed_now() or "") != self._task:
            self._task = task
            self.note(mcap_format.TASK, task)

    def note(self, code: str, text: str, level: int = mcap_format.INFO) -> None:
        """Something else happened."""
        self._hand_over("event", time.monotonic(), level, code, text)

    @property
    def is_closing(self) -> bool:
        """Whether it was asked to end."""
        return self._is_closing.is_set()

    @property
    def is_writing(self) -> bool:
        """Whether its file is open still."""
        return self._thread.is_alive()

    def close(self, text: str = "the recording was ended") -> None:
        """End it; the rest is written in the background."""
        self.end(text)
        self._is_closing.set()

    def figures(self) -> dict[str, object]:
        """What the session's stats say of it."""
        return {
            "state": OFF if self.state == ON and self.is_closing else self.state,
            "file": f"{self.name}.mcap",
            "seconds": round(self._seconds, 1),
            "bytes": self._bytes,
            "dropped": self.dropped,
            "reason": self.reason,
        }

    def join(self, within: float) -> bool:
        """Wait until its file is closed; whether it was in time (seconds)."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def _hand_over(self, what: str, *arguments: object, size: int = 0) -> None:
        if self.state != ON:
            return
        limits = self._limits
        if len(self._queue) >= limits.queue_items or (size and self._put - self._taken + size > limits.queue_bytes):
            self.dropped += 1
            return
        self._put += size
        self._queue.append((what, arguments, size))  # type: ignore[arg-type]

    # In the thread.

    def _run(self) -> None:
        lower_priority(NICENESS)
        try:
            self._record()
        except OSError as error:
            is_full = error.errno in _FULL
            # Without the path: it is shown to whoever may see the session.
            self._give_up(DISK_FULL if is_full else FAILED, error.strerror or type(error).__name__)
        except Exception as error:
            logger.exception("recording %s failed", self.name)
            self._give_up(FAILED, f"{type(error).__name__}; the server's log says more")
        finally:
            self._queue.clear()
            self._newest.clear()
            if self.reason is not None:
                logger.error("recording %s ended (%s): %s; the robot goes on", self.name, self.state, self.reason)
            self._ended(self)

    def _record(self) -> None:
        from service.recording.mcap_files import McapWriter

        self._check_room()
        if self.state != ON:
            return
        file = self._open(self._path)
        try:
            writer = McapWriter(file, self.subject)
            try:
                self._write(writer)
                writer.finish(self.state if self.state != ON else OFF, self.dropped)
            except BaseException:
                writer.cut()
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
            # Asked before the queue is emptied: what was handed over before the end is in it.
            is_last = self._is_closing.is_set()
            while self._queue:
                what, arguments, size = self._queue.popleft()
                self._taken += size
                getattr(writer, cast(str, what))(*arguments)
                if writer.sink.position > self._limits.bytes:
                    self._give_up(LIMIT, f"it has the {self._limits.bytes} bytes that one recording may have")
                    return
            self._bytes, self._seconds = writer.sink.position, writer.seconds
            if is_last:
                return
            if time.monotonic() - flushed >= _FLUSH:
                writer.flush()
                flushed = time.monotonic()
                self._check_room()
            self._is_closing.wait(_NAP)

    def _check_room(self) -> None:
        folder = self._path.parent
        while not folder.exists():
            folder = folder.parent
        whole, _, free = self._disk(folder)
        keep = min(_USUAL_FREE, whole // 20) if self._limits.free is None else self._limits.free
        if free < keep:
            self._give_up(DISK_FULL, f"{free >> 20} MiB are free on the disk, and {keep >> 20} MiB are to stay free")

    def _give_up(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason


class RecordingSettings(Group):
    """Recordings"""

    recordings: Common[Private[str | None]] = Field(
        default=None, description="Folder that recordings of sessions go to; default: recordings in the state folder."
    )
    recording_free: int | None = Field(
        default=None,
        ge=0,
        description="Bytes that stay free: a recording ends before. Default: 1 GiB, or 5 % of a small disk.",
    )
    recording_limit: int = Field(default=20 << 30, ge=1 << 20, description="Bytes of one recording.")
    recording_datasets: bool = Field(
        default=True, description="Make a LeRobotDataset of every recording when it has ended."
    )
