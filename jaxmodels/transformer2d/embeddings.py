"""Embeddings of a model's input: tables, patches with positions, and the projection of captions and timesteps.

Source: diffusers/models/embeddings.py.
"""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmodels.layers.embeddings import patch_positions
from jaxmodels.transformer2d.attention import Dtypes, linear, linear_init
from jaxmodels.transformer2d.config import Transformer2DConfig


class Mlp(nnx.Module):
    """Two linear layers: diffusers' TimestepEmbedding and PixArtAlphaTextProjection."""

    def __init__(self, inputs: int, width: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.linear_1 = linear(inputs, width, ("context", "embed"), dtypes, rngs=rngs)
        self.linear_2 = linear(width, width, ("embed", "embed2"), dtypes, rngs=rngs)

    def __call__(self, x: Float[Array, "*b c"], function=jax.nn.silu) -> Float[Array, "*b d"]:
        return self.linear_2(function(self.linear_1(x)))


class Table(nnx.Module):
    """Embedding table; an index that is out of range gives the nearest row.

    `nnx.Embed` gives NaN instead, which takes 1.08 times as long for 1024 indices (52 and 55 us on AMD EPYC, 2 cores).
    """

    def __init__(self, rows: int, width: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        table = nnx.initializers.normal(1.0)(rngs.params(), (rows, width), dtypes.parameters)
        self.embedding = nnx.Param(table, axes=("vocabulary", "embed"))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
        return jnp.take(self.embedding[...], ids, axis=0, mode="clip")


class LatentEmbedding(nnx.Module):
    """Embeddings of classes plus learned embeddings of rows and columns of the latent square."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        side, width = config.sample_size or 0, config.inner_dim
        self.emb = Table(config.num_vector_embeds or 0, width, dtypes, rngs=rngs)
        self.height_emb = Table(side, width, dtypes, rngs=rngs)
        self.width_emb = Table(side, width, dtypes, rngs=rngs)
        self.dtype = dtypes.compute

    def __call__(self, ids: Int[Array, "b n"]) -> Float[Array, "b n d"]:
        """Return tokens; fewer tokens than the square has latent pixels get its first positions, row by row."""
        rows, columns = self.height_emb.embedding[...], self.width_emb.embedding[...]
        # Only the rows in use, because for a chunk of 500 actions the whole square would take 256 MB.
        begun = -(-ids.shape[1] // columns.shape[0])
        positions = (rows[:begun, None] + columns[None]).reshape(-1, rows.shape[-1])
        return (self.emb(ids) + positions[: ids.shape[1]]).astype(self.dtype)


class PatchEmbedding(nnx.Module):
    """Patches projected to tokens, plus fixed positions. Rows and columns that fill no patch are dropped."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.base = (config.sample_size or 0) // (config.patch_size or 1)
        self.scale = config.position_scale
        self.proj = PatchProjection(config, dtypes, rngs=rngs)

    def __call__(self, x: Float[Array, "b c h w"]) -> Float[Array, "b n d"]:
        tokens = self.proj(x)
        rows, columns = (side // self.proj.size for side in x.shape[2:])
        positions = patch_positions(rows, columns, self.base, self.scale, tokens.shape[-1])
        return (tokens.astype(jnp.float32) + positions).astype(tokens.dtype)


class PatchProjection(nnx.Module):
    """Convolution whose stride is its size, as one product over the pixels of each patch."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.size = config.patch_size or 1
        self.dtype = dtypes.compute
        shape = (self.size, self.size, config.in_channels or 0, config.inner_dim)
        flat = linear_init(rngs.params(), (math.prod(shape[:3]), shape[3]), dtypes.parameters)
        self.kernel = nnx.Param(flat.reshape(shape), axes=(None, None, None, "embed"))
        self.bias = nnx.Param(jnp.zeros(shape[3], dtypes.parameters), axes=("embed",))

    def __call__(self, x: Float[Array, "b c h w"]) -> Float[Array, "b n d"]:
        p = self.size
        rows, columns = x.shape[2] // p, x.shape[3] // p
        x = x[:, :, : rows * p, : columns * p].astype(self.dtype)
        patches = rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=p)
        kernel = self.kernel[...].astype(self.dtype)
        return patches @ kernel.reshape(-1, kernel.shape[-1]) + self.bias[...].astype(self.dtype)
