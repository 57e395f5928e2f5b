"""Conversion of PyTorch's tensor layouts to ours and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from jaxmodels.checkpoints.folder import ALIGNMENT, empty_aligned

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[int | slice, ...]
EVERY = slice(None)


@dataclass(frozen=True)
class TensorLayout:
    """A reversible rearrangement of one PyTorch tensor into one or more of our arrays."""

    read: Callable[[np.ndarray], Sequence[np.ndarray]]
    write: Callable[[Sequence[np.ndarray]], np.ndarray]
    shape: Callable[[Sequence[Shape]], Shape]


@dataclass(frozen=True)
class Tensor:
    """Name of a PyTorch tensor, and names of our arrays that it holds."""

    theirs: str
    ours: tuple[str, ...]
    layout: TensorLayout


SAME = TensorLayout(lambda x: (x,), lambda a: a[0], lambda s: s[0])
# torch.nn.Linear keeps (out, in)
LINEAR = TensorLayout(lambda x: (x.T,), lambda a: a[0].T, lambda s: s[0][::-1])
# torch.nn.Conv2d keeps (out, in, height, width); ours is (height, width, in, out)
CONVOLUTION = TensorLayout(
    lambda x: (x.transpose(2, 3, 1, 0),),
    lambda a: a[0].transpose(3, 2, 0, 1),
    lambda s: (s[0][3], s[0][2], s[0][0], s[0][1]),
)
# torch.nn.Conv1d keeps (out, in, length); ours is (length, in, out)
TIME_CONVOLUTION = TensorLayout(
    lambda x: (x.transpose(2, 1, 0),), lambda a: a[0].transpose(2, 1, 0), lambda s: (s[0][2], s[0][1], s[0][0])
)
# torch.nn.ConvTranspose1d keeps (in, out, length)
UPSAMPLE = TensorLayout(
    lambda x: (x.transpose(2, 0, 1),), lambda a: a[0].transpose(1, 2, 0), lambda s: (s[0][1], s[0][2], s[0][0])
)
# a 1x1 convolution is a linear layer over channels
POINTWISE = TensorLayout(
    lambda x: (x[:, :, 0, 0].T,), lambda a: a[0].T[:, :, None, None], lambda s: (s[0][1], s[0][0], 1, 1)
)
# torch.nn.MultiheadAttention keeps query, key and value under each other
JOINT_LINEAR = TensorLayout(
    lambda x: tuple(part.T for part in np.split(x, 3)),
    lambda a: np.concatenate([part.T for part in a]),
    lambda s: (sum(part[1] for part in s), s[0][0]),
)
JOINT_VECTOR = TensorLayout(
    lambda x: np.split(x, 3), lambda a: np.concatenate(a), lambda s: (sum(part[0] for part in s),)
)


@dataclass(frozen=True)
class TensorTarget:
    """A PyTorch tensor, and the slice of one of our arrays that holds it.

    Attributes:
        theirs: the tensor's name in a file.
        ours: the array's name (jaxmodels/weights.py).
        whole: the array's shape.
        index: where in the array the tensor lies.
        layout: how it lies there.
    """

    theirs: str
    ours: str
    whole: Shape
    index: Index = ()
    layout: TensorLayout = SAME

    @property
    def shape(self) -> Shape:
        """The tensor's shape in a file."""
        index = (*self.index, *(EVERY,) * (len(self.whole) - len(self.index)))
        left = tuple(size for size, at in zip(self.whole, index, strict=True) if not isinstance(at, int))
        return tuple(self.layout.shape([left]))

    def put(self, tensor: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Write the tensor into its slice of our arrays."""
        arrays[self.ours][self.index] = self.layout.read(tensor)[0]

    def take(self, array: np.ndarray) -> np.ndarray:
        """The tensor, as a view of our array where that is possible."""
        return self.layout.write([np.asarray(array[self.index])])


def read_tensors(table: Sequence[Tensor], read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Convert checked PyTorch tensors to our float32 arrays; `read` is called for one name at a time to save memory."""
    weights: dict[str, np.ndarray] = {}
    for entry in table:
        parts = entry.layout.read(read(entry.theirs))
        weights |= {name: _aligned(part) for name, part in zip(entry.ours, parts, strict=True)}
    return weights


def _aligned(part: np.ndarray) -> np.ndarray:
    """Contiguous float32 where XLA's CPU programs can read it as it lies; JAX copies what begins elsewhere."""
    if part.dtype == np.float32 and part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0:
        return part
    aligned = empty_aligned(4 * part.size).view(np.float32).reshape(part.shape)
    aligned[...] = part
    return aligned


def write_tensors(table: Sequence[Tensor], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert our arrays to PyTorch tensors."""
    return {
        entry.theirs: np.ascontiguousarray(entry.layout.write([np.asarray(weights[name]) for name in entry.ours]))
        for entry in table
    }


def their_shapes(table: Sequence[Tensor], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes that PyTorch tensors must have to fit arrays of our shapes."""
    return {entry.theirs: tuple(entry.layout.shape([shapes[name] for name in entry.ours])) for entry in table}
