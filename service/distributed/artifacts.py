"""Policy artifacts: a policy's files by content hash, packed, sent and cached.

Engines need no access to the Hub, and no token for it: they run what the server has checked.
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

# Bytes of a file that are sent as one object, and bytes that are read at a time where only their hash is needed.
PIECE_BYTES = 64 << 20
HASH_BYTES = 1 << 20
# Bytes of policies that a machine caches. The policies that were unused for longest are deleted first, except those
# used within the last seconds below: a process may be reading or writing them.
CACHE_BYTES = 32 << 30
IN_USE_SECONDS = 600.0
_SHA = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class PolicyArtifact:
    """A policy's files in the object store.

    Attributes:
        sha: hash of all names and contents; engines know the policy by it.
        files: names with their sizes in bytes, in the order in which they are hashed.
        pieces: references to the pieces of each file in the object store.
    """

    sha: str
    files: tuple[tuple[str, int], ...]
    pieces: Mapping[str, tuple[Any, ...]]

    def check(self) -> None:
        """Refuse an artifact from another machine whose files may not be written here.

        Raises:
            CheckpointError: a name is not that of a policy's file, or the sha is not a hash.
        """
        if wrong := [name for name, _ in self.files if not is_policy_file(name)]:
            raise CheckpointError(f"{', '.join(f'{name[:80]!r}' for name in wrong[:3])} is no file of a policy")
        if not _SHA.fullmatch(self.sha):
            raise CheckpointError(f"{self.sha[:80]!r} is no hash of a policy's files; wanted 64 hexadecimal digits")

    def matches(self, folder: Path) -> bool:
        """Return whether a folder has exactly these files; reads them only if their sizes match."""
        try:
            sizes = tuple((name, (folder / name).stat().st_size) for name in list_files(folder))
            if sizes != self.files:
                return False
            digest = Digest()
            for name, _ in self.files:
                for _ in digest.hash_pieces(name, read_pieces(folder / name, HASH_BYTES)):
                    pass
        except (OSError, CheckpointError):
            return False
        return digest.sha == self.sha


class Digest:
    """Hash of consecutive files, computed while their pieces pass through.

    Attributes:
        files: names of the files hashed so far, with their sizes in bytes.
    """

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self.files: list[tuple[str, int]] = []

    def hash_pieces(self, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Hash and yield the pieces of the next file; all of them have to be consumed."""
        self._whole.update(f"{len(name)} {name} ".encode())
        size = 0
        for piece in pieces:
            self._whole.update(piece)
            size += len(piece)
            yield piece
        self._whole.update(f" {size}\n".encode())
        self.files.append((name, size))

    @property
    def sha(self) -> str:
        """Hash of the files so far."""
        return self._whole.hexdigest()


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


def read_pieces(file: Path, size: int) -> Iterator[bytes]:
    """Yield a file's content, ``size`` bytes at a time.

    Raises:
        CheckpointError: it is not a regular file (any more), or shorter than it was when it was opened.
        OSError: it cannot be read.
    """
    with closing(open_file(file)) as opened:
        for start in range(0, opened.size, size):
            yield opened.read(start, size)


def pack(folder: Path, put: Callable[[bytes], Any]) -> PolicyArtifact:
    """Put the files of a policy's folder into the object store.

    Args:
        put: puts one piece into the object store and returns a reference to it.

    Raises:
        CheckpointError: the folder has no files of a policy, or its weights are in a form that is not sent.
        OSError: the folder cannot be read.
    """
    digest, pieces = Digest(), {}
    for name in list_files(folder):
        pieces[name] = tuple(put(piece) for piece in digest.hash_pieces(name, read_pieces(folder / name, PIECE_BYTES)))
    return PolicyArtifact(digest.sha, tuple(digest.files), pieces)


def unpack(artifact: PolicyArtifact, cache: Path, get: Callable[[Any], bytes]) -> Path:
    """Return the cached folder with the files of an artifact, fetching them if needed.

    Of several processes on a machine, one fetches the files.

    Args:
        cache: created if needed, with permissions for this user only.
        get: fetches a piece from the object store.

    Raises:
        CheckpointError: the artifact has other files than a policy's, or the files changed while they were sent.
        OSError: the files cannot be written.
    """
    artifact.check()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = cache / artifact.sha
    with FileLock(cache / f".{artifact.sha}.lock", fallback_to_soft=False):
        if not artifact.matches(folder):
            shutil.rmtree(folder, ignore_errors=True)  # damaged on the disk
            with FileLock(cache / ".room.lock", fallback_to_soft=False):
                _free_space(cache, time.time())
            _write(artifact, folder, get)
        os.utime(folder)
    return folder


def _write(artifact: PolicyArtifact, folder: Path, get: Callable[[Any], bytes]) -> None:
    temporary, digest = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent)), Digest()
    try:
        for name, _ in artifact.files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            with (temporary / name).open("wb") as file:
                for piece in digest.hash_pieces(name, map(get, artifact.pieces[name])):
                    file.write(piece)
        if (digest.sha, tuple(digest.files)) != (artifact.sha, artifact.files):
            raise CheckpointError(
                f"the policy's files came as {digest.sha[:12]}, announced was {artifact.sha[:12]}: "
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
