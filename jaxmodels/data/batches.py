"""Training batches: each is a function of the seed and the step alone, so that a resumed run sees the same ones."""

from typing import NamedTuple

import numpy as np

from jaxmodels.data.episodes import Episodes


class Batch(NamedTuple):
    """Raw (not normalised) observations and the actions that followed.

    Attributes:
        images: per camera, in the order of their names, uint8 (b, h, w, 3).
        state: (b, s) float32.
        actions: (b, t, a) float32; steps after an episode's end repeat its last action.
        is_pad: (b, t) bool, True for those repeated steps.
    """

    images: tuple[np.ndarray, ...]
    state: np.ndarray
    actions: np.ndarray
    is_pad: np.ndarray


class Batches:
    """Batches of random steps, every step of every episode equally likely."""

    def __init__(self, episodes: Episodes, *, chunk: int, size: int, seed: int):
        self._episodes, self._chunk, self._size, self._seed = episodes, chunk, size, seed
        self._last = np.repeat(episodes.ends - 1, episodes.meta.lengths)

    def at(self, step: int) -> Batch:
        """The batch of one step of the training."""
        episodes = self._episodes
        random = np.random.default_rng([self._seed, step])
        # Sorted, because neighbours in a memory-mapped file are read together.
        steps = np.sort(random.integers(0, len(self._last), self._size))
        wanted = steps[:, None] + np.arange(self._chunk)
        last = self._last[steps][:, None]
        return Batch(
            images=tuple(np.asarray(frames[steps]) for _, frames in sorted(episodes.images.items())),
            state=np.asarray(episodes.state[steps], np.float32),
            actions=np.asarray(episodes.action[np.minimum(wanted, last)], np.float32),
            is_pad=wanted > last,
        )
