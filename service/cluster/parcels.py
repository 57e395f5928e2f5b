"""A policy's files on their way to engines: read once where the front is, written once on each machine.

Engines need no way to the Hub, and no token for it: what they run is what the front has checked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.policy_files.cache import find_kept
from service.policy_files.listing import Digest, Listing, files_of, pieces_of

# Bytes of a file that travel together.
PIECE = 64 << 20


@dataclass(frozen=True)
class Parcel:
    """A policy's files in the object store.

    Attributes:
        pieces: of each file, as the object store calls them.
    """

    listing: Listing
    pieces: Mapping[str, tuple[Any, ...]]

    @property
    def sha(self) -> str:
        """Of what is in it; the name of the policy in engines."""
        return self.listing.sha


def pack(folder: Path, put: Callable[[bytes], Any]) -> Parcel:
    """Read the files of a policy's folder; raises as `files_of`.

    Args:
        put: gives a piece to the object store.
    """
    digest, pieces = Digest(), {}
    for file in files_of(folder):
        pieces[file.name] = tuple(put(piece) for piece in digest.passing(file.name, pieces_of(file, PIECE)))
    return Parcel(digest.listing, pieces)


def unpack(parcel: Parcel, cache: Path, get: Callable[[Any], bytes]) -> Path:
    """The folder of a parcel on this machine; raises as `find_kept`.

    Args:
        get: asks the object store for a piece.
    """
    return find_kept(cache, parcel.listing, lambda name: map(get, parcel.pieces[name]))
