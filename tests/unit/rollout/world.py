"""Scripted sessions without robots, and the deployments and stub Hub around them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hooks.payload import WebhookPayload
from service.rollout.config import DeploymentSettings
from service.rollout.deployments import Deployments
from service.rollout.gates import GateVerdict
from service.rollout.records import Record
from service.rollout.sources import PolicySource
from tests.testing import waiting
from tests.testing.stub_hub import StubHub

until = partial(waiting.until, within=30.0)

REPO = "someone/arm"


def policy(step: int) -> dict[str, bytes | str | None]:
    """Return the files of a policy, which differ for each step."""
    return {
        "config.json": f'{{"type": "act", "step": {step}}}',
        "model.safetensors": step.to_bytes(2, "big") * 2000,
        "policy_preprocessor.json": "{}",
        "README.md": "# An arm",
    }


@dataclass
class Robot:
    """Session that follows a policy. `verdicts` has the verdicts of steps that fail."""

    session_id: str
    repo: str = REPO
    ref: str | None = None
    sha: str | None = "0" * 40
    mode: str = "swap"
    prepared: str | None = None
    before: str | None = None
    verdicts: dict[str, GateVerdict] = field(default_factory=dict)


class Robots:
    """Sessions without robots. `steps` records the requests as ``(step, session, sha)``."""

    def __init__(self, *robots: Robot):
        self.robots = list(robots)
        self.steps: list[tuple[str, str, str | None]] = []
        self.folders: list[Path] = []
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.crash: Exception | None = None

    def __getitem__(self, session_id: str) -> Robot:
        return next(robot for robot in self.robots if robot.session_id == session_id)

    def of(self, step: str) -> list[str | None]:
        return [sha for name, _, sha in self.steps if name == step]

    def list_following(self) -> Sequence[Robot]:
        return self.robots

    async def prepare(self, session_id: str, repo: str, sha: str, folder: Path, on_progress: Any) -> GateVerdict:
        self.steps.append(("prepare", session_id, sha))
        self.folders.append(folder)
        on_progress("loading")
        await self.may_prepare.wait()
        if self.crash:
            raise self.crash
        on_progress("checking")
        self[session_id].prepared = sha
        return self._verdict("prepare", session_id)

    async def swap(self, session_id: str, sha: str) -> GateVerdict:
        self.steps.append(("swap", session_id, sha))
        robot = self[session_id]
        if robot.prepared != sha:
            return GateVerdict("not_staged", "nothing is prepared")
        verdict = self._verdict("swap", session_id)
        if verdict.reason is None:
            robot.before, robot.sha, robot.prepared = robot.sha, sha, None
        return verdict

    async def probation(self, session_id: str, sha: str) -> GateVerdict:
        self.steps.append(("probation", session_id, sha))
        verdict = self._verdict("probation", session_id)
        if verdict.reason is not None:
            self[session_id].sha = self[session_id].before
        return verdict

    async def discard(self, session_id: str, sha: str) -> None:
        self.steps.append(("discard", session_id, sha))
        if self[session_id].prepared == sha:
            self[session_id].prepared = None

    async def rollback(self, session_id: str) -> GateVerdict:
        self.steps.append(("rollback", session_id, None))
        robot = self[session_id]
        robot.sha, robot.before = robot.before, None
        return GateVerdict()

    def _verdict(self, step: str, session_id: str) -> GateVerdict:
        return self[session_id].verdicts.get(step, GateVerdict(figures={"seconds": 0.01}))


SETTINGS = DeploymentSettings(quiet=0.1, longest=5.0, poll=None, transfer_pause=0.01)


class World:
    """Deployments with their Hub and robots. `events` records the published events; `now` is the clock of triggers."""

    def __init__(self, hub: StubHub, robots: Robots, sources: Callable[[str], PolicySource], folder: Path):
        self.hub = hub
        self.robots = robots
        self.sources = sources
        self.database = folder / "deployments.sqlite"
        self.now: Callable[[], float] = time.monotonic
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.deployments = self.create_deployments()
        self._running: asyncio.Task[None] | None = None

    def create_deployments(self, settings: DeploymentSettings = SETTINGS) -> Deployments:
        return Deployments(
            sources=self.sources,
            rollout=self.robots,
            database=self.database,
            settings=settings,
            on_event=lambda event, data: self.events.append((event, data)),
            now=lambda: self.now(),
        )

    def start(self) -> None:
        self._running = asyncio.create_task(self.deployments.run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        self._running = None
        self.deployments.close()

    async def restart(self, settings: DeploymentSettings = SETTINGS) -> None:
        await self.stop()
        self.deployments = self.create_deployments(settings)
        self.start()

    def push(self, files: Mapping[str, bytes | str | None], **details: Any) -> str:
        """Push a commit and notify the deployments as a webhook does."""
        sha = self.hub.push(REPO, files, **details)
        self.notify(sha, details.get("ref", "main"))
        return sha

    def notify(self, sha: str, ref: str = "main") -> None:
        self.deployments.handle_delivery(pushed(sha, ref), f"delivery-{sha[:6]}")

    async def arrive(self, files: Mapping[str, bytes | str | None]) -> str:
        """Push a commit, notify the deployments, and wait until they are idle."""
        sha = self.push(files)
        await self.idle()
        return sha

    async def start_preparing(self, *files: Mapping[str, bytes | str | None]) -> list[str]:
        """Push commits, each during the preparation of the commit before, which `Robots.may_prepare` releases."""
        self.robots.may_prepare.clear()
        made: list[str] = []
        for commit in files:
            made.append(self.push(commit))
            await until(lambda: self.robots.of("prepare")[-1:] == made[-1:])
        return made

    async def deliver(self, sha: str) -> None:
        self.notify(sha)
        await self.idle()

    async def reconcile(self) -> None:
        await self.deployments.reconcile()
        await self.idle()

    def only_record(self, expected: tuple[str, str | None]) -> Record:
        """Return the only record, which has this result and reason."""
        (record,) = self.deployments.list()
        assert (record.result, record.reason) == expected
        return record

    async def deploy(self, session_id: str, revision: str | None = None, *, force: bool = False) -> Record:
        """Request a deployment and wait for its end."""
        record = await self.deployments.begin_deployment(session_id, revision, force=force)
        await until(lambda: record.result is not None)
        await self.idle()
        return record

    @property
    def quarantined(self) -> list[str]:
        return [entry.sha for entry in self.deployments.quarantine.list()]

    async def idle(self) -> None:
        """Wait until the deployments have handled all notifications."""
        await until(lambda: self.deployments.is_idle)

    @property
    def results(self) -> list[str | None]:
        """Return the results of all records, oldest first."""
        return [record.result for record in reversed(self.deployments.list())]


def pushed(sha: str | None, ref: str = "main", repo: str = REPO, **parts: Any) -> WebhookPayload:
    """Return the payload of a delivery."""
    name = ref if ref.startswith("refs/") else f"refs/heads/{ref}"
    payload = {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": {"type": "model", "name": repo, "id": "1", "owner": {"id": "2"}, "headSha": sha},
        "webhook": {"id": "hook", "version": 3},
        "updatedRefs": [{"ref": name, "oldSha": None, "newSha": sha}],
    }
    return WebhookPayload.model_validate(payload | parts)
