"""Recordings and datasets of a folder, by name or path; the process that exports one."""

import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from service.recording.dataset import DatasetSource, write_dataset
from service.recording.mcap_files import McapSource, read_header, read_outcome
from service.recording.steps import RecordingError, StepSource

SUFFIX = ".mcap"
# A LeRobotDataset has this file; that it is there says enough.
DATASET_FILE = "meta/info.json"
# Inode, bytes and time of the last change of a file.
FileIdentity: TypeAlias = tuple[int, int, int]
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,110}")


@dataclass(frozen=True)
class RecordingEntry:
    """Description of one recording in a folder.

    Attributes:
        session_id: None when the file cannot be read.
        at: when it began, seconds since 1970.
        state: final state of its ``Recorder``, ``interrupted`` (its server was killed), or ``unreadable``.
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
    """Recordings in a folder, one file each, and a folder of the same name where a dataset was made of one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._entries: dict[str, tuple[FileIdentity, RecordingEntry]] = {}

    def new_path(self, session_id: str) -> Path:
        """Return the path of a new file."""
        stamp = datetime.fromtimestamp(time.time(), UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        return self.folder / f"{session_id}-{stamp}{SUFFIX}"

    def find_file(self, name: str) -> Path | None:
        """Return the file of this recording; None when there is none, or it is no name."""
        if not _NAME.fullmatch(name):
            return None
        path = self.folder / f"{name}{SUFFIX}"
        return path if path.is_file() and not path.is_symlink() else None

    def list_entries(self) -> list[RecordingEntry]:
        """List all recordings, newest first. Only files that changed since the last call are read; for one thread."""
        names = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as files:
            for file in files:
                name = file.name.removesuffix(SUFFIX)
                if name != file.name and _NAME.fullmatch(name) and file.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # it was removed meanwhile
                        status = file.stat(follow_symlinks=False)
                        names.append(name)
                        identity = (status.st_ino, status.st_size, status.st_mtime_ns)
                        if name not in self._entries or self._entries[name][0] != identity:
                            self._entries[name] = identity, _read_entry(Path(file.path), status.st_size)
        self._entries = {name: self._entries[name] for name in names}
        entries = [entry for _, entry in self._entries.values()]
        return sorted(entries, key=lambda entry: (entry.at or 0.0, entry.name), reverse=True)

    def read_entry(self, path: Path) -> RecordingEntry | None:
        """Describe one recording; None when it is gone."""
        try:
            return _read_entry(path, path.stat().st_size)
        except OSError:
            return None

    def has_dataset(self, name: str) -> bool:
        """Whether the folder of the recording's name is a finished dataset."""
        return (self.folder / name / DATASET_FILE).is_file()

    def remove(self, name: str) -> bool:
        """Remove a recording and the dataset made of it; False when there is none."""
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


def _read_entry(path: Path, size: int) -> RecordingEntry:
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
        raise RecordingError(f"{path} is not there; `robojax recordings list` shows those of a server")
    return DatasetSource(path) if path.is_dir() else McapSource(path)


def main(file: str, folder: str) -> int:
    """Run ``python -m service.recording.library FILE FOLDER``; returns 0 when the dataset is there."""
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
