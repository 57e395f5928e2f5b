"""A policy in closed loop without server, rooms or video: what the whole stack is compared with."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxmodels import Policy
from jaxmodels.types import TASK
from service.demo.arm import CAMERA, FRAME, HORIZON, Arm
from service.demo.episodes import Outcome
from service.demo.film import save_film
from service.demo.tasks import PICK, Task


def evaluate(
    policy: Policy,
    seeds: Sequence[int],
    *,
    task: Task = PICK,
    action_steps: int | None = None,
    delay: int = 0,
    films: Path | None = None,
) -> Iterator[Outcome]:
    """Plays one episode per seed, as fast as it goes.

    Args:
        action_steps: actions executed of each chunk; the policy's own number when None.
        delay: ticks between seeing and the first action of the chunk being there, as in a real loop: that many
            actions of the chunk before are executed meanwhile, and that many of the new one are dropped.
        films: a folder for a video of each episode, which costs a picture per tick; None draws only what is seen.

    Raises:
        ObservationError: the policy needs something that this arm does not have.
        RuntimeError: nothing here can draw without a screen.
        ValueError: fewer actions come of a chunk than are to be executed.
    """
    steps = action_steps or policy.requirements.action_steps
    if steps + delay > policy.requirements.chunk:
        raise ValueError(
            f"{steps} actions of each chunk after a delay of {delay} are more than the {policy.requirements.chunk} "
            "there are; give a shorter delay"
        )
    arm = Arm(task)
    try:
        for number, seed in enumerate(seeds, 1):
            arm.reset(seed)
            frames = _play(arm, policy, steps, delay, films is not None)
            outcome = Outcome(number, seed, arm.asked.instruction, arm.is_lifted, arm.wrong, HORIZON)
            if films is not None:
                save_film(films, frames, outcome)
            yield outcome
    finally:
        arm.close()


def _play(arm: Arm, policy: Policy, steps: int, delay: int, is_filmed: bool) -> list[np.ndarray]:
    """One episode; what the camera saw at every tick if it is filmed."""
    plan: list[np.ndarray] = []
    frames: list[np.ndarray] = []
    for tick in range(HORIZON):
        is_asked = tick % steps == 0
        if is_asked or is_filmed:
            frames.append(arm.picture(CAMERA, *FRAME))
        if is_asked:
            chunk = list(policy.act(_observation(arm, frames[-1], policy.requirements.language))[0])
            plan = plan[:delay] + chunk[delay:] if plan else chunk
        arm.step(plan.pop(0))
    return frames


def _observation(arm: Arm, picture: np.ndarray, reads_language: bool) -> dict[str, np.ndarray]:
    seen = {
        "observation.state": arm.joints[None].astype(np.float32),
        f"observation.images.{CAMERA}": picture[None],
    }
    return seen | ({TASK: np.array([arm.asked.instruction])} if reads_language else {})
