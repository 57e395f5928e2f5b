"""A robot of LeRobot's client: the session that it needs, its observations, and the action chunks that answer them."""

import asyncio
import os
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from jaxmodels import Requirements
from service.control.joints import JointTable
from service.errors import InvalidRequest, MoveRefused
from service.lerobot import pickles
from service.lerobot.pickles import RobotObservation, RobotPolicyRequest
from service.sessions.request import DIRECT, NewSession
from service.sessions.store import Session, Sessions
from service.streaming import observation
from service.streaming.direct_inference import DirectInference
from service.streaming.observation import ClientObservation
from service.threads import WorkerThread

# Threads that read messages, because a flood of messages must not delay the pictures of other clients.
READERS = WorkerThread("messages of LeRobot", max((os.cpu_count() or 2) // 4, 1))
POLL_TIMEOUT = 2.0  # Seconds that GetActions waits for an observation, as LeRobot's server.
_STOP_CHECK_INTERVAL = 0.02  # Seconds between checks for a stop, while GetActions waits.
# Distance of two states, in shares of the joints' ranges, below which the second state adds nothing. LeRobot's server
# compares the distance with 1 in the robot's unit: this share of -100..100, but 57 degrees if the unit is radians.
SIMILAR_SHARE = 0.005
_STATE, _CAMERA = "observation.state", "observation.images."
# Instruction of a session until the first observation, because LeRobot's client sends the task with observations only.
_NO_TASK = "(no task yet)"


def make_session_request(
    request: RobotPolicyRequest, requirements: Requirements, session_id: str, revision: str | None
) -> NewSession:
    """Return the request of a robot's session with a policy that has these requirements, as for ``POST /sessions``.

    Raises:
        InvalidRequest: the features have no names of joints.
    """
    cameras = tuple(name.removeprefix(_CAMERA) for name in request.features if name.startswith(_CAMERA))
    renamed = ((policy.removeprefix(_CAMERA), robot.removeprefix(_CAMERA)) for robot, policy in request.renames.items())
    return NewSession(
        session_id,
        request.path,
        DIRECT,
        cameras,
        policy_type=request.policy_type,
        language_instruction=_NO_TASK if requirements.language else None,
        revision=revision,
        # The client executes actions by position, so the names are also the check of their order.
        joint_names=_read_joint_names(request) if requirements.controls_joints else None,
        rename={policy: robot for policy, robot in renamed if robot in cameras} or None,
    )


def _read_joint_names(request: RobotPolicyRequest) -> tuple[str, ...]:
    names = request.features.get(_STATE, {}).get("names")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"lerobot_features: {_STATE} has no names; wanted the names of the robot's joints")
    return tuple(names)


def read_robot_observation(
    inference: DirectInference,
    images: Mapping[str, np.ndarray],
    state: Sequence[float] | np.ndarray,
    task: str,
    timestamp: float | None = None,
) -> ClientObservation:
    """Return a robot's complete observation; an empty task keeps the session's last one. Raises InvalidRequest."""
    task = task.strip()
    if not task and inference.session.new.language_instruction == _NO_TASK:
        raise InvalidRequest('the policy follows instructions; start the robot with --task="pick up the cube"')
    message = {"images": images, "state": state, "prompt": task or None, "timestamp": timestamp}
    return observation.read_observation(message, inference.observation_spec(), is_complete=True)


def choose_session_id(sessions: Sessions, prefix: str, count: int, taken: Container[str | None], whose: str) -> str:
    """Return the first free one of ``count`` ids with this prefix; raises MoveRefused.

    While a session with the prefix is under an emergency stop, the new one could be of the same robot, so none is made.
    """
    ids = [f"{prefix}-{number}" for number in range(1, count + 1)]
    if latched := [session_id for session_id in ids if sessions.get_latch(session_id) is not None]:
        raise MoveRefused(
            f"session {latched[0]!r} of {whose} is under an emergency stop; POST /debug/sessions/{latched[0]}/reset "
            "resets it"
        )
    live = {each.id for each in sessions.list() if isinstance(each, Session) and not each.is_closed}
    return next(session_id for session_id in ids if session_id not in live and session_id not in taken)


class _Arrival(NamedTuple):
    received: RobotObservation
    observed: ClientObservation
    state: np.ndarray  # Measured (a,).
    at: float  # Monotonic time.


class RobotExchange:
    """Observations of one robot, of which the newest waits, and the chunks that answer them.

    Args:
        inference: inference of the robot's session.
        request: the robot's request for a policy.
        max_age: seconds after which a waiting observation is too old for an inference.
    """

    def __init__(self, inference: DirectInference, request: RobotPolicyRequest, max_age: float):
        self._inference, self._request, self._max_age = inference, request, max_age
        self._joint_names = _read_joint_names(request)
        self._waiting: _Arrival | None = None
        self._has_arrived = asyncio.Event()
        self._inferred: _Arrival | None = None  # The observation of the newest chunk.
        self._chunk: np.ndarray | None = None  # The newest chunk (t, a), as sent.
        # Whether the next observation is not filtered. The client marks one observation as ``must_go`` and repeats that
        # only after a chunk, so the mark stays until a chunk is sent.
        self._is_answer_due = True

    async def take_observation(self, received: RobotObservation, received_at: float) -> None:
        """Let an observation wait for the next chunk, instead of an older one, unless it adds nothing.

        Raises:
            MoveRefused: the session was stopped, or runs no policy.
            InvalidRequest: the observation does not fit the policy.
        """
        self._inference.check_not_stopped()
        if missing := [name for name in self._joint_names if name not in received.values]:
            raise InvalidRequest(f"the observation lacks {missing[:8]}; wanted the joints of the policy instructions")
        pose = [received.values[name] for name in self._joint_names]
        observed = read_robot_observation(self._inference, received.images, pose, received.task, received.timestamp)
        spec = self._inference.observation_spec()
        skipped = arrival = _Arrival(received, observed, observed.get_pose(spec)[0], received_at)
        self._is_answer_due |= received.must_go
        if self._is_answer_due or not self._is_known(arrival, spec.joints):
            skipped, self._waiting = self._waiting, None
        if skipped is not None:
            await self._inference.observe(skipped.observed, skipped.at)
        if skipped is not arrival:
            self._waiting = arrival
            self._has_arrived.set()

    async def next_chunk(self) -> bytes:
        """Return the pickled chunk for the next observation; nothing if none arrives in ``POLL_TIMEOUT`` seconds.

        The first answer after a stop ends the plan that the client executes. Later ones are errors.

        Raises:
            MoveRefused: the session was stopped, or runs no policy.
            ServiceError: as ``DirectInference.infer``.
        """
        try:
            return await self._infer_next()
        except MoveRefused:
            if self._inferred is None or self._chunk is None:
                raise
            # This replaces the actions in the client's queue, and the client drops it.
            received, chunk = self._inferred.received, self._chunk[:1]
            self._waiting = self._chunk = None
            return pickles.write_actions(chunk, pickles.EXECUTED, received.timestamp, 0.0, received.module)

    async def _infer_next(self) -> bytes:
        robot_io = self._inference.check_not_stopped()[1]
        arrival = await self._wait_observation()
        if arrival is None:
            return b""
        received = arrival.received
        self._is_answer_due = True  # Also if the inference fails.
        trace = await self._inference.infer(arrival.observed, self._count_executed(received), observed_at=arrival.at)
        actions = trace.actions[: self._request.actions_per_chunk]
        period = 1 / robot_io.controller.config.action_rate
        answer = pickles.write_actions(actions, received.timestep, received.timestamp, period, received.module)
        self._inferred, self._chunk, self._is_answer_due = arrival, actions, False
        return answer

    def _is_known(self, arrival: _Arrival, joints: JointTable) -> bool:
        """Return whether a chunk for this observation would repeat the last chunk."""
        before, (low, high) = self._inferred, joints.ranges
        if before is None:
            return False
        moved = np.abs(arrival.state - before.state)
        # Any motion of a joint of unknown range counts.
        shares = np.where(np.isfinite(high - low), moved / (high - low), np.sign(moved))
        is_similar = float(np.linalg.norm(shares)) < SIMILAR_SHARE
        return arrival.received.timestep <= before.received.timestep or is_similar

    async def _wait_observation(self) -> _Arrival | None:
        """Return the waiting observation, or None after ``POLL_TIMEOUT`` seconds; raises MoveRefused at a stop."""
        end = time.monotonic() + POLL_TIMEOUT
        while time.monotonic() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_CHECK_INTERVAL):
                    await self._has_arrived.wait()
            self._inference.check_not_stopped()
            self._has_arrived.clear()
            arrival, self._waiting = self._waiting, None
            if arrival is not None and time.monotonic() - arrival.at <= self._max_age:
                return arrival
            self._is_answer_due |= arrival is not None  # A newer observation is needed.
        return None

    def _count_executed(self, received: RobotObservation) -> int | None:
        """Return how many actions of the last chunk precede this observation; None for an arm at rest.

        The client mixes overlapping chunks, so the executed actions are close to the last chunk's, but not equal.
        """
        if received.must_go or self._chunk is None or self._inferred is None:
            return None  # The client's queue is empty.
        executed = received.timestep - self._inferred.received.timestep
        return executed if 0 <= executed <= len(self._chunk) else None
