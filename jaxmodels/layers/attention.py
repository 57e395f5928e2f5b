"""Multi-head attention and its kernels: batched, blocked for CPUs, cuDNN, flash attention for TPUs.

On a CPU, blocks of two-dimensional products keep a block's scores in the cache.
Source: https://arxiv.org/abs/2205.14135, jax.experimental.pallas.ops.tpu.flash_attention.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers.feed_forward import dropout, split_rows
from jaxmodels.quantization import QUANTIZABLE

Queries: TypeAlias = Float[Array, "b n heads k"]
Keys: TypeAlias = Float[Array, "b m heads k"]
Bias: TypeAlias = Float[Array, "#b #heads #n m"]
# Scores in memory at once: 1 GiB of float32.
WHOLE_SCORES = 1 << 28


def attend_whole(
    query: Queries, key: Keys, value: Keys, bias: Bias | None, rate: float = 0.0, rngs: nnx.Rngs | None = None
) -> Queries:
    """Attention with all scores in memory at once; probabilities are dropped with `rate` if `rngs` is given."""
    scores = jnp.einsum("bnhk,bmhk->bhnm", query, key, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    powers, total = compute_exponents(scores)
    weights = dropout(powers, rate, rngs).astype(value.dtype)
    mixed = jnp.einsum("bhnm,bmhk->bhnk", weights, value, preferred_element_type=jnp.float32) / total
    return jnp.swapaxes(mixed, 1, 2).astype(query.dtype)


def compute_exponents(scores: Float[Array, "... n m"]) -> tuple[Float[Array, "... n m"], Float[Array, "... n 1"]]:
    """Return the exponentials of a softmax and their sums, because dividing the mixed values costs less."""
    # A shift of a whole row changes neither the softmax nor its gradient.
    powers = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return powers, powers.sum(axis=-1, keepdims=True)


def attend_in_parts(query: Queries, key: Keys, value: Keys, bias: Bias | None) -> Queries:
    """Attention over parts of the queries in a loop, with at most `WHOLE_SCORES` scores in memory."""
    batch, length, heads, _ = query.shape
    parts = min(length, math.ceil(batch * heads * length * key.shape[1] / WHOLE_SCORES))
    if parts == 1:
        return attend_whole(query, key, value, bias)
    queries = split_rows(query, 1, parts)
    biases = None if bias is None or bias.shape[2] == 1 else split_rows(bias, 2, parts)

    @jax.checkpoint
    def one(part: tuple[Array, Array | None]) -> Array:
        return attend_whole(part[0], key, value, bias if part[1] is None else part[1])

    return rearrange(lax.map(one, (queries, biases)), "i b n h k -> b (i n) h k")[:, :length]


# Limits measured with 16 to 4096 queries and keys, on two cores with 1 MB of cache each.
# Most scores per head, or in all heads, of one batched product, which starts faster than many products.
BATCHED_PER_HEAD = 1 << 16
BATCHED = 1 << 22
# Most scores per head, and most heads, that are written out without a loop and its copies.
WRITTEN_OUT_PER_HEAD = 1 << 19
WRITTEN_OUT_HEADS = 16
# Scores in a block of a loop, and its fewest queries, because products of few rows are slow.
BLOCK_SCORES = 1 << 21
BLOCK_QUERIES = 256


def attend_blocked(query: Queries, key: Keys, value: Keys, bias: Bias | None) -> Queries:
    """Attention with the scores of one block in memory, which the backward pass recomputes."""
    batch, length, heads, _ = query.shape
    scores = length * key.shape[1]
    if scores <= BATCHED_PER_HEAD:
        return attend_whole(query, key, value, bias)
    if scores <= WRITTEN_OUT_PER_HEAD and batch * heads <= WRITTEN_OUT_HEADS:
        return _attend_head_by_head(query, key, value, bias)
    if batch * heads * scores <= BATCHED:
        return attend_whole(query, key, value, bias)
    return _attend_in_loops(query, key, value, bias)


def _attend_in_loops(query: Array, key: Array, value: Array, bias: Array | None) -> Array:
    """Attention in a loop over heads, and within it over blocks of queries."""
    batch, length, heads, _ = query.shape
    count = math.ceil(length / max(BLOCK_QUERIES, BLOCK_SCORES // key.shape[1]))
    queries, keys, values = (jnp.swapaxes(x, 1, 2).reshape(batch * heads, -1, x.shape[-1]) for x in (query, key, value))

    def head(inputs: tuple[Array, Array, Array, Array]) -> Array:
        index, query, key, value = inputs
        own = None if bias is None else bias[index // heads % bias.shape[0], index % heads % bias.shape[1]]
        blocks = split_rows(query, 0, count)
        biases = None if own is None or len(own) == 1 else split_rows(own, 0, count)

        def block(part: tuple[Array, Array | None]) -> Array:
            return _attend_block(part[0], key, value, own if part[1] is None else part[1])

        return lax.map(block, (blocks, biases)).reshape(-1, query.shape[-1])[:length]

    mixed = lax.map(head, (jnp.arange(batch * heads), queries, keys, values))
    return jnp.swapaxes(mixed.reshape(batch, heads, length, -1), 1, 2)


def _attend_head_by_head(query: Array, key: Array, value: Array, bias: Array | None) -> Array:
    def head(i: int, j: int) -> Array:
        own = None if bias is None else bias[i % bias.shape[0], j % bias.shape[1]]
        return _attend_block(query[i, :, j], key[i, :, j], value[i, :, j], own)

    batch, _, heads, _ = query.shape
    return jnp.stack([jnp.stack([head(i, j) for j in range(heads)], axis=1) for i in range(batch)])


@jax.checkpoint
def _attend_block(
    query: Float[Array, "n k"], key: Float[Array, "m k"], value: Float[Array, "m k"], bias: Float[Array, "#n m"] | None
) -> Float[Array, "n k"]:
    scores = jnp.matmul(query, key.T, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    powers, total = compute_exponents(scores)
    mixed = jnp.matmul(powers.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return (mixed / total).astype(query.dtype)


# With fewer tokens, the scores of a head fit the memory on the chip, and XLA's fusion is as fast.
FLASH_TOKENS = 1024
FLASH_LANES = 128
FLASH_BLOCKS = (512, 256, 128)


def is_flash_supported(query: Array, key: Array, bias: Array | None) -> bool:
    """Return whether the TPU kernel pays off: long sequences of whole blocks, without a bias that it would repeat."""
    lengths = (query.shape[1], key.shape[1])
    return bias is None and min(lengths) >= FLASH_TOKENS and all(length % FLASH_BLOCKS[-1] == 0 for length in lengths)


def attend_flash(query: Queries, key: Keys, value: Keys, bias: None = None) -> Queries:
    """Flash attention on a TPU: one block of scores on the chip, in both passes."""
    # Imported here, because Pallas is slow to import and few policies have enough tokens.
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    size = query.shape[-1]
    # The kernel needs whole rows of lanes; channels of zeros change neither scores nor other channels.
    channels = ((0, 0), (0, 0), (0, 0), (0, -size % FLASH_LANES))
    q, k, v = (jnp.pad(jnp.swapaxes(x, 1, 2), channels) for x in (query, key, value))
    n, m = (next(size for size in FLASH_BLOCKS if x.shape[2] % size == 0) for x in (q, k))
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


def attend_cudnn(query: Queries, key: Keys, value: Keys, bias: Bias | None) -> Queries:
    """Attention by cuDNN, for arguments that `is_cudnn_supported` accepts."""
    if bias is not None:  # cuDNN broadcasts a bias over the batch and the heads, but not over the queries.
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], query.shape[1], bias.shape[3])).astype(query.dtype)
    return jax.nn.dot_product_attention(query, key, value, bias, scale=1.0, implementation="cudnn")


def is_cudnn_supported(query: Array, key: Array, bias: Array | None) -> bool:
    """Return whether cuDNN is installed and supports this, e.g. half precision and head sizes of multiples of 8."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    # The backward pass with a bias needs even lengths, and it is unknown here whether there will be one.
    if bias is not None and (query.shape[1] % 2 or key.shape[1] % 2):
        return False
    try:
        jax.eval_shape(attend_cudnn, query, key, key, bias)
    except RuntimeError:  # There is no cuDNN, or (NotImplementedError) this version cannot compute it.
        return False
    return True


# torch.nn.MultiheadAttention's default: Xavier over the joint query-key-value matrix, whose fan_out is three widths.
_joint_init = nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform")
_xavier_init = nnx.initializers.xavier_uniform()


def attend(
    query: Queries,
    key: Keys,
    value: Keys,
    bias: Bias | None = None,
    rate: float = 0.0,
    rngs: nnx.Rngs | None = None,
    *,
    scale: float | None = None,
) -> Queries:
    """Softmax attention by the kernel that is fastest for these shapes on the platform it is lowered for.

    The softmax is in float32. Without dropout, many scores are never in memory at once.

    Args:
        bias: added to the scores (-inf excludes a key); a constant without a gradient.
        rate: share of the probabilities that is dropped if `rngs` is given; all scores are then in memory at once.
        scale: factor of the scores; 1 / sqrt(k) when None.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if scale != 1.0:
        query = query * jnp.asarray(scale, query.dtype)
    if bias is not None:
        bias = lax.stop_gradient(bias)  # cuDNN has no gradient for a bias that is broadcast.
    if rngs is not None and rate > 0.0:
        return attend_whole(query, key, value, bias, rate, rngs)
    own: dict[str, Callable[..., Array]] = {"cpu": attend_blocked}
    if is_cudnn_supported(query, key, bias):
        own["cuda"] = attend_cudnn
    if is_flash_supported(query, key, bias):
        own["tpu"] = attend_flash
    return lax.platform_dependent(query, key, value, bias, default=attend_in_parts, **own)


class Attention(nnx.Module):
    """Multi-head attention over `width` channels (a multiple of `heads`); `rate` is the dropout of probabilities."""

    def __init__(self, width: int, heads: int, *, rate: float = 0.0, rngs: nnx.Rngs):
        self.heads = heads
        self.rate = rate
        self.query = nnx.Linear(width, width, kernel_init=_joint_init, rngs=rngs, **QUANTIZABLE)
        self.key = nnx.Linear(width, width, kernel_init=_joint_init, rngs=rngs, **QUANTIZABLE)
        self.value = nnx.Linear(width, width, kernel_init=_joint_init, rngs=rngs, **QUANTIZABLE)
        self.out = nnx.Linear(width, width, kernel_init=_xavier_init, rngs=rngs, **QUANTIZABLE)

    def __call__(
        self,
        query: Float[Array, "b n d"],
        key: Float[Array, "b m d"],
        value: Float[Array, "b m d"],
        bias: Bias | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b n d"]:
        split = "b n (h k) -> b n h k"
        mixed = attend(
            rearrange(self.query(query), split, h=self.heads),
            rearrange(self.key(key), split, h=self.heads),
            rearrange(self.value(value), split, h=self.heads),
            bias,
            self.rate,
            rngs,
        )
        return self.out(rearrange(mixed, "b n h k -> b n (h k)"))
