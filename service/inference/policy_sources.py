"""Policy sources: folders and Hub repos that policies may come from, and loaders that enforce them.

``policy_path`` comes over the wire. A local server without keys loads any policy, others only configured ones.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jaxmodels
from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from service.errors import InvalidRequest, PolicyError, ServiceError
from service.inference.config import PolicySettings, set_cache_folders
from service.inference.loaded_policy import LoadPolicy, Policy
from service.inference.policy_cache import truncate_error
from service.inference.sandbox import CheckpointSandbox, LoadJob
from service.threads import call_in_thread

logger = logging.getLogger(__name__)

# Called in a thread: path or repo id, revision.
ReadRequirements = Callable[[str, str | None], Requirements]
# Looks at a time; each may wait for the Hub.
MAX_CONCURRENT_READS = 2


class PolicyReader:
    """Reads the requirements of policies in threads."""

    def __init__(self, read: ReadRequirements, concurrency: int = MAX_CONCURRENT_READS):
        self._read = read
        self._slots = asyncio.Semaphore(concurrency)

    async def read(self, path: str, revision: str | None) -> Requirements:
        """Return a policy's requirements; raises PolicyError."""
        async with self._slots:
            load = LoadJob()
            try:
                return await call_in_thread(lambda: load.run(lambda: self._read(path, revision)), "policy-reader")
            except asyncio.CancelledError:
                load.cancel()
                raise
            except JaxModelsError as error:
                raise PolicyError(f"policy {path!r} cannot be used: {truncate_error(error)}") from error
            except ServiceError:
                raise  # a place that is not allowed
            except Exception as error:
                # Its text may hold anything, so only its kind goes to the client.
                logger.exception("reading what policy %r needs failed", path)
                raise PolicyError(
                    f"policy {path!r} cannot be used ({type(error).__name__}); the server's log says more"
                ) from error


log = logging.getLogger(__name__)

REPO_ID = re.compile(r"(?P<owner>[\w.-]{1,96})/[\w.-]{1,96}", re.ASCII)
HINT = (
    "it is neither in a folder of the setting policy_roots nor a Hub repo (owner/name) of an owner in policy_owners; "
    "the server's operator can start it with --policy-roots FOLDER or --policy-owners OWNER"
)
# Any account can open a pull request with its own policy in an allowed owner's repo.
_PULL_REQUEST = re.compile(r"(refs/)?pr/.*|refs/convert/.*", re.IGNORECASE | re.DOTALL)
# Whether a folder can be opened; `jaxmodels.PolicyFolder` checks every file again.
_READABLE_FILES = re.compile(r".+\.(json|safetensors)|orbax", re.DOTALL)
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".py")


class SourceRules:
    """Folders (``roots``) and Hub users or organisations (``owners``) that policies may come from.

    Args:
        is_open: whether every source is allowed if both lists are empty.
    """

    def __init__(self, roots: Iterable[str | Path] = (), owners: Iterable[str] = (), *, is_open: bool = False):
        self._roots = tuple(Path(os.path.expanduser(root)) for root in roots)
        self._owners = frozenset(owner.lower() for owner in owners)
        self.is_open = is_open and not self._roots and not self._owners

    def check(self, path: str, field: str = "policy_path", revision: str | None = None) -> None:
        """Refuse a forbidden policy path at ``field``; reads the disk, so call it in a thread.

        The message does not reveal whether the folder exists.

        Raises:
            InvalidRequest: the path is not allowed.
        """
        if self.is_open:
            return
        if "\0" in path or not (self._is_inside(path) or self._is_of_an_owner(path)):
            raise InvalidRequest(f"{field}: {HINT}", ("body", field))
        self.check_revision(revision, field.replace("policy_path", "revision"))

    def check_revision(self, revision: str | None, field: str = "revision") -> None:
        """Raise InvalidRequest at ``field`` for a pull request, which any account can open."""
        if not self.is_open and revision is not None and _PULL_REQUEST.fullmatch(revision):
            raise InvalidRequest(
                f"{field}: is a pull request, which any account can open; use a branch, a tag or a commit of the "
                "repo's owner",
                ("body", field),
            )

    def guard_loader(self, load: LoadPolicy) -> LoadPolicy:
        """Return a loader that refuses forbidden paths; sessions restored after a restart are also checked."""

        def load_allowed(path: str, revision: str | None = None, /, *, like: Any = None, **more: Any) -> Policy:
            if like is None:  # an update comes from the server's own copies of what was checked
                try:
                    self.check(path, revision=revision)
                except InvalidRequest as error:
                    raise PolicyError(str(error)) from None
            return load(path, revision, like=like, **more)

        return load_allowed

    def guard_reader(self, read: ReadRequirements) -> ReadRequirements:
        """Return a reader of requirements that refuses paths that are not allowed."""

        def read_allowed(path: str, revision: str | None) -> Requirements:
            self.check(path, revision=revision)
            return read(path, revision)

        return read_allowed

    def _is_inside(self, path: str) -> bool:
        try:
            folder = Path(os.path.expanduser(path)).resolve(strict=True)
            roots = [root.resolve() for root in self._roots]
            if not folder.is_dir() or not _is_in(folder, roots):
                return False
            names = sorted(os.listdir(folder))
            known = [(folder / name).resolve(strict=True) for name in names if _READABLE_FILES.fullmatch(name)]
        except (OSError, RuntimeError, ValueError):  # no such place, a loop of links, no text
            return False
        if ignored := [name for name in names if name.endswith(_CODE_SUFFIXES)]:
            log.info("policy folder %s: %s may run code and are not opened", folder.name, ", ".join(ignored[:20]))
        # A link among its files must not lead out of the roots either.
        return all(_is_in(file, roots) for file in known)

    def _is_of_an_owner(self, path: str) -> bool:
        match = REPO_ID.fullmatch(path)
        if match is None or match["owner"].lower() not in self._owners or ".." in path:
            return False
        # What is a folder here would be loaded from here, and it is in none of the roots.
        return not os.path.isdir(path)


def allowed_roots(settings: PolicySettings) -> tuple[Path, ...] | None:
    """Return the folders in which a policy's files must be when they are opened; None for any allowed one."""
    if not (settings.policy_roots or settings.policy_owners):
        return None
    return tuple(Path(os.path.expanduser(root)) for root in settings.policy_roots)


def copy_roots(folder: str | Path) -> tuple[Path, ...]:
    """Return the folders with the server's own copy of an update: the folder, or the Hub cache of its snapshot."""
    path = Path(os.path.expanduser(folder))
    return (path.parent.parent if path.parent.name == "snapshots" else path,)


def _is_in(path: Path, roots: Iterable[Path]) -> bool:
    return any(path == root or root in path.parents for root in roots)


# Seconds that reading the small files of a policy may take.
DESCRIBE_TIMEOUT = 15.0


def make_requirements_reader(settings: PolicySettings) -> ReadRequirements:
    """Return a function that reads a policy's requirements in a sandboxed process, before it is loaded."""
    sandbox = CheckpointSandbox(settings.load_memory, timeout=DESCRIBE_TIMEOUT)

    def read(path: str, revision: str | None) -> jaxmodels.Requirements:
        set_cache_folders(settings)
        return jaxmodels.read_requirements(path, revision, read=sandbox.describe, roots=allowed_roots(settings))

    return read
