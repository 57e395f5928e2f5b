"""Image augmentation for training, with LeRobot's names, ranges and random choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from jaxmodels.errors import ConfigError
from jaxmodels.ranges import COUNT, SHARE, find_number_errors

# Name to (LeRobot's type, smallest number, largest number).
KINDS: dict[str, tuple[str, float, float]] = {
    "brightness": ("ColorJitter", 0.0, 10.0),
    "contrast": ("ColorJitter", 0.0, 10.0),
    "saturation": ("ColorJitter", 0.0, 10.0),
    "hue": ("ColorJitter", -0.5, 0.5),
    "sharpness": ("SharpnessJitter", 0.0, 10.0),
    "affine": ("RandomAffine", -180.0, 180.0),
}
SUFFIX = "wanted an object of name to {weight, type, kwargs}, as LeRobot writes it"


@dataclass(frozen=True)
class Transform:
    """One transform of images, whose strength is drawn from a range for every picture.

    Attributes:
        name: key of `KINDS`; numbers are degrees (``affine``), a share of the colour wheel (``hue``), or a factor.
        weight: relative frequency of the transform.
        translate: largest shift of an ``affine``, as shares of width and height.

    Example:
        >>> Transform("brightness", 0.8, 1.2).weight
        1.0
    """

    name: str
    low: float
    high: float
    weight: float = 1.0
    translate: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise ConfigError(f"image transform is {self.name!r}; known: {', '.join(KINDS)}")
        _, least, most = KINDS[self.name]
        if not least <= self.low <= self.high <= most:
            raise ConfigError(
                f"image transform {self.name}: from {self.low} to {self.high}; wanted within {least:g} to {most:g}"
            )
        if not 0 <= self.weight < float("inf") or not all(0 <= share <= 1 for share in self.translate):
            raise ConfigError(
                f"image transform {self.name}: weight {self.weight}, translate {self.translate}; wanted shares"
            )


LEROBOT = (
    Transform("brightness", 0.8, 1.2),
    Transform("contrast", 0.8, 1.2),
    Transform("saturation", 0.5, 1.5),
    Transform("hue", -0.05, 0.05),
    Transform("sharpness", 0.5, 1.5),
    Transform("affine", -5.0, 5.0, translate=(0.05, 0.05)),
)


@dataclass(frozen=True)
class ImageTransforms:
    """LeRobot's `ImageTransformsConfig` (lerobot/datasets/transforms.py), and noise.

    Attributes:
        enable: whether `tfs` are applied.
        max_num_transforms: number of transforms that are chosen for each picture.
        tfs: the transforms, in the order in which they are applied.
        noise: standard deviation per pixel, as a share of the full range, independent of `enable`.

    Example:
        >>> transforms = ImageTransforms(enable=True, tfs=(Transform("hue", -0.1, 0.1),), noise=0.01)
        >>> [transform.name for transform in transforms.active]
        ['hue']
    """

    enable: bool = False
    max_num_transforms: Annotated[int, COUNT] = 3
    tfs: tuple[Transform, ...] = LEROBOT
    noise: Annotated[float, SHARE] = 0.0

    def __post_init__(self) -> None:
        wrong = find_number_errors(self)
        names = [transform.name for transform in self.tfs]
        if len(set(names)) < len(names):
            wrong.append(f"tfs has {', '.join(names)}; wanted each name once")
        if wrong:
            raise ConfigError("image transforms: " + "; ".join(wrong))

    @property
    def active(self) -> tuple[Transform, ...]:
        return tuple(transform for transform in self.tfs if transform.weight > 0) if self.enable else ()


def parse_transforms(values: Any) -> tuple[Transform, ...]:
    """Parse LeRobot's ``tfs``: ``{"hue": {"weight": 1.0, "type": "ColorJitter", "kwargs": {"hue": [-0.05, 0.05]}}}``.

    Raises:
        ConfigError: the form is wrong, or a transform is unknown.

    Example:
        >>> parse_transforms({"hue": {"type": "ColorJitter", "kwargs": {"hue": 0.1}}})
        (Transform(name='hue', low=-0.1, high=0.1, weight=1.0, translate=(0.0, 0.0)),)
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"tfs is {values!r}; {SUFFIX}")
    return tuple(_parse(str(name), entry) for name, entry in values.items())


def _parse(name: str, entry: Any) -> Transform:
    if not isinstance(entry, Mapping) or not {"type", "kwargs"} <= set(entry) <= {"weight", "type", "kwargs"}:
        raise ConfigError(f"tfs.{name} is {entry!r}; {SUFFIX}")
    kwargs = dict(entry["kwargs"])
    translate = tuple(kwargs.pop("translate", (0.0, 0.0)))
    key = "degrees" if entry["type"] == "RandomAffine" else next(iter(kwargs), "")
    kind = "affine" if entry["type"] == "RandomAffine" else key
    if len(kwargs) != 1 or kind not in KINDS or KINDS[kind][0] != entry["type"]:
        known = ", ".join(f"{kind} ({name})" for name, (kind, _, _) in KINDS.items())
        raise ConfigError(f"tfs.{name} is {entry['type']} with {sorted(entry['kwargs'])}; known: {known}")
    values = kwargs[key]
    middle = 0.0 if kind in ("hue", "affine") else 1.0
    # One number is the distance to both sides; a factor is at least 0.
    is_one = isinstance(values, int | float)
    low, high = (max(middle - values, KINDS[kind][1]), middle + values) if is_one else values
    return Transform(kind, float(low), float(high), float(entry.get("weight", 1.0)), translate)


def augment(frames: UInt8[Array, "b h w 3"], config: ImageTransforms, key: PRNGKeyArray) -> UInt8[Array, "b h w 3"]:
    """Apply random transforms to frames, and round back to uint8."""
    if not config.active and not config.noise:
        return frames
    choice, numbers, grain = jax.random.split(key, 3)
    x = frames.astype(jnp.float32) / 255
    if config.active:
        chosen = _choose(config, frames.shape[0], choice)
        for index, transform in enumerate(config.active):
            drawn = _apply(x, transform, jax.random.fold_in(numbers, index))
            x = jnp.where(chosen[:, index, None, None, None], drawn, x)
    if config.noise:
        x = x + config.noise * jax.random.normal(grain, x.shape, jnp.float32)
    return jnp.clip(jnp.round(x * 255), 0, 255).astype(jnp.uint8)


def augment_moments(
    frames: UInt8[Array, "b *t h w 3"], config: ImageTransforms, key: PRNGKeyArray
) -> UInt8[Array, "b *t h w 3"]:
    """Apply random transforms to frames, the same to all moments of an example."""
    if frames.ndim == 4:
        return augment(frames, config, key)
    return jax.vmap(lambda moment: augment(moment, config, key), in_axes=1, out_axes=1)(frames)


def _choose(config: ImageTransforms, count: int, key: PRNGKeyArray) -> Array:
    """Choose the transforms of each picture: drawn by weight without replacement (largest Gumbel scores)."""
    weights = jnp.log(jnp.asarray([transform.weight for transform in config.active], jnp.float32))
    scores = weights + jax.random.gumbel(key, (count, len(config.active)), jnp.float32)
    picks = min(config.max_num_transforms, len(config.active))
    return scores >= jnp.sort(scores, axis=-1)[:, -picks, None]


def _apply(x: Float[Array, "b h w 3"], transform: Transform, key: PRNGKeyArray) -> Float[Array, "b h w 3"]:
    def uniform(key: PRNGKeyArray, low: float, high: float) -> Array:
        return jax.random.uniform(key, x.shape[:1], jnp.float32, low, high)

    if transform.name == "affine":
        keys, (across, down) = jax.random.split(key, 3), transform.translate
        angles = uniform(keys[0], transform.low, transform.high)
        return affine(x, angles, uniform(keys[1], -across, across), uniform(keys[2], -down, down))
    return _FACTORS[transform.name](x, uniform(key, transform.low, transform.high))


# torchvision's transforms of pictures (b, h, w, 3) in [0, 1] by a number per picture (b,).
# Source: torchvision/transforms/v2/functional/_color.py and _geometry.py.

Pictures = Float[Array, "b h w 3"]
Numbers = Float[Array, " b"]

LUMA = (0.2989, 0.587, 0.114)


def brightness(x: Pictures, factor: Numbers) -> Pictures:
    """Multiply pixels by a factor."""
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
    """Blend each picture with its blur over 3x3 pixels, by a factor; the border stays unchanged."""
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
        # The source of each pixel: shifted back, then rotated back. Shifts are whole pixels, as in torchvision.
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


_FACTORS = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
    "sharpness": sharpness,
}
