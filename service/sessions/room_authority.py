"""Authority over the robots of this server's rooms: who may command one, checked before a command leaves.

The action guard has already limited every command of a policy. A command outside of the limits is therefore the result
of another failure: it is refused, counted and logged.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from service.sessions.records import Latch
from service.sessions.store import AnySession, Sessions
from service.stage import MOVING, Stage
from service.transport.protocol import Json, session_of
from service.transport.server.rooms import Commander, CommandRefused, RoomPath, matches_secret

log = logging.getLogger(__name__)

# Seconds between two lines of the log about the same thing.
LOG_INTERVAL = 10.0
# Between a measured value and the same one after its way through float32 and JSON.
_SAME = 1e-6
ROBOT_TAKEN = "robot_taken"


class RoomAuthority:
    """Finds the commander of every output room; called by the room table.

    A room belongs to a session by its name and workspace while the session is listed, in every stage. A latched
    emergency stop closes the room until its reset, even if the session is gone.

    Attributes:
        sessions: the server's sessions; None before it starts.
    """

    def __init__(self) -> None:
        self.sessions: Sessions | None = None
        self._logged_at: dict[tuple[str, str], float] = {}

    def __call__(self, place: RoomPath, owner: str | None) -> Commander | None:
        """Return who may command the robot of a room, or None; ``owner`` is the room's."""
        session_id = session_of(place.room)
        sessions = None if session_id is None else self.sessions
        if sessions is None or session_id is None:
            return None
        session = sessions.find(session_id)
        if session is None:
            latch = sessions.get_latch(session_id)
            is_closed = latch is not None and (owner is None or latch.owner == owner)
            return LatchedCommander(session_id, latch) if latch is not None and is_closed else None
        new = session.new
        if new.workspace_id != place.workspace or new.is_direct or _has_other_owner(owner, new.owner):
            return None
        # A session that failed before it joined its rooms never commanded the robot.
        if session.stage is Stage.ERROR and session.robot_io is None and session.latch is None:
            return None
        return SessionCommander(session, self._log_rarely)

    def _log_rarely(self, session_id: str, code: str, text: str) -> None:
        now = time.monotonic()
        if now - self._logged_at.get((session_id, code), -math.inf) < LOG_INTERVAL:
            return
        if len(self._logged_at) > 1000:
            self._logged_at.clear()
        self._logged_at[session_id, code] = now
        log.warning("session %s: %s (%s)", session_id, text, code)


class SessionCommander:
    """A session of this server as the commander of its output room."""

    def __init__(self, session: AnySession, log_rarely: Callable[[str, str, str], None]):
        self._session = session
        self._log_rarely = log_rarely

    @property
    def latch(self) -> str | None:
        """The session's emergency stop that waits for its reset."""
        return self._session.latch

    @property
    def is_moving(self) -> bool:
        """Whether it moves its robot, or would as soon as its input or link is back."""
        session = self._session
        return session.latch is None and session.stage in MOVING and not session.new.dry_run

    def is_own(self, claim: str | None) -> bool:
        """Return whether a command carries the session's secret."""
        return matches_secret(claim, self._session.claim)

    def refuse_stranger(self) -> CommandRefused:
        """Count a command of another sender, and return the error for it."""
        session = self._session
        latched = ", and an emergency stop of it is latched" if session.latch is not None else ""
        self._count(ROBOT_TAKEN, "another sender wanted to command its robot, and was refused")
        return CommandRefused(ROBOT_TAKEN, f"only session {session.id!r} may command the robot of this room{latched}")

    def check_command(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Return why a command of the session is refused, or None.

        A moving session's command must be finite and in range; any other command must keep the measured pose.
        """
        if not self.is_moving:
            return None if self._is_hold(joints) else self._refuse(*self._refusal_while_still())
        robot_io = self._session.robot_io
        if robot_io is None:
            return self._refuse("stopped", "it has no robot yet")
        ranges = robot_io.controller.guard.limits.ranges
        for joint in joints:
            known = ranges.get(joint["name"])
            if known is None:
                return self._refuse("unknown_joint", f"a command names {joint['name']!r:.60}, which is no joint of it")
            value = joint["value"]
            if known[0] <= value <= known[1]:  # false of NaN
                continue
            if not math.isfinite(value):
                return self._refuse("not_finite", f"a command of {joint['name']!r} is {value}")
            if not self._is_returning(joint["name"], value, known, delivered):
                text = f"a command wants {joint['name']!r} at {value:.6g}, outside of {known[0]:.6g}..{known[1]:.6g}"
                return self._refuse("position", text)
        return None

    def _refusal_while_still(self) -> tuple[str, str]:
        session = self._session
        if session.latch is not None:
            return "latched", "a command other than a hold came while an emergency stop is latched"
        if session.new.dry_run:
            return "dry_run", "a command came in a dry run"
        return "stopped", f"a command other than a hold came while it is {session.stage}"

    def _is_hold(self, joints: Sequence[Json]) -> bool:
        """Return whether this is a pose that was measured just now: the arm stays where it is."""
        robot_io = self._session.robot_io
        if robot_io is None or self._session.new.dry_run:
            return False
        places = {name: place for place, name in enumerate(robot_io.table.names)}
        if not all(joint["name"] in places for joint in joints):
            return False
        wanted = [(places[joint["name"]], joint["value"]) for joint in joints]
        return any(
            all(abs(value - (at := float(pose[place]))) <= _SAME * max(1.0, abs(at)) for place, value in wanted)
            for pose in robot_io.buffer.poses(time.monotonic())
        )

    def _is_returning(
        self, name: str, value: float, known: tuple[float, float], delivered: Mapping[str, float]
    ) -> bool:
        """Return whether a joint outside of its range is led back: not further out than it was measured or sent."""
        robot_io = self._session.robot_io
        assert robot_io is not None
        place = robot_io.table.names.index(name)
        been = [float(pose[place]) for pose in robot_io.buffer.poses(time.monotonic())]
        if name in delivered:
            been.append(delivered[name])
        slack = _SAME * max(1.0, abs(value))
        return (
            any(value <= one + slack for one in been) if value > known[1] else any(value >= one - slack for one in been)
        )

    def _refuse(self, code: str, text: str) -> CommandRefused:
        self._count(code, f"{text}; it did not leave the server")
        return CommandRefused(code, text)

    def _count(self, code: str, text: str) -> None:
        self._session.refused_commands.add(code)
        self._log_rarely(self._session.id, code, text)


class LatchedCommander:
    """Commander of a room without a session whose emergency stop is latched: it refuses every command."""

    is_moving = False

    def __init__(self, session_id: str, latch: Latch):
        self._id = session_id
        self.latch: str | None = latch.reason

    def is_own(self, claim: str | None) -> bool:
        """Return False: the session is gone."""
        return False

    def refuse_stranger(self) -> CommandRefused:
        """Return the error for every command."""
        return CommandRefused(
            "latched",
            f"an emergency stop of session {self._id!r} is latched, though the session is gone; make sure that the "
            f"robot is safe, then POST /debug/sessions/{self._id}/reset",
        )

    def check_command(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Return the error for every command."""
        return self.refuse_stranger()


def _has_other_owner(room: str | None, session: str | None) -> bool:
    """Return whether a room and a session have different owners; None equals every owner."""
    return room is not None and session is not None and room != session
