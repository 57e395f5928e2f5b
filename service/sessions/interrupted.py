"""Interrupted sessions, whose process ended: they can be restarted, reset or deleted."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import NoReturn

from service.control.observers import SessionObserver
from service.control.robot_io import RobotIO
from service.errors import MoveRefused
from service.inference.engine import Engine, LoadPolicy
from service.inference.progress import Progress
from service.sessions.base_session import BaseSession
from service.sessions.policy_slots import PolicySlots
from service.sessions.records import SessionRecord
from service.stage import Move, Stage


class InterruptedSession(BaseSession):
    """Session of a process that ended: it answers in its place, has no policy and no rooms, and moves nothing.

    All that were acknowledged and not deleted come back as this, after a kill and after an orderly end alike: whoever
    made them finds them, with their reason, and decides. None goes on by itself, as nobody knows what happened beside
    the robot meanwhile.

    Attributes:
        record: as it was last written down.

    Further attributes as of `BaseSession`.
    """

    def __init__(
        self, record: SessionRecord, engine: Engine, load: LoadPolicy, latch: str | None = None, failure: str = ""
    ):
        """Create it from its record; ``failure`` says why a restart failed."""
        super().__init__(record.new, latch, record.claim)
        self.record = record
        self.rooms = record.rooms()
        self.policies = PolicySlots(record.new, engine, load, self.require_robot_io)
        self.progress = Progress(record.new.policy_path, engine.durations)
        self.progress.report("interrupted")
        self._lifecycle.stage = Stage.INTERRUPTED
        self._lifecycle.reason = f"{describe_end(record)}; {failure}" if failure else describe_end(record)

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
        """Refuse a restart that is not possible.

        Raises:
            MoveRefused: an emergency stop is latched, or it was asked for something that this version does not know.
        """
        self._lifecycle.check(Move.RESTART)
        if self.record.is_newer:
            unknown = f" ({', '.join(sorted(self.record.wishes))})" if self.record.wishes else ""
            raise MoveRefused(
                f"session {self.id!r} was made by a newer robojax, with something this one does not know{unknown}; "
                "use that one, or delete the session"
            )

    def start(self) -> NoReturn:
        """Raise MoveRefused: it has to be restarted first."""
        self._lifecycle.check(Move.START)
        raise AssertionError("the table has no start from here")

    def stop(self) -> NoReturn:
        """Raise MoveRefused: nothing moves."""
        self._lifecycle.check(Move.STOP)
        raise AssertionError("the table has no stop from here")

    def emergency_stop(self, reason: str) -> None:
        """Latch an emergency stop: after a restart it does not move before a reset."""
        self._lifecycle.move(Move.EMERGENCY_STOP, reason)

    def reset(self) -> None:
        """Reset the latch of an emergency stop."""
        self._lifecycle.move(Move.RESET)

    def begin_close(self) -> None:
        """Mark it as deleted."""
        self._lifecycle.move(Move.DELETE)

    def attach(self, observer: SessionObserver) -> Callable[[], None]:
        """Raise MoveRefused: there is nothing to observe."""
        raise self.make_refusal()

    def require_robot_io(self) -> RobotIO:
        raise self.make_refusal()

    def make_refusal(self) -> MoveRefused:
        """Make the error for callers that need its policy or its robot."""
        return MoveRefused(f"session {self.id!r} is {self.stage} and runs no policy; restart it first")


def describe_end(record: SessionRecord) -> str:
    """Describe how the session ended."""
    how = "was shut down" if record.is_shut_down else "ended"
    reason = f" ({record.reason})" if record.reason else ""
    return f"the server {how} while it was {record.stage}{reason}"


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
