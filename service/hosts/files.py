"""The files of a policy as a follower of several hosts has them: its own if they are the same, else the front's."""

from collections.abc import Callable, Iterator
from pathlib import Path

from service.policy_files.cache import find_kept
from service.policy_files.listing import Listing, is_like

# Bytes that travel as one message: a robot's observation waits behind no more than this.
PIECE = 1 << 20


def find_files(listing: Listing, folder: Path, cache: Path, fetch: Callable[[str, int, int], bytes]) -> Path:
    """A folder with just this content: the one of the same name here, one of before, or a new one.

    Args:
        folder: where the front has it.
        fetch: name, place and length to so many bytes of the front's file.

    Raises:
        CheckpointError: what came is something else.
        OSError: the disk does not take it.
    """
    if is_like(folder, listing):
        return folder
    sizes = dict(listing.files)

    def pieces(name: str) -> Iterator[bytes]:
        for at in range(0, sizes[name], PIECE):
            yield fetch(name, at, min(PIECE, sizes[name] - at))

    return find_kept(cache, listing, pieces)


def read_piece(folder: Path, name: str, at: int, length: int) -> bytes:
    """What `find_files` asks for; fewer bytes where the file ends.

    Raises:
        OSError: it cannot be read.
    """
    with (folder / name).open("rb") as file:
        file.seek(at)
        return file.read(min(length, PIECE))
