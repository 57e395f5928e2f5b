"""The same policy and cubes without server, rooms or video: what the whole stack is compared with."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import jaxmodels
from service.demo.arm import HORIZON, Arm
from service.demo.collect import CAMERA, FRAME
from service.demo.episodes import Outcome, Score


def evaluate(
    policy: str | Path,
    seeds: Sequence[int],
    *,
    action_steps: int | None = None,
    delay: int = 0,
    on_outcome: Callable[[Outcome, Score], None] | None = None,
) -> Score:
    """Runs one episode per seed, in-process, as fast as it goes.

    Args:
        action_steps: actions executed of each chunk; the policy's own number when None.
        delay: ticks between seeing and the first action of the chunk being there, as in a real loop: that many
            actions of the chunk before are executed meanwhile, and that many of the new one are dropped.
    """
    loaded = jaxmodels.load_policy(policy)
    steps = action_steps or loaded.requirements.action_steps
    arm, score = Arm(), Score()
    try:
        for number, seed in enumerate(seeds, 1):
            arm.reset(seed)
            plan: list[np.ndarray] = []
            for tick in range(HORIZON):
                if tick % steps == 0:
                    observation = {
                        "observation.state": arm.joints[None].astype(np.float32),
                        f"observation.images.{CAMERA}": arm.picture(CAMERA, *FRAME)[None],
                    }
                    chunk = list(loaded.act(observation)[0])
                    plan = plan[:delay] + chunk[delay:] if plan else chunk
                arm.step(plan.pop(0))
            outcome = Outcome(number, seed, arm.is_lifted, HORIZON)
            score.outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome, score)
    finally:
        arm.close()
    return score
