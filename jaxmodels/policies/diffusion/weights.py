"""Diffusion Policy's weights: LeRobot's tensor names and layouts."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxmodels.checkpoints.backbones import backbone_tensor
from jaxmodels.checkpoints.tensor_layouts import LINEAR, POINTWISE, SAME, TIME_CONVOLUTION, UPSAMPLE, Layout, Tensor

# Where a ResNet is a list of its parts, as torch's Sequential names them.
PARTS = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}
BLOCKS = {"first": "0", "second": "1", "change": "2"}


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """The table for the weights of one config, given our names of them."""
    return tuple(_image_encoder(name) if name.startswith("encoder") else _unet(name) for name in names)


def prepare(config: Any, weights: Mapping[str, np.ndarray], platform: str) -> dict[str, np.ndarray]:
    """The weights as they are."""
    del config, platform
    return dict(weights)


def _image_encoder(name: str) -> Tensor:
    """``encoder.`` is shared by all cameras, ``encoders.0.`` the first one's own."""
    first, _, rest = name.partition(".")
    ours, theirs = "encoder.", "diffusion.rgb_encoder."
    if first == "encoders":
        camera, _, rest = rest.partition(".")
        ours, theirs = f"encoders.{camera}.", f"diffusion.rgb_encoder.{camera}."
    part, _, inside = rest.partition(".")
    match part, inside:
        case "backbone", _:
            tensor = backbone_tensor(inside, ours=f"{ours}backbone.")
            head, _, tail = tensor.theirs.partition(".")
            return Tensor(f"{theirs}backbone.{PARTS[head]}.{tail}", tensor.ours, tensor.layout)
        case "pool", "grid":
            return Tensor(f"{theirs}pool.pos_grid", (name,), SAME)
        case "pool", "maps.kernel":
            return Tensor(f"{theirs}pool.nets.weight", (name,), POINTWISE)
        case "pool", _:
            return Tensor(f"{theirs}pool.nets.bias", (name,), SAME)
    return _linear(f"{theirs}out", name)


def _unet(name: str) -> Tensor:
    stack, _, rest = name.removeprefix("unet.").partition(".")
    match stack:
        case "step_up" | "step_down":
            return _linear(f"diffusion.unet.diffusion_step_encoder.{1 if stack == 'step_up' else 3}", name)
        case "last":
            return _block("diffusion.unet.final_conv.0", name, rest)
        case "out":
            return _convolution("diffusion.unet.final_conv.1", name)
        case "middle":
            block, _, rest = rest.partition(".")
            return _residual(f"diffusion.unet.mid_modules.{block}", name, rest)
    level, part, rest = rest.split(".", 2)
    theirs = f"diffusion.unet.{stack}_modules.{level}.{BLOCKS[part]}"
    if part != "change":
        return _residual(theirs, name, rest)
    return _convolution(theirs, name, UPSAMPLE if stack == "up" else TIME_CONVOLUTION)


def _residual(theirs: str, name: str, rest: str) -> Tensor:
    part, _, inside = rest.partition(".")
    if part == "film":
        return _linear(f"{theirs}.cond_encoder.1", name)
    if part == "skip":
        return _convolution(f"{theirs}.residual_conv", name)
    return _block(f"{theirs}.conv{1 if part == 'first' else 2}.block", name, inside)


def _block(theirs: str, name: str, rest: str) -> Tensor:
    """A convolution and its group norm."""
    theirs = theirs if theirs.endswith(".block") else f"{theirs}.block"
    if rest.startswith("convolution."):
        return _convolution(f"{theirs}.0", name)
    return Tensor(f"{theirs}.1.{'weight' if rest == 'norm.scale' else 'bias'}", (name,), SAME)


def _convolution(theirs: str, name: str, layout: Layout = TIME_CONVOLUTION) -> Tensor:
    is_kernel = name.endswith("kernel")
    return Tensor(f"{theirs}.{'weight' if is_kernel else 'bias'}", (name,), layout if is_kernel else SAME)


def _linear(theirs: str, name: str) -> Tensor:
    return _convolution(theirs, name, LINEAR)
