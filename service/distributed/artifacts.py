"""Policy artifacts: a policy's files by content hash, packed, sent and cached.

Engines need no way to the Hub, and no token for it: what they run is what the front has checked.
"""

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from jaxmodels import is_policy_file, list_policy_files, open_file
from jaxmodels.errors import CheckpointError

# Bytes that are read at a time where only their hash is needed.
HASH_BYTES = 1 << 20
_SHA = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Listing:
    """Names and sizes of a policy's files, with one hash of all of them.

    Attributes:
        sha: of all names and contents.
        files: names with their bytes, in the order that the sha is of.
    """

    sha: str
    files: tuple[tuple[str, int], ...]

    def check(self) -> None:
        """Refuse a listing from another machine whose files may not be written here.

        Raises:
            CheckpointError: a name is none of a policy's files, or the sha is none.
        """
        if wrong := [name for name, _ in self.files if not is_policy_file(name)]:
            raise CheckpointError(f"{', '.join(f'{name[:80]!r}' for name in wrong[:3])} is no file of a policy")
        if not _SHA.fullmatch(self.sha):
            raise CheckpointError(f"{self.sha[:80]!r} is no hash of a policy's files; wanted 64 hexadecimal digits")


class Digest:
    """Hash of files that come one after the other, computed while their pieces pass through."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._files: list[tuple[str, int]] = []

    def hash_pieces(self, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Hash and yield the pieces of the next file; all of them have to be consumed."""
        self._whole.update(f"{len(name)} {name} ".encode())
        size = 0
        for piece in pieces:
            self._whole.update(piece)
            size += len(piece)
            yield piece
        self._whole.update(f" {size}\n".encode())
        self._files.append((name, size))

    @property
    def listing(self) -> Listing:
        """Listing of the files hashed so far."""
        return Listing(self._whole.hexdigest(), tuple(self._files))


def list_files(folder: Path) -> Sequence[str]:
    """Return the names of a policy's files that are sent to other machines, in their order.

    Raises:
        CheckpointError: there are none, or its weights are in a form that does not travel.
        OSError: it cannot be read.
    """
    names = list_policy_files(folder)
    has_tree = any((folder / tree).is_dir() for tree in ("orbax", "params"))
    if has_tree and not any(name.startswith("model") for name in names):
        raise CheckpointError(
            f"{folder.name}: its weights are Orbax's, which are not sent to other machines; load it on one and save it "
            "again (jaxmodels.load_policy(path).save(path)) to have them as model.safetensors"
        )
    if not names:
        raise CheckpointError(f"{folder.name}: none of the files of a policy is in it (config.json, model.safetensors)")
    return names


def read_pieces(file: Path, size: int = HASH_BYTES) -> Iterator[bytes]:
    """Yield a file's content, ``size`` bytes at a time.

    Raises:
        CheckpointError: it is not a regular file (any more), or shorter than it was when it was opened.
        OSError: it cannot be read.
    """
    with closing(open_file(file)) as opened:
        for start in range(0, opened.size, size):
            yield opened.read(start, size)


def make_listing(folder: Path) -> Listing:
    """Return the listing of a policy's folder, with the hash of all files; raises as `list_files`."""
    digest = Digest()
    for name in list_files(folder):
        for _ in digest.hash_pieces(name, read_pieces(folder / name)):
            pass
    return digest.listing


def matches_listing(folder: Path, listing: Listing) -> bool:
    """Return whether a folder has exactly the listed files; reads them only where their sizes match."""
    try:
        sizes = tuple((name, (folder / name).stat().st_size) for name in list_files(folder))
        return sizes == listing.files and make_listing(folder) == listing
    except (OSError, CheckpointError):
        return False


# Bytes that a machine keeps; those that were longest unused go, but none that was used in so many seconds: a process
# may be reading it, or writing it.
CACHE_BYTES = 32 << 30
IN_USE_SECONDS = 600.0


def fetch_to_cache(cache: Path, listing: Listing, fetch: Callable[[str], Iterable[bytes]]) -> Path:
    """Return the cached folder with exactly the listed files, fetching them if needed; one process of a machine
    fetches.

    Args:
        cache: made if there is none, for this user alone.
        fetch: the pieces of a file, by its name.

    Raises:
        CheckpointError: what is listed are no files of a policy, or what came is not what is listed.
        OSError: the disk does not take it.
    """
    listing.check()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = cache / listing.sha
    with FileLock(cache / f".{listing.sha}.lock", fallback_to_soft=False):
        if not matches_listing(folder, listing):
            shutil.rmtree(folder, ignore_errors=True)  # damaged on the disk
            with FileLock(cache / ".room.lock", fallback_to_soft=False):
                _free_space(cache, time.time())
            _write(listing, folder, fetch)
        os.utime(folder)
    return folder


def _write(listing: Listing, folder: Path, fetch: Callable[[str], Iterable[bytes]]) -> None:
    temporary, digest = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent)), Digest()
    try:
        for name, _ in listing.files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            with (temporary / name).open("wb") as file:
                for piece in digest.hash_pieces(name, fetch(name)):
                    file.write(piece)
        if (received := digest.listing) != listing:
            raise CheckpointError(
                f"the policy's files came as {received.sha[:12]}, announced was {listing.sha[:12]}: "
                "they changed while they were sent; load it once more"
            )
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _free_space(cache: Path, now: float) -> None:
    folders = []
    for folder in cache.iterdir():
        with suppress(FileNotFoundError):  # another process has just finished it
            if folder.is_dir():
                folders.append((folder.stat().st_mtime, folder, sum(file.stat().st_size for file in folder.rglob("*"))))
    total = sum(size for _, _, size in folders)
    for used_at, folder, size in sorted(folders):
        if total > CACHE_BYTES and now - used_at > IN_USE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


# Bytes of a file that travel together.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class PolicyArtifact:
    """A policy's files in the object store.

    Attributes:
        pieces: of each file, as the object store calls them.
    """

    listing: Listing
    pieces: Mapping[str, tuple[Any, ...]]

    @property
    def sha(self) -> str:
        """Hash of its files; engines know the policy by it."""
        return self.listing.sha


def pack(folder: Path, put: Callable[[bytes], Any]) -> PolicyArtifact:
    """Put the files of a policy's folder into the object store; raises as `list_files`.

    Args:
        put: gives a piece to the object store.
    """
    digest, pieces = Digest(), {}
    for name in list_files(folder):
        pieces[name] = tuple(put(piece) for piece in digest.hash_pieces(name, read_pieces(folder / name, PIECE_BYTES)))
    return PolicyArtifact(digest.listing, pieces)


def unpack(artifact: PolicyArtifact, cache: Path, get: Callable[[Any], bytes]) -> Path:
    """Return the folder of an artifact on this machine, fetching its files if needed; raises as `fetch_to_cache`.

    Args:
        get: asks the object store for a piece.
    """
    return fetch_to_cache(cache, artifact.listing, lambda name: map(get, artifact.pieces[name]))
