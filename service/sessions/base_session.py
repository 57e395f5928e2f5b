"""Base of all sessions: stage, and the status that the API answers with."""

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from service.control.aggregation import EnsembleAggregation
from service.control.robot_io import RobotIO
from service.inference.progress import LoadProgress
from service.sessions.policy_slots import PolicySlots
from service.sessions.request import NewSession
from service.stage import Lifecycle, Stage
from service.stats import Tally
from service.transport.link import Rooms

# As in "camera_stale: ...": such a code has an underscore.
_CODE = re.compile(r"([a-z]+(?:_[a-z]+)+): ")


# A docstring would change the specified document.
class SessionStatusResponse(BaseModel):  # noqa: D101
    session_id: str
    status: str
    policy_path: str
    policy_type: str
    camera_names: list[str]
    workspace_id: str
    rooms: dict[str, Any]
    stats: dict[str, Any]
    inference_stats: dict[str, Any] | None = None
    error_message: str | None = None


def _stop_stats(session: "BaseSession", robot_io: RobotIO | None, now: float) -> dict[str, object]:
    latch = session.latch
    found = _CODE.match(latch or "")
    return {
        "emergency_stop": latch,
        # The reason of an automatic stop begins with a code; a person's reason has none.
        "stop_code": None if latch is None else found[1] if found else "asked",
        "robot_latched": robot_io.robot_latch if robot_io else None,
        "dry_run": session.new.dry_run,
        "commands_withheld": robot_io.commands_withheld if robot_io else 0,
        "shadow": robot_io.runner.shadow.get_stats() if robot_io and robot_io.runner.shadow else None,
        "watch": robot_io.get_watchdog_stats(now) if robot_io else None,
        "warnings": robot_io.get_warnings(now) if robot_io else {},
    }


def describe_progress(progress: LoadProgress) -> dict[str, object]:
    """Return the step of a session's preparation, with seconds and percent until it is ready; JSON-ready."""
    if progress.stage == "ready":
        return {"progress": "ready"}
    left = progress.estimate_remaining()
    return {
        "progress": progress.stage,
        "progress_s": round(progress.elapsed(), 1),
        "progress_left_s": None if left is None else round(left, 1),
        "progress_percent": progress.percent(),
    }


def _policy_stats(session: "BaseSession") -> dict[str, object]:
    held = session.policies
    return {
        "auto_update": session.new.auto_update,
        "policy_commit": held.running.commit if held.running else None,
        "policy_staged": held.staged.commit if held.staged else None,
        "policy_before": held.previous.commit if held.previous else None,
        "policy_changes": held.changes,
    }


def _initial_stats(session: "BaseSession") -> dict[str, object]:
    return {
        "inference_count": 0,
        "images_received": dict.fromkeys(session.new.camera_names, 0),
        "joints_received": 0,
        "commands_sent": 0,
        "errors": int(session.stage is Stage.ERROR),
        "actions_in_queue": 0,
        "policy_type": session.new.policy_type,
        "hold": None,
        "hold_code": None,
    }


def _control_stats(robot_io: RobotIO, session: "BaseSession", now: float) -> dict[str, object]:
    buffer, controller = robot_io.buffer, robot_io.controller
    hold = controller.hold
    return {
        # Names of the reference server.
        "inference_count": robot_io.runner.seconds["total"].count,
        "images_received": {camera: rate.count for camera, rate in buffer.frames.items()},
        "joints_received": buffer.joint_updates.count,
        "commands_sent": robot_io.commands_sent,
        "errors": robot_io.runner.errors + controller.rejected,
        "actions_in_queue": controller.queue.left,
        "policy_type": session.new.policy_type,
        # Reasons for not moving.
        "hold": hold.text if hold else None,
        "hold_code": hold.code if hold else None,
        "hold_s": round(now - hold.since, 2) if hold else None,
        "holds": controller.holds.by_reason(),
        # Inputs.
        "camera_fps": {camera: rate.per_second(now) for camera, rate in buffer.frames.items()},
        "joints_per_second": buffer.joint_updates.per_second(now),
        "inputs_dropped": buffer.dropped.by_reason(),
        "measured_joints": buffer.measured_joints(),
        # Limits change commands, never measured values.
        "joints_clamped": controller.guard.joints.total,
        "safety": controller.guard.stats(),
        # Outputs.
        "rate": controller.config.rate,
        "action_rate": controller.config.action_rate,
        "reads_language": robot_io.runner.loaded.requirements.language,
        "instruction_tokens_cut": robot_io.runner.tokens_cut,
        "last_command": dict(robot_io.last_command),
        "commands_refused": robot_io.commands_refused,
        "chunks": controller.chunks,
        "chunks_rejected": controller.rejected,
        "chunks_discarded": controller.scheduler.discarded,
        "late_actions_dropped": controller.queue.late,
        "starvations": controller.starvations,
        **describe_overlap(robot_io),
        **controller.scheduler.get_stats(controller.queue.period),
        "ticks": controller.ticks,
        "missed_ticks": controller.missed_ticks,
        "tick_lateness_ms": controller.lateness.percentiles_ms(50, 99, 99.9),
    }


def describe_overlap(robot_io: RobotIO) -> dict[str, object]:
    """Return how a session joins chunks and when it requests them; JSON-ready."""
    config = robot_io.controller.config
    overlap = config.overlap
    return {
        "overlap": overlap.name,
        "temporal_ensemble_coeff": overlap.coefficient if isinstance(overlap, EnsembleAggregation) else None,
        "ask_ahead": config.ask_ahead,
        "action_steps": config.action_steps,
    }


def _inference_stats(robot_io: RobotIO, session: "BaseSession") -> dict[str, object]:
    total = robot_io.runner.seconds["total"]
    spent = total.total
    return {
        "inference_count": total.count,
        "total_inference_time": round(spent, 6),
        "average_inference_time": round(spent / total.count, 6) if total.count else None,
        "average_fps": round(total.count / spent, 3) if spent else None,
        "is_loaded": not session.is_closed,
        "device": robot_io.runner.loaded.policy.device,
        "stages_ms": {stage: recent.percentiles_ms(50, 99) for stage, recent in robot_io.runner.seconds.items()},
        "answer_ms": robot_io.controller.latency.percentiles_ms(50, 99),
    }


class SessionState(NamedTuple):
    """Stage of a session, its reason, and the text of an emergency stop that waits for its reset."""

    stage: Stage
    reason: str | None
    latch: str | None


ROOMS = "rooms"  # Protocol of sessions with rooms.


def new_claim() -> str:
    """Make a secret that only a session and the servers of its rooms know."""
    return secrets.token_urlsafe(24)


class BaseSession(ABC):
    """Base of running and interrupted sessions.

    Attributes:
        new: the request.
        robot_io: controls the robot, or None while it runs no policy.
        created_at: monotonic time.
        protocol: protocol with which its robot or client last controlled it, such as ``rooms``; None before.
        stats_sources: functions that each return a part of the stats.
        claim: see `SessionRecord`.
        refused_commands: commands for its robot that this server's rooms refused, by reason.
        rooms: its rooms, or None while it has none.
    """

    progress: LoadProgress
    policies: PolicySlots
    rooms: Rooms | None = None

    def __init__(self, new: NewSession, latch: str | None, claim: str | None = None):
        """Create it; ``latch`` is the text of an emergency stop of this id that has not been reset."""
        self.new = new
        self.claim = claim or new_claim()
        self.refused_commands = Tally()
        self.robot_io: RobotIO | None = None
        self.created_at = time.monotonic()
        self.protocol = None if new.is_direct else ROOMS
        self.stats_sources: list[Callable[[], Mapping[str, object]]] = [
            lambda: {"refused_at_room": self.refused_commands.by_reason()}
        ]
        self._lifecycle = Lifecycle(new.session_id, latch)

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether its rooms and policies are released, and its task has ended."""

    def _current_lifecycle(self) -> Lifecycle:
        return self._lifecycle

    @property
    def id(self) -> str:
        """The session's id."""
        return self.new.session_id

    def state(self) -> SessionState:
        """Return its stage, reason and latch."""
        lifecycle = self._current_lifecycle()
        return SessionState(lifecycle.stage, lifecycle.reason, lifecycle.latch)

    @property
    def stage(self) -> Stage:
        """The session's stage."""
        return self._current_lifecycle().stage

    @property
    def reason(self) -> str | None:
        """Reason of this stage: text of an error, a timeout or an emergency stop."""
        return self._current_lifecycle().latch or self._current_lifecycle().reason

    @property
    def latch(self) -> str | None:
        """Text of an emergency stop that waits for its reset, or None."""
        return self._current_lifecycle().latch

    @property
    def is_latched(self) -> bool:
        """Whether an emergency stop waits for its reset."""
        return self._current_lifecycle().latch is not None

    def status(self) -> SessionStatusResponse:
        """Return the status that the API answers with."""
        stage = str(self.stage)
        new, robot_io, now = self.new, self.robot_io, time.monotonic()
        stats: dict[str, object] = {
            **describe_progress(self.progress),
            "age_s": round(now - self.created_at, 1),
            "language_instruction": new.language_instruction,
            "protocol": self.protocol,
            **_policy_stats(self),
            **(_control_stats(robot_io, self, now) if robot_io else _initial_stats(self)),
            **_stop_stats(self, robot_io, now),
            **self._kind_stats(),
        }
        for get_stats in self.stats_sources:
            stats |= get_stats()
        described = self.describe_rooms()
        return SessionStatusResponse.model_construct(  # without validation, because this runs between ticks
            session_id=new.session_id,
            status=stage,
            policy_path=new.policy_path,
            policy_type=new.policy_type,
            camera_names=list(new.camera_names),
            workspace_id=described["workspace_id"],
            rooms=described,
            stats=stats,
            inference_stats=_inference_stats(robot_io, self) if robot_io else None,
            error_message=self.reason,
        )

    def describe_rooms(self) -> dict[str, Any]:
        """Return workspace and ids of its rooms; JSON-ready."""
        rooms = self.rooms
        return {
            "workspace_id": rooms.workspace_id if rooms else self.new.workspace_id or "",
            "camera_room_ids": dict(rooms.cameras) if rooms else {},
            "joint_input_room_id": rooms.joint_input if rooms else None,
            "joint_output_room_id": rooms.joint_output if rooms else None,
        }

    def queue(self) -> dict[str, object]:
        """Return the queue of actions: due times from now, rates, ages of the input; JSON-ready."""
        head: dict[str, object] = {"session_id": self.id, "status": str(self.stage)}
        if (robot_io := self.robot_io) is None:
            return {**head, "queue_length": 0, "due_in_ms": []}
        controller, buffer, now = robot_io.controller, robot_io.buffer, time.monotonic()
        lack = buffer.not_ready(now)
        ages = {camera: None if at is None else round((now - at) * 1e3, 1) for camera, at in buffer.observed_at.items()}
        return {
            **head,
            "queue_length": controller.queue.left,
            "queue_max": controller.config.chunk,
            "due_in_ms": [round((due - now) * 1e3, 1) for due in controller.queue.due_times()],
            "control_hz": controller.config.rate,
            "action_hz": controller.config.action_rate,
            "action_steps": controller.config.action_steps,
            "inference_in_flight": controller.scheduler.in_flight is not None,
            "last_inference_ms": controller.latency.newest_ms,
            "late_actions_dropped": controller.queue.late,
            "data": {
                "is_complete_and_fresh": lack is None,
                "lacking": lack.text if lack else None,
                "frame_age_ms": ages,
                "measured_joints": buffer.measured_joints(),
            },
            "link": dict(robot_io.link_health()),
        }

    @abstractmethod
    def _kind_stats(self) -> dict[str, object]:
        """Return the stats that only this kind of session has."""
