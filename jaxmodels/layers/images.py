"""Resizing of images inside a program with their aspect and padding."""

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
        place: place of the image in the result; in the centre, the smaller half of the border is left and above.

    Source: lerobot/policies/common/vla_utils.py, resize_with_pad and resize_with_pad_torch.
    """
    if images.shape[1:3] == size:
        return images
    inside = _fit(images.shape[1:3], size)
    for axis, count in ((1, inside[0]), (2, inside[1])):
        images = _resize_axis(images, axis, count)
    return _pad(images, size, place, value)


def resize_as_pillow(images: Float[Array, "b h w c"], size: tuple[int, int]) -> Float[Array, "b h2 w2 c"]:
    """Resize pixels of [0, 1] to fit into the middle of ``size`` and fill the rest with 0, as openpi's clients do.

    Bilinear with antialiasing, along rows, then columns, each rounded to integers of 0 to 255. Sources:
    openpi_client/image_tools.py, resize_with_pad; Pillow's src/libImaging/Resample.c.
    """
    if images.shape[1:3] == size:
        return images
    inside = _fit(images.shape[1:3], size)
    pixels = jnp.round(images * 255).astype(jnp.int32)
    for axis, count in ((2, inside[1]), (1, inside[0])):
        indices, weights = _weigh_neighbours(images.shape[axis], count)
        shape = [count if i == axis else 1 for i in range(4)]
        total = jnp.full((), 1 << (_BITS - 1), jnp.int32)  # A half, so that the shift rounds.
        for index, weight in zip(indices.T, weights.T, strict=True):
            total = total + jnp.take(pixels, index, axis=axis) * weight.reshape(shape)
        pixels = jnp.clip(total >> _BITS, 0, 255)
    return _pad(pixels.astype(jnp.float32) / 255, size, "center", 0.0)


_BITS = 22  # Bits of a weight's fraction, as in Pillow.


def _weigh_neighbours(size: int, count: int) -> tuple[Int[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
    """Return the neighbours of `count` pixels among `size` pixels, and their triangular weights in units of 2**-22."""
    scale = size / count
    places = (np.arange(count) + 0.5) * scale
    distance = np.abs(np.arange(size)[None] + 0.5 - places[:, None]) / max(scale, 1.0)
    weights = np.maximum(1 - distance, 0)
    weights /= weights.sum(axis=1, keepdims=True)
    near = int((weights > 0).sum(axis=1).max())
    first = np.minimum(np.argmax(weights > 0, axis=1), size - near)
    indices = first[:, None] + np.arange(near)
    near_weights = np.take_along_axis(weights, indices, axis=1)
    return indices.astype(np.int32), np.floor(near_weights * (1 << _BITS) + 0.5).astype(np.int32)


def _fit(shape: tuple[int, ...], size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of an image of this shape inside ``size``, rounded down."""
    ratio = max(shape[1] / size[1], shape[0] / size[0])
    return max(int(shape[0] / ratio), 1), max(int(shape[1] / ratio), 1)


def _pad(
    images: Float[Array, "b h w c"], size: tuple[int, int], place: Place, value: float
) -> Float[Array, "b h2 w2 c"]:
    inside = images.shape[1:3]
    left = [whole - part for whole, part in zip(size, inside, strict=True)]
    before = left if place == "bottom right" else [rest // 2 for rest in left]
    border = [(part, rest - part) for part, rest in zip(before, left, strict=True)]
    return jnp.pad(images, ((0, 0), *border, (0, 0)), constant_values=value)


def _resize_axis(images: Float[Array, "b h w c"], axis: int, count: int) -> Float[Array, "b h2 w2 c"]:
    size = images.shape[axis]
    if size == count:
        return images
    # Two neighbours per pixel are faster than a product with a sparse matrix.
    scale = np.float32(size / count)
    place = np.maximum(scale * (np.arange(count, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    before = np.minimum(place.astype(np.int32), size - 1)
    after, share = np.minimum(before + 1, size - 1), (place - before).astype(np.float32)
    share = share.reshape([count if i == axis else 1 for i in range(4)])
    return jnp.take(images, before, axis=axis) * (1 - share) + jnp.take(images, after, axis=axis) * share
