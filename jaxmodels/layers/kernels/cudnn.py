"""Attention for NVIDIA cards: cuDNN's fused one, which never writes the scores to memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attend(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: Float[Array, "#b #heads #n m"] | None,
) -> Float[Array, "b n heads k"]:
    """Attention by cuDNN; what it accepts, `takes` says."""
    if bias is not None:  # cuDNN repeats a bias over the batch and the heads, but not over the queries
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], query.shape[1], bias.shape[3])).astype(query.dtype)
    return jax.nn.dot_product_attention(query, key, value, bias, scale=1.0, implementation="cudnn")


def takes(query: Array, key: Array, bias: Array | None) -> bool:
    """Whether cuDNN is there and computes this: half precision, a head size that is a multiple of 8 and not too large.

    Where it is not there, nothing can be compiled for such a card either; a program exported from there for one
    computes attention by batched products.
    """
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    # Its backward pass with a bias wants even lengths, and whether there will be one is not known here.
    if bias is not None and (query.shape[1] % 2 or key.shape[1] % 2):
        return False
    try:
        jax.eval_shape(attend, query, key, key, bias)
    except RuntimeError:  # no cuDNN; NotImplementedError, which is one, for what this version does not compute
        return False
    return True
