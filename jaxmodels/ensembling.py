"""Temporal ensembling: overlapping chunks are averaged into one action per step, by LeRobot's recurrence.

Source: lerobot/policies/act/modeling_act.py, ACTTemporalEnsembler; algorithm 2 of https://arxiv.org/abs/2304.13705.
"""

import numpy as np
from jaxtyping import Float

from jaxmodels.errors import ConfigError, ObservationError


class TemporalEnsembler:
    """Weighted running mean of what all chunks so far predicted for each coming step.

    The weight of the i-th chunk since the first that spoke about a step is exp(-coeff * i), so that a positive
    `coeff` trusts the oldest most. Inference must happen at every step.
    """

    def __init__(self, coeff: float, chunk: int):
        if not np.isfinite(coeff):
            raise ConfigError(f"temporal ensembling: coeff is {coeff}; wanted a finite number, e.g. 0.01")
        self._chunk = chunk
        self._weights = np.exp(-np.float32(coeff) * np.arange(chunk, dtype=np.float32))
        self._sums = np.cumsum(self._weights, dtype=np.float32)
        self.reset()

    def reset(self) -> None:
        """Forget all chunks, for a new episode."""
        self._actions: np.ndarray | None = None
        self._counts = np.ones((self._chunk, 1), np.int64)  # chunks in the mean, per coming step

    def update(self, chunk: Float[np.ndarray, "b c a"]) -> Float[np.ndarray, "b a"]:
        """Add the newest chunk; returns the action of this step.

        Raises:
            ObservationError: the chunk has another length or batch than the ones before.
        """
        chunk = np.asarray(chunk, np.float32)
        if chunk.ndim != 3 or chunk.shape[1] != self._chunk:
            raise ObservationError(f"ensembled chunk has shape {chunk.shape}; wanted (batch, {self._chunk}, action)")
        if self._actions is None:
            actions, counts = chunk.copy(), np.ones((self._chunk, 1), np.int64)
        elif self._actions.shape[::2] != chunk.shape[::2]:
            raise ObservationError(f"ensembled chunk has shape {chunk.shape}; reset() before changing batch or action")
        else:
            counts = self._counts
            mean = self._actions * self._sums[counts - 1]
            mean = mean + chunk[:, :-1] * self._weights[counts]
            mean = mean / self._sums[counts]
            counts = np.minimum(counts + 1, self._chunk)
            actions = np.concatenate((mean, chunk[:, -1:]), axis=1)
            counts = np.concatenate((counts, np.ones((1, 1), np.int64)))
        self._actions, self._counts = actions[:, 1:], counts[1:]
        return actions[:, 0]
