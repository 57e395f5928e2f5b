"""Reloading file: read again when it has changed, without a restart."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")

# The clock of a file system ticks every few milliseconds: a file this young may change once more within one tick.
YOUNG = 100_000_000


# Bytes of a file of keys or secrets: five thousand keys, read in 5 ms.
LARGEST = 1 << 20


class FileUnusable(Exception):
    """A file of keys or secrets that is there and cannot be used; the text says which, why and what to do."""


class ReloadingFile(Generic[Content]):
    """What is in a file now.

    Args:
        read: makes the content of the file's bytes; raises FileUnusable, without the path.
        forbidden: bits of the file's mode that make it unusable.

    Attributes:
        last: what was in it when it could be used; None before that, and when there is no file any more.
    """

    def __init__(self, path: Path, read: Callable[[bytes], Content], forbidden: int):
        self.path = path
        self._read = read
        self._forbidden = forbidden
        self._mark: tuple[int, ...] | None = None
        self._content: Content | None = None
        self.last: Content | None = None
        self._error: FileUnusable | None = None

    def content(self) -> Content | None:
        """None when there is no such file.

        Raises:
            FileUnusable: it cannot be read, others may read or change it, or it makes no sense.
        """
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self._mark = self._content = self.last = self._error = None
            return None
        except OSError as error:
            self._mark = None
            raise FileUnusable(f"{str(self.path)!r} cannot be read: {error.strerror}") from error
        mark = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
        if mark != self._mark or abs(time.time_ns() - found.st_mtime_ns) < YOUNG:
            self._mark = mark
            self._load(found.st_mode)
        if self._error is not None:
            raise self._error
        return self._content

    def _load(self, mode: int) -> None:
        self._content = self._error = None
        try:
            if mode & self._forbidden:
                wanted = oct(stat.S_IMODE(mode) & ~self._forbidden)[2:]
                raise FileUnusable(
                    f"has mode {oct(stat.S_IMODE(mode))[2:]}, so others may read or change it; chmod {wanted} it"
                )
            self._content = self.last = self._read(read_regular(self.path))
        except FileUnusable as error:
            self._error = FileUnusable(f"{str(self.path)!r} {error}")
        except OSError as error:
            self._error = FileUnusable(f"{str(self.path)!r} cannot be read: {error.strerror}")


def read_regular(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a regular file, read by the event loop: opening a pipe that nobody writes to would never end.

    Raises:
        FileUnusable: it is something else, or larger than a file of its kind may be; without the path.
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileUnusable("is a folder, a pipe or a device; wanted a regular file")
        if found.st_size > largest:
            raise FileUnusable(f"has {found.st_size} bytes; wanted at most {largest}")
        return os.read(descriptor, largest)
    finally:
        os.close(descriptor)


def write_private(path: Path, content: bytes) -> None:
    """Put content in the place of a file, whole or not at all, for its owner's eyes only.

    Raises:
        FileUnusable: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise FileUnusable(f"{str(path)!r} cannot be written: {error.strerror}") from error
