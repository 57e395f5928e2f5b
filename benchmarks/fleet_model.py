"""Fleet simulation: robots, servers and machines in simulated time, with queues and failures of machines."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import simpy

from benchmarks.fleet_forming import Ask, Forming, Times
from benchmarks.fleet_pace import Pace

# Of a normal distribution.
_P99 = 2.3263
STEADY = Pace()


@dataclass(frozen=True)
class Link:
    """One way between a front and a machine: median and 99th percentile in seconds, lognormal; (0, 0) is no way."""

    median: float = 0.0
    p99: float = 0.0

    def draw(self, random: np.random.Generator) -> float:
        """One journey."""
        if not self.median:
            return 0.0
        return self.median * float(np.exp(np.log(self.p99 / self.median) / _P99 * random.standard_normal()))


@dataclass(frozen=True)
class Plan:
    """What is simulated; times in seconds.

    Attributes:
        robots, machines: how many; robots go to the machine with the fewest.
        period: between a robot's questions; an answer is late when it comes after one more.
        times: of batches, at the usual pace.
        pace: of each machine; each begins at some moment of it.
        forming: how a machine forms them.
        link: between fronts and machines.
        front: processor time of a front for a question and its answer, one after the other.
        robots_of_a_front: that share one.
        wake: how late robots ask: median and 99th percentile, lognormal.
        cold: how much longer a batch takes after a long pause of its machine, and the pause after which it is 63 %
            of that.
        seconds: that are simulated; ``warm`` of them do not count.
        is_even: robots of a machine ask evenly one after the other within the period, not at random moments.
        failing: machines that fail, at random moments of the middle third, and do not come back.
        notice: until their robots are moved to others.
    """

    robots: int
    machines: int
    period: float
    times: Times
    forming: Callable[[Times], Forming]
    pace: Pace = STEADY
    link: Link = Link()
    wake: Link = Link()
    front: float = 0.0
    robots_of_a_front: int = 1 << 30
    cold: tuple[float, float] = (0.0, 1.0)
    seconds: float = 10.0
    warm: float = 1.0
    is_even: bool = False
    failing: int = 0
    notice: float = 1.0


@dataclass
class Found:
    """What came of it.

    Attributes:
        answers: seconds from question to answer.
        late: answers after the plan had run dry, and questions that were lost with a machine.
        held: seconds without a plan of each robot whose machine failed.
        busy: share of their time that machines that did not fail computed.
        members: of batches, how many there were.
        squares: of the members of each batch, summed.
    """

    answers: "array[float]" = field(default_factory=lambda: array("d"))
    late: int = 0
    held: list[float] = field(default_factory=list)
    busy: float = 0.0
    members: int = 0
    squares: int = 0

    def percentile(self, percent: float) -> float:
        """Seconds that so many percent of the answers took at most."""
        return float(np.percentile(np.frombuffer(self.answers), percent)) if self.answers else float("nan")

    @property
    def mean_batch(self) -> float:
        """Answers that came together, by answer, as robots count them."""
        return self.squares / max(self.members, 1)

    @property
    def late_share(self) -> float:
        """Of all questions."""
        return self.late / max(len(self.answers), 1)


class _Machine:
    def __init__(self, world: "_World"):
        self.robots = 0
        self.is_up = True
        self.spent = 0.0
        self._world = world
        self._began = float(world.random.random()) * world.plan.pace.seconds
        self._forming = world.plan.forming(world.plan.times)
        self._is_busy = False
        self._looks_at = -1.0
        self._ended = -1e9

    def ask(self, ask: Ask) -> None:
        if self.is_up:
            self._forming.add(ask, self._world.now)
            if not self._is_busy:
                self._begin()

    def _begin(self) -> None:
        world = self._world
        taken = self._forming.take(world.now)
        if taken is None:
            return
        if isinstance(taken, float | int):
            if taken > self._looks_at:
                self._looks_at = taken
                world.later(taken - world.now, self._look)
            return
        members, size = taken
        self._is_busy = True
        more, fading = world.plan.cold
        pause = world.now - self._ended
        seconds = world.plan.times.draw(size, world.random) + more * (1 - math.exp(-pause / fading))
        seconds *= world.plan.pace.at(self._began + world.now)
        if world.counts:
            self.spent += seconds
            world.found.members += len(members)
            world.found.squares += len(members) ** 2
        world.later(seconds, partial(self._end, members, size, seconds))

    def _look(self) -> None:
        if self.is_up and not self._is_busy:
            self._begin()

    def _end(self, members: Sequence[Ask], size: int, seconds: float) -> None:
        if not self.is_up:
            return
        self._is_busy, self._ended = False, self._world.now
        self._forming.learn(size, seconds)
        for ask in members:
            self._world.answer(ask)
        self._begin()


class _Robot:
    """Asks at the moments of its grid, one question at a time; after a late answer, at the next moment but one, as the
    robots of ``benchmarks/fleet.py`` do.
    """

    def __init__(self, number: int, world: "_World", machine: _Machine, start: float):
        self.number = number
        self.machine = machine
        self._world = world
        self._ask: Ask | None = None
        self._deadline = start
        self._held_since: float | None = None
        world.later(start, self.ask)

    def ask(self) -> None:
        now = self._world.now
        self._ask = Ask(self.number, now, self._deadline + self._world.plan.period)
        self._world.send(self._ask, self.machine)

    def answered(self, ask: Ask) -> None:
        world, now = self._world, self._world.now
        if ask is not self._ask:
            return  # of a machine that was given up
        self._ask = None
        late = now - ask.due
        if self._held_since is not None:
            world.found.held.append(max(now - self._held_since, 0.0))
            self._held_since = None
        elif world.counts:
            world.found.answers.append(now - ask.asked)
            world.found.late += late > 0
        period = world.plan.period
        self._deadline += period * (1 if late <= 0 else int(late / period) + 2)
        world.later(max(self._deadline - now, 0.0) + world.plan.wake.draw(world.random), self.ask)

    def lost(self, machine: _Machine) -> None:
        """Its machine failed, and this is another one."""
        self.machine = machine
        if self._ask is not None:
            self._held_since = self._ask.due
            self._ask.is_awaited = False
            self._deadline = self._world.now
            self.ask()


class _World:
    def __init__(self, plan: Plan, seed: int):
        self.plan = plan
        self.random = np.random.default_rng(seed)
        self.found = Found()
        self._time = simpy.Environment()
        self._machines = [_Machine(self) for _ in range(plan.machines)]
        self._fronts = [0.0] * (-(-plan.robots // plan.robots_of_a_front))
        self._robots = []
        for number in range(plan.robots):
            machine = self._machines[number % plan.machines]
            machine.robots += 1
            start = plan.period * (number / plan.robots if plan.is_even else float(self.random.random()))
            self._robots.append(_Robot(number, self, machine, start))
        for number in self.random.permutation(plan.machines).tolist()[: plan.failing]:
            when = plan.seconds * float(self.random.uniform(1 / 3, 2 / 3))
            self.later(when, partial(self._fail, self._machines[number]))

    @property
    def now(self) -> float:
        return self._time.now

    @property
    def counts(self) -> bool:
        return self._time.now >= self.plan.warm

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        event: Any = self._time.timeout(seconds)
        event.callbacks.append(lambda event: call())

    def send(self, ask: Ask, machine: _Machine) -> None:
        """Through the front and over the link."""
        self.later(self._front(ask) + self.plan.link.draw(self.random), partial(machine.ask, ask))

    def answer(self, ask: Ask) -> None:
        """The way back."""
        back = self.plan.link.draw(self.random)
        self.later(back, partial(self._arrived, ask))

    def _arrived(self, ask: Ask) -> None:
        self.later(self._front(ask), partial(self._robots[ask.robot].answered, ask))

    def _front(self, ask: Ask) -> float:
        """Seconds until the front has had its half of the work."""
        if not self.plan.front:
            return 0.0
        number = ask.robot // self.plan.robots_of_a_front
        ends = self._fronts[number] = max(self._fronts[number], self.now) + self.plan.front / 2
        return ends - self.now

    def _fail(self, machine: _Machine) -> None:
        machine.is_up = False
        self.later(self.plan.notice, partial(self._move, machine))

    def _move(self, machine: _Machine) -> None:
        there = [other for other in self._machines if other.is_up]
        for robot in self._robots:
            if robot.machine is machine and there:
                other = min(there, key=lambda each: each.robots)
                other.robots += 1
                robot.lost(other)

    def run(self) -> Found:
        self._time.run(until=self.plan.seconds)
        up = [machine.spent for machine in self._machines if machine.is_up]
        self.found.busy = sum(up) / max(len(up), 1) / (self.plan.seconds - self.plan.warm)
        return self.found


def simulate(plan: Plan, seed: int = 0) -> Found:
    """One run; the same seed is the same run."""
    return _World(plan, seed).run()
