"""What is left of the plan, as a policy is shown it that continues plans: real-time chunking."""

from collections.abc import Mapping

import numpy as np

from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH
from service.motion.pace import Pace


def prefix_of(plan: np.ndarray, delay: int, pace: Pace) -> Mapping[str, np.ndarray]:
    """The parts of an observation, each with a batch axis of 1.

    Args:
        plan: (n, a) what is planned from the moment of the observation on, at most a chunk of it; none is fine.
        delay: how many of these will be over when the answer comes, as far as one knows.
    """
    actions = np.zeros((1, pace.chunk, pace.width), np.float32)
    if len(plan):  # before the first chunk not even its width is known
        actions[0, : len(plan)] = plan
    return {
        PREFIX_ACTIONS: actions,
        PREFIX_DELAY: np.array([min(delay, len(plan))], np.int32),
        PREFIX_LENGTH: np.array([len(plan)], np.int32),
    }
