"""Policies from the Hugging Face Hub: a repo id and a revision to a local folder, pinned to one commit.

Only files with names that a policy has are fetched, never a pickle. The only place of this package that uses a network.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of whichever httpx the Hub client uses
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxmodels.errors import HubError

REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
FILES = [
    "config.json",
    "model.safetensors",
    "robojax.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
    "policy_preprocessor_step_*.safetensors",
    "policy_postprocessor_step_*.safetensors",
]

logger = logging.getLogger(__name__)


def fetch(
    repo_id: str,
    revision: str | None = None,
    *,
    endpoint: str | None = None,
    cache: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """The folder of a repo's policy files at one commit; downloaded unless it is in the cache.

    Args:
        revision: branch, tag or commit; the default branch when None.
        endpoint: the Hub's address; the environment's ``HF_ENDPOINT`` or the public Hub when None.
        cache: the Hub's cache folder; its usual one when None.

    Raises:
        HubError: not a repo id, unknown, not allowed, or neither reachable nor cached.
    """
    if not REPO_ID.fullmatch(repo_id):
        raise HubError(f"{repo_id!r} is neither a folder here nor a repo id like 'owner/name'")
    what = f"{repo_id!r}" + (f" at {revision!r}" if revision else "")
    try:
        commit = HfApi(endpoint=endpoint).model_info(repo_id, revision=revision, timeout=10).sha
        if on_progress:
            on_progress("downloading")
        return Path(
            snapshot_download(repo_id, revision=commit, endpoint=endpoint, cache_dir=cache, allow_patterns=FILES)
        )
    except GatedRepoError as error:
        raise HubError(f"{what}: the repo is gated; accept its terms on the Hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{what}: the repo has no such revision; wanted a branch, a tag or a commit") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"{what}: no such repo, or it is private; check the name, or set HF_TOKEN") from error
    except HFValidationError as error:
        raise HubError(f"{what}: not a repo id ({error})") from error
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, OSError) as error:
        return _cached(repo_id, revision, cache, what, error)


def _cached(repo_id: str, revision: str | None, cache: Path | None, what: str, cause: Exception) -> Path:
    try:
        folder = Path(
            snapshot_download(repo_id, revision=revision, cache_dir=cache, allow_patterns=FILES, local_files_only=True)
        )
    except (LocalEntryNotFoundError, OSError) as error:
        raise HubError(
            f"{what}: the Hub cannot be reached ({type(cause).__name__}) and no copy is cached here; "
            "connect once, or give a local folder"
        ) from error
    logger.warning("%s: the Hub cannot be reached (%s); using the cached copy", what, type(cause).__name__)
    return folder
