"""A vision backbone small enough to be trained on a CPU: four strided convolutions that know where they look."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.layers.norm import GroupNorm

WIDTHS = (16, 32, 64, 128)
GROUPS = 8
STRIDE = 2 ** len(WIDTHS)


def coordinates(height: int, width: int) -> Float[np.ndarray, "h w 2"]:
    """Row and column of each pixel in [-1, 1]: without them a convolution knows what it sees but not where."""
    rows, columns = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    return np.stack((rows, columns), axis=-1).astype(np.float32)


class SmallCnn(nnx.Module):
    """Images to a feature map of 1/16 of their size (96x96 gives 6x6), about 0.1 M parameters."""

    def __init__(self, *, rngs: nnx.Rngs):
        inputs = (3 + 2, *WIDTHS[:-1])
        self.convolutions = nnx.List(
            [
                nnx.Conv(before, after, (3, 3), strides=2, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
                for before, after in zip(inputs, WIDTHS, strict=True)
            ]
        )
        self.norms = nnx.List([GroupNorm(width, GROUPS) for width in WIDTHS])
        self.width = WIDTHS[-1]

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 c"]:
        where = jnp.asarray(coordinates(images.shape[1], images.shape[2]), images.dtype)
        x = jnp.concatenate((images, jnp.broadcast_to(where, (*images.shape[:-1], 2))), axis=-1)
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            x = jax.nn.relu(norm(layer(x)))
        return x
