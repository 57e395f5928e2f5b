"""Where policies come from, and which of their files are taken: never one that runs code when it is loaded."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from hooks.errors import SourceError

SHA = re.compile(r"[0-9a-f]{40}")

# LeRobot's names, and ours. Anything else of a repo stays where it is.
POLICY_FILES = (
    "config.json",
    "model.safetensors",
    "robojax.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
    "policy_preprocessor_step_*.safetensors",
    "policy_postprocessor_step_*.safetensors",
)
REQUIRED = ("config.json", "model.safetensors")
# Formats whose loading runs what is written in them.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")

# Codes of a fault that may be gone the next time.
OF_TRANSFER = frozenset({"checksum", "transfer", "unreachable", "changed_meanwhile"})
# Codes of what is wrong with the commit itself.
OF_COMMIT = frozenset({"checksum", "incomplete", "denied_file", "too_large"})


class Source(Protocol):
    """A place that has policies at commits."""

    async def head(self, repo: str, ref: str | None) -> str:
        """The commit that a ref points to now: 40 hexadecimal digits.

        Raises:
            SourceError: ``unknown_repo``, ``unknown_revision``, ``denied``, ``unreachable``, ``timeout``, ...
        """
        ...

    async def fetch(self, repo: str, sha: str, tell: Callable[[str], None]) -> Path:
        """The folder of exactly that commit, every byte of it verified; ``tell`` hears ``downloading``, ``verifying``.

        Raises:
            SourceError: ``checksum``, ``transfer``, ``incomplete``, ``denied_file``, ``changed_meanwhile``, ...
        """
        ...

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        """Whether a commit lies in the history of another; None when that cannot be told.

        Raises:
            SourceError: as ``head``.
        """
        ...


def is_policy_file(name: str) -> bool:
    """Whether a file in the repo's root is one of those that are taken."""
    return any(fnmatchcase(name, pattern) for pattern in POLICY_FILES)


def check_complete(repo: str, names: set[str]) -> None:
    """Refuse what is no whole policy.

    Args:
        names: all files there are.

    Raises:
        SourceError: ``denied_file`` when its weights would run code, else ``incomplete``.
    """
    missing = [name for name in REQUIRED if name not in names]
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if "model.safetensors" in missing and pickles:
        raise SourceError(
            "denied_file",
            f"{repo}: its weights are in {', '.join(pickles)}, which may run code when loaded; "
            "wanted model.safetensors: convert and push them",
        )
    if missing:
        raise SourceError("incomplete", f"{repo}: {' and '.join(missing)} missing; push all files of the policy")
