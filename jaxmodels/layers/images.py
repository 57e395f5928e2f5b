"""Resizing of images inside a program that keeps their aspect: what is left is filled with one value."""

from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Place: TypeAlias = Literal["center", "bottom right"]


def resize_with_padding(
    images: Float[Array, "b h w c"], size: tuple[int, int], *, place: Place, value: float = 0.0
) -> Float[Array, "b h2 w2 c"]:
    """Resize to fit into ``size`` (height, width) and fill the rest with `value`; images of that size stay as they are.

    Bilinear with half-pixel centres and without antialiasing, as torch's interpolate; sizes are rounded down.

    Args:
        place: where in the result the image lies. In the centre the smaller half of the border is left and above.

    Source: lerobot/policies/common/vla_utils.py, resize_with_pad and resize_with_pad_torch.
    """
    height, width = images.shape[1:3]
    if (height, width) == size:
        return images
    ratio = max(width / size[1], height / size[0])
    inside = max(int(height / ratio), 1), max(int(width / ratio), 1)
    for axis, count in ((1, inside[0]), (2, inside[1])):
        images = _resize_axis(images, axis, count)
    left = [whole - part for whole, part in zip(size, inside, strict=True)]
    before = left if place == "bottom right" else [rest // 2 for rest in left]
    border = [(part, rest - part) for part, rest in zip(before, left, strict=True)]
    return jnp.pad(images, ((0, 0), *border, (0, 0)), constant_values=value)


def _resize_axis(images: Float[Array, "b h w c"], axis: int, count: int) -> Float[Array, "b h2 w2 c"]:
    size = images.shape[axis]
    if size == count:
        return images
    # Two neighbours each, instead of a product with a matrix that is almost all zeros.
    before, after, share = _list_neighbours(size, count)
    share = share.reshape([count if i == axis else 1 for i in range(4)])
    return jnp.take(images, before, axis=axis) * (1 - share) + jnp.take(images, after, axis=axis) * share


def _list_neighbours(
    size: int, count: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Of each of `count` pixels: the two of `size` that it lies between, and the share of the second."""
    scale = np.float32(size / count)
    place = np.maximum(scale * (np.arange(count, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    before = np.minimum(place.astype(np.int32), size - 1)
    return before, np.minimum(before + 1, size - 1), (place - before).astype(np.float32)
