"""Feed-forward layers, their activations, linear layers in torch's layout, and dropout."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmodels.quantization import QUANTIZABLE, multiply


def dropout(x: Float[Array, "..."], rate: float, rngs: nnx.Rngs | None) -> Float[Array, "..."]:
    """Apply `nnx.Dropout` with the stream ``dropout`` of `rngs`; without `rngs` return `x`.

    A layer that holds its own keys, for ``train()`` and ``eval()``, would add them to the weights of a checkpoint.
    """
    return x if rngs is None else nnx.Dropout(rate)(x, rngs=rngs)


def split_rows(x: Float[Array, "..."], axis: int, parts: int) -> Float[Array, "parts ..."]:
    """Split `x` into equal parts along one axis, with a leading axis of parts; the last is padded with zeros."""
    size = math.ceil(x.shape[axis] / parts)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, parts * size - x.shape[axis])
    shape = (*x.shape[:axis], parts, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), axis, 0)


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU through the error function, PyTorch's default; the tanh form differs by up to 5e-4."""
    return jax.nn.gelu(x, approximate=False)


def tanh_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return GELU by its approximation with tanh."""
    return jax.nn.gelu(x, approximate=True)


def sigmoid_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``x sigmoid(1.702 x)``; section 2 of https://arxiv.org/abs/1606.08415."""
    return x * jax.nn.sigmoid(1.702 * x)


def _gate_by(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function of the first half of the channels times `function` of the second."""

    def gated(x: Float[Array, "..."]) -> Float[Array, "..."]:
        value, gate = jnp.split(x, 2, axis=-1)
        return value * function(gate)

    return gated


# Most hidden numbers that a CPU computes at once, and the tokens of a part of larger inputs.
HIDDEN = 1 << 24
ROWS = 512


class Activation(NamedTuple):
    """An activation function, and its number of input channels per output channel."""

    function: Callable[[Array], Array]
    inputs: int


# Activations of torch.nn.functional by their names in LeRobot's configs.
LEROBOT_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": Activation(jax.nn.relu, 1),
    "gelu": Activation(exact_gelu, 1),
    "glu": Activation(_gate_by(jax.nn.sigmoid), 2),
}
# Activations of diffusers/models/attention.py, FeedForward.
DIFFUSERS_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(exact_gelu, 1),
    "gelu-approximate": Activation(tanh_gelu, 1),
    "geglu": Activation(_gate_by(exact_gelu), 2),
    "geglu-approximate": Activation(sigmoid_gelu, 1),  # Not gated, despite its name.
    "swiglu": Activation(_gate_by(jax.nn.silu), 2),
    "linear-silu": Activation(jax.nn.silu, 1),
}


class FeedForward(nnx.Module):
    """Feed-forward layer: `width` to `hidden` channels (half of them after a gated activation), and back."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation,
        *,
        rate: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.activation = activation.function
        self.rate = rate
        init = nnx.initializers.xavier_uniform()
        dtypes = {"dtype": dtype, "param_dtype": param_dtype, **QUANTIZABLE}
        self.up = nnx.Linear(
            width, hidden, kernel_init=init, kernel_metadata=_UP, bias_metadata=_UP_BIAS, rngs=rngs, **dtypes
        )
        self.down = nnx.Linear(
            hidden // activation.inputs,
            width,
            kernel_init=init,
            kernel_metadata=_DOWN,
            bias_metadata=_DOWN_BIAS,
            rngs=rngs,
            **dtypes,
        )

    def __call__(self, x: Float[Array, "b n d"], rngs: nnx.Rngs | None = None) -> Float[Array, "b n d"]:
        if rngs is not None and self.rate > 0.0:
            return self.down(dropout(self._activate(x), self.rate, rngs))
        length = x.shape[0] * x.shape[1]
        if length * self.up.out_features <= HIDDEN:
            return self._forward(x)
        return lax.platform_dependent(x, cpu=self._forward_in_parts, default=self._forward)

    def _activate(self, x: Float[Array, "... d"]) -> Float[Array, "... f"]:
        hidden = self.up(x)
        # In float32, because an activation of several operations would round after each operation.
        return self.activation(hidden.astype(jnp.float32)).astype(hidden.dtype)

    def _forward(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return self.down(self._activate(x))

    def _forward_in_parts(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Compute parts of the tokens in a loop, so that their hidden channels stay in the cache."""
        tokens = x.reshape(-1, x.shape[-1])
        parts = split_rows(tokens, 0, math.ceil(len(tokens) / ROWS))
        return lax.map(self._forward, parts).reshape(-1, x.shape[-1])[: len(tokens)].reshape(x.shape)


class Linear(nnx.Module):
    """Linear layer without a bias with torch's layout (out, in), which a CPU multiplies faster with few tokens."""

    def __init__(self, width: int, out: int, *, axes: tuple[str, str] | None = None, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        metadata: dict[str, Any] = {} if axes is None else {"axes": axes}
        self.weight = nnx.Param(init(rngs.params(), (out, width), jnp.float32), **metadata)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... e"]:
        return multiply(x, self.weight[...], 1)


class GatedFeedForward(nnx.Module):
    """Feed-forward layer ``down(f(gate(x)) up(x))`` without biases (https://arxiv.org/abs/2002.05202).

    Llama's with ``jax.nn.silu``, Gemma's with `tanh_gelu`.
    """

    def __init__(self, width: int, hidden: int, activation: Callable[[Array], Array], *, rngs: nnx.Rngs):
        self.activation = activation
        self.gate = Linear(width, hidden, axes=("mlp", "embed"), rngs=rngs)
        self.up = Linear(width, hidden, axes=("mlp", "embed"), rngs=rngs)
        self.down = Linear(hidden, width, axes=("embed", "mlp"), rngs=rngs)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        gate, up = self.gate(x), self.up(x)
        # In float32, as in `FeedForward`.
        return self.down((self.activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype))


# Logical axes for sharding (jaxmodels/devices.py).
_UP, _UP_BIAS = {"axes": ("embed", "mlp")}, {"axes": ("mlp",)}
_DOWN, _DOWN_BIAS = {"axes": ("mlp", "embed")}, {"axes": ("embed",)}
