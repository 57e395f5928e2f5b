"""Demonstrations of the scripted expert, recorded as a policy would see them."""

import multiprocessing
import os
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from jaxmodels.data import EpisodeWriter, resize_frames
from service.demo.arm import RATE, Arm
from service.demo.expert import Kinematics, plan, targets
from service.demo.leash import end_with_parent
from service.demo.units import JOINTS, to_radians, to_wire

CAMERA = "front"
FRAME = (240, 240)  # what the robot sends, pixels
SEEN = (96, 96)  # what the policy looks at
TASK = "pick up the red cube"
# The expert's hand is pushed while it reaches, and what is recorded is where it wanted to go: so the policy sees how
# to come back to the path (DART, https://arxiv.org/abs/1703.09327). Pushes last for a few ticks.
# Any later and the hand cannot come back before it must be over the cube: one demonstration in six would fail.
PUSH, PUSH_MEMORY, PUSHED_TICKS = 0.04, 0.8, 30  # radians, per tick, ticks

_workers: dict[str, tuple[Arm, Kinematics]] = {}


def record(seed: int) -> dict[str, np.ndarray] | None:
    """One demonstration, or None when the expert failed."""
    # An arm per process: compiling the scene and making a renderer take longer than an episode's physics.
    if "arm" not in _workers:
        arm = Arm()
        _workers["arm"] = (arm, Kinematics(arm))
    arm, kinematics = _workers["arm"]
    arm.reset(seed)
    random = np.random.default_rng([seed, 1])
    push = np.zeros(len(JOINTS))
    frames, states, actions = [], [], []
    for tick, target in enumerate(targets(plan(arm, kinematics))):
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
    return {
        "observation.state": np.asarray(states, np.float32),
        "action": np.asarray(actions, np.float32),
        f"observation.images.{CAMERA}": resize_frames(np.asarray(frames), SEEN),
    }


@contextmanager
def demonstrations(folder: Path, *, episodes: int, seed: int = 0) -> Iterator[Iterator[int]]:
    """Records `episodes` successful demonstrations into a new folder, which is there when the context has ended.

    Gives an iterator that records one more at each step and gives its seed.

    Args:
        seed: of the first; a failed demonstration is left out and the next seed takes its place.

    Raises:
        FileExistsError: the folder is there already.
    """
    with (
        EpisodeWriter(folder, rate=RATE, joint_names=JOINTS, task=TASK) as writer,
        closing(_recordings(seed, episodes)) as recordings,
    ):
        good = ((number, arrays) for number, arrays in recordings if arrays is not None)

        def write() -> Iterator[int]:
            for number, arrays in islice(good, episodes):
                writer.add(arrays, number)
                yield number

        yield write()


def _recordings(seed: int, episodes: int) -> Generator[tuple[int, dict[str, np.ndarray] | None], None, None]:
    # Spawned, because a forked child shares JAX's and OpenGL's threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    workers = max(1, (os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
        number = seed
        while True:  # the caller leaves when it has enough
            numbers = range(number, number + max(workers, min(episodes, 16)))
            yield from zip(numbers, pool.map(record, numbers), strict=True)
            number = numbers.stop
