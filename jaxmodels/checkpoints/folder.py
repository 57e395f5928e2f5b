"""Folder of a policy, whose files are each opened once and checked to be regular files.

A folder may be hostile and may change while it is read. Therefore the check and the reader of a file share one
descriptor, and read at most the size that the file had when it was opened. Pipes and devices never block, links may
only lead into allowed folders, and no file is mapped into memory, because truncating a mapped file ends the process.
"""

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxmodels.errors import CheckpointError

JSON_BYTES = 1 << 20  # LeRobot's files have a few thousand bytes, an index of 1700 tensors has 200,000.
TOKENIZER_BYTES = 32 << 20  # CLIP's tokenizer has two million bytes.
STATE_BYTES = 16 << 20  # Statistics of features have a few thousand bytes.
WEIGHT_BYTES = 1 << 40
# A larger file must occupy more than a sixteenth of its bytes on the disk, because holes cost nothing to make.
SPARSE_BYTES = 64 << 20
SPARSE_PART = 16
ENTRIES = 10_000  # Names in a folder; a policy's folder has ten.
STATE_FILES = 64
SHARDS = 64
ALIGNMENT = 64  # Bytes. A program on a CPU reads aligned arrays without a copy.
SEARCH_DEPTH = 3  # Depth of the search for a policy below a folder that is not a policy.
SEARCH_FOLDERS = 200
TREE_ENTRIES = 100_000  # Files and folders of an Orbax checkpoint.
TREE_DEPTH = 32
ORBAX = "orbax"
PARAMS, TRAINING = "params", "train_state"  # Trees of openpi's checkpoints.
BUNDLE = "bundle.json"  # Manifest of an exported policy.
NORM_STATS = "norm_stats.json"  # File of openpi's statistics, in subfolders.
# Files that are always opened, and their largest sizes. Files of statistics have other names.
KNOWN: Mapping[str, int] = {
    "config.json": JSON_BYTES,
    "robojax.json": JSON_BYTES,
    "policy_preprocessor.json": JSON_BYTES,
    "policy_postprocessor.json": JSON_BYTES,
    "tokenizer.json": TOKENIZER_BYTES,
    "model.safetensors": WEIGHT_BYTES,
    "model.safetensors.index.json": JSON_BYTES,
    "architecture.json": JSON_BYTES,
    "stats.json": JSON_BYTES,
    BUNDLE: JSON_BYTES,
    "executables.safetensors": 256 << 20,
}
SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
# Names of safetensors files that do not lead out of the folder.
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
# Files of a model that a policy is built on (``google/paligemma-3b-pt-224/tokenizer.json``), and limits of the search.
OF_MODELS = ("config.json", "tokenizer.json", NORM_STATS)
MODEL_DEPTH = 3
MODEL_FILES = 64
_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def empty_aligned(count: int) -> np.ndarray:
    """Return uninitialised memory of `count` bytes that begins at a multiple of `ALIGNMENT`."""
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]


class OpenFile:
    """Regular file that is open for reading; at most `size` bytes, its size when opened, are read."""

    def __init__(self, descriptor: int, name: str):
        """Take ownership of the descriptor."""
        self.name = name
        self.descriptor = descriptor
        self.identity = get_identity(os.fstat(descriptor))
        self.size = self.identity[2]

    def exists(self) -> bool:
        """Return True, for callers that also accept paths."""
        return True

    def read(self, start: int = 0, count: int | None = None) -> bytes:
        """Return bytes from an offset; raises CheckpointError if the file is now shorter than when it was opened."""
        return self.array(start, self.size - start if count is None else min(count, self.size - start)).tobytes()

    def array(self, start: int, count: int) -> np.ndarray:
        """Return exactly `count` bytes from an offset; raises CheckpointError if the file is shorter."""
        raw = empty_aligned(max(count, 0))
        view, done = raw.data, 0
        while done < count:
            got = os.preadv(self.descriptor, [view[done : done + (1 << 30)]], start + done)
            if not got:
                raise CheckpointError(f"{self.name}: cannot be read to its end; it is shorter than expected")
            done += got
        return raw

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file changed since it was opened."""
        if get_identity(os.fstat(self.descriptor)) != self.identity:
            raise CheckpointError(f"{self.name}: was changed while it was read; load it again")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


Source: TypeAlias = "Path | OpenFile | MissingFile"


@dataclass(frozen=True)
class MissingFile:
    """Placeholder for a file that is missing (`error` is None) or that must not be read (`error` is the reason)."""

    name: str
    error: CheckpointError | None = None

    def exists(self) -> bool:
        """Return whether an entry of this name exists that cannot be read, e.g. a pipe."""
        return self.error is not None


@contextmanager
def open_source(source: Source) -> Iterator[OpenFile]:
    """Open a file or use an open one; raises OSError if it cannot be opened, CheckpointError if it is not regular."""
    if isinstance(source, MissingFile):
        raise source.error or FileNotFoundError(2, os.strerror(2))
    if isinstance(source, OpenFile):
        yield source
        return
    file = open_file(source)
    try:
        yield file
    finally:
        file.close()


def read_bytes(source: Source, start: int, count: int) -> np.ndarray:
    """Return exactly `count` bytes from an offset of a file; raises what `open_source` and `OpenFile.array` raise."""
    with open_source(source) as file:
        return file.array(start, count)


def open_file(path: str | Path, within: int | None = None) -> OpenFile:
    """Open a regular file without blocking on pipes or devices; the caller closes it.

    Args:
        path: path of the file.
        within: descriptor of the folder to which ``path`` is relative.

    Raises:
        OSError: the file cannot be opened.
        CheckpointError: the file is not regular.

    Example:
        >>> file = open_file("robojax/sim/policy/config.json")
        >>> file.read(0, 1)
        b'{'
        >>> file.close()
    """
    name = Path(path).name
    # Check before, because opening a device may start it, and after, because the name may refer to another file.
    _check_regular(os.stat(path, dir_fd=within), name)
    descriptor = os.open(path, _FLAGS, dir_fd=within)
    try:
        _check_regular(os.fstat(descriptor), name)
        return OpenFile(descriptor, name)
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def _open_folder(path: str | Path, within: int | None = None, flags: int = 0) -> Iterator[int]:
    """Open a folder, relative to the folder `within`, and close its descriptor at the end; raises OSError."""
    descriptor = os.open(path, _FLAGS | os.O_DIRECTORY | flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def get_path(descriptor: int) -> Path:
    """Return the real path of an open file or folder, with all links followed."""
    if sys.platform == "darwin":
        import fcntl

        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, b"\0" * 1024).split(b"\0", 1)[0]))
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def get_identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """Return device, inode, size and times of change of a file; the last cannot be set back."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class PolicyFolder:
    """Folder of a policy whose files are all open; used like a path: ``folder / "config.json"``.

    Attributes:
        path: path of the folder, for messages and for files that cannot be read by descriptor.
        names: names of all entries.
        files: name to the open file, or to the reason why it is not open.

    Example:
        >>> with PolicyFolder(Path("robojax/sim/policy")) as folder:
        ...     (folder / "config.json").exists(), (folder / "tokenizer.json").exists()
        (True, False)
    """

    def __init__(self, path: Path, *, roots: Iterable[Path] | None = None, largest: int | None = None):
        """Open the files without reading them.

        Args:
            roots: folders that must contain the files after links are followed; any folder when None.
            largest: maximum bytes of the weights.

        Raises:
            CheckpointError: the folder is missing, is outside of the roots, or has more entries than a policy.
        """
        self.path = path
        self.name = path.name
        self.names: tuple[str, ...] = ()
        self.files: dict[str, OpenFile | MissingFile] = {}
        self._roots = None if roots is None else tuple(root.resolve() for root in roots)
        self._largest = largest
        self._descriptor: int | None = None
        self._tree_identities: Mapping[str, tuple[int, ...]] | None = None
        try:
            self._descriptor = os.open(path, _FLAGS | os.O_DIRECTORY)
            self._check_inside_roots(self._descriptor, self.name)
            self._open_all(self._descriptor)
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"{self.name}: cannot be opened ({error.strerror}); wanted a folder with config.json and "
                "model.safetensors"
            ) from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_descriptors(cls, path: Path, descriptors: Mapping[str, int], refused: Mapping[str, str]) -> "PolicyFolder":
        """Return the folder that another process opened, from its descriptors and reasons of refused files by name."""
        folder = cls.__new__(cls)
        folder.path, folder.name, folder._descriptor = path, path.name, None
        folder._roots = folder._largest = folder._tree_identities = None
        folder.files = {name: OpenFile(descriptor, name) for name, descriptor in descriptors.items()}
        folder.files |= {name: MissingFile(name, CheckpointError(why)) for name, why in refused.items()}
        folder.names = tuple(sorted(folder.files))
        return folder

    def __enter__(self) -> "PolicyFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __truediv__(self, name: str) -> OpenFile | MissingFile:
        return self.files.get(name) or MissingFile(name)

    def close(self) -> None:
        """Close all descriptors of the folder's files."""
        for file in self.files.values():
            if isinstance(file, OpenFile):
                file.close()
        self.files = {}
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def descriptors(self) -> Mapping[str, int]:
        """Name to descriptor of the open files, to pass to another process."""
        return {name: file.descriptor for name, file in self.files.items() if isinstance(file, OpenFile)}

    @property
    def trees(self) -> Mapping[str, Path]:
        """Name to path of the Orbax checkpoints that a loader may read; with safetensors, `ORBAX` is not read."""
        weights = ("model.safetensors", "model.safetensors.index.json")
        has_weights = any(name in weights or SHARD.fullmatch(name) for name in self.files)
        names = (PARAMS,) if has_weights else (ORBAX, PARAMS)
        return {name: self.tree(name) for name in names if self.has_tree(name)}

    @property
    def identities(self) -> Mapping[str, tuple[int, ...]]:
        """Name to device, inode, size and times of change of the open files and of the files in `trees`.

        Trees are read at the first call.

        Raises:
            CheckpointError: a tree has links, devices or too many entries.
        """
        if self._tree_identities is None:
            self._tree_identities = self._identify_trees()
        files = {name: file.identity for name, file in self.files.items() if isinstance(file, OpenFile)}
        return {**files, **self._tree_identities}

    def _identify_trees(self) -> Mapping[str, tuple[int, ...]]:
        return {
            f"{name}/{entry.partition('/')[2]}": identity
            for name, tree in self.trees.items()
            for entry, identity in check_tree(tree).items()
        }

    @property
    def refused(self) -> Mapping[str, str]:
        """Name to reason of the files that must not be read."""
        files = self.files.values()
        return {file.name: str(file.error) for file in files if isinstance(file, MissingFile)}

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file changed since it was opened."""
        for file in self.files.values():
            if isinstance(file, OpenFile):
                file.check_unchanged()
        if self._tree_identities is not None and self._identify_trees() != self._tree_identities:
            raise CheckpointError(f"{', '.join(self.trees)}: was changed while it was read; load it again")

    def has_file(self, name: str) -> bool:
        """Return whether a regular file of this name, ``/`` between folders, is in the folder."""
        return name in self.files if self._descriptor is None else stat.S_ISREG(self._get_mode(name))

    def _get_mode(self, name: str) -> int:
        """Return the mode of an entry of the folder; 0 if it is missing."""
        with suppress(OSError):
            return os.stat(name, dir_fd=self._descriptor).st_mode
        return 0

    def read_small_file(self, name: str, limit: int = JSON_BYTES) -> bytes | None:
        """Return the content of a file that is not open; None if it cannot be read.

        Args:
            name: ``/`` between folders.
            limit: largest size in bytes of a file that is read.
        """
        if self._descriptor is None:
            return None
        with suppress(OSError, CheckpointError):
            file = open_file(name, self._descriptor)
            try:
                self._check_inside_roots(file.descriptor, name)
                return file.read() if file.size <= limit else None
            finally:
                file.close()
        return None

    def find_policies(self) -> list[str]:
        """Return the relative paths of policies in subfolders, sorted by depth, the newest checkpoint first."""
        found: list[str] = []
        level, searched = [""], 0
        for _ in range(SEARCH_DEPTH + 1):
            deeper: list[str] = []
            for path in level[: SEARCH_FOLDERS - searched]:
                files, folders = self._list_below(path)
                if path and "config.json" in files and any(name.endswith(".safetensors") for name in files):
                    found.append(path)
                else:
                    deeper += [f"{path}/{name}" if path else name for name in sorted(folders, key=_newest_first)]
            searched += len(level)
            level = deeper
        return found

    def _list_below(self, path: str) -> tuple[list[str], list[str]]:
        """Return the names of files and of folders in a subfolder; both are empty if it must not be read."""
        if self._descriptor is None:
            return [], []
        with suppress(OSError, CheckpointError):
            with _open_folder(path or ".", self._descriptor) as descriptor:
                self._check_inside_roots(descriptor, path)
                with os.scandir(descriptor) as entries:
                    listed = [(entry.name, entry.is_dir()) for entry, _ in zip(entries, range(ENTRIES), strict=False)]
            folders = [name for name, is_folder in listed if is_folder and not name.startswith(".")]
            return [name for name, is_folder in listed if not is_folder], folders
        return [], []

    def has_tree(self, name: str = ORBAX) -> bool:
        """Return whether the folder has an Orbax checkpoint of this name."""
        return self._descriptor is not None and stat.S_ISDIR(self._get_mode(name))

    def tree(self, name: str = ORBAX) -> Path:
        """Return the path of an Orbax checkpoint; raises CheckpointError if it is outside of the allowed folders."""
        assert self._descriptor is not None
        try:
            with _open_folder(name, self._descriptor) as tree:
                self._check_inside_roots(tree, name)
                return get_path(tree)
        except OSError as error:
            raise CheckpointError(f"{name}: cannot be read ({error.strerror})") from error

    def _open_all(self, descriptor: int) -> None:
        names: list[str] = []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > ENTRIES:
                    raise CheckpointError(f"{self.name}: more than {ENTRIES} entries; wanted a policy's folder")
        self.names = tuple(sorted(names))
        shards = sorted(name for name in names if SHARD.fullmatch(name))
        if len(shards) > SHARDS:
            raise CheckpointError(f"{self.name}: weights in {len(shards)} files; wanted {SHARDS} at most")
        states = [name for name in names if name not in KNOWN and name not in shards and PLAIN.fullmatch(name)]
        states.sort(key=lambda name: (not name.startswith("policy_"), name))
        for name in [*(name for name in KNOWN if name in names), *shards, *states[:STATE_FILES]]:
            try:
                self.files[name] = self._open(name, descriptor)
            except CheckpointError as error:
                if name in KNOWN or name in shards or name.startswith("policy_"):
                    raise
                self.files[name] = MissingFile(name, error)  # Raised only if the file is read.
        for name in states[STATE_FILES:]:
            error = CheckpointError(
                f"{name}: the folder has more than {STATE_FILES} .safetensors files; wanted a policy's folder"
            )
            self.files[name] = MissingFile(name, error)
        size = sum(file.size for name in shards if isinstance(file := self.files[name], OpenFile))
        if size > (limit := WEIGHT_BYTES if self._largest is None else self._largest):
            raise CheckpointError(f"{self.name}: weights of {size} bytes in {len(shards)} files, over {limit} bytes")
        self._open_models(descriptor, "")

    def _open_models(self, descriptor: int, within: str) -> None:
        """Open the files of underlying models in subfolders of any name; links are not followed."""
        with os.scandir(descriptor) as entries:
            folders = [e.name for e, _ in zip(entries, range(ENTRIES), strict=False) if e.is_dir(follow_symlinks=False)]
        for name in sorted(set(folders) - {ORBAX, PARAMS, TRAINING}):
            if name.startswith(".") or not name.isascii():
                continue
            inside = f"{within}{name}/"
            with suppress(OSError), _open_folder(name, descriptor, os.O_NOFOLLOW) as folder:
                for file in OF_MODELS:
                    if sum("/" in known for known in self.files) < MODEL_FILES:
                        self._open_of_model(file, folder, inside)
                if inside.count("/") < MODEL_DEPTH:
                    self._open_models(folder, inside)

    def _open_of_model(self, name: str, descriptor: int, within: str) -> None:
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=descriptor)
            try:
                self.files[f"{within}{name}"] = self._open(name, descriptor)
            except CheckpointError as error:
                self.files[f"{within}{name}"] = MissingFile(f"{within}{name}", error)

    def _open(self, name: str, within: int) -> OpenFile:
        is_weights = name == "model.safetensors" or SHARD.fullmatch(name) is not None
        limit = WEIGHT_BYTES if is_weights else KNOWN.get(name, STATE_BYTES)
        if is_weights and self._largest is not None:
            limit = self._largest
        try:
            file = open_file(name, within)
        except OSError as error:
            raise CheckpointError(f"{name}: cannot be read ({error.strerror}); wanted a regular file") from error
        try:
            self._check_inside_roots(file.descriptor, name)
            if file.size > limit:
                raise CheckpointError(f"{name}: {file.size} bytes; wanted at most {limit}")
            # Some file systems report zero blocks.
            allocated = os.fstat(file.descriptor).st_blocks * 512
            if file.size > SPARSE_BYTES and 0 < allocated < file.size // SPARSE_PART:
                raise CheckpointError(f"{name}: {file.size} bytes, of which only {allocated} were ever written")
            return file
        except BaseException:
            file.close()
            raise

    def _check_inside_roots(self, descriptor: int, name: str) -> None:
        if self._roots is None:
            return
        real_path = get_path(descriptor)
        if not any(real_path == root or root in real_path.parents for root in self._roots):
            raise CheckpointError(f"{name}: a link leads out of the folders that policies may be in (policy_roots)")


Folder: TypeAlias = Path | PolicyFolder


def list_names(folder: Folder) -> Sequence[str]:
    """Return the sorted names of the entries of a folder."""
    return folder.names if isinstance(folder, PolicyFolder) else sorted(os.listdir(folder))


def check_tree(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the identity of each file and folder of an Orbax checkpoint, to compare before and after reading.

    Raises:
        CheckpointError: an entry is a link, a pipe or a device, or there are too many entries.
    """
    identities: dict[str, tuple[int, ...]] = {}
    try:
        with _open_folder(folder) as top:
            _check_tree_folder(top, folder.name, identities)
    except OSError as error:
        raise CheckpointError(f"{folder.name}: unreadable Orbax checkpoint ({error.strerror})") from error
    return identities


@contextmanager
def unchanged_tree(folder: Path) -> Iterator[Mapping[str, tuple[int, ...]]]:
    """Compare an Orbax checkpoint before and after it is read; yields the result of `check_tree`.

    Raises:
        CheckpointError: as `check_tree`, or the files were changed.
    """
    identities = check_tree(folder)
    yield identities
    if check_tree(folder) != identities:
        raise CheckpointError(f"{folder.name}: was changed while it was read; load it again")


def _check_tree_folder(descriptor: int, where: str, identities: dict[str, tuple[int, ...]]) -> None:
    if where.count("/") > TREE_DEPTH:
        raise CheckpointError(f"{where[:80]}: folders more than {TREE_DEPTH} deep; wanted an Orbax checkpoint")
    with os.scandir(descriptor) as entries:
        names = [entry.name for entry, _ in zip(entries, range(TREE_ENTRIES + 1), strict=False)]
    for name in names:
        if len(identities) >= TREE_ENTRIES:
            raise CheckpointError(f"{where[:80]}: more than {TREE_ENTRIES} entries; wanted an Orbax checkpoint")
        state = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        inside = f"{where}/{name}"
        if stat.S_ISDIR(state.st_mode):
            identities[inside] = (state.st_dev, state.st_ino)
            with _open_folder(name, descriptor, os.O_NOFOLLOW) as deeper:
                _check_tree_folder(deeper, inside, identities)
        elif stat.S_ISREG(state.st_mode):
            identities[inside] = get_identity(state)
        else:
            kind = _KINDS.get(stat.S_IFMT(state.st_mode), "a link")
            raise CheckpointError(f"{inside}: is {kind}; wanted regular files and folders only")


def _newest_first(name: str) -> tuple[bool, bool, int, str]:
    """Return the sort key of folders of checkpoints: LeRobot's link to the last one, then the number of steps."""
    is_number = name.isdecimal() and len(name) < 19
    return name != "last", not is_number, -int(name) if is_number else 0, name


def _check_regular(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{name}: cannot be read (it is {kind}); wanted a regular file")
