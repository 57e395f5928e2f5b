"""Commits that must not be deployed again by themselves: they failed a gate, or a robot was rolled back from them."""

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hooks.database import Database


@dataclass(frozen=True)
class Quarantined:
    """One commit.

    Attributes:
        at: seconds since 1970.
        reason: a stable code, e.g. ``not_finite``.
        deployment: id of the record that it failed in.
    """

    repo: str
    sha: str
    at: float
    reason: str
    text: str
    deployment: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Quarantine:
    """The commits in the database, and in memory to look them up."""

    def __init__(self, database: Database):
        self._database = database
        self._commits = {(one.repo, one.sha): one for one in database.run_now(_load)}

    def get(self, repo: str, sha: str) -> Quarantined | None:
        """The entry of a commit, if it is in quarantine."""
        return self._commits.get((repo, sha))

    def list(self) -> Sequence[Quarantined]:
        """Newest first."""
        return sorted(self._commits.values(), key=lambda one: one.at, reverse=True)

    async def add(self, repo: str, sha: str, reason: str, text: str, deployment: str | None) -> Quarantined:
        """Keep a commit from being deployed by itself; on the disk when this returns."""
        one = Quarantined(repo, sha, time.time(), reason, text, deployment)
        self._commits[repo, sha] = one
        await self._database.run(_add, one)
        return one

    async def release(self, sha: str, repo: str | None = None) -> int:
        """Let it be deployed again, in every repo unless one is given; how many entries there were."""
        released = [key for key in self._commits if key[1] == sha and repo in (None, key[0])]
        for key in released:
            del self._commits[key]
        await self._database.run(_remove, released)
        return len(released)


def _load(connection: sqlite3.Connection) -> Sequence[Quarantined]:
    rows = connection.execute("SELECT repo, sha, at, reason, text, deployment FROM quarantine")
    return [Quarantined(**dict(row)) for row in rows]


def _add(connection: sqlite3.Connection, one: Quarantined) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?, ?)",
        (one.repo, one.sha, one.at, one.reason, one.text, one.deployment),
    )


def _remove(connection: sqlite3.Connection, keys: Sequence[tuple[str, str]]) -> None:
    connection.executemany("DELETE FROM quarantine WHERE repo = ? AND sha = ?", keys)
