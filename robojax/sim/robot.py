"""Process that connects the simulated arm to a server, sends camera and joints at 25 Hz, and plays episodes.

An episode lays the cubes, sets the instruction, starts the session for `HORIZON` ticks, stops it and scores. After a
stop by a person it is played again. Events are lines of JSON on standard output for the parent process.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from robojax.client import AsyncClient, AsyncSession, RequestRefused, RobojaxError
from robojax.sim.arm import CAMERA, FRAME, HOME, HORIZON, JOINTS, RATE, SimulatedArm, to_wire
from robojax.sim.evaluation import save_film
from robojax.sim.tasks import PICK, TASKS, Outcome, Task
from service.errors import ServiceError
from service.transport.client.robot import Robot


class SimulatedRobot:
    """Simulation on its own thread, to which its OpenGL context belongs; ``films`` is a folder for videos.

    Its camera has noise of one grey level, because the server holds an arm whose pictures are identical.
    """

    def __init__(self, task: Task = PICK, films: Path | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, "arm")
        self._task, self._films = task, films
        self._arm: SimulatedArm | None = None
        self._frames: list[np.ndarray] = []
        self._noise = np.random.default_rng(0)

    async def reset(self, seed: int) -> str:
        """Fold the arm and lay the cubes of ``seed``; return the instruction."""
        return await self._run(self._reset, seed)

    async def tick(self, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Advance by one tick towards ``target``; return the pose and the camera's picture."""
        return await self._run(self._tick, target)

    async def outcome(self, number: int, seed: int, ticks: int) -> Outcome:
        """Return the outcome of the episode; save its video if episodes are filmed."""
        return await self._run(self._outcome, number, seed, ticks)

    async def close(self) -> None:
        await self._run(lambda: self._arm.close() if self._arm else None)
        self._thread.shutdown()

    def _run(self, call, *arguments):
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _reset(self, seed: int) -> str:
        self._arm = self._arm or SimulatedArm(self._task)
        self._arm.reset(seed)
        self._noise = np.random.default_rng(seed)
        self._frames.clear()
        return self._arm.target_cube.instruction

    def _tick(self, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._arm is not None, "reset comes first"
        self._arm.step(target)
        picture = self._arm.picture(CAMERA, *FRAME)
        if self._films is not None:
            self._frames.append(picture)
        noise = self._noise.integers(-1, 2, (*FRAME, 1), np.int16)
        return self._arm.joints, np.clip(picture + noise, 0, 255).astype(np.uint8)

    def _outcome(self, number: int, seed: int, ticks: int) -> Outcome:
        assert self._arm is not None, "reset comes first"
        outcome = Outcome(number, seed, self._arm.target_cube.instruction, self._arm.is_lifted, self._arm.wrong, ticks)
        if self._films is not None:
            save_film(self._films, self._frames, outcome)
        return outcome


PERIOD = 1 / RATE
SETTLE = 12  # ticks after laying the cubes, so that all frames of the previous episode have arrived
COMMAND_TIMEOUT = 15.0  # seconds until the session can start, and until its first command
STOP_POLL = 0.5  # seconds between checks whether a person stopped or continued the session


class EpisodeFailed(Exception):
    """An episode could not be played; the text says why."""


class EpisodeStopped(Exception):
    """A person stopped the session for a ``reason``; an emergency stop ``is_latched`` until a reset."""

    def __init__(self, reason: str, is_latched: bool):
        super().__init__(reason)
        self.reason, self.is_latched = reason, is_latched


class Player:
    """Plays episodes with a robot that has joined its rooms.

    Args:
        instructs: whether the session's policy reads instructions.
    """

    def __init__(self, robot: SimulatedRobot, session: AsyncSession, *, instructs: bool = False):
        self._robot, self._session, self._instructs = robot, session, instructs
        self._last_values: dict[str, float] = {}  # The server forwards only changed targets.
        self._commands = 0

    def on_command(self, values: Mapping[str, float], received_at: float) -> None:
        """Take a command."""
        self._last_values.update(values)
        self._commands += 1

    async def play(self, robot: Robot, number: int, seed: int, *, is_again: bool = False) -> Outcome:
        """Play one episode.

        Args:
            is_again: whether a person stopped and continued this episode before, so that the session may run already.

        Raises:
            RobojaxError: the server refused the instruction or the start, or does not respond.
            EpisodeFailed: the session sent no command, or had an emergency stop that no person requested.
            EpisodeStopped: a person stopped the session.
        """
        instruction = await self._robot.reset(seed)
        print_event("asked", number=number, instruction=instruction)
        home = to_wire(HOME)
        clock = Clock()
        for _ in range(SETTLE):
            await self._show(robot, home)
            await clock.next()
        if self._instructs:
            await self._while_showing(self._session.patch(language_instruction=instruction), robot, clock, home)
        # The session holds until it has seen fresh pictures.
        begin = self._session.restart if is_again else self._session.start
        try:
            await self._while_showing(begin(), robot, clock, home)
        except RequestRefused:
            await self._raise_if_stopped(by_request=False)
            raise
        watching = asyncio.create_task(self._watch_for_stop())
        try:
            ticks = await self._move(robot, clock, home, watching)
        finally:
            watching.cancel()
        await self._raise_if_stopped()
        await self._session.stop()
        return await self._robot.outcome(number, seed, ticks)

    async def _move(self, robot: Robot, clock: "Clock", home: np.ndarray, watching: "asyncio.Task[None]") -> int:
        """Obey commands for ``HORIZON`` ticks, or until ``watching`` raises; return the number of ticks."""
        before, ticks, timeout = self._commands, 0, COMMAND_TIMEOUT
        while ticks < HORIZON:
            # The arm stays folded until the first command, and then follows the newest targets.
            moves = self._commands > before and len(self._last_values) == len(JOINTS)
            await self._show(robot, self._target() if moves else home)
            await clock.next()
            ticks += moves
            timeout -= 0 if moves else PERIOD
            if watching.done():
                watching.result()
            if robot.latch is not None:
                await self._raise_if_stopped()
            if timeout < 0:
                session, timeout = await self._session.status(), COMMAND_TIMEOUT
                if session.stats.get("hold_code") == "compiling":
                    continue  # A large policy on a slow machine takes long to compile.
                why = session.stats.get("hold") or session.error_message or "reason unknown"
                raise EpisodeFailed(f"no command in {COMMAND_TIMEOUT:.0f} s; the session is {session.status}: {why}")
        return ticks

    async def _watch_for_stop(self) -> None:
        while True:
            await asyncio.sleep(STOP_POLL)
            await self._raise_if_stopped()

    async def _raise_if_stopped(self, *, by_request: bool = True) -> None:
        """Raise EpisodeStopped if a person stopped the session, EpisodeFailed if it stopped by itself.

        With ``by_request``, also a stop without a latch counts; between episodes the session is always stopped.
        """
        session = await self._session.status()
        latch, code = session.stats.get("emergency_stop"), session.stats.get("stop_code")
        if latch is not None and code != "asked":
            raise EpisodeFailed(f"emergency stop: {latch}")
        if latch is not None or (by_request and session.status == "stopped"):
            raise EpisodeStopped(latch or "requested", latch is not None)

    async def wait_until_released(self, robot: Robot, stop: EpisodeStopped) -> None:
        """Hold the arm and show the camera until a person resets the session, or starts it if it is not latched."""
        is_latched, clock = stop.is_latched, Clock()
        hold = self._target() if len(self._last_values) == len(JOINTS) else to_wire(HOME)
        while True:
            for _ in range(round(STOP_POLL * RATE)):
                await self._show(robot, hold)
                await clock.next()
            session = await self._session.status()
            latch = session.stats.get("emergency_stop")
            if latch is not None and not is_latched:
                is_latched = True
                print_event("stopped", reason=latch, is_latched=True)
            if latch is None and robot.latch is None and (is_latched or session.status != "stopped"):
                return

    def _target(self) -> np.ndarray:
        return np.array([self._last_values[joint] for joint in JOINTS])

    async def _while_showing(
        self, call: Coroutine[Any, Any, None], robot: Robot, clock: "Clock", home: np.ndarray
    ) -> None:
        """Wait for a call to the server while the robot continues to send pictures."""
        calling = asyncio.create_task(call)
        try:
            while not calling.done():
                await self._show(robot, home)
                await clock.next()
        finally:
            if not calling.done():
                calling.cancel()
        calling.result()

    async def _show(self, robot: Robot, target: np.ndarray) -> None:
        pose, picture = await self._robot.tick(target)
        robot.show(CAMERA, picture)
        robot.send_joints(dict(zip(JOINTS, pose.tolist(), strict=True)))


class Clock:
    """Ticks at absolute deadlines, 40 ms apart; a missed deadline restarts the sequence."""

    def __init__(self) -> None:
        self._due = time.monotonic() + PERIOD

    async def next(self) -> None:
        now = time.monotonic()
        if now > self._due + PERIOD:
            self._due = now
        await asyncio.sleep(max(0.0, self._due - now))
        self._due += PERIOD


async def _play_to_the_end(player: Player, robot: Robot, number: int, seed: int) -> Outcome:
    """Play one episode, and repeat it from its beginning whenever a person stopped and continued it."""
    is_again = False
    while True:
        try:
            return await player.play(robot, number, seed, is_again=is_again)
        except EpisodeStopped as stop:
            print_event("stopped", reason=stop.reason, is_latched=stop.is_latched)
            await player.wait_until_released(robot, stop)
            print_event("resumed", number=number)
            is_again = True


def print_event(event: str, **values: object) -> None:
    """Print an event as a JSON line for the parent process."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


async def run(args: argparse.Namespace) -> int:
    """Join the rooms and play all episodes (0: until the process ends)."""
    simulation = SimulatedRobot(TASKS[args.task], args.films)
    await simulation.reset(args.seed)
    try:
        async with AsyncClient(args.server, timeout=30) as client:
            session = client.session(args.session)
            player = Player(simulation, session, instructs=args.instruct)
            async with session.robot(args.transport, on_command=player.on_command, rate=RATE) as robot:
                print_event("joined")
                number = 0
                while args.episodes == 0 or number < args.episodes:
                    number += 1
                    outcome = await _play_to_the_end(player, robot, number, args.seed + number - 1)
                    print_event("episode", **asdict(outcome))
    finally:
        await simulation.close()
    return 0


def main() -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="The simulated arm of the demo, as a client of the server.")
    parser.add_argument("--server", required=True, help="URL of the session API")
    parser.add_argument("--transport", required=True, help="URL of the transport server")
    parser.add_argument("--session", required=True, help="session id")
    parser.add_argument("--task", choices=list(TASKS), default=PICK.name, help="task of the episodes")
    parser.add_argument("--instruct", action="store_true", help="send the instruction before each episode")
    parser.add_argument("--seed", type=int, default=5000, help="seed of the first episode")
    parser.add_argument("--episodes", type=int, default=0, help="0 plays until the process ends")
    parser.add_argument("--films", type=Path, help="folder for a video of each episode")
    args = parser.parse_args()
    # SIGTERM leaves the rooms, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return asyncio.run(run(args))
    except KeyboardInterrupt:
        return 0
    except (EpisodeFailed, ServiceError, RobojaxError, RuntimeError, OSError) as error:
        print_event("failed", reason=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
