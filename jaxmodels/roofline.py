"""Roofline of a policy: the least time of each part of a chunk on accelerators that may be absent.

The least time is the larger of two: products at the peak rate, or weights, inputs and cached keys and values at the
memory's bandwidth (https://doi.org/10.1145/1498765.1498785). Programs take longer, because they also write and read
activations, start kernels, and rarely reach a peak. Sources of the peaks, without sparsity, of a single card or chip:

- H100 SXM, H200 SXM, L40S: https://www.nvidia.com/en-us/data-center/h100/ (h200, l40s)
- TPU v5e, v6e: https://cloud.google.com/tpu/docs/v5e and v6e. No rate of float32 is published; JAX computes exact
  products of float32 in six passes in bfloat16.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxmodels.memory import measure_program
from jaxmodels.program import Inputs, Programs

TERA, GIGA = 1e12, 1e9
# Name of no platform: the default branches of a program contain its products, a platform's kernels hide them.
DEFAULT_BRANCHES = "default"


@dataclass(frozen=True)
class Accelerator:
    """Published peaks of an accelerator.

    Attributes:
        kinds: JAX's names of the device (``jax.Device.device_kind``).
        operations: multiplications and additions per second by dtype.
        bandwidth: bytes per second of the memory.
        memory: bytes.
    """

    name: str
    kinds: tuple[str, ...]
    operations: Mapping[str, float]
    bandwidth: float
    memory: float


_HOPPER = {"float32": 67 * TERA, "bfloat16": 989 * TERA, "float8": 1979 * TERA, "int8": 1979 * TERA}
_ADA = {"float32": 91.6 * TERA, "bfloat16": 362 * TERA, "float8": 733 * TERA, "int8": 733 * TERA}
_V5E = {"float32": 197 / 6 * TERA, "bfloat16": 197 * TERA, "int8": 393 * TERA}
_V6E = {"float32": 918 / 6 * TERA, "bfloat16": 918 * TERA, "int8": 1836 * TERA}
ACCELERATORS = (
    Accelerator("H100", ("NVIDIA H100 80GB HBM3",), _HOPPER, 3350 * GIGA, 80 * GIGA),
    Accelerator("H200", ("NVIDIA H200",), _HOPPER, 4800 * GIGA, 141 * GIGA),
    Accelerator("L40S", ("NVIDIA L40S",), _ADA, 864 * GIGA, 48 * GIGA),
    Accelerator("v5e", ("TPU v5 lite", "TPU v5e"), _V5E, 819 * GIGA, 16 * GIGA),
    Accelerator("v6e", ("TPU v6 lite", "TPU v6e"), _V6E, 1640 * GIGA, 32 * GIGA),
)
"""Accelerators with published peaks.

Example:
    >>> [accelerator.name for accelerator in ACCELERATORS]
    ['H100', 'H200', 'L40S', 'v5e', 'v6e']
"""


@dataclass(frozen=True)
class PartWork:
    """Work of a part of a chunk, with all its steps: multiplications and additions, and bytes that are read."""

    name: str
    operations: int
    traffic: int

    def bound(self, accelerator: Accelerator, dtype: str) -> tuple[float, str]:
        """Return the least seconds in a dtype of `Accelerator.operations`, and what limits: ``compute``, ``memory``."""
        compute, memory = self.operations / accelerator.operations[dtype], self.traffic / accelerator.bandwidth
        return max(compute, memory), "compute" if compute > memory else "memory"


@dataclass(frozen=True)
class ChunkWork:
    """Work of one chunk for a batch of robots.

    Attributes:
        dtype: dtype of weights and products.
        memory: estimated bytes on the device, of weights and live values.
    """

    batch: int
    dtype: str
    parts: tuple[PartWork, ...]
    memory: int

    def bound(self, accelerator: Accelerator) -> float:
        """Return the least seconds."""
        return sum(part.bound(accelerator, self.dtype)[0] for part in self.parts)

    def bound_in_8_bits(self, accelerator: Accelerator) -> float:
        """Return the least seconds if all numbers are read and multiplied as ``float8`` or ``int8``."""
        size = jnp.dtype(self.dtype).itemsize
        narrow = [replace(part, traffic=part.traffic // size) for part in self.parts]
        each = accelerator.operations.keys() & {"float8", "int8"}
        return min(sum(part.bound(accelerator, dtype)[0] for part in narrow) for dtype in each)


def count_work(programs: Programs, inputs: Inputs) -> ChunkWork:
    """Count the work of a chunk by traced programs; nothing is compiled, and weights are shapes."""
    demands = {name: measure_program(part.jaxpr, DEFAULT_BRANCHES) for name, part in programs.trace(inputs).items()}
    parts = tuple(PartWork(name, part.operations, part.traffic) for name, part in demands.items())
    dtype = jnp.dtype(programs.dtype)
    memory = programs.count_bytes() + max(part.activations for part in demands.values())
    return ChunkWork(inputs.batch, dtype.name, parts, memory)
