"""Policies and models from the Hugging Face Hub: a repo id and a revision to a local folder, pinned to one commit.

Only files with known names are fetched, never a pickle. The only place of this package that uses a network.
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of whichever httpx the Hub's client uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from jaxmodels.errors import HubError

REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
POLICY_FILES = (
    "config.json",
    "model.safetensors",
    "robojax.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
    "policy_preprocessor_step_*.safetensors",
    "policy_postprocessor_step_*.safetensors",
)

logger = logging.getLogger(__name__)


class _Silent(tqdm):
    """The Hub's client draws bars on the terminal of whatever process it runs in, a server's too."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **{**options, "disable": True})


def fetch(
    repo_id: str,
    revision: str | None = None,
    *,
    files: Sequence[str] = POLICY_FILES,
    endpoint: str | None = None,
    cache: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """The folder of a repo's files at one commit; what is in the cache is not fetched again.

    When the Hub cannot be reached, the commit that the revision was when it last could is used, if all of its files
    are cached.

    Args:
        revision: branch, tag or commit; the default branch when None.
        files: their names in the repo, ``?`` and ``*`` for any letters; those of a policy unless told otherwise
            (`jaxmodels.checkpoints.diffusers.files` for a model).
        endpoint: the Hub's address; the environment's ``HF_ENDPOINT`` or the public Hub when None.
        cache: the Hub's cache folder; the environment's ``HF_HUB_CACHE`` or its usual one when None.

    Raises:
        HubError: not a repo id, unknown, not allowed, or neither reachable nor cached.
    """
    if not REPO_ID.fullmatch(repo_id):
        raise HubError(f"{repo_id!r} is neither a folder here nor a repo id like 'owner/name'")
    # Its own reading of the environment is from whenever somebody first imported it.
    cache = cache or (Path(named) if (named := os.environ.get("HF_HUB_CACHE")) else None)
    what = f"{repo_id!r}" + (f" at {revision!r}" if revision else "")
    get = partial(snapshot_download, repo_id, revision=revision, cache_dir=cache, allow_patterns=list(files))
    try:
        # One quick question first: the download itself would ask again for ten seconds before it gives up.
        HfApi(endpoint=endpoint).model_info(repo_id, revision=revision, timeout=10)
        if on_progress:
            on_progress("downloading")
        # The silent bar is of tqdm's usual kind; the declared type is its asyncio variant.
        folder = get(endpoint=endpoint, tqdm_class=_Silent)  # pyright: ignore[reportArgumentType]
    except GatedRepoError as error:
        raise HubError(f"{what}: the repo is gated; accept its terms on the Hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{what}: the repo has no such revision; wanted a branch, a tag or a commit") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"{what}: no such repo, or it is private; check the name, or set HF_TOKEN") from error
    except (HTTPError, OSError) as error:
        cause = error.__cause__ or error
        if getattr(getattr(cause, "response", None), "status_code", None) in (401, 403):
            raise HubError(f"{what}: the Hub does not allow it; set HF_TOKEN to a token that may read it") from error
        try:
            folder = get(local_files_only=True)
        except OSError as missing:
            raise HubError(
                f"{what}: the Hub cannot be reached or did not answer as expected ({type(cause).__name__}), and no "
                "complete copy is cached here; connect once, or give a local folder"
            ) from missing
        logger.warning("%s: the Hub cannot be reached (%s); using the cached copy", what, type(cause).__name__)
    logger.info("%s: commit %s", what, Path(str(folder)).name)
    return Path(str(folder))
