"""Observed history of one session, and a check that each event in it was allowed.

Five claims are checked after each fault:

1. after a stop was acknowledged, no target differs from the held pose;
2. every target is finite, inside the limits, and no step is larger than allowed;
3. no action is older than its deadline: one period after it was due, and none is due before its motion began;
4. statuses follow the table of ``service.stage``, and each move that needs a request was requested;
5. the acknowledged sessions are the listed sessions.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.stage import REQUESTABLE, TRANSITIONS, Move, Stage
from tests.faults.robot import FRAMES, PERIOD, ClockPose, Reading

LIMITS = {"Jaw": (0.0, 100.0)}
USUAL = (-100.0, 100.0)
HOP = 0.03  # Seconds from the server through the rooms to the robot.
SLACK = 1e-3  # Tolerance of a joint's value.
_HAPPENS = [move for move in Move if move not in REQUESTABLE] + [Move.EMERGENCY_STOP]


@dataclass(frozen=True)
class Command:
    """A joint update that arrived; rooms forward only the changed joints."""

    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Call:
    """One call of the API, from the first byte to the last; ``status`` is 0 without a response."""

    method: str
    path: str
    began: float
    ended: float
    status: int
    answer: Any


class Look(NamedTuple):
    began: float
    ended: float
    status: str


def _punctual(since: float, until: float, ways: int) -> float:
    return 0.0


@dataclass
class History:
    """Calls, statuses and commands of one session; steps across ``breaks`` are ignored, ``late`` widens each limit."""

    session_id: str
    pose: ClockPose = field(default_factory=ClockPose)
    commands: list[Command] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    statuses: list[Look] = field(default_factory=list)
    breaks: list[float] = field(default_factory=list)
    late: Callable[[float, float, int], float] = _punctual
    step: float | None = None

    def record_command(self, values: Mapping[str, float], at: float) -> None:
        self.commands.append(Command(at, dict(values)))

    def targets(self, since: float = -math.inf, until: float = math.inf) -> list[tuple[float, dict[str, float]]]:
        """Return complete targets with their times: each command is merged into the previous ones."""
        merged: dict[str, float] = {}
        found = []
        for command in self.commands:
            merged = {**merged, **command.values}
            if since <= command.at <= until:
                found.append((command.at, merged))
        return found

    def motions(self, since: float = -math.inf, until: float = math.inf) -> list[tuple[float, dict[str, float]]]:
        """Return the targets that are not holds."""
        return [
            (at, target)
            for at, target, reading in self._readings(since, until)
            if reading is None or not reading.is_hold
        ]

    def _readings(
        self, since: float = -math.inf, until: float = math.inf
    ) -> Iterator[tuple[float, dict[str, float], Reading | None]]:
        before: dict[str, float] | None = None
        for at, target in self.targets():
            if since <= at <= until:  # Decoding takes most of the time, and robots' tests call this every 5 ms.
                yield at, target, self.pose.read(target, before)
            before = target

    def violations(self, listed: Collection[str] | None = None) -> list[str]:
        found = [*self._after_stops(), *self._outside(), *self._late(), *self._jumps_of_status()]
        if listed is not None:
            found += self._lost(listed)
        return found

    def _stops(self) -> list[tuple[float, float]]:
        """Return (time of the acknowledgement, time of the next start or restart) of each stop."""
        found = []
        for call in self.calls:
            if call.status != 200 or not _is_stop(call, self.session_id):
                continue
            again = [
                other.began
                for other in self.calls
                if other.began > call.ended and other.path.endswith(("/start", "/restart"))
            ]
            found.append((call.ended, min(again, default=math.inf)))
        return found

    def _after_stops(self) -> list[str]:
        found = []
        for since, until in self._stops():
            moved = self.motions(since + HOP, until)
            moved = [(at, target) for at, target in moved if at > since + HOP + self.late(since, at, 1)]
            if moved:
                first = moved[0]
                found.append(f"1: {len(moved)} targets {first[0] - since:.3f} s after a stop: {first[1]}")
        return found

    def _outside(self) -> list[str]:
        found = []
        before: tuple[float, dict[str, float]] | None = None
        for at, target, reading in self._readings():
            for joint, value in target.items():
                low, high = LIMITS.get(joint, USUAL)
                if not math.isfinite(value) or not low <= value <= high:
                    found.append(f"2: {joint} = {value} is outside {low}..{high}")
            # A hold is the measured pose, which may be far from the last command.
            is_hold = reading is not None and reading.is_hold
            if before is not None and self.step is not None and not is_hold and not self._is_broken(before[0], at):
                steps = {joint: abs(target[joint] - before[1].get(joint, target[joint])) for joint in target}
                worst = max(steps, key=lambda joint: steps[joint])
                ticks = max(round((at - before[0]) / PERIOD), 1)
                if steps[worst] > self.step * ticks + SLACK:
                    found.append(f"2: {worst} went {steps[worst]:.3f} in {ticks} ticks, at most {self.step} each")
            before = (at, target)
        return found

    def _late(self) -> list[str]:
        found = []
        # The policy may see a report from one frame before the frame that an action's time is counted from.
        usual = PERIOD + 1 / FRAMES + HOP
        began_at: float | None = None
        for at, _, reading in self._readings():
            if reading is None:
                continue
            if reading.is_hold:
                began_at = None
                continue
            # A resting robot skips no action during the inference: its chunk is timed from the first action.
            began_at = at if began_at is None else began_at
            late = at - reading.due_at - max(began_at - reading.observed_at, 0.0)
            if late <= usual:
                continue
            # The report may be late on its way in, and the command on its way out.
            limit = usual + self.late(reading.observed_at, at, 2)
            if late > limit:
                found.append(f"3: an action {late * 1e3:.0f} ms after it was due, limit {limit:.3f} s")
        return found

    def _jumps_of_status(self) -> list[str]:
        found = []
        for (since, _, before), (_, until, after) in zip(self.statuses, self.statuses[1:], strict=False):
            if before == after or self._is_broken(since, until):
                continue
            between = [call for call in self.calls if call.began <= until and call.ended >= since]
            asked = {move for move in REQUESTABLE if any(_asks(call, move) for call in between)}
            if Stage(after) not in _reachable(Stage(before), {*asked, *_HAPPENS}):
                found.append(f"4: {before} -> {after} although only {sorted(asked)} was requested")
        return found

    def _lost(self, listed: Collection[str]) -> list[str]:
        is_there = False
        for call in self.calls:
            if call.status == 200 and call.method == "POST" and call.path == "/sessions":
                is_there = True
            elif call.status == 200 and call.method == "DELETE":
                is_there = False
        if is_there == (self.session_id in listed):
            return []
        return [f"5: session {self.session_id} was {'made' if is_there else 'deleted'}; listed are {sorted(listed)}"]

    def _is_broken(self, since: float, until: float) -> bool:
        return any(since <= at <= until for at in self.breaks)


def _is_stop(call: Call, session_id: str) -> bool:
    return call.path in (f"/sessions/{session_id}/stop", "/debug/emergency_stop") or (
        call.method == "DELETE" and call.path == f"/sessions/{session_id}"
    )


def _asks(call: Call, move: Move) -> bool:
    if move is Move.DELETE:
        return call.method == "DELETE"
    return call.path.endswith(f"/{move}") or (move is Move.EMERGENCY_STOP and call.path == "/debug/emergency_stop")


def _reachable(start: Stage, moves: Collection[Move]) -> set[Stage]:
    found, edge = {start}, [start]
    while edge:
        stage = edge.pop()
        for move in moves:
            there = TRANSITIONS.get((stage, move))
            if there is not None and there not in found:
                found.add(there)
                edge.append(there)
    return found
