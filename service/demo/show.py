"""The whole demo: the real server and the simulated arm as processes, a session made over HTTP, what can be seen."""

import asyncio
import json
import os
import shlex
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from service.demo.children import Child, ChildDied, child
from service.demo.collect import CAMERA
from service.demo.episodes import Outcome, Score
from service.transport.credentials import headers_of

SESSION = "demo-arm"
STARTING = 60.0  # seconds for the server to answer
LOADING = 300.0  # seconds for the policy to be loaded and compiled


class ShowFailed(Exception):
    """The demo cannot go on; the text says why."""


@dataclass
class View:
    """What there is to see at one moment.

    Attributes:
        status: the session as ``GET /sessions/{id}`` tells it.
        news: episodes that ended since the view before.
        is_over: whether the arm has played all its episodes.
    """

    status: Mapping[str, Any]
    score: Score
    news: list[Outcome] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True)
class Request:
    """The body of the session's creation."""

    url: str
    policy: str
    is_recorded: bool = False

    @property
    def page(self) -> str:
        """Where a person can watch and stop it."""
        return f"{self.url}/ui"

    def body(self) -> dict[str, Any]:
        return {
            "session_id": SESSION,
            "policy_path": self.policy,
            "transport_server_url": self.url,
            "camera_names": [CAMERA],
        } | ({"record": True} if self.is_recorded else {})

    def curl(self) -> list[str]:
        """Lines a person can type to do what the demo did."""
        body = shlex.quote(json.dumps(self.body()))
        session = f"{self.url}/sessions/{SESSION}"
        return [
            f"curl -X POST {self.url}/sessions -H 'content-type: application/json' -d {body}",
            f"curl -X POST {session}/start",
            f"curl {session}",
            f"curl -X POST {session}/stop",
        ]


class Show:
    """A running demo."""

    def __init__(self, request: Request, http: aiohttp.ClientSession, server: Child):
        self.request = request
        self._http, self._server = http, server

    async def create_session(self) -> None:
        """Makes the session; returns when its policy is loaded, compiled and warm.

        Raises:
            ShowFailed: the server refused.
        """
        timeout = aiohttp.ClientTimeout(total=LOADING)
        url = f"{self.request.url}/sessions"
        async with self._http.post(url, json=self.request.body(), timeout=timeout) as answer:
            if answer.status != 200:
                raise ShowFailed(f"the server refused the session with {answer.status}: {await answer.text()}")

    async def views(self, *, seed: int, episodes: int, period: float = 0.25) -> AsyncIterator[View]:
        """Starts the arm and tells what can be seen, `period` seconds apart, until its episodes are over.

        Raises:
            ShowFailed: an episode could not be played.
            ChildDied: the server or the arm ended by itself.
        """
        url = self.request.url
        arguments = ("--server", url, "--transport", url, "--session", SESSION)
        arguments += ("--seed", str(seed), "--episodes", str(episodes))
        score, news, failure = Score(), [], None

        async def listen(arm: Child) -> None:
            nonlocal failure
            while (line := await arm.next_line()) is not None:
                told = json.loads(line)
                event = told.pop("event")
                if event == "episode":
                    outcome = Outcome(**told)
                    score.outcomes.append(outcome)
                    news.append(outcome)
                elif event == "failed":
                    failure = told["reason"]

        async with child("the arm", "service.demo.robot", *arguments) as arm:
            listening = asyncio.create_task(listen(arm))
            try:
                while True:
                    self._server.check()
                    is_over = listening.done()
                    if is_over:
                        listening.result()
                        if failure is not None:
                            raise ShowFailed(f"{failure}\n{arm.last_words()}".rstrip())
                        if episodes == 0 or score.done < episodes:
                            arm.check()
                            raise ShowFailed("the arm ended before its episodes were over")
                    shown, news[:] = list(news), []
                    yield View(await self._status(), score, shown, is_over)
                    if is_over:
                        return
                    await asyncio.sleep(period)
            finally:
                listening.cancel()

    async def recorded(self) -> Mapping[str, Any]:
        """Ends the session; returns its recording when a dataset was made of it, or could not be.

        Raises:
            ShowFailed: it took too long, or there is none.
        """
        url = self.request.url
        try:
            async with asyncio.timeout(LOADING), self._http.delete(f"{url}/sessions/{SESSION}") as answer:
                answer.raise_for_status()
                while True:
                    async with self._http.get(f"{url}/recordings") as listed:
                        newest = (await listed.json() or [{}])[0]
                    if newest.get("state") != "on" and newest.get("dataset") in ("ready", "failed"):
                        return newest
                    await asyncio.sleep(0.2)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ShowFailed(f"the recording was not finished: {error or 'it took too long'}") from error

    async def _status(self) -> Mapping[str, Any]:
        try:
            async with self._http.get(f"{self.request.url}/sessions/{SESSION}") as answer:
                answer.raise_for_status()
                return await answer.json()
        except aiohttp.ClientError as error:
            self._server.check()
            raise ShowFailed(f"the server does not answer: {error}") from error


@asynccontextmanager
async def show(policy: str, *, port: int = 0, recordings: Path | None = None) -> AsyncIterator[Show]:
    """Starts the server and waits until it answers.

    Args:
        recordings: a folder to record the session into.

    Raises:
        ShowFailed: it did not in time.
        ChildDied: it ended by itself.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=10)
    arguments = ("serve", "--host", "127.0.0.1", "--port", str(port), "--state", "off")
    if recordings is not None:
        arguments += ("--recordings", str(recordings))
    async with (
        # Where the settings name a file of keys, the demo's own server wants one too.
        aiohttp.ClientSession(
            timeout=timeout, trust_env=False, headers=headers_of(os.environ.get("ROBOJAX_KEY"))
        ) as http,
        child("the server", "service.cli", *arguments) as server,
    ):
        # Nobody reads its standard output; a full pipe would stop it.
        draining = asyncio.create_task(_drain(server))
        try:
            await wait_until_up(http, url, server)
            yield Show(Request(url, policy, recordings is not None), http, server)
        finally:
            draining.cancel()


async def _drain(server: Child) -> None:
    while await server.next_line() is not None:
        pass


async def wait_until_up(http: aiohttp.ClientSession, url: str, server: Child) -> None:
    """Returns when the server answers.

    Raises:
        ShowFailed: it did not in time.
        ChildDied: it ended by itself.
    """
    try:
        async with asyncio.timeout(STARTING):
            while True:
                server.check()
                try:
                    async with http.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    pass  # not listening yet
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise ShowFailed(f"the server did not answer at {url} in {STARTING:.0f} s\n{server.last_words()}") from None


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


__all__ = ["ChildDied", "Request", "Show", "ShowFailed", "View", "show"]
