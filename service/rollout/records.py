"""Deployment records, quarantine and events in SQLite."""

import inspect
import json
import logging
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from hooks.database import Database
from hooks.errors import StoreError

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS deployments (id TEXT PRIMARY KEY, at REAL NOT NULL, record TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS deployments_at ON deployments (at);
CREATE TABLE IF NOT EXISTS quarantine (
    repo TEXT NOT NULL, sha TEXT NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL, text TEXT NOT NULL,
    deployment TEXT, PRIMARY KEY (repo, sha)) STRICT""",
)

# Stages in which a robot may act by a commit that has not proved itself.
UNPROVEN_STAGES = ("swapping", "probation")


class DeploymentStage(BaseModel):
    """One step of a policy update."""

    name: str  # ``resolving``, ``downloading``, ``verifying``, ``loading``, ..., ``swapping``, ``probation``
    at: float = Field(description="Seconds since 1970.")
    seconds: float | None = Field(default=None, description="Duration in seconds; null while it runs.")


@dataclass
class Record:
    """Record of one deployment."""

    repo: str
    ref: str | None
    trigger: str  # ``webhook``, ``poll``, ``folder`` or ``request``
    sha: str | None = None
    webhook_id: str | None = None  # webhook of the newest delivery that caused it
    delivery_ids: list[str] = field(default_factory=list)  # ids of the newest deliveries that caused it
    sessions: list[str] = field(default_factory=list)  # ids in the order of the deployment
    stages: list[DeploymentStage] = field(default_factory=list)
    # ``swapped``, ``staged``, ``rejected``, ``rolled_back``, ``superseded``, ``failed``, ``noop`` or ``alert``; None
    # while it is running.
    result: str | None = None
    reason: str | None = None  # a stable code when it did not succeed
    text: str = ""
    # Session id to its ``result`` and the measurements of ``prepare``, ``swap`` and ``probation``.
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    at: float = field(default_factory=time.time)  # seconds since 1970

    def begin_stage(self, stage: str) -> None:
        """End the current stage and begin another. The same name continues the current stage."""
        if self.stages and self.stages[-1].name == stage and self.stages[-1].seconds is None:
            return
        self._end_stage()
        self.stages.append(DeploymentStage(name=stage, at=time.time()))

    def end(self, result: str, reason: str | None = None, text: str = "") -> None:
        """End it with this result."""
        self._end_stage()
        self.result, self.reason, self.text = result, reason, text

    def _end_stage(self) -> None:
        if self.stages and self.stages[-1].seconds is None:
            self.stages[-1].seconds = round(max(0.0, time.time() - self.stages[-1].at), 4)

    def as_json(self) -> dict[str, Any]:
        """Return all fields, JSON-ready; times are seconds. May be called in another thread."""
        # Each copy is one call of the interpreter, which no change by another thread interrupts.
        stages = [vars(stage).copy() for stage in self.stages.copy()]
        figures = {session: found.copy() for session, found in self.figures.copy().items()}
        lists = {"delivery_ids": self.delivery_ids.copy(), "sessions": self.sessions.copy()}
        return {**vars(self), **lists, "stages": stages, "figures": figures}

    def describe(self) -> str:
        """Describe it in one line for the log."""
        took = ", ".join(f"{stage.name} {stage.seconds:.2f}s" for stage in self.stages if stage.seconds is not None)
        because = f" ({self.reason}: {self.text})" if self.reason else f" ({self.text})" if self.text else ""
        what = f"{self.repo}@{self.ref or 'main'} {(self.sha or '?')[:12]}"
        cause = f"webhook {self.webhook_id}" if self.webhook_id else self.trigger
        return f"deployment {self.id}: {cause} -> {what} -> {took or 'nothing done'} -> {self.result}{because}"


def _load_records(connection: sqlite3.Connection, max_records: int) -> Sequence[Record]:
    newest = connection.execute("SELECT record FROM deployments ORDER BY at DESC LIMIT ?", (max_records,)).fetchall()
    documents = [json.loads(row["record"]) for row in reversed(newest)]
    records = [
        Record(**document | {"stages": [DeploymentStage(**one) for one in document["stages"]]})
        for document in documents
    ]
    for record in records:
        if record.result is None:
            last = record.stages[-1].name if record.stages else None
            record.result, record.reason = "failed", "interrupted"
            record.text = f"the process ended before the deployment did{f', in {last}' if last else ''}"
            _save(connection, record.id, record.at, json.dumps(record.as_json()), max_records)
            if record.sha is not None and last in UNPROVEN_STAGES:
                # The commit may have killed the process, or was being rolled back.
                text = f"the server was killed while {', '.join(record.sessions)} tried it"
                commit = _quarantine_now(record.repo, record.sha, record.reason, text, record.id)
                _add(connection, commit, "IGNORE")
    return records


def _save(connection: sqlite3.Connection, id: str, at: float, record: str, max_records: int) -> None:
    connection.execute("INSERT OR REPLACE INTO deployments VALUES (?, ?, ?)", (id, at, record))
    connection.execute(
        "DELETE FROM deployments WHERE id NOT IN (SELECT id FROM deployments ORDER BY at DESC LIMIT ?)", (max_records,)
    )


class Quarantined(BaseModel):
    """A commit that is not deployed by itself any more."""

    repo: str
    sha: str
    at: float = Field(description="Seconds since 1970.")
    reason: str = Field(description="Stable code.")
    text: str
    deployment: str | None = Field(description="The update in which it was refused or taken back.")


def _quarantine_now(repo: str, sha: str, reason: str, text: str, deployment: str | None) -> Quarantined:
    return Quarantined(repo=repo, sha=sha, at=time.time(), reason=reason, text=text, deployment=deployment)


class Quarantine:
    """Commits in quarantine, in the database and in memory."""

    def __init__(self, database: Database):
        self._database = database
        self._commits = {(one.repo, one.sha): one for one in database.run_blocking(_load_quarantine)}

    def get(self, repo: str, sha: str) -> Quarantined | None:
        """Return the entry of a commit, or None."""
        return self._commits.get((repo, sha))

    def list(self) -> Sequence[Quarantined]:
        """Return the newest entries first."""
        return sorted(self._commits.values(), key=lambda one: one.at, reverse=True)

    async def add(self, repo: str, sha: str, reason: str, text: str, deployment: str | None) -> None:
        """Put a commit into quarantine; it is on the disk when this returns."""
        one = self._commits[repo, sha] = _quarantine_now(repo, sha, reason, text, deployment)
        await self._database.run(_add, one)

    async def release(self, sha: str, repo: str | None = None) -> int:
        """Release a commit in this repo, or in all repos; return the number of entries removed."""
        released = [key for key in self._commits if key[1] == sha and repo in (None, key[0])]
        for key in released:
            del self._commits[key]
        await self._database.run(_remove, released)
        return len(released)


def _load_quarantine(connection: sqlite3.Connection) -> Sequence[Quarantined]:
    rows = connection.execute("SELECT repo, sha, at, reason, text, deployment FROM quarantine")
    return [Quarantined(**dict(row)) for row in rows]


def _add(connection: sqlite3.Connection, one: Quarantined, on_conflict: str = "REPLACE") -> None:
    row = (one.repo, one.sha, one.at, one.reason, one.text, one.deployment)
    connection.execute(f"INSERT OR {on_conflict} INTO quarantine VALUES (?, ?, ?, ?, ?, ?)", row)


def _remove(connection: sqlite3.Connection, keys: Sequence[tuple[str, str]]) -> None:
    connection.executemany("DELETE FROM quarantine WHERE repo = ? AND sha = ?", keys)


OnEvent = Callable[[str, Mapping[str, Any]], Awaitable[None] | None]

EVENTS = {
    "swapped": "policy.swapped",
    "staged": "policy.staged",
    "rejected": "policy.rejected",
    "rolled_back": "policy.rolled_back",
    "failed": "policy.failed",
    "alert": "policy.alert",
}

logger = logging.getLogger(__name__)


class Journal:
    """Newest deployment records, and the quarantine, in one database. A full disk is logged and stops no robot."""

    def __init__(self, database: Database, max_records: int, on_event: OnEvent | None):
        self._database = database
        self._max_records = max_records
        self._on_event = on_event
        # Reading the records may put the commit of an interrupted deployment into the quarantine.
        self._records = {record.id: record for record in database.run_blocking(_load_records, max_records)}
        self.quarantine = Quarantine(database)

    def list(self) -> Sequence[Record]:
        """Return the newest records first."""
        return list(reversed(self._records.values()))

    def get(self, id: str) -> Record | None:
        """Return one record, or None when it is unknown or no longer kept."""
        return self._records.get(id)

    async def save(self, record: Record) -> None:
        """Write a record as it is now."""
        with _log_failed_write(record):
            await self._database.run(_save, *self._remember(record))

    def save_blocking(self, record: Record) -> None:
        """Write a record as it is now, without awaiting."""
        with _log_failed_write(record):
            self._database.run_blocking(_save, *self._remember(record))

    def _remember(self, record: Record) -> tuple[str, float, str, int]:
        """Keep a record in memory; return the arguments that write it."""
        self._records[record.id] = record
        while len(self._records) > self._max_records:
            del self._records[next(iter(self._records))]
        return record.id, record.at, json.dumps(record.as_json()), self._max_records

    async def quarantine_commit(self, record: Record) -> None:
        """Put a record's commit into quarantine."""
        if record.sha is None:
            return
        try:
            await self.quarantine.add(record.repo, record.sha, record.reason or "", record.text, record.id)
        except StoreError as error:
            logger.error("the quarantine of %s ends with this process: %s", record.sha, error)

    async def finish(self, record: Record) -> None:
        """Write a record that has ended, and publish it."""
        level = logging.INFO if record.result in ("swapped", "staged", "noop", "superseded") else logging.WARNING
        logger.log(level, "%s", record.describe())
        await self.save(record)
        event = EVENTS.get(record.result or "")
        if event is None or self._on_event is None:
            return
        try:
            answer = self._on_event(event, record.as_json())
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            logger.exception("deployment %s: publishing %s crashed", record.id, event)


@contextmanager
def _log_failed_write(record: Record) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        logger.error("deployment %s could not be saved: %s", record.id, error)
