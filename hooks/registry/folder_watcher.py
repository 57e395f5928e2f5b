"""Reports policy folders whose content changed and settled.

A folder is looked at twice over: cheaply for its files' names, sizes and times, which tells that something moves, and
by its content, which tells whether anything is different.
"""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from watchfiles import awatch

from hooks.policy_files import REQUIRED, content_sha, is_policy_file

# (path within the folder, size, time of the last change, inode): an exchanged file of the same size and time differs.
Look = frozenset[tuple[str, int, int, int]]

# What is still being written, by the names that writers give it.
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~")


class Stopped(Exception):
    """Reading was ended before it was through."""


class Quiet:
    """Tells when a folder was the same for long enough.

    Attributes:
        quiet: seconds.
    """

    def __init__(self, quiet: float):
        self.quiet = quiet
        self._look: Look | None = None
        self._since = 0.0

    def wait(self, look: Look | None, now: float) -> float:
        """Seconds until it can be taken as whole if nothing moves any more; 0: it can.

        Args:
            look: how it is now; None when it is not there.
            now: monotonic seconds.
        """
        if look != self._look:
            self._look, self._since = look, now
        return max(self._since + self.quiet - now, 0.0)


def look_at(folder: Path) -> Look | None:
    """The folder's files, or None when it is not there (a new one is about to take its place, say)."""
    if not folder.is_dir():
        return None
    found = set()
    for name, path in _files(folder):
        try:
            status = path.stat()
        except OSError:
            continue  # gone since; the next look is another one then
        found.add((name, status.st_size, status.st_mtime_ns, status.st_ino))
    return frozenset(found)


def sha_of(folder: Path, stop: threading.Event) -> str:
    """What the folder's content is called; of a policy, what ``FolderSource`` takes for its commit.

    Raises:
        OSError: a file was taken away meanwhile, or cannot be read.
        Stopped: ``stop`` was set.
    """

    def content(path: Path) -> str:
        read = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                if stop.is_set():
                    raise Stopped
                read.update(block)
        return read.hexdigest()

    return content_sha(_files(folder), content)


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Those of a policy; all files, when the folder is none (yet)."""
    files = list(_all_files(folder))
    names = {name for name, _ in files}
    if not all(name in names for name in REQUIRED):
        return files
    return [(name, path) for name, path in files if is_policy_file(name)]


def _all_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_aside(name)]
        for name in names:
            path = Path(root, name)
            if not _is_aside(name) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _is_aside(name: str) -> bool:
    return name.startswith(".") or name.endswith(UNFINISHED)


logger = logging.getLogger(__name__)

# Milliseconds in which the kernel's notices are gathered; ``Quiet`` waits for the folder to rest.
GATHER = 50
# Milliseconds after which a watch says that it heard nothing. The first time it does, the folder is looked at once
# more: what moved before the watch was there was not heard.
SILENCE = 500


class FolderWatcher:
    """Watches folders that may be written in place, exchanged by a rename, or not be there yet."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        settled: Callable[[str, str], Awaitable[None]],
        *,
        quiet: float,
        poll: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Make one; ``run`` it.

        Args:
            settled: told a folder's name and the sha of its content, at the start and after each time it moved.
            quiet, poll: seconds; see ``RegistrySettings``.
        """
        self._folders = folders
        self._settled = settled
        self._quiet = quiet
        self._poll = poll
        self._clock = clock
        self._stop = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        # It tells every change at INFO: a log file beside a folder would be told of its own lines for ever.
        logging.getLogger("watchfiles.main").setLevel(logging.WARNING)
        tasks = []
        for name, folder in self._folders.items():
            place = folder.absolute()
            moved, replaced = asyncio.Event(), asyncio.Event()
            tasks += [
                asyncio.create_task(self._follow(name, place, moved), name=f"follow {name}"),
                asyncio.create_task(self._hear_parent(place, moved, replaced), name=f"hear parent of {name}"),
                asyncio.create_task(self._hear_content(place, moved, replaced), name=f"hear {name}"),
            ]
        try:
            await asyncio.gather(*tasks)
        finally:
            self._stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, name: str, folder: Path, moved: asyncio.Event) -> None:
        quiet = Quiet(self._quiet)
        known: Look | None = None
        while True:
            moved.clear()
            look = await asyncio.to_thread(look_at, folder)
            wait = quiet.wait(look, self._clock())
            # An empty folder is one that is about to be filled.
            if not look or look == known:
                await _until(moved, self._poll)
            elif wait:
                await asyncio.sleep(wait)
            elif await self._settle(name, folder, look):
                known = look
            else:
                await asyncio.sleep(self._quiet)

    async def _settle(self, name: str, folder: Path, look: Look) -> bool:
        """Read the content and tell; whether it was the same from the first byte to the last."""
        try:
            sha = await asyncio.to_thread(sha_of, folder, self._stop)
        except OSError as error:
            logger.info("folder %s: %s; it is looked at again", name, error.strerror or type(error).__name__)
            return False
        except Stopped:
            return False
        if await asyncio.to_thread(look_at, folder) != look:
            return False
        await self._settled(name, sha)
        return True

    async def _hear_parent(self, folder: Path, moved: asyncio.Event, replaced: asyncio.Event) -> None:
        """Hear of the folder itself being made, exchanged or taken away: its own watch would follow the old one."""
        while True:
            try:
                is_new = True
                async for changes in awatch(
                    folder.parent,
                    watch_filter=None,
                    recursive=False,
                    debounce=GATHER,
                    rust_timeout=SILENCE,
                    yield_on_timeout=True,
                ):
                    if is_new or any(Path(path).name == folder.name for _, path in changes):
                        replaced.set()
                        moved.set()
                    is_new = False
            except OSError as error:
                logger.info("folder %s: no notices of its parent (%s); it is polled", folder, error)
            await asyncio.sleep(self._poll)

    async def _hear_content(self, folder: Path, moved: asyncio.Event, replaced: asyncio.Event) -> None:
        is_missed = False
        while True:
            replaced.clear()
            try:
                is_new = True
                async for changes in awatch(
                    folder,
                    watch_filter=None,
                    stop_event=replaced,
                    debounce=GATHER,
                    rust_timeout=SILENCE,
                    yield_on_timeout=True,
                ):
                    if changes or is_new:
                        moved.set()
                    is_new = False
            except OSError as error:
                was_missed, is_missed = is_missed, isinstance(error, FileNotFoundError)
                if not is_missed:  # more files than the system watches (fs.inotify.max_user_watches)
                    logger.info("folder %s: no notices of its content (%s); it is polled", folder, error)
                elif not was_missed:
                    logger.warning("folder %s is not there; it is watched as soon as it is", folder)
                await _until(replaced, self._poll)


async def _until(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
