"""A robot's session over LeRobot's remote inference: control, observations and the actions that answer them."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.control.chunk_scheduler import plan_prefix
from service.control.config import ControlConfig
from service.lerobot.envelopes import Envelope, EnvelopeError
from service.lerobot.robot import read_robot_observation
from service.streaming.direct_inference import DirectInference

ACTION_DEADLINE = 5.0  # Seconds of an inference, after which the client must close its session.
MAX_INPUT = 2048  # Characters of a task.
STATE, CAMERA = "observation.state", "observation.images."
_ECHOED = ("artifact_identity", "observation_id", "capture_time", "task", "task_version")
_TYPES = {"sequence": int, "artifact_identity": str, "observation_id": str, "capture_time": float, "task": str}
_TYPES |= {"task_version": int, "features": dict, "delay": int, "cursor": int}


@dataclass(eq=False)
class RemoteSession:
    """One session; the client holds its robot at every error.

    Attributes:
        descriptor: of the deployment.
        state: ``new`` before the first reset, then ``ready``, ``faulted`` or ``closed``.
        work: held during an inference or a control.
        absence: timer that ends the session of an absent client; None while the client is present.
    """

    inference: DirectInference
    config: ControlConfig
    descriptor: Mapping[str, Any]
    mode: str
    is_aligned: bool
    state: str = "new"
    generation: int = 0
    work: asyncio.Lock = field(default_factory=asyncio.Lock)
    absence: asyncio.TimerHandle | None = None
    _sequence: int = 0
    _request_ids: deque[str] = field(default_factory=lambda: deque(maxlen=128))
    _chunk_cursor: int | None = None  # Cursor of the newest chunk's observation; None before a chunk.

    @property
    def _cursor_name(self) -> str:
        return "observation_cursor" if self.is_aligned else "cursor"

    async def control(self, operation: object, generation: int) -> None:
        """Apply a reset or an invalidation after the running inference."""
        async with self.work:
            if generation < self.generation or self.state in ("faulted", "closed"):
                self._refuse(generation)
            if operation not in ("reset", "invalidate"):
                raise EnvelopeError(f"operation is {operation!r:.40}; wanted reset, invalidate or close")
            self.inference.check_not_stopped()  # A client's reset never ends a stop.
            if generation > self.generation:
                self.inference.reset()
                self.generation, self._chunk_cursor = generation, None
            if operation == "reset":
                self.state = "ready"

    def _refuse(self, generation: int) -> None:
        raise EnvelopeError(
            f"generation is {generation}, and the session is {self.state} at generation {self.generation}; "
            "a faulted or closed session needs a new open",
            "stale",
        )

    async def answer_observation(self, request: Envelope, received_at: float) -> Mapping[str, Any]:
        """Return the body of the answer to an observation.

        Raises:
            EnvelopeError: the observation is stale, of another contract, or has no answer in ``ACTION_DEADLINE``.
            ServiceError: as ``DirectInference.infer``, e.g. after a stop.
        """
        body, limit = request.body, self.config.control.frame_age_limit
        self._check_order(request)
        self._check_fields(body)
        self.inference.check_not_stopped()
        if time.monotonic() - received_at > limit:
            raise EnvelopeError(f"the observation waited longer than {limit:g} s (frame_age_limit)", "timeout")
        prefix, executed = self._read_continuation(body)
        images = {name.removeprefix(CAMERA): value for name, value in body["features"].items() if name != STATE}
        observed = read_robot_observation(self.inference, images, body["features"][STATE], body["task"])
        async with self.work:
            try:
                async with asyncio.timeout(ACTION_DEADLINE):
                    trace = await self.inference.infer(observed, executed, observed_at=received_at, prefix=prefix)
            except TimeoutError:
                self.state = "faulted"
                raise EnvelopeError(f"no actions within {ACTION_DEADLINE:g} s; close the session", "timeout") from None
        self._chunk_cursor = body[self._cursor_name]
        actions = trace.actions[: self.config.action_steps if self.mode == "chunk" else self.config.chunk]
        return {
            **{name: body[name] for name in (*_ECHOED, *(("observation_cursor", "cursor") if self.is_aligned else ()))},
            "canonical_actions": actions,
            # Model space is the robot's units, so that the client returns the limited actions.
            "model_actions": None if self.mode == "chunk" else actions,
            "execution_steps": len(actions),
            "server_durations": {"queue": float(trace.inference.queue), "policy": float(trace.inference.total)},
        }

    def _check_order(self, request: Envelope) -> None:
        """Check that a request is the next request of its session."""
        if self.state != "ready" or request.generation != self.generation:
            self._refuse(request.generation)
        if request.request_id in self._request_ids:
            raise EnvelopeError("the request id was used before", "stale")
        if self.work.locked():
            raise EnvelopeError("another request of the session is in progress", "busy")
        for name, kind in (_TYPES | {self._cursor_name: int}).items():
            if type(request.body.get(name)) is not kind:
                raise EnvelopeError(f"{name} is {request.body.get(name)!r:.80}; wanted {kind.__name__}")
        if request.body["sequence"] <= self._sequence:
            raise EnvelopeError(f"sequence is {request.body['sequence']}; wanted more than {self._sequence}", "stale")
        self._sequence = request.body["sequence"]
        self._request_ids.append(request.request_id)

    def _check_fields(self, body: Mapping[str, Any]) -> None:
        """Check that the fields of an observation fit the descriptor."""
        identity, observed = self.descriptor["artifact_identity"], body[self._cursor_name]
        for name, is_right, wanted in (
            ("artifact_identity", body["artifact_identity"] == identity, identity),
            ("task", len(body["task"]) <= MAX_INPUT, f"at most {MAX_INPUT} characters"),
            ("task_version", body["task_version"] >= 0, "at least 0"),
            ("delay", 0 <= body["delay"] <= self.config.chunk, f"0 to {self.config.chunk}"),
            ("cursor", body["cursor"] >= observed, f"at least {observed}"),
        ):
            if not is_right:
                raise EnvelopeError(f"{name} is {body[name]!r:.80}; wanted {wanted}")
        wanted = {
            feature["name"]: f"{feature['dtype']} {feature['shape']}"
            for feature in self.descriptor["capabilities"]["features"]
        }
        found = {
            name: f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            for name, value in body["features"].items()
        }
        if found != wanted:
            raise EnvelopeError(f"features are {found!r:.900}; wanted {wanted!r:.900}", "incompatible")

    def _read_continuation(self, body: Mapping[str, Any]) -> tuple[Mapping[str, np.ndarray] | None, int | None]:
        """Return the policy's prefix, and how many actions of the last chunk were executed; None for an arm at rest."""
        chunk, width, last = self.config.chunk, self.config.width, self._chunk_cursor
        if self.mode == "chunk":
            if last is None:
                return None, None
            executed = body[self._cursor_name] - last if self.is_aligned else self.config.action_steps
            return None, executed if 0 <= executed <= chunk else None
        rests = [body.get(name) for name in ("canonical_continuation", "model_continuation")]
        rest, other = (np.zeros((0, width), np.float32) if value is None else value for value in rests)
        wanted = (*np.shape(rest)[:1], width)
        is_float = all(isinstance(value, np.ndarray) and value.dtype == np.float32 for value in (rest, other))
        if not is_float or not rest.shape == other.shape == wanted or len(rest) > chunk:
            raise EnvelopeError(f"continuations are not two of float32 [k, {width}] with k at most {chunk}, or nil")
        executed = None if last is None or not len(rest) else chunk - len(rest)
        return plan_prefix(rest, body["delay"], self.config), executed
