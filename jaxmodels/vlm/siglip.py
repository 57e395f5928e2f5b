"""SigLIP's vision tower: images to one token for each patch.

Sources: https://arxiv.org/abs/2303.15343; transformers/models/siglip and models/smolvlm (positions of small images).
"""

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmodels.checkpoints.tensor_layouts import CONVOLUTION, SAME, Tensor, module_tensor
from jaxmodels.layers.attention import Attention
from jaxmodels.layers.feed_forward import Activation, FeedForward, tanh_gelu
from jaxmodels.layers.norm import LayerNorm
from jaxmodels.ranges import HEADS, LAYERS_WRITTEN_OUT, WIDTH, Range

CHANNELS = 3


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of a vision tower: channels, sides in pixels of images and patches, and the norms' `epsilon`."""

    width: Annotated[int, Range(1, WIDTH)]
    hidden: Annotated[int, Range(1, WIDTH)]
    layers: Annotated[int, Range(1, LAYERS_WRITTEN_OUT)]
    heads: Annotated[int, Range(1, HEADS)]
    image_size: Annotated[int, Range(1, 8192)]
    patch_size: Annotated[int, Range(1, 1024)]
    epsilon: Annotated[float, Range(0, 1, above=True, below=True)] = 1e-6

    @property
    def side(self) -> int:
        """Positions along each side."""
        return self.image_size // self.patch_size

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the patches of an image; pixels that fill no patch are dropped."""
        return height // self.patch_size, width // self.patch_size


class VisionLayer(nnx.Module):
    """Layer of the tower: attention among all patches, then a feed-forward layer, each behind its norm."""

    def __init__(self, sizes: VisionSizes, *, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(sizes.width, epsilon=sizes.epsilon)
        self.attention = Attention(sizes.width, sizes.heads, rngs=rngs)
        self.feed_forward_norm = LayerNorm(sizes.width, epsilon=sizes.epsilon)
        self.feed_forward = FeedForward(sizes.width, sizes.hidden, Activation(tanh_gelu, 1), rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        dtype = self.feed_forward.up.kernel.dtype
        normal = self.attention_norm(x).astype(dtype)
        x = x + self.attention(normal, normal, normal).astype(x.dtype)
        return x + self.feed_forward(self.feed_forward_norm(x).astype(dtype)).astype(x.dtype)


class VisionTower(nnx.Module):
    """Images to one token for each patch, row by row."""

    def __init__(self, sizes: VisionSizes, *, rngs: nnx.Rngs):
        self.sizes = sizes
        size = sizes.patch_size
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (size, size, CHANNELS, sizes.width), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(sizes.width))
        self.positions = nnx.Param(
            nnx.initializers.normal(sizes.width**-0.5)(rngs.params(), (sizes.side**2, sizes.width), jnp.float32)
        )
        self.layers = nnx.List([VisionLayer(sizes, rngs=rngs) for _ in range(sizes.layers)])
        self.norm = LayerNorm(sizes.width, epsilon=sizes.epsilon)

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """``images``: pixels in [-1, 1]."""
        sizes, kernel = self.sizes, self.kernel[...]
        rows, columns = sizes.grid(*images.shape[1:3])
        size = sizes.patch_size
        # In float32, like the residual.
        pixels = images[:, : rows * size, : columns * size].astype(jnp.float32)
        patches = rearrange(pixels, "b (r p) (s q) c -> b (r s) (p q c)", p=size, q=size)
        x = patches @ kernel.reshape(-1, sizes.width).astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        x = x + self.positions[...][assign_positions(rows, columns, sizes.side)].astype(jnp.float32)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).astype(self.layers[0].feed_forward.up.kernel.dtype)


def assign_positions(rows: int, columns: int, side: int) -> Int[np.ndarray, " n"]:
    """Return the position of each patch; a smaller grid is stretched over all positions."""
    row, column = (np.arange(count) * side // count for count in (rows, columns))
    return (row[:, None] * side + column).reshape(-1)


PARTS = {
    "attention_norm": "layer_norm1",
    "feed_forward_norm": "layer_norm2",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}


def vision_tensor(inside: str, *, ours: str, theirs: str) -> Tensor:
    """Return transformers' name of a `VisionTower`'s weight `inside`; the prefixes end with a dot."""
    name = f"{ours}{inside}"
    if inside in ("kernel", "bias"):
        return module_tensor(f"{theirs}embeddings.patch_embedding", name, CONVOLUTION)
    if inside == "positions":
        return Tensor(f"{theirs}embeddings.position_embedding.weight", (name,), SAME)
    part = inside.rpartition(".")[0]
    place = "post_layernorm"
    if part != "norm":
        _, layer, part = part.split(".", 2)
        place = f"encoder.layers.{layer}.{PARTS[part]}"
    return module_tensor(f"{theirs}{place}", name)
