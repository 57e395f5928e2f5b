"""Which sessions want a commit: by what they follow, run, hold prepared, and were decided to stay away from."""

from collections.abc import Sequence

from hooks.deployment.rollout import Follower, Rollout
from hooks.deployment.trigger import Target
from hooks.errors import SourceError


class Standing:
    """Where each session stands.

    Attributes:
        staged: session to the commit that is prepared beside what it runs.
        declined: session to the head that it is not brought to by itself, until another one comes.
    """

    def __init__(self, rollout: Rollout):
        self.staged: dict[str, str] = {}
        self.declined: dict[str, str] = {}
        self._rollout = rollout

    def session(self, id: str) -> Follower:
        """One as it is now.

        Raises:
            SourceError: ``unknown_session``.
        """
        for one in self._rollout.followers():
            if one.session_id == id:
                return one
        raise SourceError("unknown_session", f"session {id!r} runs no policy")

    def targets(self) -> Sequence[Target]:
        """What is followed."""
        followed = (Target.of(one) for one in self._rollout.followers() if one.mode != "off")
        return [*dict.fromkeys(followed)]

    def wanting(self, target: Target, head: str) -> Sequence[Follower]:
        """Who follows it and is not there yet; those that really swap come first."""
        found = [
            one
            for one in self._rollout.followers()
            if Target.of(one) == target
            and one.mode != "off"
            and head not in (one.sha, self.declined.get(one.session_id))
            and not (one.mode == "stage" and self.staged.get(one.session_id) == head)
        ]
        return sorted(found, key=lambda one: one.mode != "swap")
