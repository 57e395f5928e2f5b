"""Gates that a policy passes before it takes over, and its probation after."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.control.joints import JointTable
from service.control.robot_io import RobotIO
from service.sessions.policy_slots import HeldPolicy
from service.sessions.session import Session
from service.stage import Stage


@dataclass(frozen=True)
class GateVerdict:
    """Result of checking a policy."""

    reason: str | None = None  # stable code of a failure (``not_finite``)
    text: str = ""  # description for people
    figures: Mapping[str, object] = field(default_factory=dict)  # measurements, JSON-ready


@dataclass(frozen=True)
class GateLimits:
    """Limits of the gates."""

    difference: float = 0.25  # largest difference from the running policy's action, as a part of the joint's range
    margin: float = 0.1  # how far an action may be outside its joint's range, as a part of it
    slow: float = 0.5  # part of a chunk's execution time that an inference may take


@dataclass(frozen=True)
class Trial:
    """A policy's answers in a trial."""

    chunks: Sequence[np.ndarray]  # (t, a) each
    references: Sequence[np.ndarray | None]  # the running policy's chunks for the same observations
    seconds: Sequence[float]  # duration of each inference
    executed: int  # actions of a chunk that are executed before the next chunk takes over
    budget: float  # seconds for their execution
    usual: float | None = None  # seconds of the running policy's inferences


def judge_trial(trial: Trial, table: JointTable, limits: GateLimits) -> GateVerdict:
    """Check a trial against all gates; the first that fails decides, and figures hold what was measured until then."""
    figures: dict[str, object] = {"observations": len(trial.chunks)}
    bad = sum(int((~np.isfinite(chunk)).sum()) for chunk in trial.chunks)
    if bad:
        total = sum(chunk.size for chunk in trial.chunks)
        return GateVerdict("not_finite", f"{bad} of {total} values of its actions are not finite", figures)
    # The difference of two finite numbers of float32 need not be one.
    chunks = [chunk[: trial.executed].astype(np.float64) for chunk in trial.chunks]
    widths = joint_widths(table, [chunk for chunk in trial.references if chunk is not None])

    outside, joint = _find_worst([_outside(chunk, table) / widths for chunk in chunks], table)
    figures["outside_range"] = round(outside, 4)
    if outside > limits.margin:
        text = f"joint {joint!r}: an action is outside its range by {outside:.0%} of it; {limits.margin:.0%} is allowed"
        return GateVerdict("out_of_range", text, figures)

    median, slowest = float(np.median(trial.seconds)), float(np.percentile(trial.seconds, 90))
    allowed = max(limits.slow * trial.budget, 1.2 * (trial.usual or 0.0))
    figures |= {"inference_ms": round(median * 1e3, 2), "inference_p90_ms": round(slowest * 1e3, 2)}
    figures["allowed_ms"] = round(allowed * 1e3, 2)
    if slowest > allowed:
        text = f"an inference takes {slowest * 1e3:.0f} ms (p90); {allowed * 1e3:.0f} ms are allowed"
        return GateVerdict("slow", text, figures)

    pairs = [(chunk, old) for chunk, old in zip(chunks, trial.references, strict=True) if old is not None]
    figures["compared"] = len(pairs)
    if pairs:
        difference, joint = _find_worst([np.abs(chunk - old[: trial.executed]) / widths for chunk, old in pairs], table)
        figures["difference"] = round(difference, 4)
        if not difference <= limits.difference:  # NaN must not pass
            text = (
                f"joint {joint!r}: differs from the running policy by {difference:.0%} of its range on what the robot "
                f"saw lately; {limits.difference:.0%} is allowed"
            )
            return GateVerdict("differs", text, figures)
        return GateVerdict(None, f"differs by {difference:.1%} at most on {len(pairs)} recent observations", figures)
    return GateVerdict(None, "not compared with the running policy: it has not seen anything lately", figures)


def joint_widths(table: JointTable, seen: Sequence[np.ndarray]) -> np.ndarray:
    """Return (a,) the width of each joint's range; of a joint without one, the range the running policy uses."""
    widths = np.array([joint.high - joint.low for joint in table.joints], np.float64)
    if not seen:
        # Widths of 1 in the joints' unit: a gate that is too narrow is better than none.
        return np.where(np.isfinite(widths), widths, 1.0)
    values = np.concatenate(seen).astype(np.float64)
    # A joint that stood still lately has a range too; joints of one robot have one unit.
    least = 0.1 * np.abs(values[:, ~np.isfinite(widths)]).max(initial=1e-5)
    return np.where(np.isfinite(widths), widths, np.maximum(np.ptp(values, axis=0), least))


def _outside(chunk: np.ndarray, table: JointTable) -> np.ndarray:
    low = np.array([joint.low for joint in table.joints])
    high = np.array([joint.high for joint in table.joints])
    return np.maximum(np.maximum(low - chunk, chunk - high), 0.0)


def _find_worst(parts: Sequence[np.ndarray], table: JointTable) -> tuple[float, str]:
    by_joint = np.concatenate(parts).max(axis=0)
    joint = int(by_joint.argmax())
    return float(by_joint[joint]), table.names[joint]


@dataclass(frozen=True)
class ProbationSettings:
    """Limits of a policy during its probation; times in seconds."""

    seconds: float = 30.0  # duration, in which the robot moves
    still_timeout: float = 60.0  # how long to wait for a robot that stands still
    # Largest change of a command from one tick to the next, as a part of the joint's range; at least 1.5 times the
    # largest change of the previous policy.
    step: float = 0.15
    starvations: int = 2  # how often the queue may run dry
    max_still: float = 2.0  # total time for which the robot may wait for late chunks
    missed: float = 0.02  # part of all ticks that may be missed, and two in any case: a shared machine pauses


def read_counters(robot_io: RobotIO) -> dict[str, int]:
    """Return the counters of a session's control now."""
    control = robot_io.controller
    return {
        "ticks": control.ticks,
        "missed_ticks": control.missed_ticks,
        "starvations": control.starvations,
        "late_actions": control.queue.late,
        "chunks": control.chunks,
    }


def cost_since(start: Mapping[str, int], robot_io: RobotIO) -> dict[str, object]:
    """Return what was added to the counters since, JSON-ready, and the late actions that the rate before predicts."""
    added = {name: count - start[name] for name, count in read_counters(robot_io).items()}
    rate = start["late_actions"] / start["chunks"] if start["chunks"] else None
    return {**added, "late_actions_usual": None if rate is None else round(rate * added["chunks"], 2)}


class Probation:
    """Probation of one policy; it begins when this is created."""

    def __init__(
        self,
        session: Session,
        robot_io: RobotIO,
        allowed: np.ndarray,
        settings: ProbationSettings,
        roll_back: Callable[[], Coroutine[Any, Any, GateVerdict]],
    ):
        """Begin; ``allowed`` (a,) limits the change of a command from one tick to the next, infinite if unknown."""
        self.robot_io = robot_io
        self.policy: HeldPolicy | None = session.policies.running
        self.start = read_counters(robot_io)
        # It begins at the first failed inference, because a few more failures would end the session.
        self.rollback: asyncio.Task[GateVerdict] | None = None
        self._roll_back = roll_back
        self._session = session
        self._settings = settings
        self._allowed = np.maximum(allowed, 1.5 * robot_io.controller.largest_step)
        # An emergency stop or an error from before it took over is not its fault.
        self._was_latched, self._had_failed = session.is_latched, session.stage is Stage.ERROR
        robot_io.controller.largest_step[:] = 0
        self._failure = robot_io.runner.begin_probation()
        self._failure.add_done_callback(self._start_rollback)

    def _start_rollback(self, trouble: asyncio.Future[tuple[str, str]]) -> None:
        if not trouble.cancelled():
            self.rollback = asyncio.create_task(self._roll_back())

    async def wait(self) -> tuple[str, str] | None:
        """Return code and text of why the policy must not stay, or None when its time of motion is over."""
        settings, robot_io, session = self._settings, self.robot_io, self._session
        pause = min(0.1, settings.seconds / 10)
        ran, stood, still_since, looked_at = 0.0, 0.0, time.monotonic(), time.monotonic()
        try:
            while ran < settings.seconds:
                done, _ = await asyncio.wait([self._failure], timeout=pause)
                # A pause of this process is not the policy's fault.
                since, looked_at = min(time.monotonic() - looked_at, 2 * pause), time.monotonic()
                if done:
                    return self._failure.result()
                if session.is_closed or session.stage is Stage.DELETED:
                    if session.stage is Stage.ERROR:
                        return "session", f"the session ended on its probation: {session.reason}"
                    return None
                if (found := self._check_session() or self._check_counters()) is not None:
                    return found
                if session.stage is Stage.RUNNING and robot_io.controller.is_waiting_for_policy:
                    stood, still_since = stood + since, looked_at
                    if stood > settings.max_still:
                        text = f"the robot stood for {stood:.1f} s on its probation, because its actions came too late"
                        return "starved", f"{text}; {settings.max_still:g} s are allowed"
                elif session.stage is Stage.RUNNING and robot_io.controller.hold is None:
                    ran, still_since = ran + pause, looked_at
                elif time.monotonic() - still_since > settings.still_timeout:
                    # A robot that stands still proves nothing, and must not keep other robots' policies waiting.
                    return None
            return None
        finally:
            robot_io.runner.end_probation()

    def _check_session(self) -> tuple[str, str] | None:
        session = self._session
        self._was_latched &= session.is_latched
        self._had_failed &= session.stage is Stage.ERROR
        if session.policies.running is not self.policy:
            return "taken_back", "another policy was requested during its probation"
        if session.is_latched and not self._was_latched:
            return "emergency_stop", f"an emergency stop came on its probation: {session.reason}"
        if session.stage is Stage.ERROR and not self._had_failed:
            return "error", f"the session failed on its probation: {session.reason}"
        return None

    def _check_counters(self) -> tuple[str, str] | None:
        settings, robot_io = self._settings, self.robot_io
        now = read_counters(robot_io)
        added = {name: now[name] - count for name, count in self.start.items()}
        dry, missed = added["starvations"], added["missed_ticks"]
        if dry > settings.starvations:
            return "starved", f"the queue ran dry {dry} times on its probation"
        allowed = max(2, int(settings.missed * settings.seconds / robot_io.controller.period))
        if missed > allowed:
            return "missed_ticks", f"{missed} of {added['ticks']} ticks were missed on its probation, {allowed} may be"
        step = robot_io.controller.largest_step
        if (step > self._allowed).any():
            joint = int(np.argmax(step / self._allowed))
            text = f"was sent {float(step[joint]):.3g} further in one tick; {self._allowed[joint]:.3g} is allowed"
            return "jump", f"joint {robot_io.table.names[joint]!r} {text}"
        return None
