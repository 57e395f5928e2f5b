"""Linear layers that keep their weights as torch does."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Linear(nnx.Module):
    """Linear layer without a bias whose weight is (out, in), as `torch.nn.Linear` has it; `axes` names the axes.

    A CPU multiplies tens to hundreds of tokens with it in half to three quarters of the time of (in, out), and torch's
    files are read as they are. Other devices take both alike.
    """

    def __init__(
        self,
        width: int,
        out: int,
        *,
        axes: tuple[str, str] | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        metadata: dict[str, Any] = {} if axes is None else {"axes": axes}
        self.weight = nnx.Param(init(rngs.params(), (out, width), param_dtype), **metadata)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... e"]:
        return jnp.einsum("...d,ed->...e", x, self.weight[...])
