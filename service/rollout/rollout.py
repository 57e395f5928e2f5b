"""Rollout to one session: stages, swaps, watches and rolls back its policy.

The session side of continuous delivery. When and from where a policy comes is decided elsewhere; here it is a folder.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from service.control.robot_io import RobotIO
from service.control.shadow import IMAGES
from service.errors import MoveRefused, ServiceError, UnknownSession
from service.inference.batching import read_layout
from service.inference.loaded_policy import STATE, LoadedPolicy, select_features, task_input
from service.rollout.gates import (
    GateLimits,
    GateVerdict,
    Probation,
    ProbationSettings,
    Trial,
    cost_since,
    joint_widths,
    judge_trial,
    read_counters,
)
from service.sessions.policy_slots import IncompatiblePolicy
from service.sessions.session import Session
from service.sessions.store import Sessions

logger = logging.getLogger(__name__)

# Inferences that a latency is measured with.
LATENCY_RUNS = 10


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a swap; times in seconds."""

    limits: GateLimits = field(default_factory=GateLimits)
    fade: float = 0.2  # duration of the blend from the old policy's plan into the new one's
    swap_timeout: float = 60.0  # how long to wait for the next chunk, which a held or stopped robot does not request
    probation: ProbationSettings = field(default_factory=ProbationSettings)


@dataclass(frozen=True)
class FollowingSession:
    """A session's policy, and which ref of its repo it follows."""

    session_id: str
    repo: str  # a repo id or a folder
    ref: str | None  # branch, tag or pattern of tags (``deploy-*``); None for the default branch
    sha: str | None  # the commit that the session runs; None if unknown, which counts as another commit
    mode: str  # ``off`` (deploy only by request), ``stage`` (prepare and wait) or ``swap``


class Rollout:
    """Brings policies to the sessions of one store."""

    def __init__(self, sessions: Sessions, settings: RolloutSettings | None = None):
        self.settings = settings or RolloutSettings()
        self._sessions = sessions
        self._engine = sessions.engine
        self._probations: dict[str, Probation] = {}

    def list_following(self) -> Sequence[FollowingSession]:
        """Return all sessions that run a policy."""
        return [
            FollowingSession(
                session_id=session.id,
                repo=_repo_of(session),
                ref=session.new.revision,
                sha=session.policies.running.commit,
                mode=session.new.auto_update,
            )
            for session in self._sessions.list()
            if isinstance(session, Session) and session.policies.running is not None and session.robot_io is not None
        ]

    async def prepare(
        self, session_id: str, repo: str, sha: str, folder: Path, on_progress: Callable[[str], None]
    ) -> GateVerdict:
        """Load, compile and check a policy in parallel to the running policy; a policy that passes is staged."""
        return self._excuse_lost_devices(await self._prepare(session_id, repo, sha, folder, on_progress))

    def _excuse_lost_devices(self, verdict: GateVerdict) -> GateVerdict:
        """Return a verdict that is not against the policy where no device works any more."""
        devices: Any = self._engine.get_stats()["devices"]
        if verdict.reason is None or any(device["failed"] is None for device in devices):
            return verdict
        # Devices of engines that left a cluster are not listed any more.
        why = devices[0]["failed"] if devices else "none is there"
        return replace(verdict, reason="busy", text=f"no device works: {why}")

    async def _prepare(
        self, session_id: str, repo: str, sha: str, folder: Path, on_progress: Callable[[str], None]
    ) -> GateVerdict:
        try:
            session = self._sessions.get_live(session_id)
            if _repo_of(session) != repo:
                return GateVerdict("gone", f"session {session_id!r} was recreated with another policy")
            on_progress("loading")
            loaded = await session.policies.stage(sha, str(folder), on_progress)
        except IncompatiblePolicy as error:
            return GateVerdict("requirements", str(error))
        except ServiceError as error:
            return _verdict_of_error(error, folder)
        robot_io = session.robot_io
        assert robot_io is not None, "only a session with a drive stages"
        try:
            on_progress("checking")
            verdict = await self._try_policy(robot_io, loaded)
        except ServiceError as error:
            verdict = GateVerdict("policy_failed", str(error))
        except BaseException:
            await session.policies.discard()
            raise
        if verdict.reason is not None:
            await session.policies.discard()
        return verdict

    async def _try_policy(self, robot_io: RobotIO, loaded: LoadedPolicy) -> GateVerdict:
        config = robot_io.controller.config
        # Observations with an outdated frame size are left out: compiling for them is the slowest step.
        seen: list[tuple[Mapping[str, np.ndarray], np.ndarray | None]] = [
            (observation, chunk)
            for observation, chunk in robot_io.runner.recent
            if loaded.is_compiled(dict(read_layout(observation).frames))
        ]
        seen = seen or [(_grey_observation(robot_io, loaded), None)]
        wanted = (1, config.chunk, config.width)
        chunks, seconds = [], []
        for run in range(max(LATENCY_RUNS, len(seen))):
            chunk, took = await self._engine.run_trial(loaded, seen[run % len(seen)][0])
            seconds.append(took)
            if chunk.shape != wanted or chunk.dtype.kind != "f":
                return GateVerdict("shape", f"it answers {chunk.dtype} {chunk.shape}, wanted floats {wanted}")
            if run < len(seen):
                chunks.append(chunk[0])
        late = round(robot_io.controller.late_by_chunk.percentile(90) or 0)
        executed = min(config.action_steps + late + config.overlap.lasting_actions, config.chunk)
        trial = Trial(
            chunks=chunks,
            references=[None if old is None else old[0] for _, old in seen],
            seconds=seconds,
            executed=executed,
            budget=config.action_steps / config.action_rate,
            usual=robot_io.runner.seconds["total"].percentile(90),
        )
        verdict = judge_trial(trial, robot_io.table, self.settings.limits)
        if verdict.reason == "slow":
            # Measured twice, because the machine may have been busy with other work.
            again = [(await self._engine.run_trial(loaded, seen[run % len(seen)][0]))[1] for run in range(LATENCY_RUNS)]
            verdict = judge_trial(replace(trial, seconds=again), robot_io.table, self.settings.limits)
        return verdict

    async def swap(self, session_id: str, sha: str) -> GateVerdict:
        """Let the staged policy take over at the next chunk boundary. The verdict's figures are the cost of that."""
        began = time.monotonic()
        try:
            session = self._sessions.get_live(session_id)
            staged = session.policies.staged
            if staged is None or staged.commit != sha:
                return GateVerdict("not_staged", f"session {session_id!r} has not staged {sha}; deploy it again")
            robot_io = session.require_robot_io()
            before, allowed = read_counters(robot_io), self._allowed_steps(robot_io)
            late = robot_io.controller.late_by_chunk
            usual, count = late.samples.max(initial=0), late.count
            await session.policies.swap(self._fade_steps(robot_io), self.settings.swap_timeout)
        except ServiceError as error:
            return _verdict_of_error(error)
        self._probations[session_id] = Probation(
            session, robot_io, allowed, self.settings.probation, lambda: self.rollback(session_id)
        )
        waited = time.monotonic() - began
        await _wait_for_next_chunk(robot_io, robot_io.controller.chunks)
        cost = {**cost_since(before, robot_io), "waited_s": round(waited, 3)}
        if late.count > count:
            cost["late_actions_because"] = max(0, round((late.newest or 0) - usual))
        return GateVerdict(None, "", cost)

    async def probation(self, session_id: str, sha: str) -> GateVerdict:
        """Watch a policy that took over. If the verdict has a reason, the policy was rolled back."""
        return self._excuse_lost_devices(await self._probation(session_id, sha))

    async def _probation(self, session_id: str, sha: str) -> GateVerdict:
        probation = self._probations.pop(session_id, None)
        try:
            session = self._sessions.get_live(session_id)
        except ServiceError as error:
            return GateVerdict(None, f"the session ended: {error}")
        if probation is None or session.robot_io is not probation.robot_io:
            return GateVerdict(None, "nothing took over here")
        found = await probation.wait()
        figures = cost_since(probation.start, probation.robot_io)
        if found is None:
            return GateVerdict(None, "", figures)
        code, text = found
        if session.policies.running is not probation.policy and probation.rollback is None:
            return GateVerdict(code, text, figures)
        logger.warning("session %s: %s goes back to the policy before: %s", session_id, sha[:12], text)
        if code == "jump":
            # The rest of this plan is dropped; the previous policy answers soon.
            probation.robot_io.controller.queue.clear()
        back = await (probation.rollback or self.rollback(session_id))
        if back.reason is not None:
            text += f"; the policy before could not take over: {back.text}"
        return GateVerdict(code, text, figures)

    async def discard(self, session_id: str, sha: str) -> None:
        """Release a staged policy that is not wanted."""
        try:
            session = self._sessions.get_live(session_id)
        except ServiceError:
            return
        if session.policies.staged is not None and session.policies.staged.commit == sha:
            await session.policies.discard()

    async def rollback(self, session_id: str) -> GateVerdict:
        """Let the previous policy take over again; it is in memory still."""
        try:
            session = self._sessions.get_live(session_id)
            robot_io = session.require_robot_io()
            if session.policies.previous is None:
                return GateVerdict("no_previous", f"session {session_id!r} ran no other policy before this one")
            before = read_counters(robot_io)
            session.policies.restore(self._fade_steps(robot_io))
        except ServiceError as error:
            return _verdict_of_error(error)
        return GateVerdict(None, "", cost_since(before, robot_io))

    def _allowed_steps(self, robot_io: RobotIO) -> np.ndarray:
        widths = np.array([joint.high - joint.low for joint in robot_io.table.joints])
        if robot_io.runner.recent:
            widths = joint_widths(robot_io.table, [chunk[0] for _, chunk in robot_io.runner.recent])
        return self.settings.probation.step * widths

    def _fade_steps(self, robot_io: RobotIO) -> int:
        return round(self.settings.fade * robot_io.controller.config.action_rate)


def _verdict_of_error(error: ServiceError, folder: Path | None = None) -> GateVerdict:
    """Return the verdict for an error; ``gone`` and ``busy`` are no fault of the policy."""
    text = str(error) if folder is None else str(error).replace(str(folder), "the new policy")
    reason = {UnknownSession: "gone", MoveRefused: "busy"}.get(type(error), "load")
    return GateVerdict(reason, text)


def _repo_of(session: Session) -> str:
    return os.path.expanduser(session.new.policy_path)


def _grey_observation(robot_io: RobotIO, loaded: LoadedPolicy) -> Mapping[str, np.ndarray]:
    """Make an observation for a robot that has sent nothing yet: grey images, joints in the middle of their ranges."""
    requirements = loaded.requirements
    sizes = robot_io.buffer.sizes
    if len(sizes) < len(requirements.cameras):
        sizes = requirements.cameras  # not all cameras have sent a frame yet; the trained sizes are compiled
    observation: dict[str, np.ndarray] = {
        f"{IMAGES}{camera}": np.full((1, *sizes[camera], 3), 128, np.uint8) for camera in requirements.cameras
    }
    if requirements.state is not None:
        if requirements.controls_joints:
            middle = np.array([[(joint.low + joint.high) / 2 for joint in robot_io.table.joints]], np.float32)
        else:
            middle = np.zeros((1, requirements.state), np.float32)  # the ranges of what it measures are not known
        observation[STATE] = np.where(np.isfinite(middle), middle, np.float32(0))
    if requirements.observation_steps > 1:
        observation = {
            name: np.stack([array] * requirements.observation_steps, axis=1) for name, array in observation.items()
        }
    runner = robot_io.runner
    return select_features(requirements, observation | task_input(runner.instruction, runner.prompt_cut))


async def _wait_for_next_chunk(robot_io: RobotIO, chunks: int) -> None:
    """Wait for the new policy's first chunk if the robot runs, because its delay is part of the cost of the swap."""
    end = time.monotonic() + 2.0
    # The controller has no events.
    while robot_io.controller.is_running and robot_io.controller.chunks <= chunks and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(robot_io.controller.period)


# Reasons for which a commit is not quarantined, and of these the reasons that do not apply to other sessions.
EXCUSED_REASONS = frozenset({"session", "not_staged", "stopped", "gone", "busy", "memory"})
SESSION_REASONS = frozenset({"gone", "busy"})
