"""Which policies may be loaded: folders inside of the operator's roots, and repos of the Hub by the owners it allows.

``policy_path`` comes over the wire. A server that only its own machine reaches, and that wants no key, takes every
policy that its user could load; any other takes what was configured and nothing else.
"""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxmodels import Requirements
from service.engine.engine import LoadPolicy, Policy
from service.engine.policy_reader import ReadRequirements
from service.errors import InvalidRequest, PolicyError
from service.setting_groups.policies import PolicySettings

log = logging.getLogger(__name__)

REPO = re.compile(r"(?P<owner>[\w.-]{1,96})/[\w.-]{1,96}", re.ASCII)
HINT = (
    "it is neither in a folder of the setting policy_roots nor a Hub repo (owner/name) of one in policy_owners; "
    "whoever runs the server may start it with --policy-roots FOLDER or --policy-owners OWNER"
)
# Whoever has an account can open one in the repo of an allowed owner, with a policy of theirs.
_PULL_REQUEST = re.compile(r"(refs/)?pr/.*|refs/convert/.*", re.IGNORECASE | re.DOTALL)
# What could be opened of a folder, which is asked again of every file when it is opened (`jaxmodels.PolicyFolder`).
_OPENED = re.compile(r".+\.(json|safetensors)|orbax", re.DOTALL)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".py")


class PolicyPlaces:
    """The rules of one server.

    Args:
        roots: folders; those that are not there (yet) hold nothing.
        owners: users and organisations of the Hub.
        is_open: whether everything may be loaded when neither roots nor owners are given.
    """

    def __init__(self, roots: Iterable[str | Path] = (), owners: Iterable[str] = (), *, is_open: bool = False):
        self._roots = tuple(Path(os.path.expanduser(root)) for root in roots)
        self._owners = frozenset(owner.lower() for owner in owners)
        self.is_open = is_open and not self._roots and not self._owners

    def check(self, path: str, field: str = "policy_path", revision: str | None = None) -> None:
        """Refuse a place that is not allowed. Looks at the disk, so it is called where that may take a moment.

        The message is the same whether there is such a folder or not: it tells nobody what this machine has.

        Raises:
            InvalidRequest: at ``field``.
        """
        if self.is_open:
            return
        if "\0" in path or not (self._is_inside(path) or self._is_of_an_owner(path)):
            raise InvalidRequest(f"{field}: {HINT}", ("body", field))
        self.check_revision(revision, field.replace("policy_path", "revision"))

    def check_revision(self, revision: str | None, field: str = "revision") -> None:
        """Refuse a revision that is of anybody's: a pull request.

        Raises:
            InvalidRequest: at ``field``.
        """
        if not self.is_open and revision is not None and _PULL_REQUEST.fullmatch(revision):
            raise InvalidRequest(
                f"{field}: anybody may have opened this pull request; wanted a branch, a tag or a commit of the "
                "repo's owner",
                ("body", field),
            )

    def guarded(self, load: LoadPolicy) -> LoadPolicy:
        """The same, but nothing is loaded from elsewhere: sessions of before a restart are asked again, too."""

        def load_allowed(path: str, revision: str | None = None, /, *, like: Any = None, **more: Any) -> Policy:
            if like is None:  # an update comes from the server's own copies of what was checked
                try:
                    self.check(path, revision=revision)
                except InvalidRequest as error:
                    raise PolicyError(str(error)) from None
            return load(path, revision, like=like, **more)

        return load_allowed

    def guarded_reading(self, read: ReadRequirements) -> ReadRequirements:
        """The same for whoever only wants to know what a policy needs."""

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
            known = [(folder / name).resolve(strict=True) for name in names if _OPENED.fullmatch(name)]
        except (OSError, RuntimeError, ValueError):  # no such place, a loop of links, no text
            return False
        if ignored := [name for name in names if name.endswith(_PICKLES)]:
            log.info("policy folder %s: %s may run code and are not opened", folder.name, ", ".join(ignored[:20]))
        # A link among its files must not lead out of the roots either.
        return all(_is_in(file, roots) for file in known)

    def _is_of_an_owner(self, path: str) -> bool:
        match = REPO.fullmatch(path)
        if match is None or match["owner"].lower() not in self._owners or ".." in path:
            return False
        # What is a folder here would be loaded from here, and it is in none of the roots.
        return not os.path.isdir(path)


def opened_in(settings: PolicySettings) -> tuple[Path, ...] | None:
    """Where a folder's files have to be when they are opened; None where whatever folder was allowed may be used."""
    if not (settings.policy_roots or settings.policy_owners):
        return None
    return tuple(Path(os.path.expanduser(root)) for root in settings.policy_roots)


def copies_in(folder: str | Path) -> tuple[Path, ...]:
    """The same for an update, which comes from the server's own copies: in the folder itself, or beside it, where a
    snapshot of the Hub's cache links to."""
    place = Path(os.path.expanduser(folder))
    return (place.parent.parent if place.parent.name == "snapshots" else place,)


def _is_in(path: Path, roots: Iterable[Path]) -> bool:
    return any(path == root or root in path.parents for root in roots)
