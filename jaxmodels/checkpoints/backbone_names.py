"""torchvision's name and layout for every weight of a ResNet; timm's are the same.

Sources: torchvision/models/resnet.py; timm/models/resnet.py (its variants with a deep stem or average pooling before
the skip's convolution, ``resnet18d`` and the like, are other networks and have other names).
"""

from jaxmodels.checkpoints.layouts import CONVOLUTION, SAME, Tensor

NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}


def backbone_tensor(name: str, *, ours: str = "", theirs: str = "") -> Tensor:
    """The tensor of one weight. Layers of our own small backbone, which has no counterpart there, keep our names.

    Args:
        name: ours, within the backbone, e.g. ``stages.0.1.norms.0.scale``.
        ours, theirs: prefixes of the policy that the backbone is part of, e.g. ``backbone.`` and ``model.backbone.``.
    """
    layer, _, last = name.rpartition(".")
    match layer.split("."):
        case ["stem"]:
            place = "conv1"
        case ["stem_norm"]:
            place = "bn1"
        case ["stages", stage, block, "convolutions", i]:
            place = f"layer{int(stage) + 1}.{block}.conv{int(i) + 1}"
        case ["stages", stage, block, "norms", i]:
            place = f"layer{int(stage) + 1}.{block}.bn{int(i) + 1}"
        case ["stages", stage, block, "skip"]:
            place = f"layer{int(stage) + 1}.{block}.downsample.0"
        case ["stages", stage, block, "skip_norm"]:
            place = f"layer{int(stage) + 1}.{block}.downsample.1"
        case _:
            place = layer
    if last == "kernel":
        return Tensor(f"{theirs}{place}.weight", (ours + name,), CONVOLUTION)
    return Tensor(f"{theirs}{place}.{NORM[last]}", (ours + name,), SAME)
