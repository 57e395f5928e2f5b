"""Policy updates as the API tells them, over whatever keeps their records."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from service.errors import ServiceError, SourceFailed, UnknownDeployment, UpdateFailed


class Record(Protocol):
    """One update, as it is now; it changes while the update goes on."""

    @property
    def sessions(self) -> Sequence[str]: ...
    @property
    def result(self) -> str | None: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def sha(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def stages(self) -> Sequence[Any]: ...
    def as_json(self) -> dict[str, Any]: ...


class Deployments(Protocol):
    """What is asked of whoever deploys."""

    @property
    def quarantine(self) -> Any: ...
    def list(self, limit: int = 50) -> Sequence[Record]: ...
    def get(self, id: str) -> Record: ...
    async def deploy(
        self, session_id: str, revision: str | None = None, *, force: bool = False, wait: bool = True
    ) -> Record: ...
    async def keep(self, record: Any) -> None: ...
    async def rollback(self, session_id: str) -> Record: ...


# Codes of a record that did not go well -> whose matter it is, for the status of the answer.
_ASKED_WRONG = frozenset(
    {"unknown_repo", "unknown_revision", "unknown_session", "quarantined", "no_previous", "busy", "gone"}
)
_OF_SOURCE = frozenset({"unreachable", "timeout", "denied", "disk", "transfer", "limited", "bad_answer"})
# How often a request that waits for its update looks at it, in seconds.
_LOOK = 0.02


class SessionUpdates:
    """``service.updates.updates.Updates`` over deployments."""

    def __init__(self, deployments: Deployments, refusal: type[Exception]):
        """``refusal`` is what the deployments raise for a session that runs no policy."""
        self._deployments = deployments
        self._refusal = refusal

    def list(self, limit: int, session_id: str | None = None) -> Sequence[Mapping[str, object]]:
        """The newest first."""
        if session_id is None:
            return [record.as_json() for record in self._deployments.list(limit)]
        found = (record for record in self._deployments.list(10_000) if session_id in record.sessions)
        return [record.as_json() for _, record in zip(range(limit), found, strict=False)]

    def get(self, deployment_id: str) -> Mapping[str, object]:
        """One of them."""
        try:
            return self._deployments.get(deployment_id).as_json()
        except KeyError:
            raise UnknownDeployment(
                f"deployment {deployment_id[:80]!r} not found; GET /deployments lists them"
            ) from None

    async def deploy(self, session_id: str, revision: str | None, *, force: bool) -> Mapping[str, object]:
        """Bring a revision to a session; returns when it runs it, or was refused. Probation goes on after that."""
        try:
            record = await self._deployments.deploy(session_id, revision, force=force, wait=False)
        except self._refusal as error:
            raise UpdateFailed(f"{error}; GET /sessions/{session_id} says why") from error
        # The record is the one thing that tells; it is ours, in this process and thread.
        while record.result is None and not (record.stages and record.stages[-1].name == "probation"):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        # It may have come here a moment ago: what is told is not forgotten when the server is killed.
        await self._deployments.keep(record)
        return self._told(record)

    async def rollback(self, session_id: str) -> Mapping[str, object]:
        """Bring back the policy from before."""
        try:
            return self._told(await self._deployments.rollback(session_id))
        except self._refusal as error:
            raise UpdateFailed(f"{error}; GET /sessions/{session_id} says why") from error

    def quarantine(self) -> Sequence[Mapping[str, object]]:
        """Commits in quarantine."""
        return [one.as_json() for one in self._deployments.quarantine.list()]

    async def release(self, sha: str) -> bool:
        """Let one out."""
        return bool(await self._deployments.quarantine.release(sha))

    def _told(self, record: Record) -> Mapping[str, object]:
        error = _error_of(record)
        if error is not None:
            raise error
        return record.as_json()


def _error_of(record: Record) -> ServiceError | None:
    """What could not be tried at all is an error; a policy that was tried and refused is an answer."""
    if record.result in ("failed", "rejected"):
        if record.reason == "quarantined":
            return UpdateFailed(f'{record.text}; send "force": true, or DELETE /quarantine/{record.sha} first')
        if record.reason in _ASKED_WRONG:
            return UpdateFailed(record.text)
        if record.reason in _OF_SOURCE:
            return SourceFailed(record.text)
    return None
