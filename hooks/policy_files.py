"""Names of the files that form a policy, and the hash of their content; never a file that runs code when loaded."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, NoReturn

from hooks.errors import SourceError

# LeRobot's names, and ours. Anything else of a repo stays where it is.
POLICY_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors",
    "robojax.json",
    "stats.json",
    "tokenizer.json",
    "architecture.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
    "policy_preprocessor_step_*.safetensors",
    "policy_postprocessor_step_*.safetensors",
    "*/config.json",
    "*/tokenizer.json",
)
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_SHARDS = 64
_SHARD = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")
# Of models that policies are built on, in folders of the model's name within the policy's.
_MODEL_DEPTH = 3
_FILE = re.compile(r"(?!.*(^|/)\.)(?!/)[A-Za-z0-9_./+@=-]{1,240}")
# Formats whose loading runs what is written in them.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")


def is_policy_file(name: str) -> bool:
    """Whether a file of this name, ``/`` between folders, belongs to a policy; never one that leads elsewhere."""
    *folders, last = name.split("/")
    # A pattern's ``*`` stands for any letters, those of a path that leads elsewhere too.
    if not _FILE.fullmatch(name) or "" in folders:
        return False
    if not folders:
        return any(fnmatchcase(name, pattern) for pattern in POLICY_FILES if "/" not in pattern)
    return len(folders) <= _MODEL_DEPTH and f"*/{last}" in POLICY_FILES


def list_policy_files(folder: Path) -> list[str]:
    """Names of a policy's files in a folder, sorted; links to other folders are not followed.

    Raises:
        OSError: it cannot be read.
    """
    names = []
    for root, folders, files in os.walk(folder, onerror=_raise):
        within = Path(root).relative_to(folder)
        if len(within.parts) >= _MODEL_DEPTH:
            folders.clear()
        names += [(within / name).as_posix() for name in files]
    return sorted(name for name in names if is_policy_file(name) and (folder / name).is_file())


def _raise(error: OSError) -> NoReturn:
    raise error


def find_missing(names: Collection[str]) -> list[str]:
    """Names of files that every policy needs and that are not there; weights are in one file, or in shards."""
    missing = [] if _CONFIG in names else [_CONFIG]
    if _INDEX not in names:
        return missing if _WEIGHTS in names else [*missing, _WEIGHTS]
    count = max((int(shard[1]) for name in names if (shard := _SHARD.fullmatch(name))), default=1)
    shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, min(count, MAX_SHARDS) + 1)]
    return missing + [shard for shard in shards if shard not in names]


def check_complete(repo: str, names: set[str]) -> None:
    """Raise when files are missing that every policy needs.

    Args:
        names: all files there are.

    Raises:
        SourceError: ``denied_file`` when its weights would run code, else ``incomplete``.
    """
    missing = find_missing(names)
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if _WEIGHTS in missing and pickles:
        raise SourceError(
            "denied_file",
            f"{repo}: its weights are in {', '.join(pickles)}, which may run code when loaded; "
            "wanted model.safetensors: convert and push them",
        )
    if missing:
        raise SourceError("incomplete", f"{repo}: {' and '.join(missing)} missing; push all files of the policy")


def open_regular_file(path: Path, max_bytes: int, roots: Sequence[Path] | None = None) -> BinaryIO:
    """Open a regular file within the given folders; pipes and devices are refused, links may not lead outside.

    Raises:
        SourceError: ``denied_file`` when it is something else or elsewhere, ``too_large``, ``changed_meanwhile``.
        OSError: it cannot be opened.
    """
    if stat.S_ISREG(path.stat().st_mode):  # before: to open a device may be to start it
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        try:
            status = os.fstat(file.fileno())
            if status.st_size > max_bytes:
                raise SourceError("too_large", f"{path.name}: {status.st_size} bytes, allowed are {max_bytes}")
            resolved = Path(os.path.realpath(path))
            is_inside = roots is None or any(root.resolve() in resolved.parents for root in roots)
            # The place is of the name, and what is open may be another file by now.
            if not os.path.samestat(status, resolved.stat()):
                raise SourceError("changed_meanwhile", f"{path.name}: was replaced while it was opened")
            if stat.S_ISREG(status.st_mode) and is_inside:
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise SourceError("denied_file", f"{path.name}: no regular file, or a link out of the folders of policies")


def hash_content(files: Iterable[tuple[str, Path]], content: Callable[[Path], str]) -> str:
    """Hash the names and contents of files to 40 hexadecimal digits, the form of a commit.

    As long as a commit's sha, so that both fit into the same places; the same content gives the same everywhere.

    Args:
        files: name within the folder, and where it is.
        content: SHA-256 of a file, in hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files):
        digest.update(f"{content(path)}  {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:40]
