"""Policy sources: commits from the Hub or from folders, fetched and verified; tracks the heads of refs."""

import asyncio
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, scan_cache_dir
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

import jaxmodels
from hooks.errors import HooksError
from hooks.threads import start_in_thread
from jaxmodels import is_policy_file, list_policy_files
from jaxmodels.errors import HubError
from service.rollout.triggers import BRANCH, TAG, Target, is_pattern, matches_ref

SHA = re.compile(r"[0-9a-f]{40}")
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")
MAX_SHARDS = 64
# Formats whose loading runs code that a file contains.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")

# Codes of a fault that may be gone the next time.
TRANSFER_ERRORS = frozenset({"checksum", "transfer", "unreachable", "changed_meanwhile"})
# Codes of what is wrong with the commit itself.
COMMIT_ERRORS = frozenset({"checksum", "incomplete", "denied_file", "too_large"})


class SourceError(HooksError):
    """A revision of a policy cannot be found, fetched or verified; ``code`` is stable, e.g. ``unknown_revision``."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Source(Protocol):
    """Interface of a place that has policies at commits."""

    async def head(self, repo: str, ref: str | None) -> str:
        """Return the commit that a ref points to now: 40 hexadecimal digits.

        Raises:
            SourceError: ``unknown_repo``, ``unknown_revision``, ``denied``, ``unreachable``, ``timeout``, ...
        """
        ...

    async def fetch(self, repo: str, sha: str, on_progress: Callable[[str], None]) -> Path:
        """Return the folder of exactly that commit, every byte verified; ``on_progress`` gets ``downloading``,
        ``verifying``.

        Raises:
            SourceError: ``checksum``, ``transfer``, ``incomplete``, ``denied_file``, ``changed_meanwhile``, ...
        """
        ...

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        """Return whether a commit is an ancestor of another; None when that cannot be known.

        Raises:
            SourceError: as ``head``.
        """
        ...


Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubLimits:
    """Limits of fetching from the Hub.

    Attributes:
        answer_timeout: seconds for a question to the Hub.
        download_timeout: seconds for all files of a commit.
        max_bytes: bytes of all files of a commit.
        min_free_bytes: bytes of the disk that stay free.
        max_commits: commits of a repo that stay in a cache of our own; older ones make room.
    """

    answer_timeout: float = 30.0
    download_timeout: float = 1800.0
    max_bytes: int = 20 << 30
    min_free_bytes: int = 1 << 30
    max_commits: int = 4


# Makes a context that limits one thread's requests, of a time limit in seconds and a size limit in bytes.
LimitRequests = Callable[[float, int], AbstractContextManager[object]]
# Largest answer of the Hub, in bytes, that is not a file.
MAX_ANSWER_BYTES = 16 << 20


def _without_limits(seconds: float, size: int) -> AbstractContextManager[object]:
    return nullcontext()


# Raised by the client for answers of unexpected types or depth, and by `bounded`.
_BAD_ANSWER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)


class HubSource:
    """Source of repos of one Hub.

    Its client's own calls have no time limit, so they run in threads that are left behind when they take too long.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        token: str | None = None,
        cache: Path | None = None,
        limits: HubLimits | None = None,
        limit_requests: LimitRequests | None = None,
    ):
        """Create the client; nothing is requested yet.

        Args:
            endpoint, token: as of `huggingface_hub.HfApi`.
            cache: where commits are kept; the client's usual folder, in which nothing is removed, when None.
            limit_requests: a context in which what the Hub's client asks takes no longer than so many seconds, and no
                more than so many bytes, whatever the Hub does; without it threads that are left behind go on by
                themselves.
        """
        self._limit_requests: LimitRequests = limit_requests or _without_limits
        self.limits = limits or HubLimits()
        self._api, self._token = HfApi(endpoint=endpoint, token=token), token
        self._cache = Path(cache or constants.HF_HUB_CACHE)
        self._is_our_cache = cache is not None

    async def head(self, repo: str, ref: str | None) -> str:
        """Return the commit of a branch, tag, commit or pattern of tags (the highest name, numbers compared as
        numbers).
        """
        if ref is not None and is_pattern(ref):
            return await self._find_highest_tag(repo, ref)
        asked = None if ref is None else ref.removeprefix(BRANCH).removeprefix(TAG)
        answer = self.limits.answer_timeout
        info = await self._call_hub(repo, ref, lambda: self._api.model_info(repo, revision=asked, timeout=answer))
        if not SHA.fullmatch(info.sha or ""):
            raise SourceError(
                "bad_answer", f"{_describe_revision(repo, ref)}: the Hub names {info.sha!r}, wanted a commit's sha"
            )
        return str(info.sha)

    async def _find_highest_tag(self, repo: str, pattern: str) -> str:
        refs = await self._call_hub(repo, pattern, lambda: self._api.list_repo_refs(repo))
        tags = [tag for tag in refs.tags if matches_ref(pattern, tag.ref)]
        if not tags:
            raise SourceError("unknown_revision", f"{repo}: no tag is like {pattern!r}")
        return max(tags, key=lambda tag: _natural_sort_key(tag.name)).target_commit

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        """Return whether a commit is in the history of another; None when that cannot be known."""
        if sha == than:
            return False
        try:
            history = await self._call_hub(repo, than, lambda: self._api.list_repo_commits(repo, revision=than))
        except SourceError as error:
            if error.code == "unknown_revision":
                return None  # the history was rewritten, or what runs came from elsewhere
            raise
        return sha in {commit.commit_id for commit in history}

    async def fetch(self, repo: str, sha: str, on_progress: Callable[[str], None]) -> Path:
        """Fetch by sha in a child process, which compares each file with its hash and removes a file that differs."""
        on_progress("listing")
        tree = await self._call_hub(
            repo,
            sha,
            lambda: list(self._api.list_repo_tree(repo, revision=sha, recursive=True)),
            self.limits.answer_timeout,
        )
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        _check_complete(f"{repo} at {sha[:12]}", {file.path for file in files})
        wanted = [file for file in files if is_policy_file(file.path)]
        if wrong := [file.path for file in wanted if not (type(file.size) is int and file.size >= 0)]:
            raise SourceError("bad_answer", f"{repo} at {sha[:12]}: the Hub does not say how large {wrong[0]} is")
        self._check_space(repo, sha, wanted)
        on_progress("downloading")
        seconds = self.limits.download_timeout
        is_abandoned, loop = threading.Event(), asyncio.get_running_loop()

        def report(stage: Any) -> None:
            if stage.done and stage.done == stage.total:
                loop.call_soon_threadsafe(on_progress, "verifying")
            if is_abandoned.is_set():
                raise SourceError("timeout", f"{repo} at {sha[:12]}: the download took over {seconds:g} s")

        def download() -> Path:
            return jaxmodels.fetch(
                repo,
                sha,
                endpoint=self._api.endpoint,
                token=self._token,
                cache=self._cache,
                on_progress=report,
                largest=self.limits.max_bytes,
                strict=True,
            )

        try:
            folder = await self._call_hub(repo, sha, download, seconds)
        finally:
            is_abandoned.set()
        if self._is_our_cache:
            await self._call_hub(repo, sha, lambda: self._prune(repo, sha), self.limits.download_timeout)
        return folder

    def _folder(self, repo: str, sha: str) -> Path:
        return self._cache / f"models--{repo.replace('/', '--')}" / "snapshots" / sha

    def _check_space(self, repo: str, sha: str, files: Sequence[RepoFile]) -> None:
        size = sum(file.size for file in files)
        if size > self.limits.max_bytes:
            raise SourceError(
                "too_large", f"{repo} at {sha[:12]}: {size} bytes, allowed are {self.limits.max_bytes}; raise the limit"
            )
        self._cache.mkdir(parents=True, exist_ok=True)
        folder = self._folder(repo, sha)
        needed = sum(file.size for file in files if not (folder / file.path).exists())
        free = shutil.disk_usage(self._cache).free
        if needed and needed + self.limits.min_free_bytes > free:
            raise SourceError(
                "disk",
                f"{repo} at {sha[:12]}: needs {needed} bytes and {self.limits.min_free_bytes} kept free, "
                f"{free} are free; make room",
            )

    def _prune(self, repo: str, newest: str) -> None:
        os.utime(self._folder(repo, newest))
        found = scan_cache_dir(self._cache)
        commits = [
            (self._folder(repo, revision.commit_hash).stat().st_mtime, revision.commit_hash)
            for one in found.repos
            if one.repo_id == repo and one.repo_type == "model"
            for revision in one.revisions
        ]
        if old := [sha for _, sha in sorted(commits, reverse=True)[self.limits.max_commits :]]:
            found.delete_revisions(*old).execute()

    async def _call_hub(
        self,
        repo: str,
        ref: str | None,
        call: Callable[[], Result],
        limit: float | None = None,
        size: int = MAX_ANSWER_BYTES,
    ) -> Result:
        """Call in a thread with time limit; whatever goes wrong becomes a `SourceError`."""
        what = _describe_revision(repo, ref)
        # A little longer than the client's own limit, whose error says more.
        seconds = self.limits.answer_timeout + 1 if limit is None else limit

        def work() -> Result:
            with self._limit_requests(seconds, size):
                return call()

        try:
            return await asyncio.wait_for(asyncio.wrap_future(start_in_thread(work)), seconds)
        except SourceError:
            raise
        except HubError as error:
            raise SourceError(error.code, str(error)) from error
        except GatedRepoError as error:
            raise SourceError("denied", f"{what}: the repo is gated; accept its terms and set a token") from error
        except RevisionNotFoundError as error:
            raise SourceError("unknown_revision", f"{what}: the repo has no such revision") from error
        except RepositoryNotFoundError as error:
            raise SourceError(
                "unknown_repo", f"{what}: no such repo, or private; check its name, or set a token"
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            code = {401: "denied", 403: "denied", 429: "limited"}.get(status, "bad_answer")
            raise SourceError(code, f"{what}: the Hub answered {status}") from error
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise SourceError("timeout", f"{what}: the Hub did not answer within {seconds:g} s") from error
        except (httpx2.TransportError, ConnectionError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
            raise SourceError(
                "unreachable", f"{what}: the Hub cannot be reached ({_cause(error)}); is there a network?"
            ) from error
        except OSError as error:
            # The client's check of lengths is a plain OSError; those of the system have a number.
            if error.errno is not None:
                raise SourceError("disk", f"{what}: cannot be written ({error.strerror})") from error
            raise SourceError("transfer", f"{what}: a file did not arrive whole") from error
        except _BAD_ANSWER_ERRORS as error:
            raise SourceError(
                "bad_answer", f"{what}: the Hub's answer makes no sense ({type(error).__name__}: {str(error)[:200]})"
            ) from error


def _find_missing(names: Collection[str]) -> list[str]:
    """Names of files that every policy needs and that are not there; weights are in one file, or in shards."""
    missing = [] if _CONFIG in names else [_CONFIG]
    if _INDEX not in names:
        return missing if _WEIGHTS in names else [*missing, _WEIGHTS]
    count = max((int(shard[1]) for name in names if (shard := _SHARD.fullmatch(name))), default=1)
    shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, min(count, MAX_SHARDS) + 1)]
    return missing + [shard for shard in shards if shard not in names]


def _check_complete(repo: str, names: set[str]) -> None:
    """Raise when files are missing that every policy needs.

    Args:
        names: all files there are.

    Raises:
        SourceError: ``denied_file`` when its weights would run code, else ``incomplete``.
    """
    missing = _find_missing(names)
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if _WEIGHTS in missing and pickles:
        raise SourceError(
            "denied_file",
            f"{repo}: its weights are in {', '.join(pickles)}, which may run code when loaded; "
            "wanted model.safetensors: convert and push them",
        )
    if missing:
        raise SourceError("incomplete", f"{repo}: {' and '.join(missing)} missing; push all files of the policy")


def _open_regular_file(path: Path, max_bytes: int, roots: Sequence[Path] | None = None) -> BinaryIO:
    """Open a regular file within the given folders; pipes and devices are refused, links may not lead outside.

    Raises:
        SourceError: ``denied_file`` when it is something else or elsewhere, ``too_large``, ``changed_meanwhile``.
        OSError: it cannot be opened.
    """
    if stat.S_ISREG(path.stat().st_mode):  # before: to open a device may be to start it
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        try:
            status = os.fstat(file.fileno())
            if status.st_size > max_bytes:
                raise SourceError("too_large", f"{path.name}: {status.st_size} bytes, allowed are {max_bytes}")
            resolved = Path(os.path.realpath(path))
            is_inside = roots is None or any(root.resolve() in resolved.parents for root in roots)
            # The place is of the name, and what is open may be another file by now.
            if not os.path.samestat(status, resolved.stat()):
                raise SourceError("changed_meanwhile", f"{path.name}: was replaced while it was opened")
            if stat.S_ISREG(status.st_mode) and is_inside:
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise SourceError("denied_file", f"{path.name}: no regular file, or a link out of the folders of policies")


def _describe_revision(repo: str, ref: str | None) -> str:
    return f"{repo} at {ref[:12] if SHA.fullmatch(ref) else ref!r}" if ref else repo


def _cause(error: BaseException) -> str:
    return type(error.__cause__ or error).__name__


def _natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


# Seconds between the last write of a file and its reading below which its hash is not cached: another write could
# get the same time stamp from the file system.
SETTLE_SECONDS = 2.0
READ_BYTES = 1 << 20


class FolderSource:
    """Source of folders; ``repo`` is a path. What is fetched is a copy: the folder may be written to at any time."""

    def __init__(
        self,
        cache: Path,
        *,
        max_copies: int = 4,
        seconds: float = 600.0,
        largest: int = 20 << 30,
        roots: Sequence[Path] | None = None,
    ):
        """Create the source; nothing is read yet.

        Args:
            cache: where copies are kept, the newest so many of each folder.
            seconds: for reading or copying a folder.
            largest: bytes of all files of a policy; twice as many have to be free on the cache's disk.
            roots: folders that files have to be in, wherever links lead to; anywhere when None.
        """
        self.max_copies = max_copies
        self._cache = Path(cache)
        self._seconds = seconds
        self._largest = largest
        self._roots = roots
        self._hashes: dict[Path, tuple[tuple[int, ...], str]] = {}

    async def head(self, repo: str, ref: str | None) -> str:
        """The hash of the folder now; a hash as ``ref`` if that is what it is, or if a copy of it is kept."""
        if ref is not None and SHA.fullmatch(ref) and _is_folder(self._copies(repo) / ref):
            return ref
        sha = await self._run_in_thread(repo, lambda: self._hash(Path(repo)))
        if ref not in (None, "main", sha):
            raise SourceError(
                "unknown_revision", f"{repo}: a folder has no revision {ref!r}, and no copy of it is kept"
            )
        return sha

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        """Return None: a folder has no history."""
        return None

    async def fetch(self, repo: str, sha: str, on_progress: Callable[[str], None]) -> Path:
        """Copy the folder; the copy is hashed again, so that one torn by a writer is refused with
        ``changed_meanwhile``.
        """
        on_progress("copying")
        return await self._run_in_thread(repo, lambda: self._copy(Path(repo), sha))

    def _copies(self, repo: str | Path) -> Path:
        return self._cache / hashlib.sha256(str(Path(repo).absolute()).encode()).hexdigest()[:16]

    def _copy(self, folder: Path, sha: str) -> Path:
        kept = self._copies(folder) / sha
        if kept.is_dir():
            if _hash_of(kept, self._content_hash) == sha:
                os.utime(kept)
                return kept
            shutil.rmtree(kept)
        part = kept.with_name(f".{sha}.{uuid.uuid4().hex[:8]}")
        part.mkdir(parents=True)
        try:
            there = _follow_links(folder)
            names = list_policy_files(there)
            _check_complete(str(folder), {path.name for path in there.iterdir()})
            self._check_space(folder, [there / name for name in names])
            for name in names:
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                with self._open(there / name) as source, (part / name).open("wb") as target:
                    shutil.copyfileobj(source, target, READ_BYTES)
            if _hash_of(part, self._content_hash) != sha:
                raise SourceError("changed_meanwhile", f"{folder}: was written to while it was copied")
            part.rename(kept)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._prune(kept)
        return kept

    def _check_space(self, folder: Path, files: list[Path]) -> None:
        size, free = sum(path.stat().st_size for path in files), shutil.disk_usage(self._cache).free
        if size > self._largest:
            raise SourceError("too_large", f"{folder}: {size} bytes, allowed are {self._largest}; raise the limit")
        if 2 * size > free:
            raise SourceError("disk", f"{folder}: has {size} bytes, and only {free} are free for a copy; make room")

    def _prune(self, newest: Path) -> None:
        copies = [path for path in newest.parent.iterdir() if SHA.fullmatch(path.name) and path != newest]
        for old in sorted(copies, key=lambda path: path.stat().st_mtime, reverse=True)[self.max_copies - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
        for part in newest.parent.glob(".*"):  # of a process that was killed
            if time.time() - part.stat().st_mtime > self._seconds:
                shutil.rmtree(part, ignore_errors=True)

    def _hash(self, folder: Path) -> str:
        return _hash_of(_follow_links(folder), self._known_hash)

    def _known_hash(self, path: Path) -> str:
        status = path.stat()
        mark = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        held = self._hashes.get(path)
        if held is not None and held[0] == mark:
            return held[1]
        content = self._content_hash(path)
        # The absolute difference: after a clock was set back files seem to come from the future, and hashing them at
        # each look would load the disk.
        if abs(time.time() - max(status.st_mtime, status.st_ctime)) > SETTLE_SECONDS:
            self._hashes[path] = (mark, content)
        return content

    def _content_hash(self, path: Path) -> str:
        read = hashlib.sha256()
        with self._open(path) as file:
            while chunk := file.read(READ_BYTES):
                read.update(chunk)
        return read.hexdigest()

    def _open(self, path: Path) -> BinaryIO:
        # Copies made by this source are outside of the allowed roots.
        return _open_regular_file(path, self._largest, None if self._cache in path.parents else self._roots)

    async def _run_in_thread(self, repo: str, call: Callable[[], Result]) -> Result:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(start_in_thread(call)), self._seconds)
        except TimeoutError as error:
            raise SourceError("timeout", f"{repo}: could not be read within {self._seconds:g} s") from error
        except FileNotFoundError as error:
            if not _is_folder(Path(repo)):
                raise SourceError("unknown_repo", f"{repo} is not there, or is a link to what is not") from error
            # A writer that replaces files removes them for a moment. The text names no path: it may be a link's target.
            name = Path(error.filename).name if error.filename else "a file"
            raise SourceError("changed_meanwhile", f"{repo}: {name} is not there") from error
        except OSError as error:
            raise SourceError("disk", f"{repo}: {error.strerror or type(error).__name__}") from error


def _is_folder(path: Path) -> bool:
    return path.is_dir()


def _follow_links(folder: Path) -> Path:
    """Where a folder really is; asked once for each reading of it.

    A link may lead to another folder before the next file is opened, and one file of each of two folders would be a
    version that nobody made.
    """
    return Path(os.path.realpath(folder, strict=True))  # Path.resolve has no OSError for links in a circle before 3.13


def _hash_of(folder: Path, content: Callable[[Path], str]) -> str:
    """Hash the names and contents of a policy's files to 40 hexadecimal digits, the length of a commit's sha.

    Args:
        folder: the policy's folder.
        content: SHA-256 of a file, in hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name in list_policy_files(folder):
        digest.update(f"{content(folder / name)}  {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:40]


class RefTracker:
    """Resolves the heads of followed refs."""

    def __init__(self, sources: Callable[[str], Source]):
        """Use these sources; ``sources`` gives the source of a repo."""
        self._sources = sources
        self._unknown: set[Target] = set()

    async def get_head(self, target: Target) -> str | None:
        """Return the commit that a ref points to, or None when it cannot be known now."""
        what = f"{target.repo} at {target.ref!r}"
        try:
            head = await self._sources(target.repo).head(target.repo, target.ref)
        except SourceError as error:
            if target not in self._unknown:
                self._unknown.add(target)
                logger.warning("the head of %s is not known; further failures are not logged: %s", what, error)
            return None
        except Exception:
            if target not in self._unknown:
                self._unknown.add(target)
                logger.exception("reading the head of %s crashed", what)
            return None
        if target in self._unknown:
            self._unknown.discard(target)
            logger.info("the head of %s is known again", what)
        return head
