"""Client of LeRobot's remote inference over Zenoh, for tests: the order of messages of its robots."""

import asyncio
import json
import socket
import uuid
from typing import Any

import msgpack
import numpy as np
import zenoh

from tests.testing.waiting import until, wait_until

ALIGNED = {"chunk_settings": {"chunk_merge": "aligned"}, "required_capabilities": ["chunk_alignment_v2"]}
DROP = zenoh.CongestionControl.DROP


def free_endpoint() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"tcp/127.0.0.1:{bound.getsockname()[1]}"


def open_zenoh(endpoint: str, **more: Any) -> zenoh.Session:
    """Connect to an endpoint; ``more`` are other values of the configuration, with ``__`` for ``/``."""
    config = zenoh.Config()
    values: dict[str, Any] = {"mode": "peer", "listen/endpoints": [], "connect/endpoints": [endpoint]}
    values |= {"connect/timeout_ms": 2000, "connect/exit_on_failure": True} | {
        key.replace("__", "/"): value for key, value in more.items()
    }
    off = ("scouting/multicast/enabled", "scouting/gossip/enabled", "transport/shared_memory/enabled")
    for key, value in (values | dict.fromkeys(off, False)).items():
        config.insert_json5(key, json.dumps(value))
    return zenoh.open(config)


def tensor(array: np.ndarray) -> dict[str, Any]:
    shape = {"dtype": array.dtype.name, "shape": list(array.shape), "endianness": "little"}
    return {"__lerobot_type__": "tensor", **shape, "data": array.tobytes()}


def rgb(array: np.ndarray, encoding: str = "raw", data: bytes | None = None) -> dict[str, Any]:
    shape = {"encoding": encoding, "shape": list(array.shape), "dtype": "uint8", "channel_order": "RGB"}
    return {"__lerobot_type__": "rgb", **shape, "data": array.tobytes() if data is None else data}


def read_array(record: dict[str, Any]) -> np.ndarray:
    assert record["__lerobot_type__"] == "tensor"
    return np.frombuffer(record["data"], record["dtype"]).reshape(record["shape"])


class ZenohRobot:
    """One robot; ``describe``, ``open``, ``attach`` and ``control("reset")`` precede its observations."""

    def __init__(self, endpoint: str, loop: asyncio.AbstractEventLoop, deployment: str = "act", **more: Any):
        self.zenoh = open_zenoh(endpoint, **more)
        self.root = f"lerobot/inference/v1/deployments/{deployment}"
        self.instance = self.session = ""
        self.generation = self.sequence = 0
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.loop = loop
        self.version = 1

    def pack(self, kind: str, body: dict[str, Any], request_id: str | None = None, **ids: Any) -> bytes:
        named = {"instance_id": self.instance, "session_id": self.session, "generation": self.generation}
        named |= {"request_id": uuid.uuid4().hex if request_id is None else request_id, **ids}
        envelope = {"version": self.version, "message_type": kind, "body": body, **named}
        return msgpack.packb(envelope) or b""

    async def get_all(self, key: str, payload: bytes) -> list[bytes]:
        def ask() -> list[bytes]:
            options = {"target": zenoh.QueryTarget.ALL, "consolidation": zenoh.ConsolidationMode.NONE, "timeout": 10}
            querier: Any = self.zenoh.declare_querier(key, **options)  # The stub of matching_status says bool.
            with querier:
                wait_until(lambda: querier.matching_status.matching, within=10)
                return [bytes(reply.ok.payload) for reply in querier.get(payload=payload) if reply.ok]

        return await asyncio.to_thread(ask)

    async def get(self, key: str, payload: bytes) -> dict[str, Any]:
        (reply,) = await self.get_all(key, payload)
        return msgpack.unpackb(reply)

    async def describe(self) -> dict[str, Any]:
        reply = await self.get(f"{self.root}/describe", self.pack("describe", {}, instance_id="", session_id=""))
        self.descriptor = reply["body"]
        self.instance = reply["instance_id"]
        return self.descriptor

    def contract(self, **changes: Any) -> dict[str, Any]:
        known, capabilities = self.descriptor, self.descriptor["capabilities"]
        own = {name: capabilities[name] for name in ("features", "action_feature", "action_interval")}
        named = {"expected_artifact": known["artifact_identity"], "semantics": known["semantics"]}
        return {**own, **named, "mode": "chunk", "encoding": "raw", **ALIGNED, **changes}

    async def open(self, request_id: str | None = None, **changes: Any) -> dict[str, Any]:
        payload = self.pack("open", self.contract(**changes), request_id, session_id="", generation=0)
        reply = await self.get(f"{self.root}/instances/{self.instance}/open", payload)
        if reply["message_type"] == "accepted":
            self.session = reply["session_id"]
        return reply

    def attach(self) -> None:
        """Subscribe to answers, and declare presence."""
        self.key = f"{self.root}/instances/{self.instance}/sessions/{self.session}"

        def receive(sample: zenoh.Sample) -> None:
            self.loop.call_soon_threadsafe(self.received.put_nowait, msgpack.unpackb(bytes(sample.payload)))

        self.subscribers = [
            self.zenoh.declare_subscriber(f"{self.key}/{name}", receive) for name in ("act", "language/result")
        ]
        self.token = self.zenoh.liveliness().declare_token(f"{self.key}/alive")
        self.observations = self.zenoh.declare_publisher(f"{self.key}/obs", congestion_control=DROP)

    async def start(self, **changes: Any) -> None:
        await self.describe()
        reply = await self.open(**changes)
        assert reply["message_type"] == "accepted", reply
        self.attach()
        assert (await self.control("reset"))["message_type"] == "ack"
        observations: Any = self.observations  # The stub of matching_status says bool.
        await until(lambda: observations.matching_status.matching)

    async def control(self, operation: str, request_id: str | None = None) -> dict[str, Any]:
        return await self.get(f"{self.key}/control", self.pack("control", {"operation": operation}, request_id))

    def observation(self, **changes: Any) -> dict[str, Any]:
        self.sequence += 1
        values = {}
        for feature in self.descriptor["capabilities"]["features"]:
            array = np.zeros(feature["shape"], feature["dtype"])
            values[feature["name"]] = rgb(array) if feature["kind"] == "rgb" else tensor(array)
        body = {"sequence": self.sequence, "artifact_identity": self.descriptor["artifact_identity"]}
        body |= {"observation_id": f"o{self.sequence}", "capture_time": 12.1 + self.sequence, "task": "lift"}
        body |= {"task_version": 0, "features": values, "delay": 0, "cursor": 0, "observation_cursor": 0}
        return body | {"model_continuation": None, "canonical_continuation": None} | changes

    async def observe(self, request_id: str | None = None, **changes: Any) -> dict[str, Any]:
        """Send an observation and return its answer."""
        return await self.send(self.observation(**changes), request_id)

    async def send(self, observation: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
        self.observations.put(self.pack("observation", observation, request_id))
        return await self.next_reply()

    async def next_reply(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.received.get(), 10)

    def resume(self, other: "ZenohRobot") -> None:
        """Continue the session of a client that is gone."""
        self.session, self.generation, self.sequence = other.session, other.generation, other.sequence
        self.attach()

    async def close(self) -> None:
        await asyncio.to_thread(self.zenoh.close)
