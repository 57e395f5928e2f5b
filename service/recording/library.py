"""Recordings and datasets of a folder, by name or path; the process that exports one."""

import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from service.recording.dataset import DatasetSource, write_dataset
from service.recording.mcap_files import McapSource, read_header, read_outcome
from service.recording.steps import RecordingError, StepSource

SUFFIX = ".mcap"
# A LeRobotDataset has this file; that it is there says enough.
DATASET_FILE = "meta/info.json"
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,110}")


@dataclass(frozen=True)
class RecordingEntry:
    """Description of one recording in a folder.

    Attributes:
        session_id: None when the file cannot be read.
        at: when it began, seconds since 1970.
        state: final state of its ``Recorder``, ``interrupted`` (its server was killed), or ``unreadable``.
        has_dataset: whether the folder of the same name is a finished dataset.
    """

    name: str
    bytes: int
    session_id: str | None = None
    at: float | None = None
    seconds: float | None = None
    episodes: int | None = None
    state: str = "unreadable"
    has_dataset: bool = False
    owner: str | None = None


class RecordingLibrary:
    """Recordings in a folder, one file each, and a folder of the same name where a dataset was made of one."""

    def __init__(self, folder: Path):
        self.folder = folder

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
        """List all recordings, newest first. Reads the head and the end of each file: not on the event loop."""
        paths = [path for path in self.folder.glob(f"*{SUFFIX}") if self.find_file(path.stem) is not None]
        entries = [entry for path in paths if (entry := self.read_entry(path)) is not None]
        return sorted(entries, key=lambda entry: (entry.at or 0.0, entry.name), reverse=True)

    def read_entry(self, path: Path) -> RecordingEntry | None:
        """Describe one recording; None when it is gone."""
        name = path.stem
        has_dataset = (self.folder / name / DATASET_FILE).is_file()
        try:
            size = path.stat().st_size
        except OSError:
            return None
        try:
            subject, outcome = read_header(path), read_outcome(path)
        except RecordingError:
            return RecordingEntry(name, size, has_dataset=has_dataset)
        return RecordingEntry(
            name=name,
            bytes=size,
            session_id=subject.session_id,
            at=subject.wall_ns / 1e9,
            seconds=outcome.seconds,
            episodes=outcome.episodes,
            state=outcome.state,
            has_dataset=has_dataset,
            owner=subject.owner,
        )

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
