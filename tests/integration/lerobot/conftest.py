"""Fixtures: a server with a port for LeRobot's robots, and a client that follows LeRobot's ``robot_client``."""

import asyncio
import io
import pickle
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from service.lerobot import robot
from service.lerobot.grpc_server import LerobotServer
from service.streaming.clients import StreamSettings
from tests.testing import rig
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy

HELPERS = "lerobot.async_inference.helpers"
JOINTS = [f"{name}.pos" for name in SO100_REQUIREMENTS.joint_names or ()]
POSE = dict(zip(JOINTS, (0.0, 10.0, -20.0, 30.0, 0.0, 50.0), strict=True))
PIECE = 2 << 20  # Bytes of data in one message of an observation.
BEGIN, MIDDLE, END = 1, 2, 3


@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict[str, Any]
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict[str, str] = field(default_factory=dict)


@dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict[str, Any]
    must_go: bool = False


class TimedAction:
    timestamp: float
    timestep: int
    action: np.ndarray


@pytest.fixture(autouse=True)
def lerobot_classes(monkeypatch) -> None:
    """Register the classes under the module of LeRobot, whose name is part of each pickle."""
    module = ModuleType(HELPERS)
    for each in (RemotePolicyConfig, TimedObservation):
        monkeypatch.setattr(each, "__module__", HELPERS)
        setattr(module, each.__name__, each)
    for name in ("lerobot", "lerobot.async_inference"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, HELPERS, module)


class ReplyUnpickler(pickle.Unpickler):
    """Reads a reply, with numpy in place of torch."""

    def find_class(self, module: str, name: str) -> Any:
        return {
            ("torch", "tensor"): lambda numbers: np.array(numbers, np.float32),
            (HELPERS, "TimedAction"): TimedAction,
        }[module, name]


def pack_varint(value: int) -> bytes:
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*packed, value])


def pack_setup(data: bytes) -> bytes:
    return b"\x0a" + pack_varint(len(data)) + data


def pack_piece(state: int, data: bytes) -> bytes:
    return b"\x08" + bytes([state]) + b"\x12" + pack_varint(len(data)) + data


def cut_pieces(data: bytes) -> list[bytes]:
    """Return the messages of one observation, cut as by LeRobot's client."""
    parts = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    states = [END] if len(parts) == 1 else [BEGIN, *[MIDDLE] * (len(parts) - 2), END]
    return [pack_piece(state, part) for state, part in zip(states, parts, strict=True)]


class RobotClient:
    """Client that makes the calls of LeRobot's ``robot_client`` in its order, over a connection of its own."""

    def __init__(self, port: int, path: str, credentials: grpc.ChannelCredentials | None = None):
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 4 << 20))
        address = f"localhost:{port}"
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options)
        self.path = path
        self.shape: tuple[int, ...] = (48, 64, 3)
        self.pose = dict(POSE)
        self.task = ""
        self.fps = 100
        self.executed: list[tuple[int, np.ndarray]] = []
        self.chunks: list[list[TimedAction]] = []
        self.queue: dict[int, np.ndarray] = {}
        self.must_go = True
        self.largest_chunk = -1

    async def call(self, name: str, message: bytes = b"") -> bytes:
        return await self.channel.unary_unary(f"/transport.AsyncInference/{name}")(message)

    def config(self, **changes: Any) -> RemotePolicyConfig:
        camera = {"dtype": "image", "shape": self.shape, "names": ["height", "width", "channels"]}
        state = {"dtype": "float32", "shape": (len(JOINTS),), "names": list(JOINTS)}
        features = {"observation.state": state, "observation.images.front": camera}
        return replace(RemotePolicyConfig("act", self.path, features, 50), **changes)

    async def start(self, **changes: Any) -> None:
        await self.call("Ready")
        await self.call("SendPolicyInstructions", pack_setup(pickle.dumps(self.config(**changes))))

    async def send_pieces(self, pieces: list[bytes]) -> None:
        async def iterate() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        assert await self.channel.stream_unary("/transport.AsyncInference/SendObservations")(iterate()) == b""

    async def observe(self, timestep: int = 0, *, must_go: bool = False, **changes: Any) -> TimedObservation:
        """Send an observation, with changes of its values, and return it."""
        values = {**self.pose, "front": np.full(self.shape, 7, np.uint8), "task": self.task} | changes
        observation = TimedObservation(time.time(), timestep, values, must_go)
        await self.send_pieces(cut_pieces(pickle.dumps(observation)))
        return observation

    async def get_actions(self) -> list[TimedAction]:
        """Return the actions of one call; none for an empty message."""
        message = await self.call("GetActions")
        if not message:
            return []
        size = next(index for index in range(1, 6) if message[index] < 0x80)
        data = message[size + 1 :]
        assert message == pack_setup(data)
        return ReplyUnpickler(io.BytesIO(data)).load()

    async def run(self, steps: int) -> None:
        """Run both loops of the client until it has executed this number of actions."""
        receiver = asyncio.create_task(self.receive())
        try:
            async with asyncio.timeout(60):
                while len(self.executed) < steps:
                    await self._tick()
                    await asyncio.sleep(1 / self.fps)
                    assert not receiver.done(), receiver
        finally:
            receiver.cancel()

    async def _tick(self) -> None:
        if self.queue:
            timestep = min(self.queue)
            self.executed.append((timestep, self.queue.pop(timestep)))
            self.pose = dict(zip(JOINTS, map(float, self.executed[-1][1]), strict=True))
        if len(self.queue) / self.largest_chunk <= 0.5:
            must_go = self.must_go and not self.queue
            await self.observe(max(self.latest, 0), must_go=must_go)
            self.must_go &= not must_go

    @property
    def latest(self) -> int:
        return self.executed[-1][0] if self.executed else -1

    async def receive(self) -> None:
        while True:
            if not (chunk := await self.get_actions()):
                continue
            self.chunks.append(chunk)
            self.largest_chunk = max(self.largest_chunk, len(chunk))
            before, self.queue = self.queue, {}
            for timed in chunk:
                if timed.timestep > self.latest:
                    old = before.get(timed.timestep, timed.action)
                    self.queue[timed.timestep] = 0.3 * old + 0.7 * timed.action
            self.must_go = True


@dataclass
class Server(rig.Server):
    """Server with a port for LeRobot's robots, and the folder of its only policy."""

    robots: Any = None
    path: str = ""

    @property
    def policy(self) -> ScriptedPolicy:
        return self.load.make()

    @asynccontextmanager
    async def connect(self, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[RobotClient]:
        """Connect a robot, which has a connection of its own."""
        client = RobotClient(self.robots.port, self.path, credentials)
        try:
            yield client
        finally:
            await client.channel.close()

    @asynccontextmanager
    async def started(self, **changes: Any) -> AsyncIterator[RobotClient]:
        """Connect a robot and request the policy."""
        async with self.connect() as client:
            await client.start(**changes)
            yield client

    async def sessions(self) -> list[dict[str, Any]]:
        return rig.expect_ok(await self.call("GET", "/sessions"))


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve(tmp_path, monkeypatch) -> Serve:
    folder = tmp_path / "policies" / "act"
    folder.mkdir(parents=True)
    monkeypatch.setattr(robot, "POLL_TIMEOUT", 0.2)

    @asynccontextmanager
    async def start(policy: ScriptedPolicy | None = None, silence: float = 30.0, **settings: Any):
        """Start a server; ``silence`` is the time without calls after which a robot's session is closed."""
        policy = policy or ScriptedPolicy()
        settings = {"policy_roots": (str(folder.parent),), "policy_owners": ("policies",), "lerobot_port": 0} | settings
        parts = {"read_requirements": lambda path, revision: policy.requirements}
        async with rig.started(Server, load=ScriptedLoader(lambda: policy), parts=parts, **settings) as server:
            server.app.ctx.stream_clients.settings = StreamSettings(silence=silence)
            server.path = str(folder)
            async with LerobotServer(server.app, "127.0.0.1") as server.robots:
                yield server

    return start


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server
