"""Frames in the size a policy looks at, made as its serving program makes them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8


@partial(jax.jit, static_argnums=1)
def _resize(frames: jax.Array, size: tuple[int, int]) -> jax.Array:
    resized = jax.image.resize(frames.astype(jnp.float32), (frames.shape[0], *size, 3), "linear")
    return jnp.clip(jnp.round(resized), 0, 255).astype(jnp.uint8)


def resize_frames(frames: UInt8[np.ndarray, "n h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "n h2 w2 3"]:
    """Frames at (height, width): linear with anti-aliasing, rounded to pixels.

    Training on frames resized in another way teaches a policy edges that it will not see when it is served.
    """
    return np.asarray(_resize(frames, size))
