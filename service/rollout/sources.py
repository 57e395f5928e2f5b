"""Policy sources: commits from the Hub or from folders, fetched and verified; tracks the heads of refs."""

import asyncio
import hashlib
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import jaxmodels
from hooks.errors import HooksError
from hooks.threads import start_in_thread
from jaxmodels import list_policy_files
from jaxmodels.errors import HubError
from service.rollout.triggers import BRANCH, TAG, is_pattern, matches_ref

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


class PolicySource(Protocol):
    """Place that has policies at commits. All methods raise `SourceError`, e.g. ``unreachable``."""

    async def head(self, repo: str, ref: str | None) -> str:
        """Return the commit that a ref points to now: 40 hexadecimal digits."""
        ...

    async def fetch(self, repo: str, sha: str, on_progress: Callable[[str], None]) -> Path:
        """Return the folder of exactly that commit, with every byte verified."""
        ...

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        """Return whether a commit is an ancestor of another; None if the source cannot tell."""
        ...


Result = TypeVar("Result")


@dataclass(frozen=True)
class HubLimits:
    """Limits of fetching from the Hub."""

    answer_timeout: float = 30.0  # seconds for a question to the Hub
    download_timeout: float = 1800.0  # seconds for all files of a commit
    max_bytes: int = 20 << 30  # bytes of all files of a commit
    min_free_bytes: int = 1 << 30  # bytes of the disk that stay free
    max_commits: int = 4  # commits of a repo that a cache of our own keeps


class HubSource:
    """Source of repos of one Hub, which child processes ask (`jaxmodels.ask_hub`)."""

    def __init__(
        self,
        endpoint: str | None = None,
        token: str | None = None,
        cache: Path | None = None,
        limits: HubLimits | None = None,
    ):
        """Create the source. Without a ``cache``, it uses the client's usual folder, and removes nothing there."""
        self.limits = limits or HubLimits()
        self._where: Any = {"endpoint": endpoint, "token": token}
        self._cache = Path(cache or jaxmodels.hub_cache())
        self._is_our_cache = cache is not None

    async def head(self, repo: str, ref: str | None) -> str:
        """Return the commit of a branch, tag or commit, or of the highest tag of a pattern: v10 is higher than v9."""
        if ref is not None and is_pattern(ref):
            tags = {tag: sha for tag, sha in (await self._ask("tags", repo, None)).items() if matches_ref(ref, tag)}
            if not tags:
                raise SourceError("unknown_revision", f"{repo}: no tag is like {ref!r}")
            return tags[max(tags, key=_natural_sort_key)]
        return await self._ask("head", repo, None if ref is None else ref.removeprefix(BRANCH).removeprefix(TAG))

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        if sha == than:
            return False
        try:
            return sha in await self._ask("commits", repo, than)
        except SourceError as error:
            if error.code == "unknown_revision":
                return None  # The history was rewritten, or the running commit came from another repo.
            raise

    async def fetch(self, repo: str, sha: str, on_progress: Callable[[str], None]) -> Path:
        """Fetch by sha in a child process, which compares each file with its hash and removes a file that differs."""
        on_progress("listing")
        loop = asyncio.get_running_loop()
        where = {**self._where, "cache": self._cache, "largest": self.limits.max_bytes}

        def check_files(sizes: Mapping[str, int | None]) -> None:
            _check_complete(f"{repo} at {sha[:12]}", set(sizes))
            self._check_space(repo, sha, {name: size for name, size in sizes.items() if size is not None})
            loop.call_soon_threadsafe(on_progress, "downloading")

        def download(check: Callable[[str], None]) -> Path:
            def report(stage: Any) -> None:
                check(stage)
                if stage.done and stage.done == stage.total:
                    loop.call_soon_threadsafe(on_progress, "verifying")

            folder = jaxmodels.fetch(repo, sha, on_progress=report, on_listing=check_files, **where)
            if self._is_our_cache:
                self._prune(folder)
            return folder

        return await self._call_hub(repo, sha, download, self.limits.download_timeout)

    def _check_space(self, repo: str, sha: str, sizes: Mapping[str, int]) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        folder = self._cache / f"models--{repo.replace('/', '--')}" / "snapshots" / sha
        needed = sum(size for name, size in sizes.items() if not (folder / name).exists())
        free = shutil.disk_usage(self._cache).free
        if needed and needed + self.limits.min_free_bytes > free:
            text = f"needs {needed} bytes and {self.limits.min_free_bytes} kept free, {free} are free; make room"
            raise SourceError("disk", f"{repo} at {sha[:12]}: {text}")

    def _prune(self, newest: Path) -> None:
        """Remove the oldest commits of a repository, and the files that no other commit has."""
        os.utime(newest)
        commits = sorted(newest.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in commits[self.limits.max_commits :]:
            shutil.rmtree(old, ignore_errors=True)
        used = {path.resolve() for path in newest.parent.rglob("*")}
        for blob in (newest.parents[1] / "blobs").resolve().iterdir():
            if blob not in used and not blob.name.endswith(".incomplete"):
                blob.unlink(missing_ok=True)

    async def _ask(self, asked: Any, repo: str, revision: str | None) -> Any:
        ask = partial(jaxmodels.ask_hub, asked, repo, revision, **self._where)
        return await self._call_hub(repo, revision, lambda check: ask(on_progress=check), self.limits.answer_timeout)

    async def _call_hub(
        self, repo: str, ref: str | None, call: Callable[[Callable[[str], None]], Result], seconds: float
    ) -> Result:
        """Call in a thread with a time limit; the call ends when its argument, which it calls often, raises."""
        late = SourceError("timeout", f"{_describe_revision(repo, ref)}: the Hub did not answer within {seconds:g} s")
        is_abandoned = threading.Event()

        def check(stage: str) -> None:
            if is_abandoned.is_set():
                raise late

        try:
            return await asyncio.wait_for(asyncio.wrap_future(start_in_thread(lambda: call(check))), seconds)
        except HubError as error:
            raise SourceError(error.code, str(error)) from error
        except TimeoutError as error:
            raise late from error
        except OSError as error:
            text = f"{_describe_revision(repo, ref)}: {self._cache} cannot be written ({error.strerror})"
            raise SourceError("disk", text) from error
        finally:
            is_abandoned.set()


def _find_missing(names: Collection[str]) -> list[str]:
    """Names of files that every policy needs and that are not there; weights are in one file, or in shards."""
    missing = [] if _CONFIG in names else [_CONFIG]
    if _INDEX not in names:
        return missing if _WEIGHTS in names else [*missing, _WEIGHTS]
    count = max((int(shard[1]) for name in names if (shard := _SHARD.fullmatch(name))), default=1)
    shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, min(count, MAX_SHARDS) + 1)]
    return missing + [shard for shard in shards if shard not in names]


def _check_complete(repo: str, names: set[str]) -> None:
    """Raise SourceError if files that every policy needs are missing, or are pickles."""
    missing = _find_missing(names)
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if _WEIGHTS in missing and pickles:
        text = f"its weights are in {', '.join(pickles)}, which may run code when loaded; wanted model.safetensors"
        raise SourceError("denied_file", f"{repo}: {text}: convert and push them")
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


def _natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


# Seconds between the last write of a file and its reading below which its hash is not cached: another write could
# get the same time stamp from the file system.
SETTLE_SECONDS = 2.0
READ_BYTES = 1 << 20
# Files and folders of a policy, of which usual policies have ten, and levels of folders that are listed.
MAX_ENTRIES, MAX_DEPTH = 5000, 3


class FolderSource:
    """Source of folders; ``repo`` is a path. Fetching copies the folder, because its owner may write to it at any time.

    Threads list, hash and copy the files. `MAX_ENTRIES` bounds the time for which listing keeps Python's lock.
    """

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
            cache: folder of the copies; the newest ``max_copies`` of each folder are kept.
            seconds: for reading or copying a folder.
            largest: limit for the bytes of a policy; the cache's disk needs twice as many free bytes.
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
        """Copy the folder and hash the copy, because a program may write to the folder meanwhile.

        Raises:
            PolicyError: ``changed_meanwhile``: the hashes differ.
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
            names = _list_files(there)
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
        for part in newest.parent.glob(".*"):  # Parts that a killed process left.
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
    """Return where a folder is. A reading resolves it once, because a link may change and mix files of two folders."""
    return Path(os.path.realpath(folder, strict=True))  # Path.resolve has no OSError for links in a circle before 3.13


def _list_files(folder: Path) -> list[str]:
    """Return the names of a policy's files, sorted.

    Raises:
        SourceError: ``too_large`` for more entries than a policy has.
        OSError: the folder cannot be read.
    """
    level, count = [str(folder)], 0
    for _ in range(MAX_DEPTH + 1):
        deeper: list[str] = []
        for path in level:
            with os.scandir(path) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_ENTRIES:
                        text = (
                            f"{folder}: over {MAX_ENTRIES} files and folders; remove those that are not of the policy"
                        )
                        raise SourceError("too_large", text)
                    if entry.is_dir(follow_symlinks=False):
                        deeper.append(entry.path)
        level = deeper
    return list_policy_files(folder)


def _hash_of(folder: Path, content: Callable[[Path], str]) -> str:
    """Hash the names and contents of a policy's files to 40 hexadecimal digits, the length of a commit's sha.

    Args:
        folder: the policy's folder.
        content: SHA-256 of a file, in hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name in _list_files(folder):
        digest.update(f"{content(folder / name)}  {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:40]
