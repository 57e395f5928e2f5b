"""A robot's session over LeRobot's remote inference: control, observations and the actions that answer them."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.control.chunk_scheduler import plan_prefix
from service.control.config import ControlConfig
from service.lerobot.envelopes import Envelope, EnvelopeError
from service.lerobot.robot import read_robot_observation
from service.streaming.direct_inference import DirectInference

ACTION_DEADLINE = 5.0  # Seconds from the arrival of an observation to its actions.
MAX_INPUT = 2048  # Characters of a task.
STATE, CAMERA = "observation.state", "observation.images."
_MAX_REMEMBERED = 128  # Ids of requests.
_ECHOED = ("artifact_identity", "observation_id", "capture_time", "task", "task_version")
_CURSORS = ("observation_cursor", "cursor")
_TYPES = {"sequence": int, "artifact_identity": str, "observation_id": str, "capture_time": float, "task": str}
_TYPES |= {"task_version": int, "features": dict, "delay": int, "cursor": int}


@dataclass(eq=False)
class RemoteSession:
    """One session; the client holds its robot at every error.

    Attributes:
        id: the client's session id.
        session_id: id of the session on the server.
        features: descriptions of the features that an observation must have.
        max_age: seconds after which an observation is too old.
        work: held during an inference or a control.
        absent_since: monotonic time since when the client has no liveliness token; None while it has one.
    """

    id: str
    session_id: str
    inference: DirectInference
    config: ControlConfig
    features: list[dict[str, Any]]
    identity: str
    mode: str
    is_aligned: bool
    max_age: float
    work: asyncio.Lock = field(default_factory=asyncio.Lock)
    generation: int = 0
    absent_since: float | None = field(default_factory=time.monotonic)
    is_ready: bool = False
    is_closing: bool = False
    _is_faulted: bool = False
    _sequence: int = 0
    _request_ids: dict[str, None] = field(default_factory=dict)
    _chunk_cursor: int | None = None  # Cursor of the newest chunk's observation; None before a chunk.

    async def control(self, request: Envelope) -> Mapping[str, Any]:
        """Apply reset, invalidate or status after the running inference; returns the acknowledgement."""
        operation = request.body.get("operation")
        async with self.work:
            if request.generation < self.generation or self.is_closing:
                raise EnvelopeError(f"generation {request.generation} is before {self.generation}", "stale")
            if operation == "status":
                if request.generation != self.generation:
                    raise EnvelopeError(f"generation is {self.generation}", "stale")
                status = {"generation": self.generation, "ready": self.is_ready}
                return {"operation": operation, "applied_generation": self.generation, "session": status}
            if operation not in ("reset", "invalidate"):
                raise EnvelopeError(f"operation is {operation!r:.40}; wanted reset, invalidate, close or status")
            self.inference.check_not_stopped()  # A client's reset never ends a stop.
            if request.generation > self.generation:
                self.inference.reset()
                self.generation, self._chunk_cursor = request.generation, None
            self.is_ready |= operation == "reset"
            return {"operation": operation, "applied_generation": self.generation}

    async def answer_observation(self, request: Envelope, received_at: float) -> Mapping[str, Any]:
        """Return the body with the actions for an observation.

        Raises:
            EnvelopeError: the observation is stale, malformed or too late.
            ServiceError: as ``DirectInference.infer``, e.g. after a stop.
        """
        body = request.body
        self._check_order(request)
        self.inference.check_not_stopped()
        if time.monotonic() - received_at > self.max_age:
            raise EnvelopeError(f"the observation waited longer than {self.max_age:g} s (frame_age_limit)", "timeout")
        prefix, executed = self._read_continuation(body)
        values = body["features"]
        images = {name.removeprefix(CAMERA): value for name, value in values.items() if name.startswith(CAMERA)}
        observed = read_robot_observation(self.inference, images, values[STATE], body["task"])
        async with self.work:
            try:
                async with asyncio.timeout(ACTION_DEADLINE):
                    trace = await self.inference.infer(observed, executed, observed_at=received_at, prefix=prefix)
            except TimeoutError:
                self._is_faulted = True
                raise EnvelopeError(f"no actions within {ACTION_DEADLINE:g} s; close the session", "timeout") from None
        steps = self.config.action_steps if self.mode == "chunk" else self.config.chunk
        actions = trace.actions[:steps]
        self._chunk_cursor = body["observation_cursor"] if self.is_aligned else body["cursor"]
        echoed = {name: body[name] for name in (*_ECHOED, *(_CURSORS if self.is_aligned else ()))}
        # Model space is the robot's units, so that the client returns the limited actions.
        model_actions = None if self.mode == "chunk" else actions
        durations = {"queue": float(trace.inference.queue), "policy": float(trace.inference.total)}
        answer = {"canonical_actions": actions, "model_actions": model_actions, "execution_steps": len(actions)}
        return {**echoed, **answer, "server_durations": durations}

    def _check_order(self, request: Envelope) -> None:
        """Check that a request is the next of its session, and that its fields fit the descriptor."""
        body = request.body
        if request.generation != self.generation or not self.is_ready or self.is_closing:
            raise EnvelopeError(f"the session is closing, was not reset, or has generation {self.generation}", "stale")
        if request.request_id in self._request_ids:
            raise EnvelopeError("the request id was used before", "stale")
        if self.work.locked():
            raise EnvelopeError("another request of the session is in progress", "busy")
        if self._is_faulted:
            raise EnvelopeError("the session failed before; close it", "execution")
        wrong = [name for name, kind in _TYPES.items() if type(body.get(name)) is not kind]
        if self.is_aligned and type(body.get("observation_cursor")) is not int:
            wrong.append("observation_cursor")
        if wrong:
            raise EnvelopeError(f"fields {wrong} are missing or of another type")
        if body["sequence"] <= self._sequence:
            raise EnvelopeError(f"sequence is {body['sequence']}; wanted more than {self._sequence}", "stale")
        self._sequence, self._request_ids[request.request_id] = body["sequence"], None
        while len(self._request_ids) > _MAX_REMEMBERED:
            del self._request_ids[next(iter(self._request_ids))]
        cursor, shown = body["cursor"], body.get("observation_cursor", body["cursor"])
        if not 0 <= body["delay"] <= self.config.chunk or len(body["task"]) > MAX_INPUT or body["task_version"] < 0:
            raise EnvelopeError(f"delay, task or task_version is out of range: delay at most {self.config.chunk}")
        if body["artifact_identity"] != self.identity or (self.is_aligned and shown > cursor):
            raise EnvelopeError("artifact_identity is another policy's, or observation_cursor exceeds cursor")
        self._check_features(body["features"])

    def _check_features(self, values: Mapping[str, Any]) -> None:
        if values.keys() != {feature["name"] for feature in self.features}:
            raise EnvelopeError(f"features are {sorted(values)[:8]}; wanted those of the descriptor", "incompatible")
        for feature in self.features:
            name, value = feature["name"], values[feature["name"]]
            is_array = isinstance(value, np.ndarray)
            if not is_array or list(value.shape) != feature["shape"] or value.dtype.name != feature["dtype"]:
                found = f"{value.dtype.name} {list(value.shape)}" if is_array else type(value).__name__
                raise EnvelopeError(f"{name} is {found}; wanted {feature['dtype']} {feature['shape']}", "incompatible")

    def _read_continuation(self, body: Mapping[str, Any]) -> tuple[Mapping[str, np.ndarray] | None, int | None]:
        """Return the policy's prefix, and how many actions of the last chunk were executed; None for an arm at rest."""
        chunk, last = self.config.chunk, self._chunk_cursor
        if self.mode == "chunk":
            if last is None or not self.is_aligned:
                return None, None if last is None else self.config.action_steps
            executed = body["observation_cursor"] - last
            return None, executed if 0 <= executed <= chunk else None
        rest, other = body.get("canonical_continuation"), body.get("model_continuation")
        if (rest is None) is not (other is None):
            raise EnvelopeError("wanted both continuations, or neither")
        if rest is None:
            rest = np.zeros((0, self.config.width), np.float32)
        elif any(
            not isinstance(value, np.ndarray)
            or value.dtype != np.float32
            or value.shape != (len(rest), self.config.width)
            or len(value) > chunk
            for value in (rest, other)
        ):
            raise EnvelopeError(f"a continuation is not float32 [k, {self.config.width}] with k at most {chunk}")
        executed = None if last is None or not len(rest) else chunk - len(rest)
        return plan_prefix(rest, body["delay"], self.config), executed


def check_interval(value: object, interval: float) -> bool:
    """Return whether an action interval of a client is this one, in seconds."""
    return isinstance(value, float) and math.isclose(value, interval, rel_tol=1e-6)
