"""From each kind of input to tokens, and from tokens to each kind of output.

Source: diffusers/models/transformers/transformer_2d.py, the _operate_on_* and _get_output_for_* methods.
"""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmodels.layers.embeddings import patch_positions
from jaxmodels.layers.norm import GroupNorm, LayerNorm, standardize
from jaxmodels.transformer2d.attention import Dtypes, linear, linear_init
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.modulation import Affine, Table

CONTINUOUS_EPSILON = 1e-6  # of the group norm; PyTorch's default would be 1e-5
HEAD_EPSILON = 1e-6  # of the norm before a patched output


def input_norm(config: Transformer2DConfig, dtypes: Dtypes) -> GroupNorm:
    """The norm of a continuous input."""
    return GroupNorm(
        config.in_channels or 0, config.norm_num_groups, epsilon=CONTINUOUS_EPSILON, param_dtype=dtypes.parameters
    )


class LatentEmbedding(nnx.Module):
    """Embeddings of classes plus learned positions, a row and a column of the square of latent pixels each."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        def table(rows: int) -> Table:
            return Table(nnx.initializers.normal(1.0)(rngs.params(), (rows, config.inner_dim), dtypes.parameters))

        self.emb = table(config.num_vector_embeds or 0)
        self.height_emb = table(config.sample_size or 0)
        self.width_emb = table(config.sample_size or 0)
        self.dtype = dtypes.compute

    def __call__(self, ids: Int[Array, "b n"]) -> Float[Array, "b n d"]:
        """Tokens; fewer of them than the square has latent pixels get its first positions, row by row."""
        rows, columns = self.height_emb.embedding[...], self.width_emb.embedding[...]
        # Those of the rows that are begun: of a chunk 500 long, all of the square would take 256 MB.
        begun = -(-ids.shape[1] // columns.shape[0])
        positions = (rows[:begun, None] + columns[None]).reshape(-1, rows.shape[-1])
        return (self.emb(ids) + positions[: ids.shape[1]]).astype(self.dtype)


class PatchEmbedding(nnx.Module):
    """Patches projected to tokens, plus fixed positions. Rows and columns that fill no patch are left out."""

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
    """A convolution whose stride is its size: one product over the pixels of each patch."""

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


def log_probabilities(x: Float[Array, "b n d"], norm: LayerNorm, out: nnx.Linear) -> Float[Array, "b v n"]:
    """Log-probabilities of each latent pixel's classes, always float32; the masked class has none."""
    logits = out(norm(x)).astype(jnp.float32)
    return jax.nn.log_softmax(logits, axis=-1).swapaxes(1, 2)


def from_patches(
    x: Float[Array, "b n d"], head: Affine, out: nnx.Linear, patch: int, rows: int
) -> Float[Array, "b c h w"]:
    """The image of a grid of tokens, `rows` of them below each other."""
    pixels = out(head(standardize(x, HEAD_EPSILON)).astype(x.dtype))
    return rearrange(pixels, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=patch, q=patch)


def patch_output(config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs) -> nnx.Linear:
    pixels = (config.patch_size or 1) ** 2 * (config.outputs or 0)
    return linear(config.inner_dim, pixels, ("embed", "channels"), dtypes, rngs=rngs)
