"""Scripted expert that lifts cubes, and demonstrations recorded from it.

Its poses come from damped least squares inverse kinematics with the fingers pointing down.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from itertools import count, islice
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import mujoco
import numpy as np

from robojax.sim import arm as scene
from robojax.sim.arm import CAMERA, FRAME, HIGH, HOME, JOINTS, LOW, RATE, SimulatedArm, to_radians, to_wire
from robojax.sim.tasks import TASKS, Task, TaskName
from service.processes import exit_with_parent

# pyright: reportAttributeAccessIssue=false
# MuJoCo's names come from a compiled module without stubs.


OPEN, CLOSED = 1.2, -0.1  # radians of the jaw
HOVER, GRASP, LIFT = 0.07, 0.005, 0.09  # metres of the grip above the cube's centre
TURN_WEIGHT = 0.15  # metres per radian: weight of the fingers' tilt relative to the position error
DAMPING = 1e-4
UP = np.array([0.0, 0.0, 1.0])
ITERATIONS = 80
LONGEST_STEP = 0.2  # radians per iteration


class Kinematics:
    """Inverse kinematics of the arm, on a copy of its state, so that the simulated arm does not move."""

    def __init__(self, arm: SimulatedArm):
        self.model = arm.model
        self._data = mujoco.MjData(arm.model)
        self._addresses = arm.addresses
        self._free = len(JOINTS) - 1  # all joints except the jaw
        self._columns = [self.model.joint(f"{scene.ARM}/{joint}").dofadr[0] for joint in JOINTS[: self._free]]
        self._grip = self.model.site(scene.GRIP).id
        self._hand = self.model.site_bodyid[self._grip]

    def solve(self, start: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return a pose (radians) near ``start`` whose grip is at ``position`` (metres), with the fingers down."""
        model, data, pose = self.model, self._data, start.copy()
        moves, turns = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        for _ in range(ITERATIONS):
            data.qpos[self._addresses] = pose
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            fingers = -data.xmat[self._hand].reshape(3, 3)[:, 1]
            missing = position - data.site_xpos[self._grip]
            tilt = np.cross(fingers, (0.0, 0.0, -1.0))
            mujoco.mj_jacSite(model, data, moves, turns, self._grip)
            jacobian = np.vstack((moves[:, self._columns], TURN_WEIGHT * turns[:, self._columns]))
            error = np.concatenate((missing, TURN_WEIGHT * tilt))
            step = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + DAMPING * np.eye(6), error)
            pose[: self._free] += np.clip(step, -LONGEST_STEP, LONGEST_STEP)
            pose = np.clip(pose, LOW, HIGH)
        return pose


def plan_legs(arm: SimulatedArm, kinematics: Kinematics) -> list[tuple[np.ndarray, int]]:
    """Plan the path that lifts the target cube: poses in radians, each with the ticks to reach it, 90 in all."""
    cube = arm.cube
    above = kinematics.solve(HOME, cube + HOVER * UP)
    at = kinematics.solve(above, cube + GRASP * UP)
    up = kinematics.solve(above, cube + LIFT * UP)
    above[-1] = at[-1] = OPEN
    closed = at.copy()
    closed[-1] = up[-1] = CLOSED
    return [(above, 25), (at, 15), (closed, 15), (up, 25), (up, 10)]


def interpolate_targets(legs: list[tuple[np.ndarray, int]]) -> Iterator[np.ndarray]:
    """Yield the targets (six wire values) of every tick, easing in and out of each leg."""
    before = HOME
    for pose, ticks in legs:
        for tick in range(1, ticks + 1):
            share = tick / ticks
            eased = share * share * (3 - 2 * share)
            yield to_wire(before + (pose - before) * eased)
        before = pose


ROBOT = "so100_simulated"
# Random pushes of the arm, which are not part of the recorded actions, so that the policy learns to return to the path
# (DART, https://arxiv.org/abs/1703.09327). With later pushes, a sixth of the demonstrations fails.
PUSH, PUSH_MEMORY, PUSHED_TICKS = 0.04, 0.8, 30  # radians, per tick, ticks

ENDING = (signal.SIGINT, signal.SIGTERM)

_arms: dict[TaskName, tuple[SimulatedArm, Kinematics]] = {}
# In a worker: returns whether the parent needs no more demonstrations.
_is_over: Callable[[], bool] = bool


class Demonstration(NamedTuple):
    """Recorded episode of the expert: its instruction, and arrays by feature in wire units.

    Frames are (t, h, w, 3) uint8, states and actions (t, 6) float32.
    """

    arrays: dict[str, np.ndarray]
    instruction: str


def demonstrate(name: TaskName, seed: int) -> Demonstration | None:
    """Play one episode with the expert; return None if it failed or was interrupted."""
    # One arm per process, because compiling the scene takes longer than an episode.
    if name not in _arms:
        arm = SimulatedArm(TASKS[name])
        _arms[name] = (arm, Kinematics(arm))
    arm, kinematics = _arms[name]
    arm.reset(seed)
    random = np.random.default_rng([seed, 1])
    push = np.zeros(len(JOINTS))
    frames, states, actions = [], [], []
    for tick, target in enumerate(interpolate_targets(plan_legs(arm, kinematics))):
        if _is_over():
            return None
        frames.append(arm.picture(CAMERA, *FRAME))
        states.append(arm.joints)
        actions.append(target)
        fresh = random.normal(size=len(JOINTS)) * PUSH * np.sqrt(1 - PUSH_MEMORY**2)
        push = PUSH_MEMORY * push + fresh
        push[-1] = 0.0
        pushed = to_wire(to_radians(target) + push) if tick < PUSHED_TICKS else target
        arm.step(pushed)
    if not arm.is_lifted:
        return None
    arrays = {
        "observation.state": np.asarray(states, np.float32),
        "action": np.asarray(actions, np.float32),
        f"observation.images.{CAMERA}": np.asarray(frames),
    }
    return Demonstration(arrays, arm.target_cube.instruction)


@contextmanager
def demonstrations(
    folder: Path, task: Task, *, episodes: int, seed: int = 0, workers: int | None = None
) -> Iterator[Iterator[int]]:
    """Record `episodes` successful demonstrations into a new folder, which exists when the context has ended.

    Gives an iterator that records one more at each step and gives its seed. What is recorded follows from the task and
    the seed, not from the number of workers.

    Args:
        seed: of the first; a failed demonstration is left out and the next seed takes its place.
        workers: processes; one for each core when None.

    Raises:
        DatasetError: the folder is there already.
        OSError: the disk does not take it.
        RuntimeError: nothing here can draw without a screen, or a worker died.
    """
    # Imported here, because the workers import this module and need neither pyarrow nor PyAV.
    from jaxmodels.data import DatasetWriter

    with (
        DatasetWriter(folder, fps=RATE, joint_names=JOINTS, cameras=[CAMERA], robot_type=ROBOT) as writer,
        closing(_play_in_order(task.name, seed, workers or os.cpu_count() or 1)) as played,
    ):
        good = ((number, demonstration) for number, demonstration in played if demonstration is not None)

        def write() -> Iterator[int]:
            for number, demonstration in islice(good, episodes):
                writer.add_episode(demonstration.arrays, demonstration.instruction)
                yield number

        yield write()


def _play_in_order(name: TaskName, seed: int, workers: int) -> Generator[tuple[int, Demonstration | None], None, None]:
    """Yield demonstrations from ``seed`` on, played in parallel, until the reader closes the generator."""
    # Spawned, because a forked child shares JAX's and OpenGL's threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    ahead: deque[tuple[int, Future[Demonstration | None]]] = deque()
    over = context.Event()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(os.getpid(), over)) as pool:
        try:
            for number in count(seed):
                with _defer_interrupts():  # Submitting also starts the workers.
                    ahead.append((number, pool.submit(demonstrate, name, number)))
                if len(ahead) > workers:
                    first, playing = ahead.popleft()
                    yield first, playing.result()
        finally:
            for _, playing in ahead:
                playing.cancel()
            # The pool waits for its workers, so they must stop early. Killing a worker while it transfers its pictures
            # would block the pool.
            over.set()


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Defer interrupts to the end of the context, because a worker that is interrupted at its start prints an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    # Workers inherit the blocked signals; this process still gets them in other threads, and keeps them for later.
    blocked = _block(signal.SIG_BLOCK, ENDING)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in ENDING}
    try:
        yield
    finally:
        _block(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _block(how: int, numbers: Iterable[int]) -> Iterable[int]:
    return signal.pthread_sigmask(how, numbers) if hasattr(signal, "pthread_sigmask") else ()


def _begin(parent: int, over: Event) -> None:
    global _is_over
    _is_over = over.is_set
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C and ends its workers.
    _block(signal.SIG_UNBLOCK, ENDING)
