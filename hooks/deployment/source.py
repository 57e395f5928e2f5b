"""Where policies come from: what is asked of such a place."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

SHA = re.compile(r"[0-9a-f]{40}")

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
