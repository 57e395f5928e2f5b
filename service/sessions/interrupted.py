"""Interrupted sessions, whose process ended: they can be restarted, reset or deleted."""

from datetime import UTC, datetime

from service.control.robot_io import RobotIO
from service.errors import MoveRefused
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadPolicy
from service.inference.progress import LoadProgress
from service.sessions.base_session import BaseSession
from service.sessions.policy_slots import PolicySlots
from service.sessions.records import SessionRecord
from service.stage import Move, Stage


class InterruptedSession(BaseSession):
    """Session of a process that ended. It has no policy, joins no rooms and moves nothing.

    Every acknowledged session that was not deleted returns as this at the next start. Only a person restarts it,
    because the surroundings of the robot may have changed.

    Attributes:
        record: its newest record.
    """

    def __init__(
        self, record: SessionRecord, engine: Engine, load: LoadPolicy, latch: str | None = None, failure: str = ""
    ):
        """Create it from its record; ``failure`` is the reason of a failed restart."""
        super().__init__(record.new, latch, record.claim)
        self.record = record
        self.rooms = record.new.rooms()
        self.policies = PolicySlots(record.new, engine, load, self.require_robot_io)
        self.progress = LoadProgress(record.new.policy_path, engine.durations)
        self.progress.report("interrupted")
        self._lifecycle.stage = Stage.INTERRUPTED
        how = "was shut down" if record.is_shut_down else "ended"
        reason = f" ({record.reason})" if record.reason else ""
        self._lifecycle.reason = f"the server {how} while it was {record.stage}{reason}"
        if failure:
            self._lifecycle.reason += f"; {failure}"

    @property
    def is_closed(self) -> bool:
        """Return True: it holds nothing."""
        return True

    def _kind_stats(self) -> dict[str, object]:
        return {
            "interrupted": self._lifecycle.reason,
            "created_at": _format_time(self.record.created_at),
            "interrupted_at": _format_time(self.record.changed_at),
        }

    def check_restart(self) -> None:
        """Raise MoveRefused if an emergency stop is latched, or a newer version made the session."""
        self._lifecycle.check(Move.RESTART)
        if self.record.is_newer:
            unknown = f" ({', '.join(sorted(self.record.wishes))})" if self.record.wishes else ""
            raise MoveRefused(
                f"session {self.id!r} was made by a newer robojax, with something this one does not know{unknown}; "
                "use that one, or delete the session"
            )

    def start(self) -> None:
        """Raise MoveRefused: it has to be restarted first."""
        self._lifecycle.move(Move.START)

    def stop(self) -> None:
        """Raise MoveRefused: nothing moves."""
        self._lifecycle.move(Move.STOP)

    def emergency_stop(self, reason: str) -> None:
        """Latch an emergency stop: after a restart it does not move before a reset."""
        self._lifecycle.move(Move.EMERGENCY_STOP, reason)

    def reset(self) -> None:
        """Reset the latch of an emergency stop."""
        self._lifecycle.move(Move.RESET)

    def begin_close(self) -> None:
        """Mark it as deleted."""
        self._lifecycle.move(Move.DELETE)

    def require_robot_io(self) -> RobotIO:
        raise self.make_refusal()

    def make_refusal(self) -> MoveRefused:
        """Make the error for callers that need its policy or its robot."""
        return MoveRefused(f"session {self.id!r} is {self.stage} and runs no policy; restart it first")


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
