"""Which rows a step of training sees: a function of the seed and the step, so that a resumed run sees the same."""

import threading

import numpy as np


class Sampler:
    """Every row once in an epoch, in an order that each epoch shuffles anew."""

    def __init__(self, rows: int, batch_size: int, seed: int):
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self._orders: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def at(self, step: int) -> np.ndarray:
        """(b,) rows of this step, ascending: neighbours in a file are read together."""
        places = np.arange(step * self._batch_size, (step + 1) * self._batch_size)
        epochs, within = np.divmod(places, self._rows)
        return np.sort(np.concatenate([self._order(int(e))[within[epochs == e]] for e in np.unique(epochs)]))

    def _order(self, epoch: int) -> np.ndarray:
        with self._lock:
            if epoch not in self._orders:
                self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
                # Steps are asked for a little out of order when several are prepared at once.
                for old in sorted(self._orders)[:-4]:
                    del self._orders[old]
            return self._orders[epoch]
