"""3x3 convolutions with 2.25 times fewer multiplications: Winograd's F(2x2, 3x3).

Every 2x2 tile of the output comes from a 4x4 tile of the input by adding and subtracting, sixteen small matrix
products, and adding and subtracting again. The factors are 1 and 1/2, so float32 loses nothing worth mentioning
(1e-6 of the largest value); larger tiles would save more and lose more. It pays where the products are compute bound
and the sixteen intermediate planes stay in the processor's cache; accelerators' libraries choose for themselves.
Source: Lavin and Gray, https://arxiv.org/abs/1509.09308.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)


def transform_kernel(kernel: Float[np.ndarray, "3 3 c c2"]) -> Float[np.ndarray, "16 c c2"]:
    """The kernel of an ordinary convolution as `convolve` wants it."""
    inputs, outputs = kernel.shape[2:]
    return (np.kron(_KERNEL, _KERNEL) @ kernel.reshape(9, -1)).reshape(16, inputs, outputs)


def intermediate_bytes(height: int, width: int, channels: int) -> int:
    """Memory of the planes that one image goes through, float32."""
    return 4 * 16 * -(-height // 2) * -(-width // 2) * channels


def convolve(x: Float[Array, "b h w c"], kernel: Float[Array, "16 c c2"]) -> Float[Array, "b h w c2"]:
    """The convolution with stride 1 and a border of one zero."""
    batch, height, width, channels = x.shape
    rows, columns = -(-height // 2), -(-width // 2)
    x = jnp.pad(x, ((0, 0), (1, 1 + 2 * rows - height), (1, 1 + 2 * columns - width), (0, 0)))
    planes = []
    for row in _spread([x[:, i : i + 2 * rows - 1 : 2] for i in range(4)]):
        planes += _spread([row[:, :, j : j + 2 * columns - 1 : 2] for j in range(4)])
    spread = jnp.stack(planes).reshape(16, batch * rows * columns, channels)
    mixed = jnp.einsum("pnc,pcd->pnd", spread, kernel).reshape(4, 4, batch, rows, columns, -1)
    lines = []
    for line in _gather([mixed[i] for i in range(4)]):
        pixels = jnp.stack(_gather([line[j] for j in range(4)]), axis=3)
        lines.append(pixels.reshape(batch, rows, 2 * columns, -1))
    out = jnp.stack(lines, axis=2).reshape(batch, 2 * rows, 2 * columns, -1)
    return out[:, :height, :width]


def _spread(tile: list[Array]) -> list[Array]:
    return [tile[0] - tile[2], tile[1] + tile[2], tile[2] - tile[1], tile[1] - tile[3]]


def _gather(tile: list[Array]) -> list[Array]:
    return [tile[0] + tile[1] + tile[2], tile[1] - tile[2] - tile[3]]
