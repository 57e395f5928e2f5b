"""Questions to the Hugging Face Hub, and downloads of repositories at one commit, each in its own process.

Only files with known names are fetched, never a pickle. Only the process of a job (`jaxmodels.hub_download`) uses a
network. It is killed at its deadline, or when the caller no longer waits.
"""

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch, fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

from jaxmodels.cache_dirs import hub_cache
from jaxmodels.errors import ConfigError, HubError
from jaxmodels.hub_process import start_process

REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
# Revisions and file names become names of files in the cache.
_REVISION = re.compile(r"(?!.*(^|/)\.)(?!.*\.\.)(?!/)[A-Za-z0-9_./+@=-]{1,200}(?<!/)")
FILE_NAME = re.compile(r"(?!.*(^|/)\.)(?!/)[A-Za-z0-9_./+@=-]{1,240}")
# Names with a slash are files of models that a policy is built on, in folders with the models' names.
POLICY_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors",
    "robojax.json",
    "stats.json",
    "tokenizer.json",
    "architecture.json",
    "bundle.json",
    "executables.safetensors",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
    "policy_preprocessor_step_*.safetensors",
    "policy_postprocessor_step_*.safetensors",
    "*/config.json",
    "*/tokenizer.json",
)
"""Files of a policy that are fetched, as patterns of names.

Example:
    >>> "config.json" in POLICY_FILES
    True
"""
WORKING_DIRECTORY = (
    "a relative path starts in the working directory of the process that loads the policy; for a session, of the server"
)
MODEL_DEPTH = 3
# Bytes of the Hub's description of a repository; 60,000 files need 16 MiB.
MAX_ANSWER = 16 << 20
# Seconds for a response to begin and between two pieces of it, and for the description of a repository.
QUIET, ANSWER = 10.0, 60.0
# Seconds for all files: a constant, and the time for their bytes at this rate per second.
GRACE, MIN_RATE = 300.0, 250_000
# Seconds after which a download with few bytes counts as stalled.
STALLED = 60.0
# Seconds between two calls of `on_progress` while no bytes arrive.
_POLL = 0.5
# Seconds after which the unfinished files of other processes are removed.
_LEFT_OVER = 86_400.0

logger = logging.getLogger(__name__)


class Downloading(str):
    """The progress text ``downloading``, with the bytes so far and in all (0 before the Hub announces the size)."""

    def __new__(cls, done: int, total: int) -> "Downloading":
        """Create the text for this point of a download."""
        word = super().__new__(cls, "downloading")
        word.done, word.total = done, total
        return word

    done: int
    total: int


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
    subfolder: str | None = None,
    token: str | None = None,
    on_listing: Callable[[Mapping[str, int | None]], None] | None = None,
) -> Path:
    """Download a repository's files at one commit and return their folder. Cached files are not fetched again.

    If the Hub cannot be reached, the last known commit of the revision is used, provided that its files are cached.

    Args:
        revision: branch, tag or commit; the default branch when None.
        files: patterns of their names, with ``?`` and ``*``; the files of a policy by default.
        kind: of the repo; policies are models.
        endpoint, token, cache: address of the Hub, access token and cache folder; of the environment when None.
        on_progress: called with `Downloading` at least twice a second; if it raises, the download ends with that error.
        largest: bytes of all of these files.
        subfolder: rest of the requested path, for the texts of errors.
        on_listing: called with the size of each of these files, and with None for each other file, by name. If it
            raises, nothing is downloaded. With it, cached files are compared again, and never replace an answer.

    Raises:
        HubError: not a repo id, unknown, not allowed, too large, too slow, with other bytes than announced, or neither
            reachable nor cached.

    Example:
        >>> fetch("owner/name", "main")  # doctest: +SKIP
        PosixPath('/home/me/.cache/huggingface/hub/models--owner--name/snapshots/4f1c...')
        >>> fetch("owner/name", "..")
        Traceback (most recent call last):
        jaxmodels.errors.HubError: 'owner/name': '..' is no revision; wanted a branch, a tag or a commit
    """
    job = {
        "asked": "folder",
        "repo_id": repo_id,
        "revision": revision,
        "files": list(files),
        "kind": kind,
        "endpoint": endpoint,
        "cache": str((cache or hub_cache()).expanduser().resolve()),
        "largest": largest,
        "subfolder": subfolder,
        "strict": on_listing is not None,
        # Without a limit of size, a user waits for a large repo at a terminal.
        "max_answer": MAX_ANSWER if largest is not None else 4 * MAX_ANSWER,
    }
    folder = Path(_run_job(job, token, on_progress, on_listing))
    logger.info("%r: commit %s", repo_id, folder.name)
    return folder


def ask_hub(
    asked: Literal["head", "tags", "commits"],
    repo_id: str,
    revision: str | None = None,
    *,
    endpoint: str | None = None,
    token: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Any:
    """Return the commit of a model's revision (``head``), all tags with their commits, or the history of a revision.

    See `fetch` for the other arguments and the errors.

    Example:
        >>> ask_hub("head", "owner/name", "main")  # doctest: +SKIP
        '4f1c...'
        >>> ask_hub("tags", "owner/name", "..")
        Traceback (most recent call last):
        jaxmodels.errors.HubError: 'owner/name': '..' is no revision; wanted a branch, a tag or a commit
    """
    job = {"asked": asked, "repo_id": repo_id, "revision": revision, "kind": "model", "endpoint": endpoint}
    return _run_job({**job, "max_answer": MAX_ANSWER}, token, on_progress)


def get_repo_folder(job: Mapping[str, Any]) -> Path:
    """Return the folder of a job's repository in the cache."""
    return Path(job.get("cache") or hub_cache()) / f"{job['kind']}s--{job['repo_id'].replace('/', '--')}"


def _run_job(
    job: dict[str, Any],
    token: str | None,
    on_progress: Callable[[str], None] | None,
    on_listing: Callable[[Mapping[str, int | None]], None] | None = None,
) -> Any:
    """Run a job in a child process, and return its result."""
    _check_names(job["repo_id"], job["revision"])
    job.update(quiet=QUIET, stalled=STALLED, mark=uuid.uuid4().hex)
    try:
        with start_process() as connection:
            with suppress(OSError):  # The process has ended, as the reader of its answers notices.
                connection.send_bytes(json.dumps({**job, "token": token}).encode())
            return _read_result(job["repo_id"], connection, on_progress or (lambda stage: None), on_listing)
    finally:
        remove_parts(job)


def _read_result(
    repo_id: str,
    connection: Connection,
    report: Callable[[str], None],
    on_listing: Callable[[Mapping[str, int | None]], None] | None,
) -> Any:
    """Read the answers of a job's process until its result arrives or its time is over, and return the result."""
    last, until, is_downloading = Downloading(0, 0), time.monotonic() + ANSWER, False
    while time.monotonic() < until:
        if not connection.poll(_POLL):
            report(last)
            continue
        try:
            answer = json.loads(connection.recv_bytes(MAX_ANSWER))
        except (EOFError, OSError) as error:
            text = "the download process was killed, or its answer is too long; try again"
            raise HubError(f"{repo_id!r}: {text}", "transfer") from error
        if "progress" in answer:
            last = Downloading(*answer["progress"])
            if not is_downloading:
                until, is_downloading = time.monotonic() + GRACE + last.total / MIN_RATE, True
            report(last)
        elif "files" in answer and on_listing is not None:
            on_listing(answer["files"])
            connection.send_bytes(b"approved")
        elif "log" in answer:
            logger.log(*answer["log"])
        elif "error" in answer:
            raise HubError(answer["error"], answer["code"])
        else:
            return answer["result"]
    raise HubError(f"{repo_id!r}: the Hub is too slow: the time for it is over", "timeout")


def remove_parts(job: Mapping[str, Any]) -> None:
    """Remove the unfinished files of the job, and the files of other jobs that have been unfinished for a day."""
    for path in get_repo_folder(job).glob("blobs/*.incomplete"):
        with suppress(OSError):
            if job["mark"] in path.name or time.time() - path.stat().st_mtime > _LEFT_OVER:
                path.unlink()


def _check_names(repo_id: str, revision: str | None) -> None:
    """Raise HubError for names that are no repository or no revision."""
    path = os.path.expanduser(repo_id)
    text = f"{repo_id!r} is neither a folder here nor a repo id like 'owner/name'"
    if repo_id and os.path.isfile(path):
        folder = os.path.dirname(repo_id) or "."
        raise HubError(f"{text}; it is a file in {folder!r}: give the folder of a policy")
    if not REPO_ID.fullmatch(repo_id):
        raise HubError(text if os.path.isabs(path) else f"{text} ({WORKING_DIRECTORY})")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise HubError(f"{repo_id!r}: {revision[:80]!r} is no revision; wanted a branch, a tag or a commit")


__all__ = ["POLICY_FILES", "ask_hub", "fetch", "find_policy", "is_policy_file", "list_policy_files"]


def is_selected(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file matches one of these patterns; in folders of a policy, only the files of models do."""
    found = [pattern for pattern in patterns if fnmatch(name, pattern)]
    return any(not pattern.startswith("*/") for pattern in found) or (bool(found) and is_policy_file(name))


def is_policy_file(name: str) -> bool:
    """Return whether a file of this name, ``/`` between folders, belongs to a policy and stays in its folder.

    Example:
        >>> "config.json" in POLICY_FILES
        True
        >>> is_policy_file("config.json"), is_policy_file("pytorch_model.bin"), is_policy_file("../config.json")
        (True, False, False)
    """
    *folders, last = name.split("/")
    if not FILE_NAME.fullmatch(name) or "" in folders:
        return False
    if not folders:
        return any(fnmatchcase(name, pattern) for pattern in POLICY_FILES if "/" not in pattern)
    return len(folders) <= MODEL_DEPTH and f"*/{last}" in POLICY_FILES


def list_policy_files(folder: Path) -> list[str]:
    """Return the sorted names of a policy's files in a folder; do not follow links to other folders. Raises OSError.

    Example:
        >>> list_policy_files(Path("robojax/sim/policy"))[:2]
        ['config.json', 'model.safetensors']
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    names = []
    for root, folders, files in os.walk(folder, onerror=fail):
        within = Path(root).relative_to(folder)
        if len(within.parts) >= MODEL_DEPTH:
            folders.clear()
        names += [(within / name).as_posix() for name in files]
    return sorted(name for name in names if is_policy_file(name) and (folder / name).is_file())


def find_policy(
    path_or_repo: str | Path,
    revision: str | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    largest: int | None = None,
) -> tuple[Path, str | None]:
    """Return the folder of a policy's files, and the commit if it is from the Hub; as `jaxmodels.load_policy`.

    Raises:
        HubError: the repo cannot be fetched, or is too large.
        ConfigError: a revision of a folder.

    Example:
        >>> find_policy("robojax/sim/policy")
        (PosixPath('robojax/sim/policy'), None)
    """
    folder = Path(os.path.expanduser(path_or_repo))  # Path.expanduser raises for an unknown user.
    if not str(path_or_repo) or not folder.is_dir():
        folder = fetch(str(path_or_repo), revision, on_progress=on_progress, largest=largest)
        return folder, folder.name  # the Hub's cache names a snapshot by its commit
    if revision is not None:
        raise ConfigError(f"{folder.name} is a folder; a revision ({revision!r}) belongs to a repo of the Hub")
    return folder, None
