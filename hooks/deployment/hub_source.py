"""Policies of the Hugging Face Hub: by commit, within limits of time and space, every byte compared with the tree."""

import asyncio
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
from huggingface_hub.utils import tqdm

from hooks.deployment.source import SHA
from hooks.deployment.trigger import BRANCH, TAG, is_about, is_pattern
from hooks.errors import SourceError
from hooks.limits import begin
from hooks.policy_files import check_complete, is_policy_file

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubLimits:
    """What fetching may take.

    Attributes:
        answer: seconds for a question to the Hub.
        download: seconds for all files of a commit.
        largest: bytes of all files of a commit.
        kept_free: bytes of the disk that stay free.
        kept: commits of a repo that stay in a cache of our own; older ones make room.
        niceness: by how much the download's threads stand back behind the control of robots; on Linux.
    """

    answer: float = 30.0
    download: float = 1800.0
    largest: int = 20 << 30
    kept_free: int = 1 << 30
    kept: int = 4
    niceness: int = 10


# Seconds and bytes to a context for one thread.
Bounded = Callable[[float, int], AbstractContextManager[object]]
# Bytes of an answer that is no file.
LARGEST_ANSWER = 16 << 20


def _unbounded(seconds: float, size: int) -> AbstractContextManager[object]:
    return nullcontext()


# What an answer of other types, or a nested one, makes the client raise; and what `bounded` does.
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)


class _Abandoned(Exception):
    """Nobody waits for this download any more."""


def _bar(is_abandoned: threading.Event) -> type[tqdm]:
    """A progress bar that draws nothing on whatever terminal there is, and ends a download that nobody wants."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if is_abandoned.is_set():
                raise _Abandoned
            return super().update(n)

    return Bar


class HubSource:
    """Repos of one Hub.

    Its client's own calls have no time limit, so they run in threads that are left behind when they take too long.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        token: str | None = None,
        cache: Path | None = None,
        limits: HubLimits | None = None,
        bounded: Bounded | None = None,
    ):
        """Nothing is asked yet.

        Args:
            endpoint, token: as of `huggingface_hub.HfApi`.
            cache: where commits are kept; the client's usual folder, in which nothing is removed, when None.
            bounded: a context in which what the Hub's client asks takes no longer than so many seconds, and no more
                than so many bytes, whatever the Hub does; without it threads that are left behind go on by themselves.
        """
        self._bounded: Bounded = bounded or _unbounded
        self.limits = limits or HubLimits()
        self._api = HfApi(endpoint=endpoint, token=token)
        self._cache = Path(cache or constants.HF_HUB_CACHE)
        self._is_our_cache = cache is not None

    async def head(self, repo: str, ref: str | None) -> str:
        """The commit of a branch, tag, commit or pattern of tags (the highest name, numbers compared as numbers)."""
        if ref is not None and is_pattern(ref):
            return await self._highest(repo, ref)
        asked = None if ref is None else ref.removeprefix(BRANCH).removeprefix(TAG)
        answer = self.limits.answer
        info = await self._ask(repo, ref, lambda: self._api.model_info(repo, revision=asked, timeout=answer))
        if not SHA.fullmatch(info.sha or ""):
            raise SourceError("bad_answer", f"{_named(repo, ref)}: the Hub names {info.sha!r}, wanted a commit's sha")
        return str(info.sha)

    async def _highest(self, repo: str, pattern: str) -> str:
        refs = await self._ask(repo, pattern, lambda: self._api.list_repo_refs(repo))
        tags = [tag for tag in refs.tags if is_about(pattern, tag.ref)]
        if not tags:
            raise SourceError("unknown_revision", f"{repo}: no tag is like {pattern!r}")
        return max(tags, key=lambda tag: _natural(tag.name)).target_commit

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        """Whether a commit is among those before another."""
        if sha == than:
            return False
        try:
            history = await self._ask(repo, than, lambda: self._api.list_repo_commits(repo, revision=than))
        except SourceError as error:
            if error.code == "unknown_revision":
                return None  # the history was rewritten, or what runs came from elsewhere
            raise
        return sha in {commit.commit_id for commit in history}

    async def fetch(self, repo: str, sha: str, tell: Callable[[str], None]) -> Path:
        """Fetch by sha, then compare each file with the tree; a file that differs is taken out of the cache."""
        tell("listing")
        tree = await self._ask(
            repo, sha, lambda: list(self._api.list_repo_tree(repo, revision=sha, recursive=True)), self.limits.answer
        )
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        check_complete(f"{repo} at {sha[:12]}", {file.path for file in files})
        wanted = [file for file in files if is_policy_file(file.path)]
        if wrong := [file.path for file in wanted if not (type(file.size) is int and file.size >= 0)]:
            raise SourceError("bad_answer", f"{repo} at {sha[:12]}: the Hub does not say how large {wrong[0]} is")
        self._check_space(repo, sha, wanted)
        tell("downloading")
        is_abandoned = threading.Event()
        try:
            size = sum(file.size for file in wanted)
            # A transfer that broke off may begin anew.
            most = size + size // 2 + LARGEST_ANSWER
            download = self.limits.download
            await self._ask(repo, sha, lambda: self._download(repo, sha, wanted, is_abandoned), download, most)
        finally:
            is_abandoned.set()
        tell("verifying")
        await self._ask(repo, sha, lambda: self._verify(repo, sha, wanted), self.limits.download)
        if self._is_our_cache:
            await self._ask(repo, sha, lambda: self._prune(repo, sha), self.limits.download)
        return self._folder(repo, sha)

    def _folder(self, repo: str, sha: str) -> Path:
        return self._cache / f"models--{repo.replace('/', '--')}" / "snapshots" / sha

    def _check_space(self, repo: str, sha: str, files: Sequence[RepoFile]) -> None:
        size = sum(file.size for file in files)
        if size > self.limits.largest:
            raise SourceError(
                "too_large", f"{repo} at {sha[:12]}: {size} bytes, allowed are {self.limits.largest}; raise the limit"
            )
        self._cache.mkdir(parents=True, exist_ok=True)
        folder = self._folder(repo, sha)
        needed = sum(file.size for file in files if not (folder / file.path).exists())
        free = shutil.disk_usage(self._cache).free
        if needed and needed + self.limits.kept_free > free:
            raise SourceError(
                "disk",
                f"{repo} at {sha[:12]}: needs {needed} bytes and {self.limits.kept_free} kept free, "
                f"{free} are free; make room",
            )

    def _download(self, repo: str, sha: str, files: Sequence[RepoFile], is_abandoned: threading.Event) -> None:
        """One file after the other: a whole snapshot's threads would hold the end of the process when they hang."""
        # On Linux niceness belongs to a thread and those that it starts.
        if self.limits.niceness and sys.platform == "linux":
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), self.limits.niceness))
        bar = _bar(is_abandoned)
        for file in sorted(files, key=lambda file: file.size):
            self._api.hf_hub_download(
                repo,
                file.path,
                revision=sha,
                cache_dir=self._cache,
                tqdm_class=bar,  # pyright: ignore[reportArgumentType] - declared as its asyncio variant
            )

    def _verify(self, repo: str, sha: str, wanted: Sequence[RepoFile]) -> None:
        folder = self._folder(repo, sha)
        found = self._api.verify_repo_checksums(repo, revision=sha, cache_dir=self._cache)
        bad = [mismatch["path"] for mismatch in found.mismatches]
        for name in bad:
            # The blob too: other commits' snapshots would take it for the right one.
            (folder / name).resolve().unlink(missing_ok=True)
            (folder / name).unlink(missing_ok=True)
        if bad:
            raise SourceError(
                "checksum", f"{repo} at {sha[:12]}: {', '.join(sorted(bad))} came with other bytes than the commit has"
            )
        lacking = sorted({file.path for file in wanted} & set(found.missing_paths))
        if lacking:
            raise SourceError("transfer", f"{repo} at {sha[:12]}: {', '.join(lacking)} did not arrive")

    def _prune(self, repo: str, newest: str) -> None:
        os.utime(self._folder(repo, newest))
        found = scan_cache_dir(self._cache)
        commits = [
            (self._folder(repo, revision.commit_hash).stat().st_mtime, revision.commit_hash)
            for one in found.repos
            if one.repo_id == repo and one.repo_type == "model"
            for revision in one.revisions
        ]
        if old := [sha for _, sha in sorted(commits, reverse=True)[self.limits.kept :]]:
            found.delete_revisions(*old).execute()

    async def _ask(
        self,
        repo: str,
        ref: str | None,
        call: Callable[[], Result],
        limit: float | None = None,
        size: int = LARGEST_ANSWER,
    ) -> Result:
        """Call in a thread; whatever goes wrong becomes a `SourceError`."""
        what = _named(repo, ref)
        # A little longer than the client's own limit, whose error says more.
        seconds = self.limits.answer + 1 if limit is None else limit

        def work() -> Result:
            with self._bounded(seconds, size):
                return call()

        try:
            return await asyncio.wait_for(asyncio.wrap_future(begin(work)), seconds)
        except SourceError:
            raise
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
        except _NONSENSE as error:
            raise SourceError(
                "bad_answer", f"{what}: the Hub's answer makes no sense ({type(error).__name__}: {str(error)[:200]})"
            ) from error


def _named(repo: str, ref: str | None) -> str:
    return f"{repo} at {ref[:12] if SHA.fullmatch(ref) else ref!r}" if ref else repo


def _cause(error: BaseException) -> str:
    return type(error.__cause__ or error).__name__


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
