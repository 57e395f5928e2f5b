"""Manifest of a bundle: a policy's folder that was exported for one platform (`jaxmodels.export`).

``bundle.json`` lists the SHA-256 of every other file. Its own SHA-256, the digest, therefore identifies the content.
The weights in the folder are the arrays of the serving program, in their dtype, by our names.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.cache_dirs import user_cache
from jaxmodels.checkpoints.files import find_floats
from jaxmodels.checkpoints.folder import BUNDLE, OpenFile, PolicyFolder, open_source
from jaxmodels.errors import CheckpointError
from jaxmodels.ranges import shorten_value

EXECUTABLES = "executables.safetensors"
FORMAT = 1
EXPORTED = ("cpu", "cuda", "rocm", "tpu")
_HASH = re.compile(r"[0-9a-f]{64}")
# Name of an entry of JAX's compilation cache: the function, and the hash of program, options and device.
_ENTRY = re.compile(r"[A-Za-z0-9_<>-]{1,200}-[0-9a-f]{64}-cache")
_TEXT = re.compile(r"[ -~]{1,100}")
_PIECE = 16 << 20  # Bytes that are hashed at once.
VARIABLE = "ROBOJAX_TRUSTED_BUNDLES"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """Content of ``bundle.json``.

    Attributes:
        robojax: version that exported the bundle; another version may prepare weights in another way.
        platform: one of `EXPORTED`.
        dtype: name of the dtype that the policy computes in.
        batch_sizes: batch sizes of the StableHLO programs and of the executables.
        device: kind of device of the executables; None without executables.
        jaxlib: version of jaxlib that compiled the executables; None without executables.
        files: name of each file to its SHA-256.
    """

    robojax: str
    platform: str
    dtype: str
    batch_sizes: tuple[int, ...]
    device: str | None
    jaxlib: str | None
    files: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Manifest":
        """Check and return the content of the file; raises CheckpointError."""
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"{BUNDLE}: format is {shorten_value(values.get('format'))}; wanted {FORMAT}: export the policy again"
            )
        if values.get("robojax") != version("robojax"):
            raise CheckpointError(
                f"{BUNDLE}: exported by robojax {shorten_value(values.get('robojax'))}; this is {version('robojax')}, "
                "whose programs may read other weights: export the policy again"
            )
        sizes, files = values.get("batch_sizes"), values.get("files")
        texts = ("platform", "dtype", *(name for name in ("device", "jaxlib") if values.get(name) is not None))
        found = {name: values.get(name) for name in texts}
        wrong = [name for name, text in found.items() if not isinstance(text, str) or not _TEXT.fullmatch(text)]
        if values.get("platform") not in EXPORTED:
            wrong.append("platform")
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            wrong.append("batch_sizes")
        if not isinstance(files, dict) or not all(_HASH.fullmatch(str(value)) for value in files.values()):
            wrong.append("files")
        if unknown := sorted(set(values) - {entry.name for entry in fields(cls)} - {"format"}):
            wrong += unknown
        if wrong:
            raise CheckpointError(f"{BUNDLE}: {', '.join(wrong)[:200]} cannot be read; export the policy again")
        own = {entry.name: values.get(entry.name) for entry in fields(cls)}
        return cls(**{**own, "batch_sizes": tuple(values["batch_sizes"])})


def compute_digest(folder: PolicyFolder) -> str:
    """Return the SHA-256 of a bundle's manifest, which identifies its whole content."""
    with open_source(folder / BUNDLE) as file:
        return _hash(file)


def check_files(folder: PolicyFolder, manifest: Manifest) -> None:
    """Raise CheckpointError if an open file differs from the manifest, or is not in it."""
    found = {name: file for name, file in folder.files.items() if isinstance(file, OpenFile) and name != BUNDLE}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        hashes = dict(zip(found, threads.map(_hash, found.values()), strict=True))
    wrong = sorted(name for name in hashes if hashes[name] != manifest.files.get(name))
    # StableHLO is not opened, because a server does not read it.
    wrong += sorted(name for name in set(manifest.files) - set(hashes) if name.endswith((".json", ".safetensors")))
    if wrong:
        raise CheckpointError(
            f"{', '.join(wrong[:20])}: missing, or not as exported (SHA-256 in {BUNDLE}); copy the bundle again, or "
            "export the policy again"
        )


def hash_files(paths: Sequence[os.PathLike[str]]) -> list[str]:
    """Return the SHA-256 of each file."""

    def hash_path(path: os.PathLike[str]) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(hash_path, paths))


def _copy_executables(folder: PolicyFolder, cache: Path) -> int:
    entries = find_floats(folder / EXECUTABLES, dtypes={"U8": np.dtype(np.uint8)})
    if wrong := [name for name in entries if not _ENTRY.fullmatch(name)]:
        raise CheckpointError(f"{EXECUTABLES}: {wrong[0][:80]!r} is no entry of a compilation cache")
    for name, stored in entries.items():
        if not (cache / name).exists():
            # Other threads and processes may copy the same bundle at this moment.
            with tempfile.TemporaryDirectory(dir=cache, prefix=".bundle-") as draft:
                (Path(draft) / name).write_bytes(stored.read().data)
                os.replace(Path(draft) / name, cache / name)
    return len(entries)


def _hash(file: OpenFile) -> str:
    total = hashlib.sha256()
    for start in range(0, file.size, _PIECE):
        total.update(file.array(start, min(_PIECE, file.size - start)).data)
    return total.hexdigest()


def trust(digest: str) -> None:
    """Keep the digest of a bundle whose executables this user may run; log a warning if that is not possible."""
    folder = user_cache() / "robojax" / "bundles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / digest).touch()
    except OSError as error:
        logger.warning("%s cannot be written (%s); name the digest in trusted_bundles", folder, error.strerror)


def is_trusted(digest: str) -> bool:
    """Return whether a bundle was exported by this user, or is in ``ROBOJAX_TRUSTED_BUNDLES`` (split by commas)."""
    named = re.split(r"[\s,]+", os.environ.get(VARIABLE, ""))
    return digest in named or (user_cache() / "robojax" / "bundles" / digest).exists()


def install_executables(folder: PolicyFolder, manifest: Manifest, kind: str, cache: Path | None) -> None:
    """Copy the executables of a trusted bundle into JAX's compilation cache; log why, if they are not used.

    Args:
        folder: folder whose files fit the manifest.
        kind: kind of the device that will run the policy.
        cache: folder of the compilation cache; None if it is off.
    """
    digest, here = compute_digest(folder), (kind, version("jaxlib"))
    if manifest.jaxlib is None:
        reason = "it has no executables"
    elif (manifest.device, manifest.jaxlib) != here:
        reason = (
            f"its executables are for {manifest.device} and jaxlib {manifest.jaxlib}, here are {' and '.join(here)}"
        )
    elif not is_trusted(digest):
        reason = f"its executables are not trusted; add {digest} to the setting trusted_bundles to use them"
    elif cache is None:
        reason = "the compile cache is off"
    else:
        try:
            count = _copy_executables(folder, cache)
        except OSError as error:
            reason = f"the compile cache cannot be written ({error.strerror})"
        else:
            logger.info("bundle %s: uses %d executables", folder.name, count)
            return
    logger.info("bundle %s: its programs are compiled, because %s", folder.name, reason)
