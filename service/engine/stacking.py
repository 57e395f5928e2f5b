"""One set of arrays per kind of batch, in which the observations of its members are put side by side."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

# XLA takes an array of the host as it is when it begins on such a boundary; others it copies first.
ALIGNMENT = 64
KEPT = 8

Shape = tuple[str, tuple[int, ...], str]


def shape_of(observation: Mapping[str, np.ndarray]) -> tuple[Shape, ...] | None:
    """What an observation has to have in common with others to be stacked with them; None when it cannot be."""
    found = []
    for name, array in observation.items():
        if not isinstance(array, np.ndarray) or not array.ndim or array.shape[0] != 1 or array.dtype.hasobject:
            return None
        found.append((name, array.shape[1:], array.dtype.str))
    return tuple(sorted(found))


class Stacks:
    """Arrays that are used again and again, by one thread."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[tuple[Shape, ...], int], dict[str, np.ndarray]] = OrderedDict()

    def stack(
        self, shape: tuple[Shape, ...], observations: Sequence[Mapping[str, np.ndarray]], size: int
    ) -> Mapping[str, np.ndarray]:
        """Observations of one shape as one with a batch axis of ``size``; good until the next call.

        Rows that nobody needs hold what is there, numbers apart: those are the first member's, because leftovers of
        somebody whose numbers were refused would be refused again.
        """
        arrays = self._arrays.pop((shape, size), None)
        if arrays is None:
            arrays = {name: aligned((size, *rest), np.dtype(kind)) for name, rest, kind in shape}
        self._arrays[shape, size] = arrays
        if len(self._arrays) > KEPT:
            self._arrays.popitem(last=False)
        for name, array in arrays.items():
            for row, observation in enumerate(observations):
                array[row] = observation[name][0]
            if array.dtype != np.uint8:
                array[len(observations) :] = array[0]
        return arrays


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin on a boundary of `ALIGNMENT` bytes."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
