"""Watcher that reports policy folders when their content has changed and settled.

A folder is looked at twice over: cheaply for its files' names, sizes and times, which tells that something moves, and
by its content, which tells whether anything is different.
"""

import asyncio
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from watchfiles import awatch

# Files of a policy, by LeRobot's names and by those of this package.
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
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_SHARDS = 64
_SHARD = re.compile(r"model-[0-9]{5}-of-([0-9]{5})\.safetensors")
# Of models that policies are built on, in folders of the model's name within the policy's.
_MODEL_DEPTH = 3
_FILE = re.compile(r"(?!.*(^|/)\.)(?!/)[A-Za-z0-9_./+@=-]{1,240}")

# (path within the folder, size, time of the last change, inode): an exchanged file of the same size and time differs.
FolderState = frozenset[tuple[str, int, int, int]]

# What is still being written, by the names that writers give it.
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~")


def is_policy_file(name: str) -> bool:
    """Whether a file of this name, ``/`` between folders, belongs to a policy; never one that leads elsewhere."""
    *folders, last = name.split("/")
    # A pattern's ``*`` stands for any letters, those of a path that leads elsewhere too.
    if not _FILE.fullmatch(name) or "" in folders:
        return False
    if not folders:
        return any(fnmatchcase(name, pattern) for pattern in POLICY_FILES if "/" not in pattern)
    return len(folders) <= _MODEL_DEPTH and f"*/{last}" in POLICY_FILES


def find_missing(names: Collection[str]) -> list[str]:
    """Names of files that every policy needs and that are not there; weights are in one file, or in shards."""
    missing = [] if _CONFIG in names else [_CONFIG]
    if _INDEX not in names:
        return missing if _WEIGHTS in names else [*missing, _WEIGHTS]
    count = max((int(shard[1]) for name in names if (shard := _SHARD.fullmatch(name))), default=1)
    shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, min(count, MAX_SHARDS) + 1)]
    return missing + [shard for shard in shards if shard not in names]


def hash_content(files: Iterable[tuple[str, Path]], content: Callable[[Path], str]) -> str:
    """Hash the names and contents of files to 40 hexadecimal digits, the form of a commit.

    As long as a commit's sha, so that both fit into the same places; the same content gives the same everywhere.

    Args:
        files: name within the folder, and where it is.
        content: SHA-256 of a file, in hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files):
        digest.update(f"{content(path)}  {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:40]


class WatchStopped(Exception):
    """Reading a folder was stopped before its end."""


class SettleTimer:
    """Timer for how long a folder has been unchanged.

    Attributes:
        quiet: seconds.
    """

    def __init__(self, seconds: float):
        self.quiet = seconds
        self._state: FolderState | None = None
        self._since = 0.0

    def get_remaining(self, state: FolderState | None, now: float) -> float:
        """Return the seconds until the folder counts as settled if it does not change; 0 when it does now.

        Args:
            state: how it is now; None when it is not there.
            now: monotonic seconds.
        """
        if state != self._state:
            self._state, self._since = state, now
        return max(self._since + self.quiet - now, 0.0)


def scan_folder(folder: Path) -> FolderState | None:
    """Scan a folder's files; None when it does not exist (a new one may be about to replace it)."""
    if not folder.is_dir():
        return None
    files = set()
    for name, path in _list_watched_files(folder):
        try:
            status = path.stat()
        except OSError:
            continue  # gone since; the next look is another one then
        files.add((name, status.st_size, status.st_mtime_ns, status.st_ino))
    return frozenset(files)


def hash_folder(folder: Path, stop: threading.Event) -> str:
    """Hash a folder's content; for a policy, the hash that ``FolderSource`` takes for its commit.

    Raises:
        OSError: a file was taken away meanwhile, or cannot be read.
        WatchStopped: ``stop`` was set.
    """

    def hash_file(path: Path) -> str:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                if stop.is_set():
                    raise WatchStopped
                digest.update(block)
        return digest.hexdigest()

    return hash_content(_list_watched_files(folder), hash_file)


def _list_watched_files(folder: Path) -> list[tuple[str, Path]]:
    """List the policy's files; all files while the folder is not a whole policy."""
    files = list(_list_all_files(folder))
    names = {name for name, _ in files}
    if find_missing(names):
        return files
    return [(name, path) for name, path in files if is_policy_file(name)]


def _list_all_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_temporary(name)]
        for name in names:
            path = Path(root, name)
            if not _is_temporary(name) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _is_temporary(name: str) -> bool:
    return name.startswith(".") or name.endswith(UNFINISHED)


logger = logging.getLogger(__name__)

# Milliseconds in which the kernel's notices are gathered; ``SettleTimer`` waits for the folder to rest.
DEBOUNCE = 50
# Milliseconds after which a watch says that it heard nothing. The first time it does, the folder is looked at once
# more: what moved before the watch was there was not heard.
WATCH_TIMEOUT = 500


class FolderWatcher:
    """Watches folders that may be written in place, replaced by a rename, or not exist yet."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        on_settled: Callable[[str, str], Awaitable[None]],
        *,
        quiet: float,
        poll: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Make a watcher; nothing is watched before ``run``.

        Args:
            on_settled: told a folder's name and the sha of its content, at the start and after each time it moved.
            quiet, poll: seconds; see ``RegistrySettings``.
        """
        self._folders = folders
        self._on_settled = on_settled
        self._quiet = quiet
        self._poll = poll
        self._clock = clock
        self._stop = threading.Event()

    async def run(self) -> None:
        """Watch the folders until cancelled."""
        # It tells every change at INFO: a log file beside a folder would be told of its own lines for ever.
        logging.getLogger("watchfiles.main").setLevel(logging.WARNING)
        tasks = []
        for name, folder in self._folders.items():
            path = folder.absolute()
            moved, replaced = asyncio.Event(), asyncio.Event()
            tasks += [
                asyncio.create_task(self._watch_folder(name, path, moved), name=f"follow {name}"),
                asyncio.create_task(self._watch_parent(path, moved, replaced), name=f"hear parent of {name}"),
                asyncio.create_task(self._watch_content(path, moved, replaced), name=f"hear {name}"),
            ]
        try:
            await asyncio.gather(*tasks)
        finally:
            self._stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_folder(self, name: str, folder: Path, moved: asyncio.Event) -> None:
        timer = SettleTimer(self._quiet)
        reported: FolderState | None = None
        while True:
            moved.clear()
            state = await asyncio.to_thread(scan_folder, folder)
            wait = timer.get_remaining(state, self._clock())
            # An empty folder is one that is about to be filled.
            if not state or state == reported:
                await _wait_for_event(moved, self._poll)
            elif wait:
                await asyncio.sleep(wait)
            elif await self._report_settled(name, folder, state):
                reported = state
            else:
                await asyncio.sleep(self._quiet)

    async def _report_settled(self, name: str, folder: Path, state: FolderState) -> bool:
        """Hash and report the content; return whether it stayed the same while it was read."""
        try:
            sha = await asyncio.to_thread(hash_folder, folder, self._stop)
        except OSError as error:
            logger.info("folder %s: %s; it is looked at again", name, error.strerror or type(error).__name__)
            return False
        except WatchStopped:
            return False
        if await asyncio.to_thread(scan_folder, folder) != state:
            return False
        await self._on_settled(name, sha)
        return True

    async def _watch_parent(self, folder: Path, moved: asyncio.Event, replaced: asyncio.Event) -> None:
        """Watch for the folder itself being made, replaced or removed: a watch on it would follow the old one."""
        while True:
            try:
                is_new = True
                async for changes in awatch(
                    folder.parent,
                    watch_filter=None,
                    recursive=False,
                    debounce=DEBOUNCE,
                    rust_timeout=WATCH_TIMEOUT,
                    yield_on_timeout=True,
                ):
                    if is_new or any(Path(path).name == folder.name for _, path in changes):
                        replaced.set()
                        moved.set()
                    is_new = False
            except OSError as error:
                logger.info("folder %s: no notices of its parent (%s); it is polled", folder, error)
            await asyncio.sleep(self._poll)

    async def _watch_content(self, folder: Path, moved: asyncio.Event, replaced: asyncio.Event) -> None:
        is_missed = False
        while True:
            replaced.clear()
            try:
                is_new = True
                async for changes in awatch(
                    folder,
                    watch_filter=None,
                    stop_event=replaced,
                    debounce=DEBOUNCE,
                    rust_timeout=WATCH_TIMEOUT,
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
                await _wait_for_event(replaced, self._poll)


async def _wait_for_event(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
