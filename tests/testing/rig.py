"""The real server on a loopback port, or its sessions alone, in the process of a test.

Policies are scripted, rooms are in memory, keys are in a file.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import numpy as np

from jaxmodels.errors import ConfigError
from service.api.context import App
from service.app import create_app
from service.auth.caller import Role
from service.auth.keys import KeyFile
from service.http.server import listen, serve_app
from service.inference.batching import LatencyModel
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy
from service.sessions.store import NewSession, Session, Sessions, SessionSettings
from service.settings import Settings
from tests.testing.doubles import MemoryLink, MemoryTransport, ScriptedLoader, ScriptedPolicy
from tests.testing.waiting import until

REAL: Any = object()  # Selects the server's own transport or loader.
ROOMS = "http://rooms.example"
JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
OBSERVATION = {
    "observation.images.front": np.zeros((1, 48, 64, 3), np.uint8),
    "observation.state": np.zeros((1, 6), np.float32),
}
POSE = {name: float(number) for number, name in enumerate(JOINTS, 1)}


def body(session_id: str = "arm", **more: Any) -> dict[str, Any]:
    return {"session_id": session_id, "policy_path": "policies/act", "transport_server_url": ROOMS} | more


def address_of(url: str) -> tuple[str, int]:
    """Return the host and port of a server's URL."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def expect_ok(answer: tuple[int, Any]) -> Any:
    """Return the body of a response that must have status 200."""
    assert answer[0] == 200, answer
    return answer[1]


def expect_refusal(answer: tuple[int, Any], status: int, code: str, *words: str) -> None:
    """Check the status, the code and words of the detail of an error."""
    assert (answer[0], answer[1].get("code")) == (status, code), answer
    assert [word for word in words if word not in answer[1]["detail"]] == [], answer


async def show(link: MemoryLink, size: tuple[int, int] = (48, 64), period: float = 0.01) -> None:
    """Send changing frames and the joints of `POSE` until cancelled."""
    for count in itertools.count():
        for camera in link.rooms.cameras:
            link.deliver_frame(camera, np.full((*size, 3), count % 2, np.uint8))
        link.deliver_joints(POSE)
        await asyncio.sleep(period)


@dataclass
class Server:
    """A running server with its parts, its keys by name, and a client."""

    app: App
    url: str
    http: aiohttp.ClientSession
    load: Any
    transport: MemoryTransport
    file: KeyFile
    keys: dict[str, str] = field(default_factory=dict)

    async def call(self, method: str, path: str, by: str | None = None, **more: Any) -> tuple[int, Any]:
        """Return the status and JSON (or text) of one call with the key of this name."""
        headers = ({"x-api-key": self.keys[by]} if by else {}) | more.pop("headers", {})
        async with self.http.request(method, path, headers=headers, **more) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def create(self, session_id: str = "arm", by: str | None = None, **more: Any) -> Any:
        return await self.call("POST", "/sessions", by, json=body(session_id, **more))

    async def until_loading(self) -> None:
        """Wait until a policy is loading; the loader thread has no event to wait for."""
        await until(lambda: self.load.loads)

    @property
    def address(self) -> tuple[str, int]:
        return address_of(self.url)


Kind = TypeVar("Kind", bound=Server)


@asynccontextmanager
async def started(
    kind: type[Kind] = Server,  # pyright: ignore[reportArgumentType] - its default needs PEP 696
    *,
    transport: Any = None,
    load: Any = None,
    parts: Mapping[str, Any] | None = None,
    roles: Mapping[str, Role] | None = None,
    headers: Mapping[str, str] | None = None,
    port: int = 0,
    prepare: Callable[[App], object] = lambda app: None,
    **settings: Any,
) -> AsyncIterator[Kind]:
    """Yield a server with these settings; ``REAL`` selects its own transport or loader, ``prepare`` gets the app."""
    transport, load = transport or MemoryTransport(), load or ScriptedLoader()
    file = KeyFile(Path(settings.get("state", "nowhere")) / "keys.json")
    keys = {name: file.create(name, role, name, time.time()) for name, role in (roles or {}).items()}
    given = {name: None if part is REAL else part for name, part in (("transport", transport), ("load", load))}
    app = create_app(Settings.from_values(**settings), **given, **(parts or {}))
    prepare(app)
    async with (
        serve_app(app, listen("127.0.0.1", port)) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60), headers=headers) as http,
    ):
        yield kind(app, url, http, load, transport, file, keys)


class SessionRig:
    """Sessions without a server, and robots that send every 10 ms; ``is_dark`` stops frames, ``is_dumb`` joints."""

    def __init__(
        self,
        new: NewSession,
        settings: SessionSettings | None = None,
        stuck_after: float = 5.0,
        batch_sizes: tuple[int, ...] = (1,),
    ) -> None:
        self.new, self.policies = new, {new.policy_path: ScriptedPolicy()}
        self.transport, self.loader = MemoryTransport(), ScriptedLoader()
        self.events: list[tuple[str, dict[str, object]]] = []
        self.robots: list[asyncio.Task[None]] = []
        self.is_dark = self.is_dumb = False
        self.still: np.ndarray | None = None
        self.size, self.pose = (48, 64), POSE
        self.sessions = Sessions(
            transport=self.transport,
            load=self.load,
            engine=Engine(stuck_after=stuck_after, batch_sizes=batch_sizes),
            settings=settings or SessionSettings(),
            listeners=[lambda event: self.events.append((event.name, dict(event.payload)))],
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *reason: object) -> None:
        for robot in self.robots:
            robot.cancel()
        await self.sessions.close()
        assert self.transport.existing == set()

    def load(self, path: str, revision: str | None = None, /, **more: Any) -> ScriptedPolicy:
        self.loader(path, revision, **more)
        if path not in self.policies:
            raise ConfigError(f"nothing at {path}")
        return self.policies[path]

    @property
    def policy(self) -> ScriptedPolicy:
        return self.policies[self.new.policy_path]

    @policy.setter
    def policy(self, policy: ScriptedPolicy) -> None:
        self.policies[self.new.policy_path] = policy

    @property
    def link(self) -> MemoryLink:
        return self.transport.link

    @property
    def session(self) -> Session:
        return self.sessions.get_live(self.new.session_id)

    @property
    def stats(self) -> dict[str, object]:
        return self.session.status().stats

    def robot(self, size: tuple[int, int] | None = None) -> asyncio.Task[None]:
        """Start a robot in the newest session's rooms that sends until it is cancelled."""
        self.robots.append(asyncio.create_task(self._send(self.link, size)))
        return self.robots[-1]

    async def _send(self, link: MemoryLink, size: tuple[int, int] | None) -> None:
        count = 0
        while True:
            count += 1
            picture = np.full((*(size or self.size), 3), count % 251, np.uint8) if self.still is None else self.still
            for camera in link.rooms.cameras if not self.is_dark else ():
                link.deliver_frame(camera, picture)
            if not self.is_dumb:
                link.deliver_joints(self.pose)
            await asyncio.sleep(0.01)

    async def running(self, new: NewSession | None = None, **changes: Any) -> Session:
        session = await self.sessions.create(replace(new or self.new, **changes))
        self.robot()
        await self.sessions.start(session.id)
        await until(lambda: self.ticks(session) > 5)
        return session

    def ticks(self, session: Session | None = None) -> int:
        robot_io = (session or self.session).robot_io
        assert robot_io is not None
        return robot_io.commands_sent + robot_io.commands_withheld


def latency_model(loaded: LoadedPolicy) -> LatencyModel:
    """Return the latency model of the first device, with frames of the trained sizes."""
    replica = loaded.replicas[0]
    return replica.latencies[replica.trained_frames]
