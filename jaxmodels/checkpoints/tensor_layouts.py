"""Stored tensors, and the conversion of PyTorch's layouts to ours and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxmodels.checkpoints.folder import ALIGNMENT, Source, empty_aligned, read_bytes
from jaxmodels.errors import CheckpointError

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


def _permute(*axes: int) -> TensorLayout:
    """Return the layout of a tensor whose axes, in this order, are the axes of our array."""
    back = [axes.index(axis) for axis in range(len(axes))]
    return TensorLayout(
        lambda x: (x.transpose(axes),), lambda a: a[0].transpose(back), lambda s: tuple(s[0][axis] for axis in back)
    )


SAME = TensorLayout(lambda x: (x,), lambda a: a[0], lambda s: s[0])
LINEAR = _permute(1, 0)  # torch.nn.Linear stores (out, in).
CONVOLUTION = _permute(2, 3, 1, 0)  # torch.nn.Conv2d stores (out, in, height, width).
TIME_CONVOLUTION = _permute(2, 1, 0)  # torch.nn.Conv1d stores (out, in, length).
UPSAMPLE = _permute(2, 0, 1)  # torch.nn.ConvTranspose1d stores (in, out, length).
# A 1x1 convolution is a linear layer over channels.
POINTWISE = TensorLayout(
    lambda x: (x[:, :, 0, 0].T,), lambda a: a[0].T[:, :, None, None], lambda s: (s[0][1], s[0][0], 1, 1)
)
# torch.nn.MultiheadAttention stores query, key and value one below the other.
JOINT_LINEAR = TensorLayout(
    lambda x: tuple(part.T for part in np.split(x, 3)),
    lambda a: np.concatenate([part.T for part in a]),
    lambda s: (sum(part[1] for part in s), s[0][0]),
)
JOINT_VECTOR = TensorLayout(
    lambda x: np.split(x, 3), lambda a: np.concatenate(a), lambda s: (sum(part[0] for part in s),)
)


def module_tensor(theirs: str, ours: str, layout: TensorLayout = LINEAR) -> Tensor:
    """Return the weight or bias of a PyTorch module for our ``kernel``, ``scale`` or ``bias``.

    Args:
        theirs: PyTorch's name of the module.
        ours: our name of the array.
        layout: layout of a kernel.
    """
    kind = ours.rpartition(".")[2]
    name = f"{theirs}.{'bias' if kind == 'bias' else 'weight'}"
    return Tensor(name, (ours,), layout if kind == "kernel" else SAME)


@dataclass(frozen=True)
class TensorTarget:
    """A PyTorch tensor as a slice of one of our arrays.

    Attributes:
        theirs: name of the tensor in a file.
        ours: name of the array (jaxmodels/weights.py).
        whole: shape of the array.
        index: index of the slice in the array.
        layout: layout of the tensor.
    """

    theirs: str
    ours: str
    whole: Shape
    index: Index = ()
    layout: TensorLayout = SAME

    @property
    def shape(self) -> Shape:
        """Shape of the tensor in a file."""
        index = (*self.index, *(EVERY,) * (len(self.whole) - len(self.index)))
        left = tuple(size for size, at in zip(self.whole, index, strict=True) if not isinstance(at, int))
        return tuple(self.layout.shape([left]))

    def put(self, tensor: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Write the tensor into its slice of our arrays."""
        arrays[self.ours][self.index] = self.layout.read(tensor)[0]

    def take(self, array: np.ndarray) -> np.ndarray:
        """Return the tensor, as a view of our array if possible."""
        return self.layout.write([np.asarray(array[self.index])])


@dataclass(frozen=True)
class Stored:
    """Position, dtype and shape of a tensor in a safetensors file."""

    path: Source
    dtype: np.dtype[Any]
    shape: Shape
    start: int

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Read the tensor from its file."""
        try:
            return read_bytes(self.path, self.start, self.bytes).view(self.dtype).reshape(self.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path.name}: cannot be read to its end ({error})") from error


def read_tensors(table: Sequence[Tensor], stored: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """Convert checked PyTorch tensors to our float32 arrays, one at a time to save memory."""
    weights: dict[str, np.ndarray] = {}
    for entry in table:
        parts = entry.layout.read(stored[entry.theirs].read())
        weights |= {name: align_array(part) for name, part in zip(entry.ours, parts, strict=True)}
    return weights


def align_array(part: np.ndarray) -> np.ndarray:
    """Return an array as contiguous, aligned float32, which XLA's CPU programs read without a copy."""
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
    """Return the shapes of the PyTorch tensors that fit arrays of our shapes, by name."""
    return {entry.theirs: tuple(entry.layout.shape([shapes[name] for name in entry.ours])) for entry in table}
