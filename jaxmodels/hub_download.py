"""Child process that asks a Hub about a repository or downloads its files. `jaxmodels.hub` starts, limits and kills it.

A Hub is not trusted. Names of files in the cache come from its listing and are checked; no header becomes a name. Each
file is compared with the hash of the listing before it has its name in the cache.
"""

import errno
import hashlib
import ipaddress
import json
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url, set_client_factory, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of the httpx version that the Hub's client uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (
    build_hf_headers,
)
from huggingface_hub.utils._http import hf_request_event_hook  # The default client calls it for each request.

from jaxmodels.errors import HubError
from jaxmodels.hub import FILE_NAME, WORKING_DIRECTORY, get_repo_folder, is_selected, remove_parts

_SHA = re.compile(r"[0-9a-f]{40}")
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
# A download with fewer bytes than these in the seconds of ``stalled`` is ended.
STALLED_BYTES = 300_000
DOWNLOADS = 8
# Downloads leave the processor to the control of robots.
NICENESS = 10
# Bytes of memory; the longest answer that is allowed needs half of them.
MEMORY = 1 << 30
# Bytes beyond the announced size, of a file and in all, at which a download ends.
MARGIN = 64 << 20
_MISMATCH = "{} came with other bytes than the commit has; it was removed, try again"

# Reading the certificates takes 20 ms; the process that forks the process of each job has read them.
_TLS = httpx2.create_ssl_context()

logger = logging.getLogger(__name__)


class _Listed(NamedTuple):
    """File of a listing: its size, and the SHA-256 of a large file's content or else git's name of it."""

    size: int
    hash: str


def _use_client(endpoint: str | None, max_answer: int) -> None:
    """Check the addresses of all further requests, and limit the bytes of each answer; 0 for no limit."""
    home = urlsplit(endpoint or constants.ENDPOINT).hostname

    def check_request(request: Any) -> None:
        """Check a request, also after a redirect."""
        host = request.url.host
        if host != home and not _is_public(host):
            raise HubError(f"the Hub sends us on to {host[:80]!r}, which is not on the public network", "bad_answer")

    def read_answer(response: Any) -> None:
        body = bytearray()
        for piece in response.stream:
            body += piece
            if len(body) > max_answer:
                raise HubError(f"the Hub sends more bytes than an answer may have ({max_answer})", "bad_answer")
        response.stream.close()
        response.stream = httpx2.ByteStream(bytes(body))

    hooks: Any = {"request": [hf_request_event_hook, check_request], "response": [read_answer] if max_answer else []}
    options: Any = {"event_hooks": hooks, "follow_redirects": True, "timeout": None, "verify": _TLS}
    set_client_factory(lambda: httpx2.Client(**options))


def _is_public(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return True  # The client fails in the same way and describes it.
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_global for address in addresses)


def _run_job(job: Mapping[str, Any], send: Callable[..., None], is_approved: threading.Event) -> Any:
    """Return the result of a job of `jaxmodels.hub`, or raise HubError."""
    repo_id, revision = job["repo_id"], job["revision"]
    repo = f"{repo_id!r}" + (f" at {revision!r}" if revision else "")
    the_hub, start = f"{repo}: the Hub", ""
    if job["asked"] == "folder" and job["kind"] == "model" and not job["strict"]:
        # The caller looked for a folder of this name before it asked for a model.
        subfolder = job["subfolder"]
        reads = "Hub repo id" if subfolder is None else f"folder of the Hub repo {repo_id!r}"
        named = repo_id if subfolder is None else f"{repo_id}/{subfolder}"
        the_hub = f"no folder {named!r} here; it also reads as a {reads}, and the Hub"
        start = f" ({WORKING_DIRECTORY})"
    try:
        _use_client(job["endpoint"], job["max_answer"])
        return _ask(repo, job, send, is_approved)
    except HubError as error:
        raise HubError(f"{repo}: {error}", error.code) from error
    except Exception as error:  # The client raises errors of many types for an answer that makes no sense.
        status = getattr(getattr(error, "response", None), "status_code", None)
        code, text = _describe_failure(error, status)
        detail = type(error).__name__ if status is None else f"status {status}"
        if text is _UNREACHABLE and job["asked"] == "folder":
            found = None if job["strict"] else _find_cached(job)
            if found is not None:
                logger.warning("%s: the Hub cannot be reached (%s); using the cached copy", repo, detail)
                return str(found)
            text += ", and no complete copy is cached here; connect once, or give a local folder{start}"
        raise HubError(text.format(repo=repo, hub=the_hub, start=start, detail=detail), code) from error


def _ask(repo: str, job: Mapping[str, Any], send: Callable[..., None], is_approved: threading.Event) -> Any:
    """Ask for what the job names: ``head``, ``tags``, ``commits`` or the ``folder`` with the files."""
    api, where = HfApi(endpoint=job["endpoint"]), {"repo_id": job["repo_id"], "repo_type": job["kind"]}
    if job["asked"] == "tags":
        return {tag.ref: _check_commit(tag.target_commit) for tag in api.list_repo_refs(**where).tags}
    where["revision"] = job["revision"]
    if job["asked"] == "commits":
        return [_check_commit(commit.commit_id) for commit in api.list_repo_commits(**where)]
    answer: Any = api.repo_info(**where, timeout=job["quiet"], files_metadata=job["asked"] == "folder")
    commit = _check_commit(answer.sha)
    if job["asked"] == "head":
        return commit
    listed = {
        str(file.rfilename): _Listed(file.size, str(file.lfs.sha256 if file.lfs is not None else file.blob_id))
        for file in answer.siblings or ()
    }
    selected = {name: file for name, file in listed.items() if is_selected(name, job["files"])}
    _check_files(selected)
    size = sum(file.size for file in selected.values())
    if job["largest"] is not None and size > job["largest"]:
        text = f"its files have {size} bytes; allowed are {job['largest']}. Raise the limit, if it is meant"
        raise HubError(text, "too_large")
    if job["strict"]:
        send(files={name: selected[name].size if name in selected else None for name in listed})
        is_approved.wait()
    if ignored := sorted(name for name in listed if name.endswith(UNSAFE)):
        logger.info("%s: %s may run code and are not fetched", repo, ", ".join(name[:80] for name in ignored[:20]))
    if "robojax.json" in job["files"] and (text := _describe_other_repo(listed)) is not None:
        raise HubError(text, "incomplete")
    return str(_Download(job, commit, selected).run(list(listed), lambda *progress: send(progress=progress)))


_UNREACHABLE = "{hub} cannot be reached or did not answer as expected ({detail})"


def _describe_failure(error: Exception, status: int | None) -> tuple[str, str]:
    """Return the code of `HubError` and the text for an exception of the Hub's client."""
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
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        return "timeout", _UNREACHABLE
    if isinstance(error, HTTPError | ConnectionError):
        return "unreachable", _UNREACHABLE
    if error.errno == errno.EFBIG:
        return "bad_answer", "{repo}: the Hub sends more bytes than it announced"
    # The client's check of a file's length raises an OSError without a number.
    return "transfer" if error.errno is None else "disk", _UNREACHABLE


def _check_commit(commit: Any) -> str:
    if not isinstance(commit, str) or not _SHA.fullmatch(commit):
        raise HubError(f"the Hub names commit {str(commit)[:50]!r}; wanted 40 hexadecimal digits", "bad_answer")
    return commit


def _check_files(files: Mapping[str, _Listed]) -> None:
    for name, file in files.items():
        if not FILE_NAME.fullmatch(name):
            raise HubError(f"the Hub names a file {name[:80]!r}; wanted letters, digits and _./+@=-", "bad_answer")
        is_size = type(file.size) is int and file.size >= 0
        if not is_size or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file.hash):
            raise HubError(f"the Hub does not say how large {name} is, or what its hash is", "bad_answer")


def _describe_other_repo(names: Collection[str]) -> str | None:
    """Return the error text for a repo without a policy, by the names of its files; None if it may have a policy."""
    known = [what for name, what in OTHER_REPOS.items() if name in names]
    # Orbax, in which openpi saves, writes _METADATA into the folder of the weights.
    has_weights = any(re.match(r"model.*\.safetensors|.+/_METADATA$", name) for name in names)
    if {"config.json", "robojax.json"} & set(names):
        # LeRobot writes config.json next to an adapter of PEFT, too.
        return f"the repo has no model.safetensors; {known[0]}" if known and not has_weights else None
    folders = {name.rpartition("/")[0] for name in names if name.endswith("/config.json")}
    if policies := sorted(folder for folder in folders if f"{folder}/model.safetensors" in names):
        where = f"the policy is in its folder {policies[-1]}"
        known = [f"{where}: download the repo with `hf download`, and give that folder"]
    return f"the repo has no config.json; {known[0] if known else 'wanted the repo of a policy'}"


def _find_cached(job: Mapping[str, Any]) -> Path | None:
    """Return the cached folder of a revision with all files of the job; None if there is none."""
    repo, commit = get_repo_folder(job), job["revision"] or constants.DEFAULT_REVISION
    with suppress(OSError):
        commit = (repo / "refs" / commit).read_text()
    note = _read_note(repo, commit) if _SHA.fullmatch(commit) else {}
    if selected := [name for name in note if is_selected(name, job["files"])]:
        folder = repo / "snapshots" / commit
        return folder if all(note[name] and (folder / name).is_file() for name in selected) else None
    # Another program of the Hub downloaded it.
    where = {"repo_type": job["kind"], "revision": job["revision"], "cache_dir": job["cache"]}
    with suppress(OSError):
        return Path(snapshot_download(job["repo_id"], **where, allow_patterns=job["files"], local_files_only=True))
    return None


def _get_note_path(repo: Path, commit: str) -> Path:
    return repo / ".robojax" / f"{commit}.json"


def _read_note(repo: Path, commit: str) -> dict[str, bool]:
    """Return for the name of each file of a commit whether the file was compared with its hash."""
    try:
        return {name: bool(value) for name, value in json.loads(_get_note_path(repo, commit).read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


class _Download:
    """Download of the selected files of a commit into the layout of the Hub's cache."""

    def __init__(self, job: Mapping[str, Any], commit: str, selected: Mapping[str, _Listed]):
        self._job, self._commit, self._selected = job, commit, selected
        self._repo = get_repo_folder(job)
        self._folder = self._repo / "snapshots" / commit
        self._note = _read_note(self._repo, commit)
        self._compared = 0  # bytes

    def run(self, names: list[str], report: Callable[[int, int], None]) -> Path:
        """Fetch the files that are not cached, and return the snapshot's folder.

        Args:
            names: of all files of the commit.
            report: called with the bytes so far, and the bytes in all.
        """
        size = sum(file.size for file in self._selected.values())
        _limit(resource.RLIMIT_FSIZE, max((file.size for file in self._selected.values()), default=0) + MARGIN)
        _use_client(self._job["endpoint"], 0)
        report(reported := 0, size)
        # The process ends without waiting for the other downloads when a download fails.
        pool = ThreadPoolExecutor(DOWNLOADS)
        pending = {pool.submit(self._get_file, *each) for each in self._selected.items()}
        finished, began, before = 0, time.monotonic(), 0
        while pending:
            done, pending = wait(pending, 0.25, FIRST_COMPLETED)
            finished += sum(one.result() for one in done)
            received = finished
            for path in self._repo.glob(f"blobs/*.{self._job['mark']}.incomplete"):
                with suppress(FileNotFoundError):
                    received += path.lstat().st_size
            if received > size + MARGIN:
                raise HubError("the Hub sends more bytes than it announced", "bad_answer")
            if reported != min(received, size):
                report(reported := min(received, size), size)
            now, work = time.monotonic(), received + self._compared
            if pending and now - began > self._job["stalled"]:
                if work - before < STALLED_BYTES:
                    text = f"{work - before} bytes in {now - began:.1f} s; wanted {STALLED_BYTES}"
                    raise HubError(f"the Hub is too slow: {text}", "timeout")
                began, before = now, work
        self._folder.mkdir(parents=True, exist_ok=True)
        if not all(self._note.get(name) for name in self._selected):
            note = {name: name in self._selected or self._note.get(name, False) for name in names}
            self._write(_get_note_path(self._repo, self._commit), json.dumps(note))
        if self._job["revision"] != self._commit:
            self._write(self._repo / "refs" / (self._job["revision"] or constants.DEFAULT_REVISION), self._commit)
        return self._folder

    def _get_part(self, name: str) -> Path:
        """Return the path of an unfinished file of this thread; `jaxmodels.hub` removes the files with this mark."""
        return self._repo / "blobs" / f"{name}.{threading.get_ident()}.{self._job['mark']}.incomplete"

    def _get_file(self, name: str, file: _Listed) -> int:
        """Provide a file in the snapshot's folder, and return its bytes."""
        path, blob = self._folder / name, self._repo / "blobs" / file.hash
        if path.is_file():
            if (self._note.get(name) and not self._job["strict"]) or self._matches(file, path):
                return file.size
            path.unlink(missing_ok=True)  # A process was killed while it wrote the file, or the disk changed it.
            if self._job["strict"]:
                raise HubError(_MISMATCH.format(name), "checksum")
        if not (blob.is_file() and self._matches(file, blob)):
            self._receive(file, name, blob)
        link = self._get_part(f"link-{file.hash}")
        link.symlink_to(os.path.relpath(blob, path.parent))
        path.parent.mkdir(parents=True, exist_ok=True)
        link.replace(path)
        return file.size

    def _receive(self, file: _Listed, name: str, blob: Path) -> None:
        where = {"repo_type": self._job["kind"], "endpoint": self._job["endpoint"], "revision": self._commit}
        url, part = hf_hub_url(self._job["repo_id"], name, **where), self._get_part(file.hash)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as target:
            http_get(url, target, headers=build_hf_headers(), expected_size=file.size)
        if not self._matches(file, part):
            raise HubError(_MISMATCH.format(name), "checksum")
        part.replace(blob)

    def _matches(self, file: _Listed, path: Path) -> bool:
        """Return whether a file has the content that the Hub announced."""
        with path.open("rb") as content:
            if os.fstat(content.fileno()).st_size != file.size:
                return False
            is_large = len(file.hash) == 64
            digest = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
            while piece := content.read(1 << 20):
                digest.update(piece)
                self._compared += len(piece)
        return digest.hexdigest() == file.hash

    def _write(self, path: Path, text: str) -> None:
        """Write a file as a whole; in a cache that cannot be written to, files are compared each time."""
        part = self._get_part("note")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            part.replace(path)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", path, error.strerror)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(connection: Connection) -> None:
    """Run the job that arrives over a connection, and end the process; end it too when the parent closes it.

    The answers are ``progress`` (bytes so far and in all), ``log``, ``files`` (which the parent approves with a
    message), and ``result`` or ``error`` at the end.
    """
    is_approved = threading.Event()

    def send(**values: Any) -> None:
        connection.send_bytes(json.dumps(values).encode())

    def listen() -> None:
        with suppress(EOFError, OSError):
            while connection.recv_bytes():
                is_approved.set()
        remove_parts(job)
        os._exit(1)

    job = json.loads(connection.recv_bytes())
    if job["token"] is not None:
        os.environ["HF_TOKEN"] = job["token"]
    threading.Thread(target=listen, daemon=True).start()
    os.nice(NICENESS)
    _limit(resource.RLIMIT_DATA, MEMORY)
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: send(log=[record.levelno, record.getMessage()])
    logger.addHandler(handler)
    constants.HF_HUB_DOWNLOAD_TIMEOUT = job["quiet"]
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 16  # A larger piece would hide the progress of a slow download.
    try:
        send(result=_run_job(job, send, is_approved))
    except HubError as error:
        send(error=str(error), code=error.code)
    os._exit(0)  # Threads of downloads must not delay the end.
