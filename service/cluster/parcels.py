"""A policy's files on their way to engines: read once where the front is, written once on each machine.

Engines need no way to the Hub, and no token for it: what they run is what the front has checked.
"""

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jaxmodels import POLICY_FILES
from jaxmodels.errors import CheckpointError

# Bytes of a file that travel together.
PIECE = 64 << 20
# Bytes of parcels that a machine keeps; those that were longest unused go, but none that was wanted in so many seconds:
# an engine may be reading it, or writing it.
KEPT = 32 << 30
IN_USE = 600.0

_SHA = re.compile("[0-9a-f]{64}")


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
        CheckpointError: it has none, or its weights are in a form that does not travel.
    """
    if (folder / "orbax").is_dir() and not (folder / "model.safetensors").exists():
        raise CheckpointError(
            f"{folder.name}: its weights are Orbax's, which are not sent to engines; load it here and save it again "
            "(jaxmodels.load_policy(path).save(path)) to have them as model.safetensors"
        )
    digest = hashlib.sha256()
    files = []
    for path in _files(folder):
        pieces = []
        for piece in _digested(digest, path.name, _pieces(path)):
            pieces.append(put(piece))
        files.append((path.name, tuple(pieces)))
    if not files:
        raise CheckpointError(f"{folder.name}: none of the files of a policy is in it ({', '.join(POLICY_FILES[:2])})")
    return Parcel(digest.hexdigest(), tuple(files))


def unpack(parcel: Parcel, cache: Path, get: Callable[[Any], bytes]) -> Path:
    """The folder of a parcel on this machine; the first engine here that wants it fetches the pieces.

    Raises:
        CheckpointError: its names are not those of a policy's files, or what came is not what was sent.
        OSError: the disk does not take it.
    """
    wrong = [name for name, _ in parcel.files if "/" in name or not _is_known(name)]
    if wrong or not _SHA.fullmatch(parcel.sha):
        raise CheckpointError(f"a policy came with files that are none of a policy ({', '.join(map(repr, wrong[:3]))})")
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = cache / parcel.sha
    with _alone(cache / f".{parcel.sha}.lock"):
        if not folder.is_dir():
            with _alone(cache / ".room.lock"):
                _make_room(cache, time.time())
            part, digest = Path(tempfile.mkdtemp(prefix=".part-", dir=cache)), hashlib.sha256()
            try:
                for name, pieces in parcel.files:
                    with (part / name).open("wb") as file:
                        for piece in _digested(digest, name, map(get, pieces)):
                            file.write(piece)
                if digest.hexdigest() != parcel.sha:
                    raise CheckpointError("a policy's files came otherwise than they were sent")
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        os.utime(folder)
    return folder


def _files(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.iterdir() if _is_known(path.name) and path.is_file())


def _is_known(name: str) -> bool:
    return any(fnmatch(name, known) for known in POLICY_FILES)


def _digested(digest: Any, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    digest.update(f"{len(name)} {name} ".encode())
    size = 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        yield piece
    digest.update(f" {size}\n".encode())


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _make_room(cache: Path, now: float) -> None:
    found = []
    for folder in cache.iterdir():
        with suppress(FileNotFoundError):  # another engine has just finished it
            if folder.is_dir():
                found.append((folder.stat().st_mtime, folder, sum(file.stat().st_size for file in folder.iterdir())))
    there = sum(size for _, _, size in found)
    for used_at, folder, size in sorted(found):
        if there > KEPT and now - used_at > IN_USE:
            shutil.rmtree(folder, ignore_errors=True)
            there -= size


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
