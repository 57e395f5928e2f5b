"""Session of a process that ended: restart, reset or delete."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NoReturn

from service.control.observers import SessionObserver
from service.control.robot_io import RobotIO
from service.errors import MoveRefused
from service.inference.engine import Engine, LoadPolicy
from service.inference.progress import Progress
from service.sessions.base_session import About, BaseSession
from service.sessions.policy_slots import PolicySlots
from service.sessions.records import SessionRecord
from service.stage import Move, Stage
from service.transport.link import Rooms


class Interrupted(BaseSession):
    """Stands where the session stood and answers as one: it has no policy and no rooms, and moves nothing.

    All that were acknowledged and not deleted come back as this, after a kill and after an orderly end alike: whoever
    made them finds them, with their reason, and decides. None goes on by itself, as nobody knows what happened beside
    the robot meanwhile.

    Attributes:
        record: as it was last written down.
        is_over: as of a session that has let go of everything.

    Further attributes as of `Standing`.
    """

    is_over = True

    def __init__(
        self, record: SessionRecord, engine: Engine, load: LoadPolicy, latch: str | None = None, failure: str = ""
    ):
        """``failure`` says what came of trying to bring it back."""
        super().__init__(record.new, latch, record.claim)
        self.record = record
        self.policies = PolicySlots(record.new, engine, load, self._refuse_robot_io)
        self.progress = Progress(record.new.policy_path, engine.durations)
        self.progress.tell("interrupted")
        self._lifecycle.stage = Stage.INTERRUPTED
        self._lifecycle.reason = f"{why(record)}; {failure}" if failure else why(record)

    @property
    def rooms(self) -> Rooms:
        """Those it was in."""
        return self.record.rooms()

    def _about(self) -> About:
        figures: dict[str, object] = {
            "interrupted": self._lifecycle.reason,
            "created_at": _in_words(self.record.created_at),
            "interrupted_at": _in_words(self.record.changed_at),
        }
        for told in self.figures:
            figures |= told()
        return About(
            new=self.new,
            stage=self.stage,
            reason=self.reason,
            latch=self.latch,
            is_over=True,
            progress=self.progress,
            age=time.monotonic() - self.created_at,
            rooms=self.rooms,
            policies=self.policies,
            figures=figures,
        )

    def check_restart(self) -> None:
        """Refuse to bring it back where that is not possible.

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
        """Raises MoveRefused: it has to be restarted first."""
        self._lifecycle.check(Move.START)
        raise AssertionError("the table has no start from here")

    def stop(self) -> NoReturn:
        """Raises MoveRefused: nothing moves."""
        self._lifecycle.check(Move.STOP)
        raise AssertionError("the table has no stop from here")

    def emergency_stop(self, reason: str) -> None:
        """Latch it: what comes of it later does not move before a reset."""
        self._lifecycle.move(Move.EMERGENCY_STOP, reason)

    def reset(self) -> None:
        """Take the latch off."""
        self._lifecycle.move(Move.RESET)

    def begin_end(self) -> None:
        """It is forgotten."""
        self._lifecycle.move(Move.DELETE)

    def attach(self, tap: SessionObserver) -> Callable[[], None]:
        """Raises MoveRefused: there is nothing to look at."""
        raise self.refusal()

    def _refuse_robot_io(self) -> RobotIO:
        raise self.refusal()

    def refusal(self) -> MoveRefused:
        """For whoever wants something of a policy or a robot that are not there."""
        return MoveRefused(f"session {self.id!r} is {self.stage} and runs no policy; restart it first")


def why(record: SessionRecord) -> str:
    """What ended it, in words."""
    how = "was shut down" if record.is_shut_down else "ended"
    reason = f" ({record.reason})" if record.reason else ""
    return f"the server {how} while it was {record.stage}{reason}"


def _in_words(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
