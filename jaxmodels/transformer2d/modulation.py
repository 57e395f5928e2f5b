"""What timesteps, classes and conditions do to the blocks: scales, shifts and gates of every layer, made at once.

They depend on nothing else, so that a sampler can make them for all of its steps before its loop.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmodels.layers.embeddings import time_sinusoid
from jaxmodels.transformer2d.attention import Dtypes, linear
from jaxmodels.transformer2d.config import TIME_CHANNELS

CLASS_DROPOUT = 0.1  # share of labels that become the null class in training; diffusers' LabelEmbedding


class Affine(NamedTuple):
    """``x (1 + scale) + shift`` for each token of an element (n is 1: the same for all) or for one each."""

    scale: Float[Array, "*l b n d"]
    shift: Float[Array, "*l b n d"]

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return x * (1 + self.scale) + self.shift


class Modulation(NamedTuple):
    """What one block (or, with a leading axis, each layer) does to its three parts; None leaves one as it is."""

    first: Affine | None = None
    first_gate: Float[Array, "*l b n d"] | None = None
    second: Affine | None = None
    feed_forward: Affine | None = None
    feed_forward_gate: Float[Array, "*l b n d"] | None = None


class Mlp(nnx.Module):
    """Two linear layers; an embedder of diffusers' (TimestepEmbedding, PixArtAlphaTextProjection)."""

    def __init__(self, inputs: int, width: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.linear_1 = linear(inputs, width, ("context", "embed"), dtypes, rngs=rngs)
        self.linear_2 = linear(width, width, ("embed", "embed2"), dtypes, rngs=rngs)

    def __call__(self, x: Float[Array, "*b c"], function=jax.nn.silu) -> Float[Array, "*b d"]:
        return self.linear_2(function(self.linear_1(x)))


class TimeNorm(nnx.Module):
    """ada_norm: a table of learned timesteps, and their scale and shift. Scale comes first here alone."""

    def __init__(self, width: int, timesteps: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        table = nnx.initializers.normal(1.0)(rngs.params(), (timesteps, width), dtypes.parameters)
        self.emb = Table(table)
        self.linear = linear(width, 2 * width, ("embed", "mlp"), dtypes, rngs=rngs)

    def __call__(self, timestep: Int[Array, " b"]) -> Affine:
        parts = self.linear(jax.nn.silu(self.emb(timestep))).astype(jnp.float32)
        scale, shift = jnp.split(parts[:, None], 2, axis=-1)
        return Affine(scale, shift)


class Table(nnx.Module):
    """Embeddings by number; numbers are checked before compiled code runs, where they would be clipped silently."""

    def __init__(self, rows: Float[Array, "e d"]):
        self.embedding = nnx.Param(rows, axes=("vocabulary", "embed"))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
        return jnp.take(self.embedding[...], ids, axis=0, mode="clip")


class TimeAndClass(nnx.Module):
    """The embedding of a timestep plus that of a class; the last row of the table is the null class."""

    def __init__(self, width: int, classes: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.timestep_embedder = Mlp(TIME_CHANNELS, width, dtypes, rngs=rngs)
        table = nnx.initializers.normal(1.0)(rngs.params(), (classes + 1, width), dtypes.parameters)
        self.class_embedder = ClassEmbedder(table)

    def __call__(self, timestep: Float[Array, " b"], labels: Int[Array, " b2"]) -> Float[Array, "b3 d"]:
        time = self.timestep_embedder(time_sinusoid(timestep, TIME_CHANNELS, shift=1))
        return time + self.class_embedder(labels).astype(time.dtype)


class ClassEmbedder(nnx.Module):
    """A table of classes, nested as in diffusers' files."""

    def __init__(self, rows: Float[Array, "e d"]):
        self.embedding_table = Table(rows)

    def __call__(self, labels: Int[Array, " b"]) -> Float[Array, "b d"]:
        return self.embedding_table(labels)


class TimeAndClassNorm(nnx.Module):
    """ada_norm_zero: shift, scale and gate of the attention and of the feed-forward, from a timestep and a class."""

    def __init__(self, width: int, classes: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.emb = TimeAndClass(width, classes, dtypes, rngs=rngs)
        self.linear = linear(width, 6 * width, ("embed", "mlp"), dtypes, rngs=rngs)

    def __call__(self, timestep: Float[Array, " b"], labels: Int[Array, " b2"]) -> Modulation:
        parts = self.linear(jax.nn.silu(self.emb(timestep, labels))).astype(jnp.float32)
        return six_parts(parts.reshape(parts.shape[0], 6, -1))


def six_parts(parts: Float[Array, "b 6 d"]) -> Modulation:
    """Shift, scale and gate of the attention, then of the feed-forward, as ada_norm_zero and ada_norm_single order."""
    shift, scale, gate, shift2, scale2, gate2 = (parts[:, i : i + 1] for i in range(6))
    return Modulation(Affine(scale, shift), gate, None, Affine(scale2, shift2), gate2)


class TimeSingle(nnx.Module):
    """ada_norm_single: one embedding of the timestep (and of resolution and aspect ratio) for all layers.

    Source: diffusers/models/normalization.py, AdaLayerNormSingle; https://arxiv.org/abs/2310.00426.
    """

    def __init__(self, width: int, has_conditions: bool, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.emb = TimeAndConditions(width, has_conditions, dtypes, rngs=rngs)
        self.linear = linear(width, 6 * width, ("embed", "mlp"), dtypes, rngs=rngs)

    def __call__(
        self, timestep: Float[Array, " b"], conditions: Mapping[str, Array] | None
    ) -> tuple[Float[Array, "b 6 d"], Float[Array, "b d"]]:
        """The blocks' six parts, and the embedding itself for the head."""
        embedded = self.emb(timestep, conditions)
        parts = self.linear(jax.nn.silu(embedded))
        return parts.reshape(parts.shape[0], 6, -1).astype(jnp.float32), embedded.astype(jnp.float32)


class TimeAndConditions(nnx.Module):
    """The embedding of a timestep plus, for PixArt at 1024 pixels, those of resolution and aspect ratio."""

    def __init__(self, width: int, has_conditions: bool, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.timestep_embedder = Mlp(TIME_CHANNELS, width, dtypes, rngs=rngs)
        third = width // 3
        self.resolution_embedder = Mlp(TIME_CHANNELS, third, dtypes, rngs=rngs) if has_conditions else None
        self.aspect_ratio_embedder = Mlp(TIME_CHANNELS, third, dtypes, rngs=rngs) if has_conditions else None

    def __call__(self, timestep: Float[Array, " b"], conditions: Mapping[str, Array] | None) -> Float[Array, "b d"]:
        embedded = self.timestep_embedder(time_sinusoid(timestep, TIME_CHANNELS, shift=0))
        if self.resolution_embedder is None or self.aspect_ratio_embedder is None or conditions is None:
            return embedded
        size = self._embed(self.resolution_embedder, conditions["resolution"])
        return embedded + jnp.concatenate(
            (size, self._embed(self.aspect_ratio_embedder, conditions["aspect_ratio"])), -1
        )

    @staticmethod
    def _embed(embedder: Mlp, numbers: Float[Array, "b k"]) -> Float[Array, "b c"]:
        embedded = embedder(time_sinusoid(numbers, TIME_CHANNELS, shift=0))
        return embedded.reshape(numbers.shape[0], -1)
