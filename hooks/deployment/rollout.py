"""What a deployment needs of whoever runs the sessions; the service provides it without knowing of this package."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Follower(Protocol):
    """A session as it is now.

    Attributes:
        ref: the branch, tag or pattern of tags (``deploy-*``) that it follows; None for the default branch.
        sha: the commit that it runs; None when that is not known, which counts as another one.
        mode: ``off`` (only when asked), ``stage`` (prepare and wait) or ``swap``.
    """

    @property
    def session_id(self) -> str: ...
    @property
    def repo(self) -> str: ...
    @property
    def ref(self) -> str | None: ...
    @property
    def sha(self) -> str | None: ...
    @property
    def mode(self) -> str: ...


class Verdict(Protocol):
    """How a step went.

    Attributes:
        reason: None when it passed, else a stable code (``load``, ``not_finite``, ``stopped``, ...).
        text: for people.
        figures: what was measured.
    """

    @property
    def reason(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, object]: ...


class Rollout(Protocol):
    """The sessions, and the steps of one."""

    def followers(self) -> Sequence[Follower]:
        """Every session, those with mode ``off`` too."""
        ...

    async def prepare(self, session_id: str, repo: str, sha: str, folder: Path, tell: Callable[[str], None]) -> Verdict:
        """Load, compare, compile, warm up and pass the gates beside the running policy; may be cancelled."""
        ...

    async def swap(self, session_id: str, sha: str) -> Verdict:
        """Hand the prepared policy over; returns when the session acts by it."""
        ...

    async def probation(self, session_id: str, sha: str) -> Verdict:
        """Wait until it has proved itself; with a reason it was rolled back already."""
        ...

    async def discard(self, session_id: str, sha: str) -> None:
        """Drop a prepared policy that is not wanted; nothing happens when there is none."""
        ...

    async def rollback(self, session_id: str) -> Verdict:
        """Back to the policy before."""
        ...


# Reasons that say nothing against the commit, so that it is not quarantined for them.
INNOCENT = frozenset({"session", "not_staged", "stopped", "gone", "busy", "memory"})
# Those that say nothing about other sessions either.
OF_SESSION = frozenset({"gone", "busy"})
