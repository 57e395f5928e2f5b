"""The two-layer perceptron of a transformer block, with the activations that checkpoints ask for."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.layers.dropout import dropout


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU through the error function, PyTorch's default; the tanh form differs by up to 5e-4."""
    return jax.nn.gelu(x, approximate=False)


# name -> (function, how many input channels it takes per output channel)
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], int]] = {
    "relu": (jax.nn.relu, 1),
    "gelu": (exact_gelu, 1),
    "glu": (jax.nn.glu, 2),  # first half times sigmoid of the second
}


class FeedForward(nnx.Module):
    """`width` up to `hidden`, activation, and back down.

    Gated activations halve what they are given, so that the way down is `hidden / 2` wide with them.
    """

    def __init__(self, width: int, hidden: int, activation: str, *, rate: float = 0.0, rngs: nnx.Rngs):
        self.activation, shrink = ACTIVATIONS[activation]
        self.rate = rate
        init = nnx.initializers.xavier_uniform()
        self.up = nnx.Linear(width, hidden, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(hidden // shrink, width, kernel_init=init, rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"], rngs: nnx.Rngs | None = None) -> Float[Array, "b n d"]:
        return self.down(dropout(self.activation(self.up(x)), self.rate, rngs))
