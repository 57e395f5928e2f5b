"""Why something is deployed, and with that: to whom, what forbids it, and what makes it obsolete."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from hooks.deployment.deployment import Ended
from hooks.deployment.heads import Heads
from hooks.deployment.quarantine import Quarantine
from hooks.deployment.source import Source
from hooks.deployment.standing import Standing
from hooks.deployment.trigger import Target

WENT_BACK = "somebody went back to the policy before"


class Aim(NamedTuple):
    """A session that a commit is for, and whether it is only prepared there."""

    session: str
    is_only_staged: bool


class Purpose(Protocol):
    """A reason to deploy.

    Attributes:
        target: what is followed; None when somebody asked, which nothing but another request supersedes.
    """

    @property
    def target(self) -> Target | None: ...

    async def choose(self, source: Source, repo: str, head: str) -> Sequence[Aim]:
        """The sessions that are to have it, in this order; may raise `Ended`."""
        ...

    async def check(self, sha: str) -> None:
        """Raise `Ended` when what was prepared is not wanted any more."""
        ...

    def wants(self, session: str, sha: str) -> bool:
        """Whether a session that was chosen is to have it still."""
        ...


class Followed:
    """Sessions follow a ref, and it may have moved."""

    def __init__(
        self,
        target: Target,
        standing: Standing,
        quarantine: Quarantine,
        heads: Heads,
        again: Callable[[], None] | None,
    ):
        """``again`` asks for another look when the ref has moved on; None: it is deployed nevertheless."""
        self.target = target
        self._standing = standing
        self._quarantine = quarantine
        self._heads = heads
        self._again = again

    async def choose(self, source: Source, repo: str, head: str) -> Sequence[Aim]:
        """Those who are not there yet, unless they are ahead of it."""
        wanting = self._standing.wanting(self.target, head)
        if wanting:
            check_quarantine(self._quarantine, repo, head)
        ahead = [one for one in wanting if one.sha and await source.is_older(repo, head, one.sha)]
        for one in ahead:
            self._standing.declined[one.session_id] = head
        if ahead and len(ahead) == len(wanting):
            raise Ended("rejected", "older", f"{head[:12]} is older than what runs; ask for it if it is meant")
        return [Aim(one.session_id, one.mode == "stage") for one in wanting if one not in ahead]

    async def check(self, sha: str) -> None:
        """The head again; when it is not known now, what was verified is not worse for that."""
        if self._again is None:
            return
        head = await self._heads.ask(self.target)
        if head not in (None, sha):
            self._again()
            raise Ended("superseded", "newer", f"{head[:12]} came while it was being prepared")

    def wants(self, session: str, sha: str) -> bool:
        """It may have been made anew, to follow something else or nothing."""
        return any(one.session_id == session for one in self._standing.wanting(self.target, sha))


class Asked:
    """Somebody wants a session to have it, newer or older.

    Attributes:
        is_withdrawn: somebody went back to the policy before since then.
    """

    target = None

    def __init__(self, session: str, standing: Standing, quarantine: Quarantine, is_forced: bool):
        """``is_forced``: from quarantine too."""
        self.is_withdrawn = False
        self.session = session
        self._standing = standing
        self._quarantine = quarantine
        self._is_forced = is_forced

    async def choose(self, source: Source, repo: str, head: str) -> Sequence[Aim]:
        """That session, unless it runs it already."""
        if self.is_withdrawn:
            raise Ended("superseded", "rollback", WENT_BACK)
        if self._standing.session(self.session).sha == head:
            return []
        if not self._is_forced:
            check_quarantine(self._quarantine, repo, head)
        return [Aim(self.session, False)]

    async def check(self, sha: str) -> None:
        """Whoever asked meant this commit."""

    def wants(self, session: str, sha: str) -> bool:
        """As long as nobody asks for another one."""
        return True


def check_quarantine(quarantine: Quarantine, repo: str, sha: str) -> None:
    """Raise `Ended` for a commit that is in quarantine."""
    if one := quarantine.get(repo, sha):
        raise Ended("rejected", "quarantined", f"{sha[:12]} is in quarantine ({one.reason}: {one.text})")
