"""ResNets up to their last feature map, with frozen batch norm and optionally a dilated last stage.

Source: torchvision/models/resnet.py (v1.5: the stride of a bottleneck sits in its 3x3 convolution).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers.norm import FrozenBatchNorm

# name -> (is a bottleneck, blocks of each stage)
RESNETS: dict[str, tuple[bool, tuple[int, int, int, int]]] = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
    "resnet152": (True, (3, 8, 36, 3)),
}
STAGE_WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # of a bottleneck

_init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


def convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, dilation: int = 1, *, rngs: nnx.Rngs
) -> nnx.Conv:
    pad = dilation * (size // 2)
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        strides=stride,
        padding=((pad, pad), (pad, pad)),  # "SAME" would pad strided convolutions unlike PyTorch
        kernel_dilation=dilation,
        use_bias=False,
        kernel_init=_init,
        rngs=rngs,
    )


class Block(nnx.Module):
    """Convolutions with norms around a skip connection; the basic kind has two 3x3, the bottleneck 1x1, 3x3, 1x1."""

    def __init__(
        self, inputs: int, width: int, *, bottleneck: bool, stride: int, dilation: int, project: bool, rngs: nnx.Rngs
    ):
        outputs = width * (EXPANSION if bottleneck else 1)
        if bottleneck:
            convolutions = [
                convolution(inputs, width, 1, rngs=rngs),
                convolution(width, width, 3, stride, dilation, rngs=rngs),
                convolution(width, outputs, 1, rngs=rngs),
            ]
        else:
            convolutions = [
                convolution(inputs, width, 3, stride, rngs=rngs),
                convolution(width, width, 3, rngs=rngs),
            ]
        self.convolutions = nnx.List(convolutions)
        self.norms = nnx.List([FrozenBatchNorm(layer.out_features) for layer in convolutions])
        self.projects = project
        if project:
            self.skip = convolution(inputs, outputs, 1, stride, rngs=rngs)
            self.skip_norm = FrozenBatchNorm(outputs)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        skip = self.skip_norm(self.skip(x)) if self.projects else x
        last = len(self.convolutions) - 1
        for i, (layer, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(layer(x))
            if i < last:
                x = jax.nn.relu(x)
        return jax.nn.relu(x + skip)


def max_pool(x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c"]:
    """3x3 with stride 2, the border never being the largest."""
    lowest = jnp.array(-jnp.inf, x.dtype)
    return lax.reduce_window(x, lowest, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


class ResNet(nnx.Module):
    """Images to the feature map of the last stage, 1/32 of their size (1/16 when that stage is dilated).

    Args:
        name: one of `RESNETS`.
        dilate_last: keep the stride of the last stage at 1 and dilate its convolutions instead; bottlenecks only,
            as in torchvision.
    """

    def __init__(self, name: str, *, dilate_last: bool = False, rngs: nnx.Rngs):
        bottleneck, counts = RESNETS[name]
        self.stem = convolution(3, 64, 7, 2, rngs=rngs)
        self.stem_norm = FrozenBatchNorm(64)
        inputs = 64
        stages = []
        for stage, (width, count) in enumerate(zip(STAGE_WIDTHS, counts, strict=True)):
            blocks = []
            outputs = width * (EXPANSION if bottleneck else 1)
            dilate = dilate_last and stage == 3
            for i in range(count):
                stride = 2 if i == 0 and stage > 0 and not dilate else 1
                blocks.append(
                    Block(
                        inputs,
                        width,
                        bottleneck=bottleneck,
                        stride=stride,
                        # The first block keeps the dilation of the stage before it.
                        dilation=2 if dilate and i > 0 else 1,
                        project=i == 0 and (stage > 0 or inputs != outputs),
                        rngs=rngs,
                    )
                )
                inputs = outputs
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)
        self.width = inputs

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 c"]:
        x = max_pool(jax.nn.relu(self.stem_norm(self.stem(images))))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x
