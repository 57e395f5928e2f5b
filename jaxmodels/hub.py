"""Downloads of repositories of the Hugging Face Hub at one commit, with limits and hashes.

Only files with known names are fetched, never a pickle. The only place of this package that uses a network.

A Hub is not trusted: what it may take of time, memory and disk is limited while it answers, whatever it announces, and
every file is compared with the hash that was announced for the commit.
"""

import contextvars
import hashlib
import ipaddress
import json
import logging
import os
import queue
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch, fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    set_client_factory,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of whichever httpx the Hub's client uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    _http,  # pyright: ignore[reportPrivateUsage] - whichever factory is in use now, to add to it
    close_session,
    get_session,
    tqdm,
)

from jaxmodels.cache_dirs import hub_cache
from jaxmodels.errors import ConfigError, HubError

REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
# Names of what becomes a file here.
_REVISION = re.compile(r"(?!.*(^|/)\.)(?!.*\.\.)(?!/)[A-Za-z0-9_./+@=-]{1,200}(?<!/)")
_FILE = re.compile(r"(?!.*(^|/)\.)(?!/)[A-Za-z0-9_./+@=-]{1,240}")
_SHA = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(W/)?"?[A-Za-z0-9_-]{1,128}"?')
# Those with a slash are of models that policies are built on, in folders of the model's name within the policy's.
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
WORKING_DIRECTORY = (
    "a relative path starts in the working directory of the process that loads the policy; for a session, of the server"
)
MODEL_DEPTH = 3
# What a repo without a policy is that has a file of this name.
OTHER_REPOS = {
    "adapter_config.json": "it is an adapter (PEFT, e.g. LoRA): merge it into its base with PEFT's merge_and_unload, "
    "save the result with save_pretrained, and give that folder",
    "model_index.json": "it is a pipeline of diffusers, which is not a policy",
    "meta/info.json": "it is a LeRobotDataset, which is not a policy",
    "pytorch_model.bin": "it has only pickle files, which can run code and are never opened: load the policy where you "
    "trust it and save it as safetensors (LeRobot's save_pretrained does)",
}
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".py")
# Bytes of all that the Hub says about a repo; one with 60,000 files has 16 MiB.
MAX_ANSWER = 16 << 20
# Seconds for an answer to begin, between two pieces of it, and for all that is said about a repo.
QUIET, ANSWER = 10.0, 60.0
# Seconds that files may take in all: so many, and those of their bytes at this rate.
GRACE, MIN_RATE = 300.0, 250_000
# Of one answer: after so many seconds fewer bytes than these are as good as none.
STALLED, STALLED_BYTES = 60.0, 300_000
DOWNLOADS = 8
# Seconds after which what a killed download left is removed.
_LEFT_OVER = 86_400.0
_RETRY_AFTER = 8.0

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Downloading(str):
    """The progress text ``downloading``, with the bytes so far and in all.

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


class LimitExceeded(RuntimeError):
    """An answer of the Hub takes more time or bytes than allowed; the text gives both figures."""


@dataclass
class Limits:
    """Deadline and bytes left for all requests of one download, shared by its threads.

    Attributes:
        host: of the endpoint; others are only followed to where everybody may go.
        until: ``time.monotonic()`` at which it has to be done.
        bytes: that may still come.
        commit: the only one that answers may be about, or None.
        without_xet: whether files come over HTTP alone: what the Xet client takes cannot be limited.
        stopped: set when nobody waits any more.
    """

    host: str
    until: float
    bytes: int
    commit: str | None = None
    without_xet: bool = True
    stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise LimitExceeded when the deadline is over, or nobody waits any more."""
        if self.stopped.is_set():
            raise LimitExceeded("nobody waits for it any more")
        if time.monotonic() > self.until:
            raise LimitExceeded("the Hub is too slow: the time for it is over")

    def take(self, count: int) -> None:
        """Count received bytes; raise LimitExceeded when they are too many."""
        with self._lock:
            self.bytes -= count
            if self.bytes < 0:
                raise LimitExceeded("the Hub sends more bytes than it announced, or than an answer may have")


_LIMITS: contextvars.ContextVar[Limits | None] = contextvars.ContextVar("hub_limits", default=None)


@contextmanager
def apply_limits(limits: Limits) -> Iterator[None]:
    """Context whose requests to the Hub are limited, also those made inside huggingface_hub."""
    if _check_request not in get_session().event_hooks["request"]:
        # Added to what is in use: somebody may have set proxies or certificates.
        make = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
        set_client_factory(partial(_add_hooks, make))
    token = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(token)


def hub_limits(seconds: float, size: int) -> AbstractContextManager[None]:
    """Context whose requests to the Hub take at most this many seconds and bytes."""
    return apply_limits(build_limits(None, seconds, size))


def build_limits(endpoint: str | None, seconds: float, size: int, *, commit: str | None = None) -> Limits:
    """Limits for an endpoint (as in `fetch`): `seconds` from now, and `size` bytes."""
    return Limits(urlsplit(endpoint or constants.ENDPOINT).hostname or "", time.monotonic() + seconds, size, commit)


def _add_hooks(make: Callable[[], Any]) -> Any:
    client = make()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _check_request],
        "response": [*hooks["response"], _check_response],
    }
    return client


def _check_request(request: Any) -> None:
    """Check and limit every request, also those of redirects."""
    limits = _LIMITS.get()
    if limits is None:
        return
    limits.check()
    # Compressed answers can be a thousand times what comes over the wire.
    request.headers["Accept-Encoding"] = "identity"
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        name: min(timeouts.get(name) or QUIET, QUIET) for name in ("connect", "read", "write", "pool")
    }
    host = request.url.host
    if host != limits.host and not _is_public(host):
        raise LimitExceeded(f"the Hub sends us on to {host[:80]!r}, which is not on the public network")


def _is_public(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return True  # the client fails in the same way, and says so
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_global for address in addresses)


def _check_response(response: Any) -> None:
    """Check the headers of an answer before its body is read."""
    limits = _LIMITS.get()
    if limits is None:
        return
    headers = response.headers
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        raise LimitExceeded(f"the Hub answers in {encoding[:20]!r}, which nobody asked for")
    # Both become names of files.
    for name in ("etag", "x-linked-etag"):
        if name in headers and not _ETAG.fullmatch(headers[name]):
            raise LimitExceeded(f"the Hub calls a file {headers[name][:80]!r}, which is no ETag of it")
    commit = headers.get("x-repo-commit")
    if commit is not None and (not _SHA.fullmatch(commit) or limits.commit not in (None, commit)):
        raise LimitExceeded(f"the Hub answers with commit {commit[:50]!r}; asked was {limits.commit or 'a commit'}")
    if limits.without_xet and "x-xet-hash" in headers:
        del headers["x-xet-hash"]
    # The client would sleep for as long as it is told.
    for name in ("retry-after", "ratelimit"):
        if name in headers:
            del headers[name]
    if response.status_code in (429, 503):
        headers["retry-after"] = str(int(_RETRY_AFTER))
    response.stream = _Counted(response.stream, limits)


class _Counted(httpx2.SyncByteStream):
    """A body of which each piece is counted."""

    def __init__(self, stream: Any, limits: Limits):
        self._stream, self._limits = stream, limits

    def __iter__(self) -> Iterator[bytes]:
        began, received = time.monotonic(), 0
        for piece in self._stream:
            self._limits.check()
            self._limits.take(len(piece))
            received += len(piece)
            if (now := time.monotonic()) - began > STALLED:
                if received < STALLED_BYTES:
                    raise LimitExceeded(
                        f"the Hub is too slow: {received} bytes in {STALLED:g} s; wanted {STALLED_BYTES}"
                    )
                began, received = now, 0
            yield piece

    def close(self) -> None:
        self._stream.close()


def _make_progress_bar(received: list[int]) -> type[tqdm]:
    """Make a bar that draws nothing and appends the bytes of each step to ``received``, from several threads."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: int | float | None = 1) -> bool | None:
            received.append(int(n or 0))
            return super().update(n)

    return Bar


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
) -> Path:
    """Download a repository's files at one commit and return their folder; cached files are not fetched again.

    When the Hub cannot be reached, the commit that the revision was when it last could is used, if all of its files
    are cached. What it may take is limited: `ANSWER` seconds and `MAX_ANSWER` bytes for what it says of the repo,
    `GRACE` seconds and `MIN_RATE` for files, and no more bytes than it announced.

    Args:
        revision: branch, tag or commit; the default branch when None.
        files: their names in the repo, ``?`` and ``*`` for any letters; those of a policy unless told otherwise
            (`jaxmodels.transformer2d.diffusers_folder.files` for a model).
        kind: of the repo; policies are models.
        endpoint: the Hub's address; the environment's ``HF_ENDPOINT`` or the public Hub when None.
        on_progress: told ``Downloading`` at every hundredth, in several threads, and every second; when it raises, the
            download ends with that.
        largest: bytes that these files may have together.
        cache: the Hub's cache folder; the environment's ``HF_HUB_CACHE`` or its usual one when None.
        subfolder: rest of the path that was asked for, for the texts of errors.

    Raises:
        HubError: not a repo id, unknown, not allowed, too large, too slow, with other bytes than announced, or neither
            reachable nor cached.
    """
    if repo_id and os.path.isfile(os.path.expanduser(repo_id)):
        folder = os.path.dirname(repo_id) or "."
        raise HubError(
            f"{repo_id!r} is neither a folder here nor a repo id like 'owner/name'; it is a file in {folder!r}: give "
            "the folder of a policy"
        )
    if not REPO_ID.fullmatch(repo_id):
        start = "" if os.path.isabs(os.path.expanduser(repo_id)) else f" ({WORKING_DIRECTORY})"
        raise HubError(f"{repo_id!r} is neither a folder here nor a repo id like 'owner/name'{start}")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise HubError(f"{repo_id!r}: {revision[:80]!r} is no revision; wanted a branch, a tag or a commit")
    cache = cache or hub_cache()
    store = _Store(cache.expanduser().resolve(), repo_id, kind)
    repo = f"{repo_id!r}" + (f" at {revision!r}" if revision else "")
    # The caller looked for a folder of this name before it asks for a model.
    reads = "Hub repo id" if subfolder is None else f"folder of the Hub repo {repo_id!r}"
    named = repo_id if subfolder is None else f"{repo_id}/{subfolder}"
    the_hub, start = f"{repo}: the Hub", ""
    if kind == "model":
        the_hub = f"no folder {named!r} here; it also reads as a {reads}, and the Hub"
        start = f" ({WORKING_DIRECTORY})"
    try:
        # Without a limit of size, a user waits for a large repo at a terminal.
        limits = build_limits(endpoint, ANSWER, MAX_ANSWER if largest is not None else 4 * MAX_ANSWER)
        ask = partial(HfApi(endpoint=endpoint).repo_info, repo_id, repo_type=kind, revision=revision, timeout=QUIET)
        (answer,) = _run_in_threads([partial(ask, files_metadata=True)], limits, lambda: None)
        commit, listed = _read_listing(repo, answer)
        selected = {name: file for name, file in listed.items() if _is_selected(name, files)}
        size = sum(file.size for file in selected.values())
        _check_files(repo, selected, list(listed), size, largest)
        if "robojax.json" in files and (missing := _find_missing_file(listed)) is not None:
            raise HubError(_describe_other_repo(repo, missing, listed))
        limits = build_limits(endpoint, GRACE + size / MIN_RATE, size + size // 2 + MAX_ANSWER, commit=commit)
        limits.without_xet = largest is not None
        get = partial(hf_hub_download, repo_id, repo_type=kind, endpoint=endpoint)
        report = on_progress or (lambda word: None)
        folder = _download(store, commit, selected, list(listed), limits, report, get)
        store.write_ref(revision, commit)
    except GatedRepoError as error:
        raise HubError(f"{repo}: the repo is gated; accept its terms on the Hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo}: the repo has no such revision; wanted a branch, a tag or a commit") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{the_hub} has no such repo, or it is private; check the name, or set HF_TOKEN{start}"
        ) from error
    except LimitExceeded as error:
        raise HubError(f"{repo}: {error}") from error
    except (HTTPError, OSError) as error:
        cause = error.__cause__ or error
        if getattr(getattr(cause, "response", None), "status_code", None) in (401, 403):
            raise HubError(f"{the_hub} does not allow it; set HF_TOKEN to a token that may read it{start}") from error
        folder = store.find(revision, files)
        if folder is None:
            raise HubError(
                f"{the_hub} cannot be reached or did not answer as expected ({type(cause).__name__}), and no "
                f"complete copy is cached here; connect once, or give a local folder{start}"
            ) from error
        logger.warning("%s: the Hub cannot be reached (%s); using the cached copy", repo, type(cause).__name__)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise HubError(f"{repo}: the Hub's answer makes no sense ({type(error).__name__})") from error
    logger.info("%s: commit %s", repo, folder.name)
    return folder


def _is_selected(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file is to be fetched; of folders within a policy's, only where a model's may be."""
    found = [pattern for pattern in patterns if fnmatch(name, pattern)]
    return any(not pattern.startswith("*/") for pattern in found) or (bool(found) and is_policy_file(name))


@dataclass(frozen=True)
class _Listed:
    """A file as the Hub announces it.

    Attributes:
        hash: SHA-256 of a large file's content, else git's name of it.
    """

    size: int
    hash: str

    def matches(self, path: Path) -> bool:
        """Whether this is what is in a file."""
        digest = hashlib.sha256() if len(self.hash) == 64 else hashlib.sha1(usedforsecurity=False)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if len(self.hash) != 64:
                digest.update(b"blob %d\0" % size)
            while piece := file.read(1 << 20):
                digest.update(piece)
        return size == self.size and digest.hexdigest() == self.hash


def _read_listing(repo: str, answer: Any) -> tuple[str, Mapping[str, _Listed]]:
    """The commit, and its files by name."""
    if not _SHA.fullmatch(str(answer.sha)):
        raise HubError(f"{repo}: the Hub names commit {str(answer.sha)[:50]!r}; wanted 40 hexadecimal digits")
    listed = {}
    for file in answer.siblings or ():
        hashed = str(file.lfs.sha256 if file.lfs is not None else file.blob_id)
        size = file.size
        is_known = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        listed[str(file.rfilename)] = _Listed(size if is_known else -1, hashed)
    return answer.sha, listed


def _find_missing_file(names: Collection[str]) -> str | None:
    """Return the file without which a repo has no policy; None for a repo that may have one.

    LeRobot writes config.json next to an adapter of PEFT, too.
    """
    if not {"config.json", "robojax.json"} & set(names):
        return "config.json"
    # Orbax, in which openpi saves, writes _METADATA into the folder of the weights.
    has_weights = any(re.match(r"model.*\.safetensors|.+/_METADATA$", name) for name in names)
    return None if has_weights or not set(OTHER_REPOS) & set(names) else "model.safetensors"


def _describe_other_repo(repo: str, missing: str, names: Collection[str]) -> str:
    """Return the error text for a repo without a policy, by the names of its files."""
    what = next((what for name, what in OTHER_REPOS.items() if name in names), "wanted the repo of a policy")
    folders = {name.rpartition("/")[0] for name in names if name.endswith("/config.json")}
    policies = sorted(folder for folder in folders if f"{folder}/model.safetensors" in names)
    if policies and missing == "config.json":
        what = f"the policy is in its folder {policies[-1]}: download the repo with `hf download`, and give that folder"
    return f"{repo}: the repo has no {missing}; {what}"


def _check_files(repo: str, files: Mapping[str, _Listed], names: Sequence[str], size: int, largest: int | None) -> None:
    for name, file in files.items():
        if not _FILE.fullmatch(name):
            raise HubError(f"{repo}: the Hub names a file {name[:80]!r}; wanted letters, digits and _./+@=-")
        if file.size < 0 or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file.hash):
            raise HubError(f"{repo}: the Hub does not say how large {name} is, or what its hash is")
    if largest is not None and size > largest:
        raise HubError(f"{repo}: its files have {size} bytes; allowed are {largest}. Raise the limit, if it is meant")
    if ignored := sorted(name for name in names if name.endswith(UNSAFE)):
        logger.info("%s: %s may run code and are not fetched", repo, ", ".join(name[:80] for name in ignored[:20]))


class _Store:
    """A repo's folder in the Hub's cache, with notes of the files that were compared with their hashes."""

    def __init__(self, cache: Path, repo: str, kind: str):
        self.folder, self.repo, self._kind = cache / f"{kind}s--{repo.replace('/', '--')}", repo, kind

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def read(self, commit: str) -> tuple[set[str], list[str]]:
        """Names that were compared, and all names of the commit."""
        try:
            note = json.loads(self._get_note_path(commit).read_text())
            return {str(name) for name in note["verified"]}, [str(name) for name in note["names"]]
        except (OSError, ValueError, LookupError, TypeError):
            return set(), []

    def write(self, commit: str, verified: set[str], names: Sequence[str]) -> None:
        self._replace(self._get_note_path(commit), json.dumps({"verified": sorted(verified), "names": list(names)}))

    def write_ref(self, revision: str | None, commit: str) -> None:
        """Record the commit of a branch or tag; called when its files are here, not before."""
        if revision != commit:
            self._replace(self.folder / "refs" / (revision or constants.DEFAULT_REVISION), commit)

    def find(self, revision: str | None, files: Sequence[str]) -> Path | None:
        """The cached folder of a revision with all of these files; None if there is none."""
        commit = revision or constants.DEFAULT_REVISION
        with suppress(OSError):
            commit = (self.folder / "refs" / commit).read_text()
        if not _SHA.fullmatch(commit):
            return self._find_of_others(revision, files)
        verified, names = self.read(commit)
        if not names:
            return self._find_of_others(revision, files)
        selected = {name for name in names if _is_selected(name, files)}
        is_complete = all((self.snapshot(commit) / name).is_file() for name in selected)
        return self.snapshot(commit) if selected and selected <= verified and is_complete else None

    def _find_of_others(self, revision: str | None, files: Sequence[str]) -> Path | None:
        """The folder that another program of the Hub downloaded."""
        where = {"repo_type": self._kind, "revision": revision, "cache_dir": self.folder.parent}
        with suppress(OSError):
            return Path(snapshot_download(self.repo, **where, allow_patterns=list(files), local_files_only=True))
        return None

    def remove(self, commit: str, name: str) -> None:
        """A file and what it points to: other commits would take that for the right one."""
        path = self.snapshot(commit) / name
        target = path.resolve()
        path.unlink(missing_ok=True)
        if target.is_relative_to(self.folder.resolve()):
            target.unlink(missing_ok=True)

    def remove_partial_downloads(self) -> None:
        """Remove what downloads left that were killed."""
        for path in (self.folder / "blobs").glob("*.incomplete"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFT_OVER:
                    path.unlink()

    def _get_note_path(self, commit: str) -> Path:
        return self.folder / ".robojax" / f"{commit}.json"

    def _replace(self, path: Path, text: str) -> None:
        """Whole or not at all; a cache that cannot be written to is compared anew each time."""
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            part.replace(path)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", path, error.strerror)
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _download(
    store: _Store,
    commit: str,
    files: Mapping[str, _Listed],
    names: Sequence[str],
    limits: Limits,
    on_progress: Callable[[str], None],
    get: Callable[..., Any],
) -> Path:
    """Fetch the files that are not cached, and compare each with its hash before the snapshot is used."""
    folder, size = store.snapshot(commit), sum(file.size for file in files.values())
    verified, _ = store.read(commit)
    store.remove_partial_downloads()
    received: list[int] = []
    # The bar is of tqdm's usual kind; the declared type is its asyncio variant.
    bar: Any = _make_progress_bar(received)

    def download_file(name: str, file: _Listed) -> None:
        path = folder / name
        if path.is_file():
            if name in verified or file.matches(path):
                return
            store.remove(commit, name)  # a process was killed while it wrote the file
        get(filename=name, revision=commit, cache_dir=store.folder.parent, tqdm_class=bar)
        limits.check()
        if not file.matches(path):
            store.remove(commit, name)
            raise HubError(
                f"{store.repo!r} at {commit[:12]}: {name} came with other bytes than the commit has; it was removed, "
                "try again"
            )

    on_progress(Downloading(0, size))
    jobs = [partial(download_file, name, file) for name, file in files.items()]
    _run_in_threads(jobs, limits, lambda: on_progress(Downloading(min(sum(received), size), size)))
    if not set(files) <= verified:
        store.write(commit, verified | set(files), names)
    folder.mkdir(parents=True, exist_ok=True)
    on_progress(Downloading(size, size))
    return folder


_active: list[Limits] = []


def _run_in_threads(jobs: Sequence[Callable[[], Result]], limits: Limits, tick: Callable[[], None]) -> list[Result]:
    """Run jobs in parallel and return their results in order; ``tick`` is called twice a second and may raise.

    The threads are daemons: threads of a pool would delay the end of the process while a Hub keeps them waiting.
    """
    waiting = deque(enumerate(jobs))
    results: dict[int, Result] = {}
    outcomes: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        with suppress(IndexError):
            while not limits.stopped.is_set():
                number, job = waiting.popleft()
                try:
                    with apply_limits(limits):
                        outcomes.put((number, job(), None))
                except BaseException as error:
                    outcomes.put((number, None, error))

    threads = [threading.Thread(target=work, name="hub-download", daemon=True) for _ in jobs[:DOWNLOADS]]
    _active.append(limits)
    try:
        for thread in threads:
            thread.start()
        while len(results) < len(jobs):
            try:
                number, result, error = outcomes.get(timeout=0.5)
            except queue.Empty:
                limits.check()
                tick()
                continue
            if error is not None:
                raise error
            results[number] = result
    except BaseException:
        limits.stopped.set()
        threading.Thread(target=_end_threads, args=(threads,), name="hub-end", daemon=True).start()
        raise
    finally:
        _active.remove(limits)
    return [results[number] for number in range(len(jobs))]


def _end_threads(threads: Sequence[threading.Thread]) -> None:
    """End threads that a Hub keeps waiting by closing all connections, once no other download uses them."""
    until = time.monotonic() + 2 * QUIET
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    while any(thread.is_alive() for thread in threads):
        if not _active:
            close_session()
            return
        time.sleep(QUIET / 10)


__all__ = ["POLICY_FILES", "find_policy", "is_policy_file", "list_policy_files"]


def is_policy_file(name: str) -> bool:
    """Whether a file of this name, ``/`` between folders, belongs to a policy; never one that leads elsewhere."""
    *folders, last = name.split("/")
    if not _FILE.fullmatch(name) or "" in folders:
        return False
    if not folders:
        return any(fnmatchcase(name, pattern) for pattern in POLICY_FILES if "/" not in pattern)
    return len(folders) <= MODEL_DEPTH and f"*/{last}" in POLICY_FILES


def list_policy_files(folder: Path) -> list[str]:
    """Names of a policy's files in a folder, sorted; links to other folders are not followed.

    Raises:
        OSError: it cannot be read.
    """
    names = []
    for root, folders, files in os.walk(folder, onerror=_raise):
        within = Path(root).relative_to(folder)
        if len(within.parts) >= MODEL_DEPTH:
            folders.clear()
        names += [(within / name).as_posix() for name in files]
    return sorted(name for name in names if is_policy_file(name) and (folder / name).is_file())


def _raise(error: OSError) -> NoReturn:
    raise error


def find_policy(
    path_or_repo: str | Path,
    revision: str | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    largest: int | None = None,
) -> tuple[Path, str | None]:
    """Folder of a policy's files, and the commit when it comes from the Hub.

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
