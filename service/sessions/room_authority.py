"""Authority over the robots of this server's rooms: who may command one, checked before a command leaves.

The guard brings every command of a policy inside its limits long before this; what is wrong here is wrong because
something else failed, so nothing is brought inside any more: it does not leave, is counted, and is logged.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from service.control.robot_io import RobotIO
from service.sessions.records import Latch
from service.sessions.request import NewSession
from service.stage import MOVING, Stage
from service.stats import Tally
from service.transport.protocol import Json, session_of
from service.transport.server.rooms import Commander, CommandRefused, RoomPath, matches_secret

log = logging.getLogger(__name__)

# Seconds between two lines of the log about the same thing.
QUIET = 10.0
# Between a measured value and the same one after its way through float32 and JSON.
_SAME = 1e-6
STRANGER = "robot_taken"


class Session(Protocol):
    """A session, or one that was interrupted, as far as its room has to know it."""

    new: NewSession
    robot_io: RobotIO | None
    claim: str
    refused: Tally

    @property
    def id(self) -> str: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def latch(self) -> str | None: ...


class Sessions(Protocol):
    """Those of this server."""

    def find(self, session_id: str) -> Session | None:
        """The session of this id, also while it is being deleted."""
        ...

    def latch_of(self, session_id: str) -> Latch | None:
        """The emergency stop of this id that nobody has reset, also when its session is gone."""
        ...


class Authority:
    """Knows the commander of every output room; a room table asks it.

    A room is a session's by its name and workspace, from when the session is listed until it is gone: while its policy
    loads, while its link is being made again, while it is stopped, and while it is interrupted, as its server ended.
    Its latch closes the room beyond that, until somebody resets it.
    """

    def __init__(self, sessions: Callable[[], Sessions | None]):
        """``sessions`` are there from the start of the server."""
        self._sessions = sessions
        self._said: dict[tuple[str, str], float] = {}

    def __call__(self, place: RoomPath, owner: str | None) -> Commander | None:
        """Whose robot takes its commands from there; ``owner`` is the room's."""
        session_id = session_of(place.room)
        sessions = None if session_id is None else self._sessions()
        if sessions is None or session_id is None:
            return None
        session = sessions.find(session_id)
        if session is None:
            latch = sessions.latch_of(session_id)
            is_closed = latch is not None and (owner is None or latch.owner == owner)
            return Latched(session_id, latch) if latch is not None and is_closed else None
        new = session.new
        if new.workspace_id != place.workspace or new.is_direct or _is_of_another(owner, new.owner):
            return None
        # One that failed before it was in its rooms never commanded anybody.
        if session.stage is Stage.ERROR and session.robot_io is None and session.latch is None:
            return None
        return SessionCommander(session, self._say)

    def _say(self, session_id: str, code: str, text: str) -> None:
        now = time.monotonic()
        if now - self._said.get((session_id, code), -math.inf) < QUIET:
            return
        if len(self._said) > 1000:
            self._said.clear()
        self._said[session_id, code] = now
        log.warning("session %s: %s (%s)", session_id, text, code)


class SessionCommander:
    """A session of this server, as the one who commands in its output room."""

    def __init__(self, session: Session, say: Callable[[str, str, str], None]):
        self._session = session
        self._say = say

    @property
    def latch(self) -> str | None:
        """Its own."""
        return self._session.latch

    @property
    def is_moving(self) -> bool:
        """Whether it moves its robot, or would if what it lacks came back."""
        session = self._session
        return session.latch is None and session.stage in MOVING and not session.new.dry_run

    def is_own(self, claim: str | None) -> bool:
        """Whether it came with the session's secret."""
        return matches_secret(claim, self._session.claim)

    def refuse_stranger(self) -> CommandRefused:
        """What others are told."""
        session = self._session
        latched = ", and an emergency stop of it is latched" if session.latch is not None else ""
        self._count(STRANGER, "somebody else wanted to command its robot, and was refused")
        return CommandRefused(STRANGER, f"only session {session.id!r} may command the robot of this room{latched}")

    def check_command(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Why a command of the session itself must not leave: its room lets out what is finite and in range while it
        moves, and else only that the robot stays where it was measured."""
        if not self.is_moving:
            return None if self._is_hold(joints) else self._refused(*self._why_only_holds())
        robot_io = self._session.robot_io
        if robot_io is None:
            return self._refused("stopped", "it has no robot yet")
        ranges = robot_io.controller.guard.limits.ranges
        for joint in joints:
            known = ranges.get(joint["name"])
            if known is None:
                return self._refused("unknown_joint", f"a command names {joint['name']!r:.60}, which is no joint of it")
            value = joint["value"]
            if known[0] <= value <= known[1]:  # false of NaN
                continue
            if not math.isfinite(value):
                return self._refused("not_finite", f"a command of {joint['name']!r} is {value}")
            if not self._is_led_back(joint["name"], value, known, delivered):
                text = f"a command wants {joint['name']!r} at {value:.6g}, outside of {known[0]:.6g}..{known[1]:.6g}"
                return self._refused("position", text)
        return None

    def _why_only_holds(self) -> tuple[str, str]:
        session = self._session
        if session.latch is not None:
            return "latched", "a command that is no hold came while an emergency stop is latched"
        if session.new.dry_run:
            return "dry_run", "a command came in a dry run"
        return "stopped", f"a command that is no hold came while it is {session.stage}"

    def _is_hold(self, joints: Sequence[Json]) -> bool:
        """Whether this is a pose that was measured just now, whatever it is: that is where the arm stands."""
        robot_io = self._session.robot_io
        if robot_io is None or self._session.new.dry_run:
            return False
        places = {name: place for place, name in enumerate(robot_io.table.names)}
        if not all(joint["name"] in places for joint in joints):
            return False
        wanted = [(places[joint["name"]], joint["value"]) for joint in joints]
        return any(
            all(abs(value - float(pose[place])) <= _SAME * max(1.0, abs(value)) for place, value in wanted)
            for pose in robot_io.buffer.poses(time.monotonic())
        )

    def _is_led_back(self, name: str, value: float, known: tuple[float, float], delivered: Mapping[str, float]) -> bool:
        """Whether a joint that was outside of its range is brought back: not further out than it was, or was sent."""
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

    def _refused(self, code: str, text: str) -> CommandRefused:
        self._count(code, f"{text}; it did not leave the server")
        return CommandRefused(code, text)

    def _count(self, code: str, text: str) -> None:
        self._session.refused.add(code)
        self._say(self._session.id, code, text)


class Latched:
    """The commander of a room whose session is gone, and whose emergency stop nobody has reset: nobody."""

    is_moving = False

    def __init__(self, session_id: str, latch: Latch):
        self._id = session_id
        self.latch: str | None = latch.reason

    def is_own(self, claim: str | None) -> bool:
        """It is gone."""
        return False

    def refuse_stranger(self) -> CommandRefused:
        """What everybody is told."""
        return CommandRefused(
            "latched",
            f"an emergency stop of session {self._id!r} is latched, though the session is gone; make sure that the "
            f"robot is safe, then POST /debug/sessions/{self._id}/reset",
        )

    def check_command(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Nobody gets so far."""
        return self.refuse_stranger()


def _is_of_another(room: str | None, session: str | None) -> bool:
    """Whether a room belongs to somebody else than a session; None is nobody, and whoever sees all."""
    return room is not None and session is not None and room != session
