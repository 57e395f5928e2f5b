"""Where a policy's files are: a folder, or a repo of the Hub that is fetched. Imports no JAX."""

import os
from collections.abc import Callable
from pathlib import Path

from jaxmodels.errors import ConfigError
from jaxmodels.hub import POLICY_FILES, fetch

__all__ = ["POLICY_FILES", "find_policy"]


def find_policy(
    path_or_repo: str | Path,
    revision: str | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    largest: int | None = None,
) -> tuple[Path, str | None]:
    """The folder of a policy's files, and the commit where it is a repo's.

    Args:
        path_or_repo, revision, on_progress, largest: as of `jaxmodels.load_policy`.

    Raises:
        HubError: the repo cannot be fetched, or is larger.
        ConfigError: a revision of a folder.
    """
    folder = Path(os.path.expanduser(path_or_repo))  # leaves a "~nobody" as it is, where Path would raise
    if not str(path_or_repo) or not folder.is_dir():
        folder = fetch(str(path_or_repo), revision, on_progress=on_progress, largest=largest)
        return folder, folder.name  # the Hub's cache names a snapshot by its commit
    if revision is not None:
        raise ConfigError(f"{folder.name} is a folder; a revision ({revision!r}) belongs to a repo of the Hub")
    return folder, None
