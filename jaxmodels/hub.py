"""Policies, models and datasets of the Hugging Face Hub: a repo id and a revision to a local folder at one commit.

Only files with known names are fetched, never a pickle. The only place of this package that uses a network.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
    "tokenizer.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
    "policy_preprocessor_step_*.safetensors",
    "policy_postprocessor_step_*.safetensors",
)
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".py")

logger = logging.getLogger(__name__)


class Downloading(str):
    """The word ``downloading``, with how much of it is done.

    Attributes:
        done, total: bytes; ``total`` is 0 where the Hub does not say.
    """

    def __new__(cls, done: int, total: int) -> "Downloading":
        """The word at this point."""
        word = super().__new__(cls, "downloading")
        word.done, word.total = done, total
        return word

    done: int
    total: int


def _counting(tell: Callable[[str], None], total: int) -> type[tqdm]:
    """A silent bar that tells at every hundredth: the Hub's client would draw on the terminal of a server, too."""
    done = told = 0
    counting = threading.Lock()  # files come in several threads

    class Counting(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            # There are two bars of bytes: those on the network, which may be compressed, and those on the disk.
            self._is_counted = options.get("unit") == "B" and not str(options.get("name")).endswith(".transfer")
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: int | float | None = 1) -> bool | None:
            nonlocal done, told
            if self._is_counted and n:
                with counting:
                    done += int(n)
                    is_news = (done - told) * 100 >= max(total, 1)
                    told = done if is_news else told
                    if is_news:
                        tell(Downloading(min(done, total) if total else done, total))
            return super().update(n)

    return Counting


def fetch(
    repo_id: str,
    revision: str | None = None,
    *,
    files: Sequence[str] = POLICY_FILES,
    kind: Literal["model", "dataset"] = "model",
    endpoint: str | None = None,
    cache: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
    largest: int | None = None,
) -> Path:
    """The folder of a repo's files at one commit; what is in the cache is not fetched again.

    When the Hub cannot be reached, the commit that the revision was when it last could is used, if all of its files
    are cached.

    Args:
        revision: branch, tag or commit; the default branch when None.
        files: their names in the repo, ``?`` and ``*`` for any letters; those of a policy unless told otherwise
            (`jaxmodels.checkpoints.diffusers.files` for a model).
        kind: of the repo; policies are models.
        endpoint: the Hub's address; the environment's ``HF_ENDPOINT`` or the public Hub when None.
        on_progress: told ``Downloading`` at every hundredth, in several threads.
        largest: bytes that these files may have together.
        cache: the Hub's cache folder; the environment's ``HF_HUB_CACHE`` or its usual one when None.

    Raises:
        HubError: not a repo id, unknown, not allowed, too large, or neither reachable nor cached.
    """
    if not REPO_ID.fullmatch(repo_id):
        raise HubError(f"{repo_id!r} is neither a folder here nor a repo id like 'owner/name'")
    # Its own reading of the environment is from whenever somebody first imported it.
    cache = cache or (Path(named) if (named := os.environ.get("HF_HUB_CACHE")) else None)
    what = f"{repo_id!r}" + (f" at {revision!r}" if revision else "")
    get = partial(
        snapshot_download, repo_id, repo_type=kind, revision=revision, cache_dir=cache, allow_patterns=list(files)
    )
    try:
        # One quick question first: the download itself would ask again for ten seconds before it gives up.
        found: Any = HfApi(endpoint=endpoint).repo_info(
            repo_id, repo_type=kind, revision=revision, timeout=10, files_metadata=True
        )
        sizes = [file.size or 0 for file in found.siblings or () if any(fnmatch(file.rfilename, one) for one in files)]
        _check(what, [file.rfilename for file in found.siblings or ()], sum(sizes), largest)
        tell = on_progress or (lambda word: None)
        tell(Downloading(0, sum(sizes)))
        # The bar is of tqdm's usual kind; the declared type is its asyncio variant.
        bar: Any = _counting(tell, sum(sizes))
        folder = get(endpoint=endpoint, tqdm_class=bar)
        tell(Downloading(sum(sizes), sum(sizes)))
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


def _check(what: str, names: Sequence[str], size: int, largest: int | None) -> None:
    if largest is not None and size > largest:
        raise HubError(f"{what}: its files have {size} bytes; allowed are {largest}. Raise the limit, if it is meant")
    if ignored := sorted(name for name in names if name.endswith(UNSAFE)):
        logger.info("%s: %s may run code and are not fetched", what, ", ".join(ignored[:20]))
