"""The demo: a server and the simulated arm as child processes."""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robojax.client import AsyncClient, RequestRefused, RobojaxError
from robojax.sim.arm import CAMERA
from robojax.sim.tasks import PICK, Outcome, Score, Task
from service.processes import Child, child

SESSION = "demo-arm"


@dataclass(frozen=True)
class DemoRequest:
    """Settings of the demo's session.

    Attributes:
        instruction: instruction of the first episode; None for a policy that does not read language.
    """

    url: str
    policy: str
    revision: str | None
    policy_type: str
    instruction: str | None = None
    is_recorded: bool = False

    def body(self) -> dict[str, Any]:
        """Request body that creates the session, without defaults."""
        body: dict[str, Any] = {
            "session_id": SESSION,
            "policy_path": self.policy,
            "transport_server_url": self.url,
            "camera_names": [CAMERA],
            "revision": self.revision,
            "policy_type": None if self.policy_type == "act" else self.policy_type,
            "language_instruction": self.instruction,
            "record": self.is_recorded or None,
        }
        return {name: value for name, value in body.items() if value is not None}

    def curl(self) -> list[str]:
        """Return shell commands that do the same."""
        body = shlex.quote(json.dumps(self.body()))
        session, is_json = f"{self.url}/sessions/{SESSION}", "-H 'content-type: application/json' -d"
        other = shlex.quote(json.dumps({"language_instruction": self.instruction}))
        return [
            f"curl -X POST {self.url}/sessions {is_json} {body}",
            *([f"curl -X PATCH {session} {is_json} {other}"] if self.instruction is not None else []),
            f"curl -X POST {session}/start",
            f"curl {session}",
            f"curl -X POST {session}/stop",
        ]


_SERVES_AT = re.compile(r"robojax serves at (http://\S+)")  # `robojax serve` prints this when it is ready.
STARTING = 60.0  # seconds until the server is ready
LOADING = 300.0  # seconds for the policy to be loaded and compiled


class DemoFailed(Exception):
    """The demo cannot continue; the text says why."""


@dataclass
class View:
    """State of the demo at one moment; ``news`` and ``notes`` are new since the previous view.

    Attributes:
        status: the response of ``GET /sessions/{id}``.
        news: ended episodes.
        instruction: instruction of the current episode; empty before the first.
        notes: lines for the terminal about a person who stopped or continued the session.
        is_over: whether all episodes have ended.
    """

    status: Mapping[str, Any]
    score: Score
    news: list[Outcome] = field(default_factory=list)
    instruction: str = ""
    notes: list[str] = field(default_factory=list)
    is_over: bool = False


class Demo:
    """A running demo with its server at ``url``."""

    def __init__(self, client: AsyncClient, server: Child, is_recorded: bool):
        self.url = client.url
        self._client, self._server, self._is_recorded = client, server, is_recorded

    @property
    def page(self) -> str:
        """URL of the page on which a person can watch and stop the demo."""
        return f"{self.url}/ui"

    async def create_session(
        self, policy: str, task: Task = PICK, seed: int = 0, *, revision: str | None = None
    ) -> DemoRequest:
        """Create the session with a warm policy and the instruction of ``seed``; raise ``DemoFailed`` if refused."""
        named = {"policy_path": policy} | ({} if revision is None else {"revision": revision})
        needs = (await self._request("policy", "POST", "/policies/check", named))["requirements"]
        instruction = task.choose_cube(seed).instruction if needs["language"] else None
        request = DemoRequest(self.url, policy, revision, needs["policy_type"], instruction, self._is_recorded)
        await self._request("session", "POST", "/sessions", request.body())
        return request

    async def _request(self, what: str, method: str, path: str, body: object = None, timeout: float = LOADING) -> Any:
        try:
            return await self._client.request(method, path, body, timeout=timeout)
        except RequestRefused as error:
            raise DemoFailed(f"the server refused the {what} with {error.status}: {error.text}") from error
        except RobojaxError as error:
            self._server.check()
            raise DemoFailed(f"the server does not answer: {error}") from error

    async def views(
        self,
        request: DemoRequest,
        *,
        seed: int,
        episodes: int,
        task: Task = PICK,
        films: Path | None = None,
    ) -> AsyncIterator[View]:
        """Start the arm and yield its state four times per second, until its episodes are over.

        Args:
            films: folder for a video of each episode.

        Raises:
            DemoFailed: an episode could not be played.
            ChildDied: the server or the arm ended unexpectedly.
        """
        arguments = ("--server", self.url, "--transport", self.url, "--session", SESSION)
        arguments += ("--task", task.name, "--seed", str(seed), "--episodes", str(episodes))
        arguments += () if request.instruction is None else ("--instruct",)
        arguments += () if films is None else ("--films", str(films))
        score, instruction, failure = Score(), "", None
        news: list[Outcome] = []
        notes: list[str] = []

        async def listen(arm: Child) -> None:
            nonlocal instruction, failure
            while (line := await arm.next_line()) is not None:
                message = json.loads(line)
                event = message.pop("event")
                if event == "episode":
                    outcome = Outcome(**message)
                    score.outcomes.append(outcome)
                    news.append(outcome)
                elif event == "asked":
                    instruction = message["instruction"]
                elif event == "stopped":
                    notes.append(self._explain_stop(**message))
                elif event == "resumed":
                    notes.append(f"continued: episode {message['number']} starts again from its beginning")
                elif event == "failed":
                    failure = message["reason"]

        async with child("the arm", "robojax.sim.robot", *arguments) as arm:
            listening = asyncio.create_task(listen(arm))
            try:
                while True:
                    self._server.check()
                    is_over = listening.done()
                    if is_over:
                        listening.result()
                        if failure is not None:
                            raise DemoFailed(f"{failure}\n{arm.read_stderr_tail()}".rstrip())
                        if episodes == 0 or score.done < episodes:
                            arm.check()
                            raise DemoFailed("the arm ended before its last episode")
                    recent, news[:] = list(news), []
                    lines, notes[:] = list(notes), []
                    status = await self._request("request", "GET", f"/sessions/{SESSION}", timeout=10.0)
                    yield View(status, score, recent, instruction, lines, is_over)
                    if is_over:
                        return
                    await asyncio.sleep(0.25)
            finally:
                listening.cancel()

    def _explain_stop(self, reason: str, is_latched: bool) -> str:
        """Describe that a person stopped the session, and how to continue it."""
        command, button = ("reset", "Reset") if is_latched else ("start", "Start")
        stopped = f"emergency stop ({reason})" if is_latched else "a person stopped the session"
        return (
            f"STOPPED: {stopped}; the arm holds and waits, and this episode does not count. When it is safe: "
            f"{button} on {self.page}, or: robojax {command} {SESSION} --server {self.url}"
        )

    async def finish_recording(self) -> Mapping[str, Any]:
        """End the session and return its finished recording; raise ``DemoFailed`` if it is missing or late."""
        try:
            async with asyncio.timeout(LOADING):
                await self._client.session(SESSION).delete()
                while True:
                    newest = (await self._client.request("GET", "/recordings?limit=1") or [{}])[0]
                    if newest.get("state") != "on" and newest.get("dataset") in ("ready", "failed"):
                        return newest
                    await asyncio.sleep(0.2)
        except (RobojaxError, TimeoutError) as error:
            raise DemoFailed(f"the recording was not finished: {error or 'it took too long'}") from error


@asynccontextmanager
async def serve_demo(*, port: int = 0, recordings: Path | None = None) -> AsyncIterator[Demo]:
    """Start the server and wait until it is ready, as a context manager.

    Args:
        port: port of the server; 0 for a free port.
        recordings: folder to record the session into.

    Raises:
        DemoFailed: the server was not ready in time.
        ChildDied: the server ended, for example because another program listens on its port.
    """
    arguments = ("serve", "--host", "127.0.0.1", "--port", str(port), "--state", "off")
    if recordings is not None:
        arguments += ("--recordings", str(recordings))
    async with child("the server", "robojax.cli", *arguments) as server:
        url = await read_server_url(server)
        # A full pipe of standard output would block the server.
        draining = asyncio.create_task(_drain(server))
        try:
            async with AsyncClient(url) as client:
                yield Demo(client, server, is_recorded=recordings is not None)
        finally:
            draining.cancel()


async def _drain(server: Child) -> None:
    while await server.next_line() is not None:
        pass


async def read_server_url(server: Child) -> str:
    """Wait until the server is ready, and return the URL that it prints; another server may use the port.

    Raises:
        DemoFailed: the server was not ready in time.
        ChildDied: the server ended.
    """
    try:
        async with asyncio.timeout(STARTING):
            while (line := await server.next_line()) is not None:
                if found := _SERVES_AT.match(line):
                    return found[1]
    except TimeoutError:
        raise DemoFailed(f"the server did not answer in {STARTING:.0f} s\n{server.read_stderr_tail()}") from None
    server.check()
    raise DemoFailed(f"the server closed its output before it answered\n{server.read_stderr_tail()}")
