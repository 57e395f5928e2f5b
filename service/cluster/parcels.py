"""A policy's files on their way to engines: read once where the front is, written once on each machine.

Engines need no way to the Hub, and no token for it: what they run is what the front has checked.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jaxmodels import POLICY_FILES
from jaxmodels.errors import CheckpointError

# Bytes of a file that travel together.
PIECE = 64 << 20
# Bytes of parcels that a machine keeps; those that were longest unused go.
KEPT = 32 << 30


@dataclass(frozen=True)
class Parcel:
    """Files by name.

    Attributes:
        sha: of their names and contents.
        files: name to its pieces, as the object store calls them.
    """

    sha: str
    files: tuple[tuple[str, tuple[Any, ...]], ...]


def pack(folder: Path, put: Callable[[bytes], Any]) -> Parcel:
    """Read the files of a policy's folder.

    Args:
        put: gives a piece to the object store.

    Raises:
        CheckpointError: it has none.
    """
    digest = hashlib.sha256()
    files = []
    for path in _files(folder):
        digest.update(f"{len(path.name)} {path.name} ".encode())
        pieces, size = [], 0
        for piece in _pieces(path):
            digest.update(piece)
            size += len(piece)
            pieces.append(put(piece))
        digest.update(f" {size}\n".encode())
        files.append((path.name, tuple(pieces)))
    if not files:
        raise CheckpointError(f"{folder.name}: none of the files of a policy is in it ({', '.join(POLICY_FILES[:2])})")
    return Parcel(digest.hexdigest(), tuple(files))


def unpack(parcel: Parcel, cache: Path, get: Callable[[Any], bytes]) -> Path:
    """The folder of a parcel on this machine; the first engine here that wants it fetches the pieces.

    Raises:
        OSError: the disk does not take it.
    """
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = cache / parcel.sha
    with _alone(cache / f".{parcel.sha}.lock"):
        if not folder.is_dir():
            _make_room(cache)
            part = Path(tempfile.mkdtemp(prefix=".part-", dir=cache))
            try:
                for name, pieces in parcel.files:
                    with (part / name).open("wb") as file:
                        for piece in pieces:
                            file.write(get(piece))
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        os.utime(folder)
    return folder


def _files(folder: Path) -> Sequence[Path]:
    known = [path for path in folder.iterdir() if any(fnmatch(path.name, name) for name in POLICY_FILES)]
    return sorted(path for path in known if path.is_file())


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _make_room(cache: Path) -> None:
    folders = sorted((path for path in cache.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    for folder, size in zip(folders[:-1], sizes[:-1], strict=True):
        if sum(sizes) <= KEPT:
            return
        shutil.rmtree(folder, ignore_errors=True)
        sizes[folders.index(folder)] -= size


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
