"""Recordings and datasets of a folder, and the process that exports a recording."""

import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from service.recording.dataset import DatasetSource, write_dataset
from service.recording.mcap_files import McapSource, read_header, read_outcome
from service.recording.steps import RecordingError, StepSource

SUFFIX = ".mcap"
DATASET_FILE = "meta/info.json"  # A folder with this file is a LeRobotDataset.
SETTLING_NS = 2_000_000_000  # Nanoseconds without a change after which the list of files is cached.
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,110}")


@dataclass(frozen=True)
class RecordingEntry:
    """Description of one recording in a folder.

    Attributes:
        session_id: None if the file cannot be read.
        at: start in seconds since 1970.
        state: final state of its ``Recorder``, ``interrupted`` (the server was killed), or ``unreadable``.
    """

    name: str
    bytes: int
    session_id: str | None = None
    at: float | None = None
    seconds: float | None = None
    episodes: int | None = None
    state: str = "unreadable"
    owner: str | None = None


class RecordingLibrary:
    """Recordings in a folder, one file each; the dataset of a recording is a folder of the same name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[str, tuple[tuple[int, int, int], RecordingEntry]] = {}
        self._listing: tuple[tuple[int, int], Sequence[RecordingEntry]] | None = None

    def new_path(self, session_id: str) -> Path:
        """Return the path of a new file."""
        stamp = datetime.fromtimestamp(time.time(), UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        return self.folder / f"{session_id}-{stamp}{SUFFIX}"

    def find_file(self, name: str) -> Path | None:
        """Return the file of this recording; None for an unknown or invalid name."""
        if not _NAME.fullmatch(name):
            return None
        path = self.folder / f"{name}{SUFFIX}"
        return path if path.is_file() and not path.is_symlink() else None

    def list_entries(self) -> Sequence[RecordingEntry]:
        """List all recordings, newest first; call it from one thread only.

        Size and state of an entry may be outdated; ``read_entry`` returns the present values.
        """
        try:
            status = self.folder.stat()
            version = status.st_ino, status.st_mtime_ns
            if self._listing is not None and self._listing[0] == version:
                return self._listing[1]
            now, files = time.time_ns(), os.listdir(self.folder)
        except OSError:
            return ()
        names = (name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX))
        entries = [entry for name in names if _NAME.fullmatch(name) and (entry := self.read_entry(name)) is not None]
        entries.sort(key=lambda entry: (entry.at or 0.0, entry.name), reverse=True)
        self._known = {entry.name: self._known[entry.name] for entry in entries}
        # The list is not cached after a recent change, because a second change may have the same time, and a file
        # without a header may be a new recording.
        changes = [self._known[entry.name][0][2] for entry in entries if entry.at is None]
        self._listing = (version, entries) if now - max([version[1], *changes]) > SETTLING_NS else None
        return entries

    def read_entry(self, name: str) -> RecordingEntry | None:
        """Describe one recording, or return None without it. The file is read only after a change."""
        path = f"{self.folder}/{name}{SUFFIX}"
        try:
            status = os.lstat(path)
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        identity = status.st_ino, status.st_size, status.st_mtime_ns
        known = self._known.get(name)
        if known is None or known[0] != identity:
            known = self._known[name] = identity, _read_file(Path(path), status.st_size)
        return known[1]

    def has_dataset(self, name: str) -> bool:
        """Whether the folder of the recording's name is a finished dataset."""
        return (self.folder / name / DATASET_FILE).is_file()

    def remove(self, name: str) -> bool:
        """Remove a recording and its dataset; False if the recording does not exist."""
        path = self.find_file(name)
        if path is None:
            return False
        path.unlink()
        folder = self.folder / name
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        for unfinished in self.folder.glob(f"{name}.*.partial"):
            if unfinished.is_dir() and not unfinished.is_symlink():
                shutil.rmtree(unfinished)
        return True


def _read_file(path: Path, size: int) -> RecordingEntry:
    try:
        subject, outcome = read_header(path), read_outcome(path)
    except RecordingError:
        return RecordingEntry(path.stem, size)
    return RecordingEntry(
        name=path.stem,
        bytes=size,
        session_id=subject.session_id,
        at=subject.wall_ns / 1e9,
        seconds=outcome.seconds,
        episodes=outcome.episodes,
        state=outcome.state,
        owner=subject.owner,
    )


def open_source(path: Path) -> StepSource:
    """Open a recording (.mcap) or a LeRobotDataset folder, v3.0 or v2.1; raises RecordingError if it cannot be read."""
    if not path.exists():
        raise RecordingError(f"{path} is not there; `robojax recordings list` shows the recordings of a server")
    return DatasetSource(path) if path.is_dir() else McapSource(path)


def main(file: str, folder: str) -> int:
    """Run ``python -m service.recording.library FILE FOLDER``; returns 0 if the dataset was written."""
    # An orderly exit removes the unfinished folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)
    try:
        source = open_source(Path(file))
        write_dataset(Path(folder), source.info, source.steps())
    except (RecordingError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if source.damage is not None:
        sys.stderr.write(f"{source.damage}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
