"""All deployments of a server, from triggers to outcomes, and what the API answers about them."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hooks.database import Database
from hooks.payload import WebhookPayload
from service.errors import SourceFailed, UnknownDeployment, UpdateFailed
from service.rollout.config import DeploymentSettings
from service.rollout.deployment import (
    ROLLED_BACK_TEXT,
    DeploymentEnded,
    DeployReason,
    DeployRequest,
    PolicyDeployment,
    RefMoved,
    RolloutState,
)
from service.rollout.records import SCHEMA, Journal, OnEvent, Record
from service.rollout.rollout import FollowingSession, Rollout
from service.rollout.sources import FolderSource, PolicySource, SourceError
from service.rollout.triggers import (
    Interpretation,
    Retries,
    Trigger,
    TriggerQueue,
    TriggerTarget,
    interpret_delivery,
    newest_ids,
)

logger = logging.getLogger(__name__)

# Seconds for which a requested rollback waits for its record to be written.
WRITE_TIMEOUT = 0.1


class Deployments:
    """All deployments of a server. A webhook only triggers a check of a ref; its head at that time is deployed.

    Attributes:
        quarantine: commits that are deployed only by a forced request.
    """

    def __init__(
        self,
        *,
        sources: Callable[[str], PolicySource],
        rollout: Rollout,
        database: Path | None = None,
        settings: DeploymentSettings | None = None,
        on_event: OnEvent | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """Open the database (in memory without a file); nothing happens before `run`.

        Args:
            sources: returns the source of a repo.
            on_event: called with an event of ``EVENTS`` and the record as JSON.
        """
        self.settings = settings or DeploymentSettings()
        self._database = Database(database, SCHEMA)
        self._journal = Journal(self._database, self.settings.max_records, on_event)
        self.quarantine = self._journal.quarantine
        self._rollout = rollout
        self._now = now
        self._state = RolloutState(rollout, sources, self.quarantine)
        self._lock = asyncio.Lock()  # One deployment runs at a time.
        self._current: PolicyDeployment | None = None
        self._target: TriggerTarget | None = None
        self._retries = Retries(self.settings.retry, self.settings.retry_longest)
        self._trigger_queue = TriggerQueue(self.settings.quiet, self.settings.longest, now)
        self._waiting: dict[TriggerTarget, Trigger] = {}
        self._superseded: dict[TriggerTarget, int] = {}  # Count in a row.
        self._requests: set[DeployRequest] = set()
        self._has_waiting = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def list(self, session_id: str | None = None) -> Sequence[Record]:
        """Return the newest records first, of one session or of all; may be called in another thread."""
        return [record for record in self._journal.list() if session_id is None or session_id in record.sessions]

    def get(self, id: str) -> Record:
        """Return one record, or raise UnknownDeployment if it does not exist or is no longer kept."""
        record = self._journal.get(id)
        if record is None:
            raise UnknownDeployment(f"deployment {id[:80]!r} not found; GET /deployments lists them")
        return record

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, waiting or going on."""
        return self._trigger_queue.is_empty and not (self._lock.locked() or self._waiting or self._tasks)

    def handle_delivery(self, payload: WebhookPayload, delivery_id: str | None) -> Interpretation:
        """Trigger checks of the refs that a webhook delivery names, without waiting."""
        interpretation = interpret_delivery(payload, self._rollout.list_following())
        ids = (delivery_id,) if delivery_id else ()
        for target in interpretation.targets:
            self._trigger_queue.put(Trigger(target, "webhook", payload.webhook.id, ids))
        if interpretation.alert is not None:
            record = Record(payload.repo.name, None, "webhook", webhook_id=payload.webhook.id, delivery_ids=[*ids])
            record.end("alert", *interpretation.alert)
            self._start_task(self._journal.finish(record))
        return interpretation

    def handle_change(self, repo: str) -> None:
        """Trigger checks of all followed refs of a repo, for example after a change of a folder."""
        for target in self._state.list_targets():
            if target.repo == repo:
                self._trigger_queue.put(self._make_trigger(target))

    async def run(self) -> None:
        """Deploy until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._collect_triggers())
                group.create_task(self._deploy_waiting())
                group.create_task(self._poll_heads())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def deploy(self, session_id: str, revision: str | None = None, *, force: bool = False) -> Record:
        """Deploy a revision to a session; return when the session runs it or refused it, before the probation ends.

        Args:
            revision: branch, tag or commit, which may be older; None for the ref that the session follows.
            force: allow a commit in quarantine, which is released if the deployment succeeds.

        Raises:
            UpdateFailed: there is no such session or revision, or the session cannot take it now.
            SourceFailed: the policy cannot be fetched.
        """
        record = await self.begin_deployment(session_id, revision, force=force)
        # A record has no event, and changes only in this thread.
        while record.result is None and not (record.stages and record.stages[-1].name == "probation"):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_INTERVAL)
        # Saved before the answer, so that a server that is killed next does not forget it.
        await self._journal.save(record)
        return _raise_error(record)

    async def begin_deployment(self, session_id: str, revision: str | None, *, force: bool = False) -> Record:
        """Begin a deployment and return its record; raises `UpdateFailed` for an unknown session."""
        one = self._get_session(session_id)
        record = Record(one.repo, revision or one.ref, "request", sessions=[session_id])
        self._supersede(session_id, "request", "another revision was requested")
        await self._journal.save(record)
        self._start_task(self._deploy_request(record, session_id, force))
        return record

    async def rollback(self, session_id: str) -> Record:
        """Roll a session back to its previous policy at once, and quarantine the commit that ran.

        Raises:
            UpdateFailed: there is no such session, or it has no previous policy.
        """
        one = self._get_session(session_id)
        record = Record(one.repo, one.ref, "request", sha=one.sha, sessions=[session_id])
        self._supersede(session_id, "rollback", ROLLED_BACK_TEXT, is_requested=True)
        for request in self._requests:
            request.is_withdrawn |= request.session == session_id
        await asyncio.shield(self._start_task(self._roll_back(record, session_id)))  # the client may disconnect
        return _raise_error(record)

    def _get_session(self, session_id: str) -> FollowingSession:
        try:
            return self._state.get_session(session_id)
        except SourceError as error:
            raise UpdateFailed(f"{error}; GET /sessions/{session_id} says why") from error

    async def _roll_back(self, record: Record, session_id: str) -> None:
        record.begin_stage("swapping")
        # Written first, so that a process that is killed here does not start with this commit again. A slow disk must
        # not delay the robot.
        await asyncio.wait((self._start_task(self._journal.save(record)),), timeout=WRITE_TIMEOUT)
        try:
            record.sha = self._state.get_session(session_id).sha  # Another commit may have taken over.
            verdict = await self._rollout.rollback(session_id)
        except SourceError as error:
            record.end("failed", "gone", str(error))
        except Exception as error:
            logger.exception("deployment %s: the rollback of session %s crashed", record.id, session_id)
            record.end("failed", "crash", f"{type(error).__name__}; the service's log says more")
        else:
            record.figures[session_id] = {"swap": dict(verdict.figures)}
            if verdict.reason is not None:
                record.end("failed", verdict.reason, verdict.text)
            else:
                record.end("rolled_back", "request", f"session {session_id} was rolled back by request")
                await self._journal.quarantine_commit(record)
        await self._journal.finish(record)

    async def reconcile(self) -> None:
        """Check the heads of all followed refs; a new head is handled like a delivery."""
        for target in self._state.list_targets():
            head = await self._state.get_head(target)
            if (
                head is not None
                and self._state.list_outdated(target, head)
                and self.quarantine.get(target.repo, head) is None
                and self._retries.may_retry((target, head), self._now())
            ):
                self._trigger_queue.put(self._make_trigger(target))

    def _make_trigger(self, target: TriggerTarget) -> Trigger:
        return Trigger(target, "folder" if isinstance(self._state.sources(target.repo), FolderSource) else "poll")

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _poll_heads(self) -> None:
        if self.settings.poll is None:
            return
        while True:
            try:
                await self.reconcile()
            except Exception:
                logger.exception("looking at the heads crashed; it is done again")
            spread = self.settings.jitter * random.uniform(-1, 1)
            await asyncio.sleep(self.settings.poll * (1 + spread))

    async def _collect_triggers(self) -> None:
        while True:
            for trigger in await self._trigger_queue.wait_for_due():
                self._waiting[trigger.target] = trigger.merge(self._waiting.get(trigger.target))
                self._has_waiting.set()
                if self._get_preparing(trigger.target):
                    self._start_task(self._look_for_newer(trigger.target))

    def _may_supersede(self, target: TriggerTarget) -> bool:
        return self._superseded.get(target, 0) < self.settings.superseded

    async def _look_for_newer(self, target: TriggerTarget) -> None:
        """Check whether a trigger during a preparation is about the same commit, or a newer one."""
        if not self._may_supersede(target):
            return
        head = await self._state.get_head(target)
        deployment = self._get_preparing(target)
        if head is None or deployment is None:
            return  # the trigger stays, and its own deployment reports the error
        if head != deployment.sha:
            deployment.supersede("newer", f"{head[:12]} came while it was being prepared")
        elif trigger := self._waiting.pop(target, None):
            record = deployment.record
            record.delivery_ids = [*newest_ids((*record.delivery_ids, *trigger.delivery_ids))]

    async def _deploy_waiting(self) -> None:
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while self._waiting:
                await self._deploy_moved_ref(self._waiting.pop(next(iter(self._waiting))))

    async def _deploy_moved_ref(self, trigger: Trigger) -> None:
        target, ids = trigger.target, [*trigger.delivery_ids]
        record = Record(target.repo, target.ref, trigger.kind, webhook_id=trigger.webhook_id, delivery_ids=ids)
        requeue = (lambda: self._trigger_queue.put(trigger)) if self._may_supersede(target) else None
        await self._run_deployment(record, RefMoved(target, self._state, requeue))
        is_superseded = record.result == "superseded" and record.reason == "newer"
        self._superseded[target] = self._superseded.get(target, 0) + 1 if is_superseded else 0
        if record.result == "failed":
            self._retries.record_failure((target, record.sha), self._now())
        elif record.result in ("swapped", "staged"):
            self._retries.record_success((target, record.sha))

    async def _deploy_request(self, record: Record, session_id: str, force: bool) -> None:
        request = DeployRequest(session_id, self._state, force)
        self._requests.add(request)
        try:
            head = await self._state.get_head(TriggerTarget.of_session(self._state.get_session(session_id)))
            await self._run_deployment(record, request)
        except SourceError as error:  # it ended before its turn came
            record.end("failed", "gone", str(error))
            await self._journal.finish(record)
            return
        finally:
            self._requests.discard(request)
        if record.result != "swapped" or record.sha is None:
            return
        if head is not None:
            # A requested commit stays until a newer one is pushed.
            self._state.declined[session_id] = head
        if force:
            await self.quarantine.release(record.sha, record.repo)

    def _get_preparing(self, target: TriggerTarget) -> PolicyDeployment | None:
        """Return the running deployment of a ref if it affects no robot yet, else None."""
        one = self._current
        return one if one is not None and self._target == target and one.is_preparing and one.record.sha else None

    def _supersede(self, session: str, reason: str, text: str, *, is_requested: bool = False) -> None:
        """End the running deployment if it still prepares a session for which there is another request."""
        one = self._current
        if one is not None and (is_requested or self._target is not None) and session in one.record.sessions:
            one.supersede(reason, text)

    async def _run_deployment(self, record: Record, reason: DeployReason) -> None:
        """Run one deployment to its end, after the deployment that runs now."""
        async with self._lock:
            try:
                await self._deploy_to_sessions(record, reason)
            except DeploymentEnded as ended:
                record.end(ended.result, ended.reason, ended.text)
                if ended.is_commit_at_fault:
                    await self._journal.quarantine_commit(record)
            except SourceError as error:
                record.end("failed", error.code, str(error))
            except asyncio.CancelledError:
                record.end("failed", "interrupted", "the service ended before the deployment did")
                self._journal.save_blocking(record)
                raise
            except Exception as error:
                logger.exception("deployment %s crashed", record.id)
                record.end("failed", "crash", f"{type(error).__name__}; the service's log says more")
            finally:
                self._current = self._target = None
            # A ref that did not move is not worth a record.
            if record.result != "noop" or reason.target is None:
                await self._journal.finish(record)

    async def _deploy_to_sessions(self, record: Record, reason: DeployReason) -> None:
        source = self._state.sources(record.repo)
        deployment = PolicyDeployment(record, source, self._rollout, self.settings, self._journal.save)
        self._current, self._target = deployment, reason.target
        record.begin_stage("resolving")
        record.sha = resolved = await source.head(record.repo, record.ref)
        if not (targets := await reason.choose_sessions(source, record.repo, record.sha)):
            return record.end("noop", text="it runs already")
        record.sessions = [aim.session for aim in targets]
        await self._journal.save(record)
        if reason.target is None and await self._try_swap_staged(deployment, targets[0].session):
            return record.end("swapped")
        folder = await deployment.fetch()
        if record.sha != resolved and not (targets := await reason.choose_sessions(source, record.repo, record.sha)):
            return record.end("noop", text="it runs already")
        deployment.raise_if_superseded()
        for aim in targets:
            if (staged := self._state.staged.pop(aim.session, None)) is not None:
                await self._rollout.discard(aim.session, staged)
        try:
            await deployment.roll_out(targets, folder, reason)
        finally:
            results = {session: figures.get("result") for session, figures in record.figures.items()}
            staged = {session: deployment.sha for session, result in results.items() if result == "staged"}
            self._state.staged |= staged
        return record.end("swapped" if "swapped" in results.values() else "staged")

    async def _try_swap_staged(self, deployment: PolicyDeployment, session: str) -> bool:
        """Swap to the commit if it is staged already; return False if it is not."""
        if self._state.staged.get(session) != deployment.sha:
            return False
        del self._state.staged[session]
        deployment.is_preparing = False
        try:
            await deployment.swap(session)
        except DeploymentEnded as ended:
            if ended.reason != "not_staged":
                raise
            deployment.is_preparing = True
            return False
        await deployment.wait_for_probation(session)
        return True


# Codes of a deployment that failed by its request, and by the policy's source: they decide the answer's status.
_REQUEST_ERRORS = frozenset(
    {"unknown_repo", "unknown_revision", "unknown_session", "quarantined", "no_previous", "busy", "gone"}
)
_SOURCE_ERRORS = frozenset({"unreachable", "timeout", "denied", "disk", "transfer", "limited", "bad_answer"})
# How often a request that waits for its update looks at it, in seconds.
_POLL_INTERVAL = 0.02


def _raise_error(record: Record) -> Record:
    """Raise the error of a deployment that could not be tried; return the record of any other deployment."""
    if record.result in ("failed", "rejected"):
        if record.reason == "quarantined":
            raise UpdateFailed(f'{record.text}; send "force": true, or DELETE /quarantine/{record.sha} first')
        if record.reason in _REQUEST_ERRORS:
            raise UpdateFailed(record.text)
        if record.reason in _SOURCE_ERRORS:
            raise SourceFailed(record.text)
    return record
