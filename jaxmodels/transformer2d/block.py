"""One transformer block: attention, attention over a context, feed-forward, each with a norm before and a skip.

Source: diffusers/models/attention.py, BasicTransformerBlock.
"""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.layers.feed_forward import DIFFUSERS_ACTIVATIONS, FeedForward
from jaxmodels.layers.norm import LayerNorm, standardize
from jaxmodels.transformer2d.attention import Bias, ContextAttention, Dtypes, Fuser, KeyValue, SelfAttention
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.modulation import Affine, Modulation, TimeAndClassNorm, TimeNorm

ADA_NORM_EPSILON = 1e-5  # of the norms that ada_norm and ada_norm_zero modulate; fixed in diffusers, as is that
ADA_NORM_ZERO_EPSILON = 1e-6  # they have no weights of their own


class PlainNorm(LayerNorm):
    """A layer norm with the config's epsilon and weights."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes):
        super().__init__(
            config.inner_dim,
            epsilon=float(config.norm_eps),
            affine=config.norm_elementwise_affine,
            keeps_float32=True,
            param_dtype=dtypes.parameters,
        )


class Seen(NamedTuple):
    """Keys and values of the context; with a leading axis, of every layer. None where a block looks at itself."""

    first: KeyValue | None = None
    second: KeyValue | None = None


class Biases(NamedTuple):
    """What is added to the scores of both attentions."""

    first: Bias | None = None
    second: Bias | None = None


class Block(nnx.Module):
    """A block of every kind of norm; what timesteps and classes do to it comes from outside (`Modulation`)."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        width, heads, norm = config.inner_dim, config.num_attention_heads, config.block_norm
        options = {"bias": config.attention_bias, "rate": float(config.dropout), "rngs": rngs}
        self.dtype = dtypes.compute
        self.norm1 = self._first_norm(config, dtypes, rngs=rngs)
        if config.first_context is None:
            self.attn1 = SelfAttention(width, heads, dtypes, **options)
        else:
            self.attn1 = ContextAttention(width, heads, config.first_context, dtypes, **options)
        self.fuser = (
            Fuser(width, heads, config.cross_attention_dim or width, dtypes, rngs=rngs) if config.has_fuser else None
        )
        has_second = config.has_cross_attention
        if norm == "ada_norm" and has_second:
            self.norm2 = TimeNorm(width, config.num_embeds_ada_norm or 0, dtypes, rngs=rngs)
        else:
            self.norm2 = PlainNorm(config, dtypes) if has_second or norm == "ada_norm_single" else None
        self.attn2 = ContextAttention(width, heads, config.second_context, dtypes, **options) if has_second else None
        # ada_norm_single has its second norm here, before the feed-forward, and none before the second attention.
        self.is_single = norm == "ada_norm_single"
        self.norm3 = None if self.is_single else PlainNorm(config, dtypes)
        activation = DIFFUSERS_ACTIVATIONS[config.activation_fn]
        self.ff = FeedForward(
            width,
            4 * width * activation.inputs,
            activation,
            rate=float(config.dropout),
            dtype=dtypes.compute,
            param_dtype=dtypes.parameters,
            rngs=rngs,
        )
        if self.is_single:
            table = nnx.initializers.normal(width**-0.5)(rngs.params(), (6, width), dtypes.parameters)
            self.scale_shift_table = nnx.Param(table, axes=(None, "embed"))

    @staticmethod
    def _first_norm(
        config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs
    ) -> PlainNorm | TimeNorm | TimeAndClassNorm:
        count = config.num_embeds_ada_norm or 0
        if config.block_norm == "ada_norm":
            return TimeNorm(config.inner_dim, count, dtypes, rngs=rngs)
        if config.block_norm == "ada_norm_zero":
            return TimeAndClassNorm(config.inner_dim, count, dtypes, rngs=rngs)
        return PlainNorm(config, dtypes)

    def look_at(self, context: Float[Array, "b m c"]) -> Seen:
        """Keys and values of the context for both attentions, where they look at it."""
        first = self.attn1.look_at(context) if isinstance(self.attn1, ContextAttention) else None
        return Seen(first, None if self.attn2 is None else self.attn2.look_at(context))

    def __call__(
        self,
        x: Float[Array, "b n d"],
        modulation: Modulation,
        seen: Seen,
        biases: Biases,
        objects: Float[Array, "b o c"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b n d"]:
        normal = self._modulate(self._normalize(self.norm1, x), modulation.first)
        if isinstance(self.attn1, ContextAttention):
            mixed = self.attn1(normal, seen.first, biases.first, rngs)
        else:
            mixed = self.attn1(normal, biases.first, rngs)
        x = x + _gate(mixed, modulation.first_gate)
        if self.fuser is not None and objects is not None:
            x = self.fuser(x, objects)
        if self.attn2 is not None:
            normal = x if self.is_single else self._modulate(self._normalize(self.norm2, x), modulation.second)
            x = x + self.attn2(normal, seen.second, biases.second, rngs)
        norm = self.norm2 if self.is_single else self.norm3
        normal = self._modulate(self._normalize(norm, x), modulation.feed_forward)
        return x + _gate(self.ff(normal, rngs), modulation.feed_forward_gate)

    def _modulate(self, normal: Float[Array, "b n d"], affine: Affine | None) -> Float[Array, "b n d"]:
        return (normal if affine is None else affine(normal)).astype(self.dtype)

    @staticmethod
    def _normalize(norm: nnx.Module | None, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        if isinstance(norm, PlainNorm):
            return norm(x)
        return standardize(x, ADA_NORM_EPSILON if isinstance(norm, TimeNorm) else ADA_NORM_ZERO_EPSILON)


def _gate(x: Float[Array, "b n d"], gate: Float[Array, "#b #n d"] | None) -> Float[Array, "b n d"]:
    return x if gate is None else x * gate.astype(x.dtype)
