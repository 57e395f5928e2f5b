"""When a policy folder on disk has changed, and is whole again.

A folder is looked at twice over: cheaply for its files' names, sizes and times, which tells that something moves, and
by its content, which tells whether anything is different.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from hooks.policy_files import REQUIRED, content_sha, is_policy_file

# (path within the folder, size, time of the last change, inode): an exchanged file of the same size and time differs.
Look = frozenset[tuple[str, int, int, int]]

# What is still being written, by the names that writers give it.
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~")


class Stopped(Exception):
    """Reading was ended before it was through."""


class Quiet:
    """Tells when a folder was the same for long enough.

    Attributes:
        quiet: seconds.
    """

    def __init__(self, quiet: float):
        self.quiet = quiet
        self._look: Look | None = None
        self._since = 0.0

    def wait(self, look: Look | None, now: float) -> float:
        """Seconds until it can be taken as whole if nothing moves any more; 0: it can.

        Args:
            look: how it is now; None when it is not there.
            now: monotonic seconds.
        """
        if look != self._look:
            self._look, self._since = look, now
        return max(self._since + self.quiet - now, 0.0)


def look_at(folder: Path) -> Look | None:
    """The folder's files, or None when it is not there (a new one is about to take its place, say)."""
    if not folder.is_dir():
        return None
    found = set()
    for name, path in _files(folder):
        try:
            status = path.stat()
        except OSError:
            continue  # gone since; the next look is another one then
        found.add((name, status.st_size, status.st_mtime_ns, status.st_ino))
    return frozenset(found)


def sha_of(folder: Path, stop: threading.Event) -> str:
    """What the folder's content is called; of a policy, what ``FolderSource`` takes for its commit.

    Raises:
        OSError: a file was taken away meanwhile, or cannot be read.
        Stopped: ``stop`` was set.
    """

    def content(path: Path) -> str:
        read = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                if stop.is_set():
                    raise Stopped
                read.update(block)
        return read.hexdigest()

    return content_sha(_files(folder), content)


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Those of a policy; all files, when the folder is none (yet)."""
    files = list(_all_files(folder))
    names = {name for name, _ in files}
    if not all(name in names for name in REQUIRED):
        return files
    return [(name, path) for name, path in files if is_policy_file(name)]


def _all_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_aside(name)]
        for name in names:
            path = Path(root, name)
            if not _is_aside(name) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _is_aside(name: str) -> bool:
    return name.startswith(".") or name.endswith(UNFINISHED)
