"""Child process that downloads a repository of the Hugging Face Hub, and limits for requests to the Hub.

A Hub is not trusted: the hooks here limit its time, its bytes, the addresses of its redirects, and the headers that
become names of files. Each file is compared with the hash that the Hub announced for the commit. `jaxmodels.hub.fetch`
starts this process, writes a job as a line of JSON, and reads lines of JSON with progress, log records and the result.
"""

import contextvars
import hashlib
import ipaddress
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, set_client_factory, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of the httpx version that the Hub's client uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    _http,  # pyright: ignore[reportPrivateUsage] - the current client factory, to extend it
    get_session,
    tqdm,
)

from jaxmodels.errors import HubError
from jaxmodels.hub import FILE_NAME, WORKING_DIRECTORY, DownloadLimits, is_selected

_SHA = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(W/)?"?[A-Za-z0-9_-]{1,128}"?')
# Files that show what a repository without a policy is.
OTHER_REPOS = {
    "adapter_config.json": "it is an adapter (PEFT, e.g. LoRA): merge it into its base with PEFT's merge_and_unload, "
    "save the result with save_pretrained, and give that folder",
    "model_index.json": "it is a pipeline of diffusers, which is not a policy",
    "meta/info.json": "it is a LeRobotDataset, which is not a policy",
    "pytorch_model.bin": "it has only pickle files, which can run code and are never opened: load the policy where you "
    "trust it and save it as safetensors (LeRobot's save_pretrained does)",
}
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".py")
# A response with fewer bytes than these after `DownloadLimits.stalled` seconds counts as stalled.
STALLED_BYTES = 300_000
DOWNLOADS = 8
# Downloads leave the processor to the control of robots.
NICENESS = 10
# Seconds after which the partial files of a killed download are removed.
_LEFT_OVER = 86_400.0
_RETRY_AFTER = 8.0

logger = logging.getLogger(__name__)


class LimitExceeded(RuntimeError):
    """An answer of the Hub takes more time or bytes than allowed; the text gives both figures."""


@dataclass
class RequestLimits:
    """Deadline and bytes left for all requests of one download, shared by its threads.

    Attributes:
        host: name of the endpoint's host; redirects to other hosts are followed only on the public network.
        until: ``time.monotonic()`` of the deadline.
        bytes: bytes that may still arrive.
        commit: the only commit that answers may be about, or None.
        without_xet: whether files come over HTTP alone, because the transfers of Xet cannot be limited.
        quiet: seconds for a response to begin, and between two pieces of it.
        stalled: seconds after which a response with few bytes is given up.
        stopped: set when the download is cancelled.
    """

    host: str
    until: float
    bytes: int
    commit: str | None = None
    without_xet: bool = True
    quiet: float = 10.0
    stalled: float = 60.0
    stopped: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, endpoint: str | None, seconds: float, size: int) -> "RequestLimits":
        """Return limits for an endpoint, from now on."""
        return cls(urlsplit(endpoint or constants.ENDPOINT).hostname or "", time.monotonic() + seconds, size)

    def check(self) -> None:
        """Raise LimitExceeded if the deadline has passed, or if the download is cancelled."""
        if self.stopped.is_set():
            raise LimitExceeded("the download is cancelled")
        if time.monotonic() > self.until:
            raise LimitExceeded("the Hub is too slow: the time for it is over")

    def take(self, count: int) -> None:
        """Count received bytes; raise LimitExceeded if they are too many."""
        with self._lock:
            self.bytes -= count
            if self.bytes < 0:
                raise LimitExceeded("the Hub sends more bytes than it announced, or than an answer may have")


_LIMITS: contextvars.ContextVar[RequestLimits | None] = contextvars.ContextVar("hub_limits", default=None)


@contextmanager
def apply_limits(limits: RequestLimits) -> Iterator[None]:
    """Limit the requests of this context to the Hub, also those inside huggingface_hub."""
    if _check_request not in get_session().event_hooks["request"]:
        # The factory in use is extended, because it may have proxies or certificates.
        make = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
        set_client_factory(partial(_add_hooks, make))
    token = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(token)


def hub_limits(seconds: float, size: int) -> AbstractContextManager[None]:
    """Return a context whose requests to the Hub take at most this many seconds and bytes."""
    return apply_limits(RequestLimits.start(None, seconds, size))


def _add_hooks(make: Callable[[], Any]) -> Any:
    client = make()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _check_request],
        "response": [*hooks["response"], _check_response],
    }
    return client


def _check_request(request: Any) -> None:
    """Check and limit every request, also after a redirect."""
    limits = _LIMITS.get()
    if limits is None:
        return
    limits.check()
    # Compressed answers can be a thousand times what comes over the wire.
    request.headers["Accept-Encoding"] = "identity"
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        name: min(timeouts.get(name) or limits.quiet, limits.quiet) for name in ("connect", "read", "write", "pool")
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
    # The client would sleep for the time that the Hub asks for.
    for name in ("retry-after", "ratelimit"):
        if name in headers:
            del headers[name]
    if response.status_code in (429, 503):
        headers["retry-after"] = str(int(_RETRY_AFTER))
    response.stream = _Counted(response.stream, limits)


class _Counted(httpx2.SyncByteStream):
    """A body of which each piece is counted."""

    def __init__(self, stream: Any, limits: RequestLimits):
        self._stream, self._limits = stream, limits

    def __iter__(self) -> Iterator[bytes]:
        began, received = time.monotonic(), 0
        for piece in self._stream:
            self._limits.check()
            self._limits.take(len(piece))
            received += len(piece)
            if (now := time.monotonic()) - began > self._limits.stalled:
                if received < STALLED_BYTES:
                    raise LimitExceeded(
                        f"the Hub is too slow: {received} bytes in {self._limits.stalled:g} s; wanted {STALLED_BYTES}"
                    )
                began, received = now, 0
            yield piece

    def close(self) -> None:
        self._stream.close()


def download(job: Mapping[str, Any], report: Callable[[int, int], None], stopped: threading.Event) -> Path:
    """Download the files of a job that are not cached, and return the folder of the snapshot.

    Args:
        job: arguments of `jaxmodels.hub.fetch`, and ``limits``, a `DownloadLimits`.
        report: called with bytes received and bytes in all.

    Raises:
        HubError: as `jaxmodels.hub.fetch`.
    """
    repo_id, revision, kind, endpoint = job["repo_id"], job["revision"], job["kind"], job["endpoint"]
    files, largest, limits = job["files"], job["largest"], DownloadLimits(**job["limits"])
    store = _Store(Path(job["cache"]), repo_id, kind)
    repo = f"{repo_id!r}" + (f" at {revision!r}" if revision else "")
    the_hub, start = f"{repo}: the Hub", ""
    if kind == "model":
        # The caller looked for a folder of this name before it asks for a model.
        subfolder = job["subfolder"]
        reads = "Hub repo id" if subfolder is None else f"folder of the Hub repo {repo_id!r}"
        named = repo_id if subfolder is None else f"{repo_id}/{subfolder}"
        the_hub = f"no folder {named!r} here; it also reads as a {reads}, and the Hub"
        start = f" ({WORKING_DIRECTORY})"

    def limit(seconds: float, size: int) -> RequestLimits:
        request = RequestLimits.start(endpoint, seconds, size)
        request.quiet, request.stalled, request.stopped = limits.quiet, limits.stalled, stopped
        return request

    try:
        # Without a limit of size, a user waits for a large repo at a terminal.
        with apply_limits(limit(limits.answer, limits.max_answer if largest is not None else 4 * limits.max_answer)):
            answer = HfApi(endpoint=endpoint).repo_info(
                repo_id, repo_type=kind, revision=revision, timeout=limits.quiet, files_metadata=True
            )
        commit, listed = _read_listing(repo, answer)
        selected = {name: file for name, file in listed.items() if is_selected(name, files)}
        size = sum(file.size for file in selected.values())
        _check_files(repo, selected, list(listed), size, largest)
        if "robojax.json" in files and (missing := _find_missing_file(listed)) is not None:
            raise HubError(_describe_other_repo(repo, missing, listed), "incomplete")
        request = limit(limits.count_seconds(size), size + size // 2 + limits.max_answer)
        request.commit, request.without_xet = commit, largest is not None
        get = partial(hf_hub_download, repo_id, repo_type=kind, endpoint=endpoint)
        folder = _download_files(store, commit, selected, list(listed), request, report, get, job["strict"])
        store.write_ref(revision, commit)
    except (
        LimitExceeded,
        HTTPError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
    ) as error:
        code, text = _describe_failure(error)
        detail = str(error) if isinstance(error, LimitExceeded) else type(error.__cause__ or error).__name__
        names = {"repo": repo, "hub": the_hub, "start": start, "detail": detail}
        if text is not _UNREACHABLE:
            raise HubError(text.format(**names), code) from error
        found = None if job["strict"] else store.find(revision, files)
        if found is None:
            text += ", and no complete copy is cached here; connect once, or give a local folder{start}"
            raise HubError(text.format(**names), code) from error
        folder = found
        logger.warning("%s: the Hub cannot be reached (%s); using the cached copy", repo, detail)
    return folder


_UNREACHABLE = "{hub} cannot be reached or did not answer as expected ({detail})"


def _describe_failure(error: Exception) -> tuple[str, str]:
    """Return the code of `HubError` and the text for an exception of the Hub's client."""
    cause = error.__cause__ or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(error, LimitExceeded):
        return "timeout" if "too slow" in str(error) else "bad_answer", "{repo}: {detail}"
    if isinstance(error, GatedRepoError):
        return "denied", "{repo}: the repo is gated; accept its terms on the Hub and set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "unknown_revision", "{repo}: the repo has no such revision; wanted a branch, a tag or a commit"
    if isinstance(error, RepositoryNotFoundError):
        return "unknown_repo", "{hub} has no such repo, or it is private; check the name, or set HF_TOKEN{start}"
    if not isinstance(error, HTTPError | OSError):
        return "bad_answer", "{repo}: the Hub's answer makes no sense ({detail})"
    if status in (401, 403):
        return "denied", "{hub} does not allow it; set HF_TOKEN to a token that may read it{start}"
    if status is not None:
        return "limited" if status == 429 else "bad_answer", _UNREACHABLE
    if isinstance(cause, httpx2.TimeoutException | TimeoutError):
        return "timeout", _UNREACHABLE
    if isinstance(cause, HTTPError | ConnectionError):
        return "unreachable", _UNREACHABLE
    # The client's check of a file's length raises an OSError without a number.
    return "transfer" if getattr(cause, "errno", None) is None else "disk", _UNREACHABLE


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
        if not FILE_NAME.fullmatch(name):
            raise HubError(f"{repo}: the Hub names a file {name[:80]!r}; wanted letters, digits and _./+@=-")
        if file.size < 0 or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file.hash):
            raise HubError(f"{repo}: the Hub does not say how large {name} is, or what its hash is")
    if largest is not None and size > largest:
        raise HubError(
            f"{repo}: its files have {size} bytes; allowed are {largest}. Raise the limit, if it is meant", "too_large"
        )
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
        selected = {name for name in names if is_selected(name, files)}
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
        """Whole or not at all; files in a cache that cannot be written to are compared each time."""
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            part.replace(path)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", path, error.strerror)
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _download_files(
    store: _Store,
    commit: str,
    files: Mapping[str, _Listed],
    names: Sequence[str],
    limits: RequestLimits,
    report: Callable[[int, int], None],
    get: Callable[..., Any],
    is_strict: bool,
) -> Path:
    """Fetch the files that are not cached, and compare each with its hash before the snapshot is used."""
    folder, size = store.snapshot(commit), sum(file.size for file in files.values())
    verified, _ = store.read(commit)
    store.remove_partial_downloads()
    received: list[int] = []

    class Bar(tqdm):
        """Progress bar that draws nothing and reports the bytes."""

        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: int | float | None = 1) -> bool | None:
            received.append(int(n or 0))
            return super().update(n)

    def download_file(name: str, file: _Listed) -> None:
        path = folder / name
        if path.is_file():
            if (name in verified and not is_strict) or file.matches(path):
                return
            store.remove(commit, name)  # A process was killed while it wrote the file, or the disk changed it.
            if is_strict:
                raise HubError(describe_mismatch(name), "checksum")
        with apply_limits(limits):
            get(filename=name, revision=commit, cache_dir=store.folder.parent, tqdm_class=Bar)
            limits.check()
        if not file.matches(path):
            store.remove(commit, name)
            raise HubError(describe_mismatch(name), "checksum")

    def describe_mismatch(name: str) -> str:
        where = f"{store.repo!r} at {commit[:12]}: {name}"
        return f"{where} came with other bytes than the commit has; it was removed, try again"

    report(0, size)
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        pending = {pool.submit(download_file, name, file) for name, file in files.items()}
        while pending:
            done, pending = wait(pending, 0.25, FIRST_EXCEPTION)
            if error := next((one.exception() for one in done if one.exception() is not None), None):
                # Each thread ends within `limits.quiet` seconds, and removes its partial file.
                limits.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise error
            report(min(sum(received), size), size)
    if not set(files) <= verified:
        store.write(commit, verified | set(files), names)
    folder.mkdir(parents=True, exist_ok=True)
    report(size, size)
    return folder


class _LineHandler(logging.Handler):
    """Sends the log records of this module to the parent process."""

    def emit(self, record: logging.LogRecord) -> None:
        _write_line(log=[record.levelno, record.getMessage()])


def _write_line(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the job of the standard input, and end soon after the input is closed."""
    logger.setLevel(logging.INFO)
    logger.addHandler(_LineHandler())
    job = json.loads(sys.stdin.readline())
    os.nice(NICENESS)
    stopped = threading.Event()

    def end_when_alone() -> None:
        while os.read(0, 1):
            pass
        stopped.set()
        time.sleep(2 * job["limits"]["quiet"])
        os._exit(1)

    threading.Thread(target=end_when_alone, daemon=True).start()
    try:
        folder = download(job, lambda done, total: _write_line(progress=[done, total]), stopped)
        _write_line(folder=str(folder))
    except HubError as error:
        _write_line(error=str(error), code=error.code)
    os._exit(0)  # Threads of the Hub's client must not delay the end.
