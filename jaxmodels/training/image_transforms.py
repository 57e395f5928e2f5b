"""Image transforms as torchvision computes them, over a batch.

Each takes pictures (b, h, w, 3) and one number per picture (b,), and gives pictures in [0, 1] back.
Source: torchvision/transforms/v2/functional/_color.py and _geometry.py.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Pictures = Float[Array, "b h w 3"]
Numbers = Float[Array, " b"]

LUMA = (0.2989, 0.587, 0.114)


def brightness(x: Pictures, factor: Numbers) -> Pictures:
    return jnp.clip(x * _broadcast(factor), 0, 1)


def contrast(x: Pictures, factor: Numbers) -> Pictures:
    """Blend each picture with its mean grey, by a factor."""
    return _blend(x, _grey(x).mean(axis=(1, 2, 3), keepdims=True), factor)


def saturation(x: Pictures, factor: Numbers) -> Pictures:
    """Blend each pixel with its grey, by a factor."""
    return _blend(x, _grey(x), factor)


def hue(x: Pictures, turn: Numbers) -> Pictures:
    """Rotate the hue; 1 is a whole turn."""
    red, green, blue = x[..., 0], x[..., 1], x[..., 2]
    highest, lowest = x.max(axis=-1), x.min(axis=-1)
    spread = highest - lowest
    safe = jnp.where(spread > 0, spread, 1)
    sector = jnp.where(
        highest == red,
        (green - blue) / safe,
        jnp.where(highest == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    angle = (sector / 6 + turn[:, None, None]) % 1.0
    # Each channel falls by `spread` where the angle is far from its own third of the wheel.
    offsets = jnp.asarray((5.0, 3.0, 1.0), x.dtype)
    away = (offsets + angle[..., None] * 6) % 6
    ramp = jnp.clip(jnp.minimum(away, 4 - away), 0, 1)
    return highest[..., None] - spread[..., None] * ramp


def sharpness(x: Pictures, factor: Numbers) -> Pictures:
    """Blend each picture with one blurred over 3x3 pixels, by a factor; the border stays as it is."""
    kernel = jnp.asarray(((1, 1, 1), (1, 5, 1), (1, 1, 1)), x.dtype) / 13
    weights = jnp.broadcast_to(kernel[..., None, None], (3, 3, 1, 3))
    inner = jax.lax.conv_general_dilated(
        x, weights, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3
    )
    return _blend(x, x.at[:, 1:-1, 1:-1].set(inner), factor)


def affine(x: Pictures, degrees: Numbers, across: Numbers, down: Numbers) -> Pictures:
    """Rotate around the centre and shift by shares of width and height; nearest pixels, black outside."""
    height, width = x.shape[1:3]
    middle = jnp.asarray(((height - 1) / 2, (width - 1) / 2), x.dtype)
    rows, columns = jnp.meshgrid(jnp.arange(height) - middle[0], jnp.arange(width) - middle[1], indexing="ij")

    def one(picture: Float[Array, "h w 3"], angle: Array, dx: Array, dy: Array) -> Float[Array, "h w 3"]:
        # Where each pixel comes from: shifted back, then turned back. Shifts are whole pixels, as torchvision's.
        y, x = rows - jnp.round(dy * height), columns - jnp.round(dx * width)
        sine, cosine = jnp.sin(jnp.deg2rad(angle)), jnp.cos(jnp.deg2rad(angle))
        row = jnp.round(cosine * y - sine * x + middle[0]).astype(jnp.int32)
        column = jnp.round(sine * y + cosine * x + middle[1]).astype(jnp.int32)
        is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        moved = picture[jnp.clip(row, 0, height - 1), jnp.clip(column, 0, width - 1)]
        return jnp.where(is_inside[..., None], moved, 0)

    return jax.vmap(one)(x, degrees, across, down)


def _broadcast(numbers: Numbers) -> Float[Array, "b 1 1 1"]:
    return numbers[:, None, None, None]


def _grey(x: Pictures) -> Float[Array, "b h w 1"]:
    return (x * jnp.asarray(LUMA, x.dtype)).sum(axis=-1, keepdims=True)


def _blend(x: Pictures, other: Array, factor: Numbers) -> Pictures:
    return jnp.clip(_broadcast(factor) * x + (1 - _broadcast(factor)) * other, 0, 1)
