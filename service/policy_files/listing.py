"""The files of a policy's folder that go to other machines, and what their content is called."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from jaxmodels import POLICY_FILES, open_file
from jaxmodels.errors import CheckpointError

# Bytes that are read at a time where nothing but their hash is wanted.
_PIECE = 1 << 20
_SHA = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Listing:
    """Files by name.

    Attributes:
        sha: of all names and contents.
        files: names with their bytes, in the order that the sha is of.
    """

    sha: str
    files: tuple[tuple[str, int], ...]

    def check(self) -> None:
        """Refuse what may not be written here: it came from another machine.

        Raises:
            CheckpointError: a name is none of a policy's files, or the sha is none.
        """
        if wrong := [name for name, _ in self.files if not is_policy_file(name)]:
            raise CheckpointError(f"{', '.join(f'{name[:80]!r}' for name in wrong[:3])} is no file of a policy")
        if not _SHA.fullmatch(self.sha):
            raise CheckpointError(f"{self.sha[:80]!r} is no hash of a policy's files; wanted 64 hexadecimal digits")


class Digest:
    """Of files that come one after the other, taken while their pieces pass by."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._files: list[tuple[str, int]] = []

    def passing(self, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The pieces of the next file, all of which have to be taken."""
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
        """Of those that have passed."""
        return Listing(self._whole.hexdigest(), tuple(self._files))


def is_policy_file(name: str) -> bool:
    """Whether it is one of `jaxmodels.POLICY_FILES`; no others are sent or written."""
    return "/" not in name and any(fnmatchcase(name, known) for known in POLICY_FILES)


def files_of(folder: Path) -> Sequence[Path]:
    """Those of a policy's folder that go to other machines, in the order of their names.

    Raises:
        CheckpointError: there are none, or its weights are in a form that does not travel.
        OSError: it cannot be read.
    """
    if (folder / "orbax").is_dir() and not (folder / "model.safetensors").exists():
        raise CheckpointError(
            f"{folder.name}: its weights are Orbax's, which are not sent to other machines; load it on one and save it "
            "again (jaxmodels.load_policy(path).save(path)) to have them as model.safetensors"
        )
    files = sorted(path for path in folder.iterdir() if is_policy_file(path.name) and path.is_file())
    if not files:
        raise CheckpointError(f"{folder.name}: none of the files of a policy is in it ({', '.join(POLICY_FILES[:2])})")
    return files


def pieces_of(file: Path, size: int = _PIECE) -> Iterator[bytes]:
    """Its content, so many bytes at a time.

    Raises:
        CheckpointError: it is no regular file (any more), or shorter than it was when it was opened.
        OSError: it cannot be read.
    """
    with closing(open_file(file)) as opened:
        for start in range(0, opened.size, size):
            yield opened.read(start, size)


def listing_of(folder: Path) -> Listing:
    """Reads all of the files once; raises as `files_of`."""
    digest = Digest()
    for file in files_of(folder):
        for _ in digest.passing(file.name, pieces_of(file)):
            pass
    return digest.listing


def is_like(folder: Path, listing: Listing) -> bool:
    """Whether just these files are in it; reads them only where their sizes are the same."""
    try:
        sizes = tuple((file.name, file.stat().st_size) for file in files_of(folder))
        return sizes == listing.files and listing_of(folder) == listing
    except (OSError, CheckpointError):
        return False
