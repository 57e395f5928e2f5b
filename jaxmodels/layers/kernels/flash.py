"""Attention for TPUs over long sequences: the flash attention kernel that comes with JAX.

Source: https://arxiv.org/abs/2205.14135, jax.experimental.pallas.ops.tpu.flash_attention.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

# Below, XLA's own fusion of the batched products is as good: the scores of a head fit the memory on the chip.
LONG = 1024
LANES = 128
BLOCKS = (512, 256, 128)


def takes(query: Array, key: Array, bias: Array | None) -> bool:
    """Whether the kernel computes this and is worth it: long sequences of whole blocks.

    Not with a bias: the kernel wants it repeated for every head and query, which is as large as the scores.
    """
    lengths = (query.shape[1], key.shape[1])
    return bias is None and min(lengths) >= LONG and all(length % BLOCKS[-1] == 0 for length in lengths)


def attend(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: None = None,
) -> Float[Array, "b n heads k"]:
    """Attention that holds one block of scores on the chip, forwards and backwards."""
    # Here, as Pallas takes 0.16 s to import, and few policies have so many tokens.
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    size = query.shape[-1]
    # The kernel works on whole rows of lanes; channels of zeros change neither scores nor the channels before them.
    channels = ((0, 0), (0, 0), (0, 0), (0, -size % LANES))
    q, k, v = (jnp.pad(jnp.swapaxes(x, 1, 2), channels) for x in (query, key, value))
    n, m = (next(size for size in BLOCKS if x.shape[2] % size == 0) for x in (q, k))
    sizes = BlockSizes(
        block_q=n,
        block_k_major=m,
        block_k=m,
        block_b=1,
        block_q_major_dkv=n,
        block_k_major_dkv=m,
        block_k_dkv=m,
        block_q_dkv=n,
        block_k_major_dq=m,
        block_k_dq=m,
        block_q_dq=n,
    )
    return jnp.swapaxes(flash_attention(q, k, v, block_sizes=sizes), 1, 2)[..., :size]
