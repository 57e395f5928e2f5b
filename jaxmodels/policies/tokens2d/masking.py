"""Which tokens of a chunk a model in training does not see, and has to predict."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxmodels.samplers import MaskSchedule
from jaxmodels.samplers.masked import ranks


def even_shares(key: PRNGKeyArray, batch: int) -> Float[Array, " {batch}"]:
    """A number in [0, 1) for each member, uniform on its own, and evenly spread over the batch.

    Less noise than independent ones: https://arxiv.org/abs/2107.00630, appendix I.1.
    """
    return (jax.random.uniform(key, (), jnp.float32) + jnp.arange(batch, dtype=jnp.float32) / batch) % 1


def hide(
    schedule: MaskSchedule, is_pad: Bool[Array, "b t"], width: int, prefix_rate: float, key: PRNGKeyArray
) -> Bool[Array, "b t {width}"]:
    """Tokens to predict: of each chunk a random share, at least one.

    Padded steps are not among them. Nor are, in a share `prefix_rate` of the chunks, the first actions, however many:
    a policy that continues a plan sees those.

    Args:
        width: numbers of an action.
    """
    batch, steps = is_pad.shape
    share_key, prefix_key, delay_key, order_key = jax.random.split(key, 4)
    planned = jnp.sum(~is_pad, axis=1).astype(jnp.float32)
    delay = jnp.floor(jax.random.uniform(delay_key, (batch,), jnp.float32) * planned)
    has_prefix = jax.random.uniform(prefix_key, (batch,), jnp.float32) < prefix_rate
    is_past = jnp.arange(steps)[None] < jnp.where(has_prefix, delay, 0).astype(jnp.int32)[:, None]
    can_hide = jnp.repeat(~is_pad & ~is_past, width, axis=1)
    count = schedule.share(even_shares(share_key, batch)) * jnp.sum(can_hide, axis=1).astype(jnp.float32)
    count = jnp.maximum(jnp.ceil(count), 1)
    order = jnp.where(can_hide, jax.random.uniform(order_key, can_hide.shape, jnp.float32), jnp.inf)
    return (can_hide & (ranks(order) < count.astype(jnp.int32)[:, None])).reshape(batch, steps, width)
