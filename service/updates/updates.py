"""Policy updates as the routes see them: what may be asked of whatever brings policies to sessions."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Updates(Protocol):
    """Deployments are told as JSON-ready mappings with the fields of ``service.schemas.Deployment``."""

    def list(self, limit: int, session_id: str | None = None) -> Sequence[Mapping[str, object]]:
        """The newest first."""
        ...

    def get(self, deployment_id: str) -> Mapping[str, object]:
        """One of them.

        Raises:
            UnknownDeployment: there is none.
        """
        ...

    async def deploy(self, session_id: str, revision: str | None, *, force: bool) -> Mapping[str, object]:
        """Bring a revision to a session now; returns when the session runs it, or it was refused.

        Raises:
            ServiceError: no such session, or no such revision.
        """
        ...

    async def rollback(self, session_id: str) -> Mapping[str, object]:
        """Bring back the policy that a session ran before.

        Raises:
            ServiceError: no such session.
        """
        ...

    def quarantine(self) -> Sequence[Mapping[str, object]]:
        """Commits that are not deployed any more by themselves, with the reason."""
        ...

    async def release(self, sha: str) -> bool:
        """Let a commit out of the quarantine; whether it was in it."""
        ...
