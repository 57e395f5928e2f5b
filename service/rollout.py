"""Another policy for a running session: loaded beside the old one, judged, swapped in, watched, taken back.

The session side of continuous delivery. When and from where a policy comes is decided elsewhere; here it is a folder.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from service.changeover import Held, Misfit
from service.drive import Drive
from service.engine import Engine, Served
from service.errors import MoveRefused, ServiceError, UnknownSession
from service.gates import Limits, Trial, Verdict, judge, ranges
from service.session import Session
from service.sessions import Sessions
from service.stage import Stage

logger = logging.getLogger(__name__)

# Inferences that a latency is measured with.
RUNS = 10
IMAGES = "observation.images."


@dataclass(frozen=True)
class RolloutSettings:
    """How another policy is let in; times in seconds.

    Attributes:
        limits: of the gates.
        fade: how long the first actions of the new policy lead over from the old one's plan.
        patience: how long a robot that is held or stopped is waited for: before the swap, as there is no chunk
            boundary, and on probation.
        probation: how long the new policy has to run before the old one is not gone back to by itself any more.
        step: how far a command may change from one tick to the next on probation, as a part of the joint's range; at
            least 1.5 times what the old policy did.
        starvations: how often the new policy may let the queue run dry on probation.
        missed: part of the ticks that may be missed on probation (two in any case).
    """

    limits: Limits = field(default_factory=Limits)
    fade: float = 0.2
    patience: float = 60.0
    probation: float = 30.0
    step: float = 0.15
    starvations: int = 2
    missed: float = 0.02


@dataclass(frozen=True)
class Follower:
    """What a session runs, and which moves of its repo it wants to hear of.

    Attributes:
        repo: a repo id or a folder.
        ref: branch or tag, None for the default branch.
        sha: what runs now, None when nobody knows.
        mode: ``off``, ``stage`` or ``swap``.
    """

    session_id: str
    repo: str
    ref: str | None
    sha: str | None
    mode: str


@dataclass(frozen=True)
class _Counters:
    """Figures of a drive at one moment."""

    inference_errors: int
    rejected: int
    starvations: int
    missed_ticks: int
    ticks: int
    late: int
    chunks: int

    @classmethod
    def of(cls, drive: Drive) -> "_Counters":
        control = drive.control
        return cls(
            drive.inference_errors,
            control.rejected,
            control.starvations,
            control.missed_ticks,
            control.ticks,
            control.actions.late,
            control.chunks,
        )


@dataclass
class _Watched:
    """A session whose policy is on probation.

    Attributes:
        held: the policy.
        first: its figures when the policy took over.
        allowed: (a,) how far a command may change from one tick to the next; infinite where nothing is known.
        was_latched, had_failed: that an emergency stop or an error was there before it took over, and is still.
        trouble: set with code and text when an inference fails.
        back: the way back, begun at that moment: a few more failures would end the session.
    """

    drive: Drive
    held: Held | None
    first: _Counters
    allowed: np.ndarray
    was_latched: bool
    had_failed: bool
    trouble: asyncio.Future[tuple[str, str]]
    back: "asyncio.Task[Verdict] | None" = None

    def watch(self, go_back: Callable[[], Coroutine[Any, Any, Verdict]]) -> None:
        """Whatever fails from now on is the new policy's."""

        def happened(code: str, text: str) -> None:
            if not self.trouble.done():
                self.trouble.set_result((code, text))
                self.back = asyncio.create_task(go_back())

        self.drive.guard = happened


class Rollout:
    """Brings policies to the sessions of one store."""

    def __init__(self, sessions: Sessions, settings: RolloutSettings | None = None):
        self.settings = settings or RolloutSettings()
        self._sessions = sessions
        self._watched: dict[str, _Watched] = {}

    @property
    def _engine(self) -> Engine:
        return self._sessions.engine

    def followers(self) -> Sequence[Follower]:
        """All sessions that run a policy."""
        return [
            Follower(
                session_id=session.id,
                repo=_repo_of(session),
                ref=session.new.revision,
                sha=session.policies.running.commit,
                mode=session.new.auto_update,
            )
            for session in self._sessions.list()
            if session.policies.running is not None and session.drive is not None
        ]

    async def prepare(self, session_id: str, repo: str, sha: str, folder: Path, tell: Callable[[str], None]) -> Verdict:
        """Load, compile and judge a policy beside the running one; with no reason against it, it is staged."""
        try:
            session = self._sessions.get(session_id)
            if _repo_of(session) != repo:
                return Verdict("gone", f"session {session_id!r} was made anew, with another policy")
            tell("loading")
            served = await session.stage_policy(sha, str(folder), tell)
        except Misfit as error:
            return Verdict("requirements", str(error))
        except ServiceError as error:
            return _refusal(error, folder)
        drive = session.drive
        assert drive is not None, "only a session with a drive stages"
        try:
            tell("checking")
            verdict = await self._judge(drive, served)
        except ServiceError as error:
            verdict = Verdict("policy_failed", str(error))
        except BaseException:
            await session.discard_policy()
            raise
        if verdict.reason is not None:
            await session.discard_policy()
        return verdict

    async def _judge(self, drive: Drive, served: Served) -> Verdict:
        pace = drive.control.pace
        # Frames of a size that comes no more would be compiled for, and nothing is as slow as that.
        seen: list[tuple[Mapping[str, np.ndarray], np.ndarray | None]] = [
            (observation, chunk) for observation, chunk in drive.recent if served.is_compiled(_sizes_of(observation))
        ]
        if not seen:
            seen = [(_grey(drive, served), None)]
        wanted = (1, pace.chunk, pace.width)
        chunks, seconds = [], []
        for run in range(max(RUNS, len(seen))):
            chunk, took = await self._engine.try_out(served, seen[run % len(seen)][0])
            seconds.append(took)
            if chunk.shape != wanted or chunk.dtype.kind != "f":
                return Verdict("shape", f"it answers {chunk.dtype} {chunk.shape}, wanted floats {wanted}")
            if run < len(seen):
                chunks.append(chunk[0])
        # Ensembling does something of every action; otherwise a chunk is done from where its answer finds it.
        late = round(drive.control.late_by_chunk.percentile(90) or 0)
        executed = pace.chunk if pace.ensemble is not None else min(pace.action_steps + late, pace.chunk)
        trial = Trial(
            chunks=chunks,
            references=[None if old is None else old[0] for _, old in seen],
            seconds=seconds,
            executed=executed,
            budget=pace.action_steps / pace.action_rate,
            usual=drive.inference["total"].percentile(90),
        )
        return judge(trial, drive.table, self.settings.limits)

    async def swap(self, session_id: str, sha: str) -> Verdict:
        """Let the staged policy take over at the next chunk boundary; figures tell what that cost."""
        began = time.monotonic()
        try:
            session = self._sessions.get(session_id)
            staged = session.policies.staged
            if staged is None or staged.commit != sha:
                return Verdict("not_staged", f"session {session_id!r} has not staged {sha}; deploy it again")
            drive = _drive_of(session)
            before, allowed = _Counters.of(drive), self._allowed_steps(drive)
            usual, count = drive.control.late_by_chunk.samples.max(initial=0), drive.control.late_by_chunk.count
            await session.change_policy(self._fade(drive), self.settings.patience)
        except ServiceError as error:
            return _refusal(error)
        trouble: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        watched = _Watched(
            drive,
            session.policies.running,
            _Counters.of(drive),
            np.maximum(allowed, 1.5 * drive.control.largest_step),
            session.is_latched,
            session.stage is Stage.ERROR,
            trouble,
        )
        watched.watch(lambda: self.rollback(session_id))
        self._watched[session_id] = watched
        drive.control.largest_step[:] = 0
        waited = time.monotonic() - began
        await _until_next_chunk(drive, drive.control.chunks)
        cost = _cost(before, _Counters.of(drive))
        late = drive.control.late_by_chunk
        if late.count > count:
            # Every chunk has a few actions that are over when it comes: frames take their time to arrive, too.
            cost["late_actions_because"] = max(0, round((late.newest or 0) - usual))
        return Verdict(None, "", cost | {"waited_s": round(waited, 3)})

    async def probation(self, session_id: str, sha: str) -> Verdict:
        """Watch a policy that took over. With a reason in the verdict, the policy before has taken over again."""
        watched = self._watched.pop(session_id, None)
        try:
            session = self._sessions.get(session_id)
        except ServiceError as error:
            return Verdict(None, f"the session ended: {error}")
        if watched is None or session.drive is not watched.drive:
            return Verdict(None, "nothing took over here")
        drive, first = watched.drive, watched.first
        try:
            found = await self._watch(session, watched)
        finally:
            drive.guard = None
        figures = _cost(first, _Counters.of(drive))
        if found is None:
            return Verdict(None, "", figures)
        code, text = found
        if session.policies.running is not watched.held and watched.back is None:
            return Verdict(code, text, figures)
        logger.warning("session %s: %s goes back to the policy before: %s", session_id, sha[:12], text)
        back = await (watched.back or self.rollback(session_id))
        if back.reason is not None:
            return Verdict(code, f"{text}; the policy before could not take over: {back.text}", figures)
        return Verdict(code, text, figures)

    async def _watch(self, session: Session, watched: _Watched) -> tuple[str, str] | None:
        """Why it must not stay, or None when its time is over. Only time in which the robot runs counts."""
        settings, drive, first, trouble = self.settings, watched.drive, watched.first, watched.trouble
        pause = min(0.1, settings.probation / 10)
        ran, still_since = 0.0, time.monotonic()
        allowed = watched.allowed
        while ran < settings.probation:
            done, _ = await asyncio.wait([trouble], timeout=pause)
            if done:
                return trouble.result()
            now = _Counters.of(drive)
            watched.was_latched &= session.is_latched
            watched.had_failed &= session.stage is Stage.ERROR
            if session.stage is Stage.ERROR and session.is_over:
                return "session", f"the session ended on its probation: {session.reason}"
            if session.is_over or session.stage is Stage.DELETED:
                return None
            if session.policies.running is not watched.held:
                return "taken_back", "another policy was asked for on its probation"
            if session.is_latched and not watched.was_latched:
                return "emergency_stop", f"an emergency stop came on its probation: {session.reason}"
            if session.stage is Stage.ERROR and not watched.had_failed:
                return "error", f"the session failed on its probation: {session.reason}"
            if now.starvations - first.starvations > settings.starvations:
                return "starved", f"the queue ran dry {now.starvations - first.starvations} times on its probation"
            missed, ticks = now.missed_ticks - first.missed_ticks, now.ticks - first.ticks
            if missed > max(2, settings.missed * ticks):
                return "missed_ticks", f"{missed} of {ticks} ticks were missed on its probation"
            jumps = drive.control.largest_step > allowed
            if jumps.any():
                joint = int(np.argmax(drive.control.largest_step / allowed))
                step, name = float(drive.control.largest_step[joint]), drive.table.names[joint]
                return (
                    "jump",
                    f"joint {name!r} was sent {step:.3g} further in one tick, allowed are {allowed[joint]:.3g}",
                )
            if session.stage is Stage.RUNNING and drive.control.hold is None:
                ran, still_since = ran + pause, time.monotonic()
            elif time.monotonic() - still_since > settings.patience:
                # A robot that stands still proves nothing, and must not keep other robots' policies waiting.
                return None
        return None

    async def discard(self, session_id: str, sha: str) -> None:
        """Let go of a staged policy that is not wanted."""
        try:
            session = self._sessions.get(session_id)
        except ServiceError:
            return
        if session.policies.staged is not None and session.policies.staged.commit == sha:
            await session.discard_policy()

    async def rollback(self, session_id: str) -> Verdict:
        """Let the policy from before take over again; it is in memory still."""
        try:
            session = self._sessions.get(session_id)
            drive = _drive_of(session)
            if session.policies.before is None:
                return Verdict("no_previous", f"session {session_id!r} ran no other policy before this one")
            before = _Counters.of(drive)
            session.restore_policy(self._fade(drive))
        except ServiceError as error:
            return _refusal(error)
        return Verdict(None, "", _cost(before, _Counters.of(drive)))

    def _allowed_steps(self, drive: Drive) -> np.ndarray:
        widths = np.array([joint.high - joint.low for joint in drive.table.joints])
        if drive.recent:
            widths = ranges(drive.table, [chunk[0] for _, chunk in drive.recent])
        return self.settings.step * widths

    def _fade(self, drive: Drive) -> int:
        return round(self.settings.fade * drive.control.pace.action_rate)


def _refusal(error: ServiceError, folder: Path | None = None) -> Verdict:
    """Why a step was not done: ``gone`` and ``busy`` are the session's matter and say nothing against the policy."""
    text = str(error) if folder is None else str(error).replace(str(folder), "the new policy")
    match error:
        case UnknownSession():
            return Verdict("gone", text)
        case MoveRefused():
            return Verdict("busy", text)
        case _:
            return Verdict("load", text)


def _repo_of(session: Session) -> str:
    return os.path.expanduser(session.new.policy_path)


def _drive_of(session: Session) -> Drive:
    if session.drive is None:
        raise MoveRefused(f"session {session.id!r} is {session.stage} and runs no policy")
    return session.drive


def _grey(drive: Drive, served: Served) -> Mapping[str, np.ndarray]:
    """An observation for a robot that has shown nothing yet: grey pictures, joints in the middle of their ranges."""
    needs = served.requirements
    sizes = drive.buffer.sizes()
    if len(sizes) < len(needs.cameras):
        sizes = needs.cameras  # what some of them show is not what it was compiled for
    observation: dict[str, np.ndarray] = {
        f"{IMAGES}{camera}": np.full((1, *sizes[camera], 3), 128, np.uint8) for camera in needs.cameras
    }
    if needs.state is not None:
        middle = np.array([[(joint.low + joint.high) / 2 for joint in drive.table.joints]], np.float32)
        observation["observation.state"] = np.where(np.isfinite(middle), middle, np.float32(0))
    return observation


def _sizes_of(observation: Mapping[str, np.ndarray]) -> dict[str, tuple[int, int]]:
    images = {name.removeprefix(IMAGES): array for name, array in observation.items() if name.startswith(IMAGES)}
    return {camera: (image.shape[1], image.shape[2]) for camera, image in images.items()}


async def _until_next_chunk(drive: Drive, chunks: int) -> None:
    """Until the new policy's first chunk is there, if the robot runs: what the swap cost is only known then."""
    end = time.monotonic() + 2.0
    # Control is a pure core without events; a tick is as precise as it gets.
    while drive.control.is_running and drive.control.chunks <= chunks and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(drive.control.period)


def _cost(before: _Counters, after: _Counters) -> dict[str, object]:
    return {
        "ticks": after.ticks - before.ticks,
        "missed_ticks": after.missed_ticks - before.missed_ticks,
        "starvations": after.starvations - before.starvations,
        "late_actions": after.late - before.late,
        "late_actions_usual": round(before.late / before.chunks * (after.chunks - before.chunks), 2)
        if before.chunks
        else None,
        "chunks": after.chunks - before.chunks,
    }
