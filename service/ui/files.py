"""The page's files, read once; and the policy that lets a browser use nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# connect-src: 'self' covers the socket too, in every browser since 2022. Pictures of cameras are blobs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)


@dataclass(frozen=True)
class File:
    """One file as it is answered."""

    content: bytes
    type: str


def read_files() -> Mapping[str, File]:
    """File name to file, of all that the page is made of."""
    found = {}
    for path in files("service.ui").joinpath("static").iterdir():
        kind = path.name.rpartition(".")[2]
        if kind in TYPES:
            found[path.name] = File(path.read_bytes(), TYPES[kind])
    return found
