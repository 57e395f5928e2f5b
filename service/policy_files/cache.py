"""Policies' files on a machine that was sent them, in a folder each that is named by the hash of what is in it."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from jaxmodels.errors import CheckpointError
from service.policy_files.listing import Digest, Listing, is_like

# Bytes that a machine keeps; those that were longest unused go, but none that was wanted in so many seconds: a process
# may be reading it, or writing it.
KEPT = 32 << 30
IN_USE = 600.0


def find_kept(cache: Path, listing: Listing, fetch: Callable[[str], Iterable[bytes]]) -> Path:
    """The folder with just these files; of the processes of a machine that want it, one fetches them.

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
        if not is_like(folder, listing):
            shutil.rmtree(folder, ignore_errors=True)  # damaged on the disk
            with FileLock(cache / ".room.lock", fallback_to_soft=False):
                _make_room(cache, time.time())
            _write(listing, folder, fetch)
        os.utime(folder)
    return folder


def _write(listing: Listing, folder: Path, fetch: Callable[[str], Iterable[bytes]]) -> None:
    part, digest = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent)), Digest()
    try:
        for name, _ in listing.files:
            with (part / name).open("wb") as file:
                for piece in digest.passing(name, fetch(name)):
                    file.write(piece)
        if (came := digest.listing) != listing:
            raise CheckpointError(
                f"the policy's files came as {came.sha[:12]}, announced was {listing.sha[:12]}: "
                "they changed while they were sent; load it once more"
            )
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _make_room(cache: Path, now: float) -> None:
    found = []
    for folder in cache.iterdir():
        with suppress(FileNotFoundError):  # another process has just finished it
            if folder.is_dir():
                found.append((folder.stat().st_mtime, folder, sum(file.stat().st_size for file in folder.iterdir())))
    there = sum(size for _, _, size in found)
    for used_at, folder, size in sorted(found):
        if there > KEPT and now - used_at > IN_USE:
            shutil.rmtree(folder, ignore_errors=True)
            there -= size
