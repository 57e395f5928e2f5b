"""The files of a policy's folder by their content: what a follower has already, it need not be sent."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxmodels.errors import CheckpointError

# Those that a policy may have are among these; others are not sent.
ENDINGS = (".json", ".safetensors")
# Bytes that travel as one message: a robot's observation waits behind no more than this.
PIECE = 1 << 20
# Policies that a follower keeps on its disk; those that were longest unused go.
KEPT = 4


@dataclass(frozen=True)
class Listing:
    """Files by name.

    Attributes:
        sha: of all names and contents.
        files: names with their bytes.
    """

    sha: str
    files: tuple[tuple[str, int], ...]


def listing_of(folder: Path) -> Listing:
    """Reads all of the files once.

    Raises:
        OSError: they cannot be read.
    """
    digest, files = hashlib.sha256(), []
    names = sorted(path.name for path in folder.iterdir() if path.suffix in ENDINGS and path.is_file())
    for name in names:
        with (folder / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
            files.append((name, file.tell()))
        digest.update(f"{len(name)} {name} ".encode() + content)
    return Listing(digest.hexdigest(), tuple(files))


def find_files(listing: Listing, folder: Path, cache: Path, fetch: Callable[[str, int, int], bytes]) -> Path:
    """A folder with just this content: the one of the same name here, one of before, or a new one.

    Args:
        folder: where the front has it.
        fetch: name, place and length to so many bytes of the front's file.

    Raises:
        CheckpointError: what came is something else.
        OSError: the disk does not take it.
    """
    if folder.is_dir() and _is_like(folder, listing):
        return folder
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = cache / listing.sha
    with _alone(cache / ".lock"):
        if not (kept.is_dir() and _is_like(kept, listing)):
            shutil.rmtree(kept, ignore_errors=True)
            _make_room(cache)
            _write(listing, kept, fetch)
        os.utime(kept)
    return kept


def _is_like(folder: Path, listing: Listing) -> bool:
    try:
        sizes = {name: (folder / name).stat().st_size for name, _ in listing.files}
        return sizes == dict(listing.files) and listing_of(folder).sha == listing.sha
    except OSError:
        return False


def _write(listing: Listing, kept: Path, fetch: Callable[[str, int, int], bytes]) -> None:
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=kept.parent))
    try:
        for name, size in listing.files:
            if Path(name).name != name or Path(name).suffix not in ENDINGS:
                raise CheckpointError(f"{name[:80]!r} is no file of a policy")
            with (part / name).open("wb") as file:
                for at in range(0, size, PIECE):
                    file.write(fetch(name, at, min(PIECE, size - at)))
        if listing_of(part).sha != listing.sha:
            raise CheckpointError("the policy's files changed while they were sent; load it once more")
        part.rename(kept)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_piece(folder: Path, name: str, at: int, length: int) -> bytes:
    """What `find_files` asks for; fewer bytes where the file ends.

    Raises:
        OSError: it cannot be read.
    """
    with (folder / name).open("rb") as file:
        file.seek(at)
        return file.read(min(length, PIECE))


def _make_room(cache: Path) -> None:
    folders: Sequence[Path] = [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime)[: 1 - KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
