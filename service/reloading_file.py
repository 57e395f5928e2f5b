"""File that is read again when it has changed, without a restart."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")

# A younger file may change again without a new time stamp.
SETTLE_NS = 100_000_000
# Bytes of a file of keys or secrets: five thousand keys, read in 5 ms.
MAX_BYTES = 1 << 20


class FileUnusable(Exception):
    """A file of keys or secrets exists and cannot be used; the text says which, why and what to do."""


class ReloadingFile(Generic[Content]):
    """File whose content is parsed again whenever the file has changed.

    Args:
        parse: parses the file's bytes; raises FileUnusable, without the path.
        forbidden: bits of the file's mode that make it unusable.

    Attributes:
        last: the newest usable content, also while the file is missing or unusable; None before the first.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Content], forbidden: int):
        self.path = path
        self._parse = parse
        self._forbidden = forbidden
        self._mark: tuple[int, ...] | None = None
        self._content: Content | None = None
        self.last: Content | None = None
        self._error: FileUnusable | None = None

    def read(self) -> Content | None:
        """Return the present content; None if the file does not exist.

        Raises:
            FileUnusable: it cannot be read, others may read or change it, or its content is invalid.
        """
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self._mark = self._content = self._error = None
            return None
        except OSError as error:
            self._mark = None
            raise FileUnusable(f"{str(self.path)!r} cannot be read: {error.strerror}") from error
        mark = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode)
        if mark != self._mark or abs(time.time_ns() - status.st_mtime_ns) < SETTLE_NS:
            self._mark = mark
            self._load(status.st_mode)
        if self._error is not None:
            raise self._error
        return self._content

    def _load(self, mode: int) -> None:
        self._content = self._error = None
        try:
            if mode & self._forbidden:
                allowed = oct(stat.S_IMODE(mode) & ~self._forbidden)[2:]
                raise FileUnusable(
                    f"has mode {oct(stat.S_IMODE(mode))[2:]}, so others may read or change it; chmod {allowed} it"
                )
            self._content = self.last = self._parse(read_regular_file(self.path))
        except FileUnusable as error:
            self._error = FileUnusable(f"{str(self.path)!r} {error}")
        except OSError as error:
            self._error = FileUnusable(f"{str(self.path)!r} cannot be read: {error.strerror}")


def read_regular_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file, without waiting for the writer of a pipe.

    Raises:
        FileUnusable: it is not a regular file, or too large; without the path.
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileUnusable("is a folder, a pipe or a device; wanted a regular file")
        if status.st_size > max_bytes:
            raise FileUnusable(f"has {status.st_size} bytes; wanted at most {max_bytes}")
        return os.read(descriptor, max_bytes)
    finally:
        os.close(descriptor)


def write_private_file(path: Path, content: bytes) -> None:
    """Replace a file atomically; only its owner can read the new content.

    Raises:
        FileUnusable: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FileUnusable(f"{str(path)!r} cannot be written: {error.strerror}") from error
