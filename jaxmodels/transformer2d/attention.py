"""Self-attention, cross-attention, GLIGEN's fusers, and biases of masks."""

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxmodels.layers.attention import attend
from jaxmodels.layers.feed_forward import DIFFUSERS_ACTIVATIONS, FeedForward, dropout
from jaxmodels.layers.norm import LayerNorm

Tokens: TypeAlias = Float[Array, "b n d"]
Bias: TypeAlias = Float[Array, "#b #heads #n m"]
# torch.nn.Linear's default: uniform within 1 / sqrt(inputs).
linear_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class Dtypes(NamedTuple):
    """Dtypes that a model computes in and stores its weights in."""

    compute: DTypeLike
    parameters: DTypeLike


def linear(
    inputs: int, outputs: int, axes: tuple[str, str], dtypes: Dtypes, *, bias: bool = True, rngs: nnx.Rngs
) -> nnx.Linear:
    """Return a linear layer; `axes` are the logical names of its inputs and outputs."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        kernel_init=linear_init,
        dtype=dtypes.compute,
        param_dtype=dtypes.parameters,
        kernel_metadata={"axes": axes},
        bias_metadata={"axes": axes[1:]},
        rngs=rngs,
    )


def projections(
    inputs: int, parts: int, width: int, dtypes: Dtypes, *, bias: bool, rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    """Return linear layers of one input as one matrix: (inputs, parts, width)."""
    return nnx.LinearGeneral(
        inputs,
        (parts, width),
        use_bias=bias,
        kernel_init=linear_init,
        dtype=dtypes.compute,
        param_dtype=dtypes.parameters,
        kernel_metadata={"axes": ("embed", None, "heads")},
        bias_metadata={"axes": (None, "heads")},
        rngs=rngs,
    )


class KeyValue(NamedTuple):
    """Keys and values of attended tokens; can be reused while these tokens stay the same."""

    key: Float[Array, "b m d"]
    value: Float[Array, "b m d"]


class SelfAttention(nnx.Module):
    """Attention of tokens to themselves."""

    def __init__(self, width: int, heads: int, dtypes: Dtypes, *, bias: bool, rate: float, rngs: nnx.Rngs):
        self.heads = heads
        self.rate = rate
        self.to_qkv = projections(width, 3, width, dtypes, bias=bias, rngs=rngs)
        self.to_out = linear(width, width, ("heads", "embed"), dtypes, rngs=rngs)

    def __call__(self, x: Tokens, bias: Bias | None = None, rngs: nnx.Rngs | None = None) -> Tokens:
        query, key, value = jnp.unstack(self.to_qkv(x), axis=2)
        return dropout(self.to_out(_mix(query, KeyValue(key, value), self.heads, bias)), self.rate, rngs)


class ContextAttention(nnx.Module):
    """Attention to the tokens of a context of width `context_width`; without a context, self-attention."""

    def __init__(
        self, width: int, heads: int, context_width: int, dtypes: Dtypes, *, bias: bool, rate: float, rngs: nnx.Rngs
    ):
        self.heads = heads
        self.rate = rate
        self.to_q = linear(width, width, ("embed", "heads"), dtypes, bias=bias, rngs=rngs)
        self.to_kv = projections(context_width, 2, width, dtypes, bias=bias, rngs=rngs)
        self.to_out = linear(width, width, ("heads", "embed"), dtypes, rngs=rngs)

    def project_context(self, context: Float[Array, "b m c"]) -> KeyValue:
        """Return keys and values of the context's tokens."""
        return KeyValue(*jnp.unstack(self.to_kv(context), axis=2))

    def __call__(
        self, x: Tokens, context: KeyValue | None = None, bias: Bias | None = None, rngs: nnx.Rngs | None = None
    ) -> Tokens:
        context = self.project_context(x) if context is None else context
        return dropout(self.to_out(_mix(self.to_q(x), context, self.heads, bias)), self.rate, rngs)


def _mix(query: Tokens, context: KeyValue, heads: int, bias: Bias | None) -> Tokens:
    def split(x: Array) -> Array:
        return x.reshape(*x.shape[:2], heads, -1)

    mixed = attend(split(query), split(context.key), split(context.value), bias)
    return mixed.reshape(query.shape)


class Fuser(nnx.Module):
    """GLIGEN's gated self-attention to tokens and objects (diffusers' GatedSelfAttentionDense, arXiv 2301.07093)."""

    def __init__(self, width: int, heads: int, object_width: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        geglu = DIFFUSERS_ACTIVATIONS["geglu"]
        self.linear = linear(object_width, width, ("context", "embed"), dtypes, rngs=rngs)
        self.attn = SelfAttention(width, heads, dtypes, bias=False, rate=0.0, rngs=rngs)
        self.ff = FeedForward(width, 8 * width, geglu, dtype=dtypes.compute, param_dtype=dtypes.parameters, rngs=rngs)
        self.norm1 = LayerNorm(width, param_dtype=dtypes.parameters)
        self.norm2 = LayerNorm(width, param_dtype=dtypes.parameters)
        self.alpha_attn = nnx.Param(jnp.zeros((), dtypes.parameters), axes=())
        self.alpha_dense = nnx.Param(jnp.zeros((), dtypes.parameters), axes=())

    def __call__(self, x: Tokens, objects: Float[Array, "b o c"]) -> Tokens:
        both = jnp.concatenate((x, self.linear(objects.astype(x.dtype))), axis=1)
        mixed = self.attn(self.norm1(both))[:, : x.shape[1]]
        x = x + jnp.tanh(self.alpha_attn[...]).astype(x.dtype) * mixed
        return x + jnp.tanh(self.alpha_dense[...]).astype(x.dtype) * self.ff(self.norm2(x))


DISCARD = -10000.0  # Added for a key that a two-dimensional mask discards; not -inf, which would make rows NaN.
NEVER = -1e30  # Added where a boolean mask of three or four dimensions is false.


def to_bias(mask: Float[Array, "..."] | Bool[Array, "..."], batch: int, heads: int) -> Float[Array, "#b #heads #n m"]:
    """Return the bias of the scores from a (batch, keys) mask of 0 to 1; masks of other shapes are biases already."""
    if mask.ndim == 2:
        return ((1 - mask.astype(jnp.float32)) * DISCARD)[:, None, None]
    bias = jnp.where(mask, 0.0, NEVER).astype(jnp.float32) if mask.dtype == bool else mask
    if bias.ndim == 4:
        return bias
    per_head = bias.shape[0] not in (1, batch)
    return bias.reshape(batch, heads, *bias.shape[1:]) if per_head else bias[:, None]
