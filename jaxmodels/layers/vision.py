"""Vision backbones: ResNets, a small CNN, and Winograd's 3x3 convolution.

Source: torchvision/models/resnet.py (v1.5: the stride of a bottleneck is in its 3x3 convolution).

Winograd (https://arxiv.org/abs/1509.09308) computes every 2x2 tile of the output from a 4x4 tile of the input by sums
and sixteen small matrix products, which is faster on CPUs if the intermediate planes stay in the cache.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers.norm import Buffer, FrozenBatchNorm, GroupNorm

# Name to (is a bottleneck, blocks of each stage).
RESNETS: dict[str, tuple[bool, tuple[int, int, int, int]]] = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
    "resnet152": (True, (3, 8, 36, 3)),
}
STAGE_WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # Output channels of a bottleneck per inner channel.

_init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


def convolve(
    x: Float[Array, "b h w c"], kernel: Float[Array, "k k c c2"], stride: int = 1, dilation: int = 1
) -> Float[Array, "b h2 w2 c2"]:
    """Convolve with a border of zeros that keeps the size except for the stride, as torchvision's ResNets do.

    Maps that are not larger than the kernel use a product, because XLA's convolution on a CPU is slow for them.
    """
    size = kernel.shape[0]
    pad = dilation * (size // 2)
    rows, columns = (-(-side // stride) for side in x.shape[1:3])
    if min(rows, columns) < size and dilation == 1:
        x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        ends = stride * (rows - 1) + 1, stride * (columns - 1) + 1
        looks = [x[:, i : i + ends[0] : stride, j : j + ends[1] : stride] for i in range(size) for j in range(size)]
        return jnp.concatenate(looks, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((pad, pad), (pad, pad)),
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


class Convolution(nnx.Module):
    """Convolution without a bias, by `convolve`, or by `convolve_winograd` if the kernel is transformed for it.

    `nnx.Conv` has neither the product for small maps nor Winograd's algorithm: a 60x80 map of 128 channels takes 1.6
    times as long without the latter (AMD EPYC, 2 cores).
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, dilation: int = 1, *, rngs: nnx.Rngs):
        self.stride, self.dilation = stride, dilation
        self.kernel = nnx.Param(_init(rngs.params(), (size, size, inputs, outputs), jnp.float32))

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        kernel = self.kernel[...]
        return convolve_winograd(x, kernel) if kernel.ndim == 3 else convolve(x, kernel, self.stride, self.dilation)


class BlockPlan(NamedTuple):
    """Shapes of one residual block.

    Attributes:
        convolutions: (input channels, kernel size, stride, dilation) of each convolution.
        scale: pixels of the image per pixel of the block's output, per side.
        projects: whether the skip connection has a convolution with stride `stride`.
    """

    stage: int
    position: int
    convolutions: tuple[tuple[int, int, int, int], ...]
    outputs: int
    stride: int
    scale: int
    projects: bool

    @property
    def inputs(self) -> int:
        return self.convolutions[0][0]


def plan_blocks(name: str, dilate_last: bool = False) -> Iterator[BlockPlan]:
    """Yield the shapes of the residual blocks of a ResNet, in order."""
    is_bottleneck, counts = RESNETS[name]
    inputs, scale = STAGE_WIDTHS[0], 4
    for stage, (width, count) in enumerate(zip(STAGE_WIDTHS, counts, strict=True)):
        outputs = width * EXPANSION if is_bottleneck else width
        is_dilated = dilate_last and stage == 3
        for position in range(count):
            stride = 2 if position == 0 and stage > 0 and not is_dilated else 1
            # The first block keeps the dilation of the stage before it.
            dilation = 2 if is_dilated and position > 0 else 1
            scale *= stride
            if is_bottleneck:
                convolutions = ((inputs, 1, 1, 1), (width, 3, stride, dilation), (width, 1, 1, 1))
            else:
                convolutions = ((inputs, 3, stride, 1), (width, 3, 1, 1))
            projects = stride != 1 or inputs != outputs
            yield BlockPlan(stage, position, convolutions, outputs, stride, scale, projects)
            inputs = outputs


def measure_feature_map(name: str, frame: tuple[int, int], dilate_last: bool = False) -> tuple[int, int]:
    """Return height and width of a backbone's last feature map for a frame of this height and width."""
    scale = 2 ** (4 if name not in RESNETS or dilate_last else 5)
    return -(-frame[0] // scale), -(-frame[1] // scale)


Norm: TypeAlias = Callable[[int], nnx.Module]  # Number of channels to a norm.


class ResNetBlock(nnx.Module):
    """Residual block of a ResNet: two 3x3 convolutions (basic), or 1x1, 3x3 and 1x1 (bottleneck)."""

    def __init__(self, plan: BlockPlan, *, norm: Norm = FrozenBatchNorm, rngs: nnx.Rngs):
        widths = [inputs for inputs, *_ in plan.convolutions[1:]] + [plan.outputs]
        self.convolutions = nnx.List(
            [
                Convolution(inputs, outputs, size, stride, dilation, rngs=rngs)
                for (inputs, size, stride, dilation), outputs in zip(plan.convolutions, widths, strict=True)
            ]
        )
        self.norms = nnx.List([norm(width) for width in widths])
        self.projects = plan.projects
        if plan.projects:
            self.skip = Convolution(plan.inputs, plan.outputs, 1, plan.stride, rngs=rngs)
            self.skip_norm = norm(plan.outputs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        skip = self.skip_norm(self.skip(x)) if self.projects else x
        last = len(self.convolutions) - 1
        for i, (layer, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(layer(x))
            if i < last:
                x = jax.nn.relu(x)
        return jax.nn.relu(x + skip)


def max_pool(x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c"]:
    """3x3 max pooling with stride 2; the border never wins."""
    padding: Any = ((1, 1), (1, 1))  # Flax declares only a string.
    return nnx.max_pool(x, (3, 3), strides=(2, 2), padding=padding)


class ResNet(nnx.Module):
    """ResNet without classifier: images to the last feature map, 1/32 of their size (1/16 when dilated).

    Args:
        name: key of `RESNETS`.
        dilate_last: dilate the last stage instead of its stride; bottlenecks only, as in torchvision.
        norm: number of channels to the norm that follows each convolution.
    """

    def __init__(self, name: str, *, dilate_last: bool = False, norm: Norm = FrozenBatchNorm, rngs: nnx.Rngs):
        self.stem = Convolution(3, STAGE_WIDTHS[0], 7, 2, rngs=rngs)
        self.stem_norm = norm(STAGE_WIDTHS[0])
        plans = list(plan_blocks(name, dilate_last))
        self.stages = nnx.List(
            [
                nnx.List([ResNetBlock(plan, norm=norm, rngs=rngs) for plan in plans if plan.stage == stage])
                for stage in range(len(STAGE_WIDTHS))
            ]
        )
        self.width = plans[-1].outputs

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 c"]:
        x = max_pool(jax.nn.relu(self.stem_norm(self.stem(images))))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


class SpatialSoftmax(nnx.Module):
    """Expected places of `keypoints` in a feature map of `channels` and `size` (h, w): column and row in [-1, 1].

    Sources: https://arxiv.org/abs/1509.06113; lerobot/policies/diffusion/modeling_diffusion.py.
    """

    def __init__(self, size: tuple[int, int], channels: int, keypoints: int, *, rngs: nnx.Rngs):
        self.maps = nnx.Linear(channels, keypoints, rngs=rngs)
        self.grid = Buffer(jnp.asarray(coordinates(*size)[..., ::-1].reshape(-1, 2)))

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b k 2"]:
        maps = rearrange(self.maps(x), "b h w k -> b k (h w)").astype(jnp.float32)
        return (jax.nn.softmax(maps, axis=-1) @ self.grid[...].astype(jnp.float32)).astype(x.dtype)


_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)


def transform_winograd_kernel(kernel: Float[Any, "3 3 c c2"]) -> Float[Any, "16 c c2"]:
    """Transform a 3x3 kernel for `convolve_winograd`."""
    inputs, outputs = kernel.shape[2:]
    return (np.kron(_KERNEL, _KERNEL) @ kernel.reshape(9, -1)).reshape(16, inputs, outputs)


def count_winograd_bytes(height: int, width: int, channels: int) -> int:
    """Return the bytes of the float32 planes of one image in `convolve_winograd`."""
    return 4 * 16 * -(-height // 2) * -(-width // 2) * channels


def convolve_winograd(x: Float[Array, "b h w c"], kernel: Float[Array, "16 c c2"]) -> Float[Array, "b h w c2"]:
    """3x3 convolution with stride 1 and zero padding, by Winograd's algorithm."""
    batch, height, width, channels = x.shape
    rows, columns = -(-height // 2), -(-width // 2)
    x = jnp.pad(x, ((0, 0), (1, 1 + 2 * rows - height), (1, 1 + 2 * columns - width), (0, 0)))
    planes = []
    for row in _transform_input_tile([x[:, i : i + 2 * rows - 1 : 2] for i in range(4)]):
        planes += _transform_input_tile([row[:, :, j : j + 2 * columns - 1 : 2] for j in range(4)])
    spread = jnp.stack(planes).reshape(16, batch * rows * columns, channels)
    mixed = jnp.einsum("pnc,pcd->pnd", spread, kernel).reshape(4, 4, batch, rows, columns, -1)
    lines = []
    for line in _transform_output_tile([mixed[i] for i in range(4)]):
        pixels = jnp.stack(_transform_output_tile([line[j] for j in range(4)]), axis=3)
        lines.append(pixels.reshape(batch, rows, 2 * columns, -1))
    out = jnp.stack(lines, axis=2).reshape(batch, 2 * rows, 2 * columns, -1)
    return out[:, :height, :width]


def _transform_input_tile(tile: list[Array]) -> list[Array]:
    return [tile[0] - tile[2], tile[1] + tile[2], tile[2] - tile[1], tile[1] - tile[3]]


def _transform_output_tile(tile: list[Array]) -> list[Array]:
    return [tile[0] + tile[1] + tile[2], tile[1] - tile[2] - tile[3]]


WIDTHS = (16, 32, 64, 128)
GROUPS = 8


def coordinates(height: int, width: int) -> Float[np.ndarray, "h w 2"]:
    """Return row and column of each pixel in [-1, 1], as extra channels."""
    rows, columns = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    return np.stack((rows, columns), axis=-1).astype(np.float32)


class SmallCnn(nnx.Module):
    """Small CNN of about 0.1 M parameters: images to a feature map of 1/16 of their size (96x96 to 6x6)."""

    def __init__(self, *, rngs: nnx.Rngs):
        inputs = (3 + 2, *WIDTHS[:-1])
        self.convolutions = nnx.List(
            [
                nnx.Conv(before, after, (3, 3), strides=2, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
                for before, after in zip(inputs, WIDTHS, strict=True)
            ]
        )
        self.norms = nnx.List([GroupNorm(width, GROUPS) for width in WIDTHS])
        self.width = WIDTHS[-1]

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 c"]:
        where = jnp.asarray(coordinates(images.shape[1], images.shape[2]), images.dtype)
        x = jnp.concatenate((images, jnp.broadcast_to(where, (*images.shape[:-1], 2))), axis=-1)
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            x = jax.nn.relu(norm(layer(x)))
        return x
