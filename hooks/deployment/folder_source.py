"""Policies in folders on this machine: the "commit" of one is a hash of its files' names and contents."""

import asyncio
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from hooks.deployment.source import SHA
from hooks.errors import SourceError
from hooks.limits import begin
from hooks.policy_files import check_complete, content_sha, is_policy_file, open_regular

Result = TypeVar("Result")

# A file that was written so short before it was read may be written again within the same tick of the file system.
FRESH = 2.0
CHUNK = 1 << 20


class FolderSource:
    """Folders; ``repo`` is the path of one. What is fetched is a copy: the folder may be written to at any time."""

    def __init__(
        self,
        cache: Path,
        *,
        kept: int = 4,
        seconds: float = 600.0,
        largest: int = 20 << 30,
        roots: Sequence[Path] | None = None,
    ):
        """Nothing is read yet.

        Args:
            cache: where copies are kept, the newest so many of each folder.
            seconds: for reading or copying a folder.
            largest: bytes of all files of a policy; twice as many have to be free on the cache's disk.
            roots: folders that files have to be in, wherever links lead to; anywhere when None.
        """
        self.kept = kept
        self._cache = Path(cache)
        self._seconds = seconds
        self._largest = largest
        self._roots = roots
        self._hashes: dict[Path, tuple[tuple[int, ...], str]] = {}

    async def head(self, repo: str, ref: str | None) -> str:
        """The hash of the folder now; a hash as ``ref`` if that is what it is, or if a copy of it is kept."""
        if ref is not None and SHA.fullmatch(ref) and _is_folder(self._copies(repo) / ref):
            return ref
        sha = await self._work(repo, lambda: self._hash(Path(repo)))
        if ref not in (None, "main", sha):
            raise SourceError(
                "unknown_revision", f"{repo}: a folder has no revision {ref!r}, and no copy of it is kept"
            )
        return sha

    async def is_older(self, repo: str, sha: str, than: str) -> bool | None:
        """A folder has no history."""
        return None

    async def fetch(self, repo: str, sha: str, tell: Callable[[str], None]) -> Path:
        """Copy it; the copy is hashed again, so that one torn by a writer is refused with ``changed_meanwhile``."""
        tell("copying")
        return await self._work(repo, lambda: self._copy(Path(repo), sha))

    def _copies(self, repo: str | Path) -> Path:
        return self._cache / hashlib.sha256(str(Path(repo).absolute()).encode()).hexdigest()[:16]

    def _copy(self, folder: Path, sha: str) -> Path:
        kept = self._copies(folder) / sha
        if kept.is_dir():
            if _hash_of(_files(kept), self._content_hash) == sha:
                os.utime(kept)
                return kept
            shutil.rmtree(kept)
        part = kept.with_name(f".{sha}.{uuid.uuid4().hex[:8]}")
        part.mkdir(parents=True)
        try:
            files = _files(folder)
            check_complete(str(folder), {path.name for path in folder.iterdir()})
            self._check_room(folder, files)
            for path in files:
                with self._open(path) as source, (part / path.name).open("wb") as target:
                    shutil.copyfileobj(source, target, CHUNK)
            if _hash_of(_files(part), self._content_hash) != sha:
                raise SourceError("changed_meanwhile", f"{folder}: was written to while it was copied")
            part.rename(kept)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._prune(kept)
        return kept

    def _check_room(self, folder: Path, files: list[Path]) -> None:
        size, free = sum(path.stat().st_size for path in files), shutil.disk_usage(self._cache).free
        if size > self._largest:
            raise SourceError("too_large", f"{folder}: {size} bytes, allowed are {self._largest}; raise the limit")
        if 2 * size > free:
            raise SourceError("disk", f"{folder}: has {size} bytes, and only {free} are free for a copy; make room")

    def _prune(self, newest: Path) -> None:
        copies = [path for path in newest.parent.iterdir() if SHA.fullmatch(path.name) and path != newest]
        for old in sorted(copies, key=lambda path: path.stat().st_mtime, reverse=True)[self.kept - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
        for part in newest.parent.glob(".*"):  # of a process that was killed
            if time.time() - part.stat().st_mtime > self._seconds:
                shutil.rmtree(part, ignore_errors=True)

    def _hash(self, folder: Path) -> str:
        return _hash_of(_files(folder), self._known_hash)

    def _known_hash(self, path: Path) -> str:
        status = path.stat()
        mark = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        held = self._hashes.get(path)
        if held is not None and held[0] == mark:
            return held[1]
        content = self._content_hash(path)
        # A clock that was set back makes it a file of the time to come; read anew at each look, it would load the disk.
        if abs(time.time() - max(status.st_mtime, status.st_ctime)) > FRESH:
            self._hashes[path] = (mark, content)
        return content

    def _content_hash(self, path: Path) -> str:
        read = hashlib.sha256()
        with self._open(path) as file:
            while chunk := file.read(CHUNK):
                read.update(chunk)
        return read.hexdigest()

    def _open(self, path: Path) -> BinaryIO:
        # Its own copies are in no root.
        return open_regular(path, self._largest, None if self._cache in path.parents else self._roots)

    async def _work(self, repo: str, call: Callable[[], Result]) -> Result:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(begin(call)), self._seconds)
        except TimeoutError as error:
            raise SourceError("timeout", f"{repo}: could not be read within {self._seconds:g} s") from error
        except FileNotFoundError as error:
            # A writer that replaces files takes them away for a moment.
            code = "changed_meanwhile" if _is_folder(Path(repo)) else "unknown_repo"
            raise SourceError(code, f"{repo}: {error.filename or 'a file'} is not there") from error
        except OSError as error:
            raise SourceError("disk", f"{repo}: {error.strerror or type(error).__name__}") from error


def _is_folder(path: Path) -> bool:
    return path.is_dir()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_policy_file(path.name) and path.is_file())


def _hash_of(files: list[Path], content: Callable[[Path], str]) -> str:
    return content_sha(((path.name, path) for path in files), content)
