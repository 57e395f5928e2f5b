"""ImageNet vision backbones from torchvision or timm safetensors files, with or without their classifier.

Sources: torchvision/models/resnet.py; timm/models/resnet.py. timm's variants with a deep stem or average pooling
(``resnet18d``) are other networks.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.files import NEVER_USED, PICKLES, find_floats, read_json
from jaxmodels.checkpoints.tensor_layouts import CONVOLUTION, SAME, Tensor, read_tensors, their_shapes
from jaxmodels.errors import CheckpointError, ConfigError, WeightsMismatch
from jaxmodels.hub import fetch
from jaxmodels.layers.vision import RESNETS, ResNet
from jaxmodels.ranges import POSITIVE, Range, are_numbers
from jaxmodels.weights import blueprint, check_fit, not_finite

NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}


def backbone_tensor(name: str, *, ours: str = "", theirs: str = "") -> Tensor:
    """Return the tensor of one weight of a backbone; `SmallCnn` has our names in files.

    Args:
        name: our name within the backbone, e.g. ``stages.0.1.norms.0.scale``.
        ours, theirs: prefixes of the policy that contains it, e.g. ``backbone.`` and ``model.backbone.``.
    """
    layer, _, last = name.rpartition(".")
    match layer.split("."):
        case ["stem"]:
            their_name = "conv1"
        case ["stem_norm"]:
            their_name = "bn1"
        case ["stages", stage, block, "convolutions", i]:
            their_name = f"layer{int(stage) + 1}.{block}.conv{int(i) + 1}"
        case ["stages", stage, block, "norms", i]:
            their_name = f"layer{int(stage) + 1}.{block}.bn{int(i) + 1}"
        case ["stages", stage, block, "skip"]:
            their_name = f"layer{int(stage) + 1}.{block}.downsample.0"
        case ["stages", stage, block, "skip_norm"]:
            their_name = f"layer{int(stage) + 1}.{block}.downsample.1"
        case _:
            their_name = layer
    if last == "kernel":
        return Tensor(f"{theirs}{their_name}.weight", (ours + name,), CONVOLUTION)
    return Tensor(f"{theirs}{their_name}.{NORM[last]}", (ours + name,), SAME)


WEIGHTS, CONFIG = "model.safetensors", "config.json"
SAFETENSORS = ".safetensors"
CLASSIFIER = "fc."
# torchvision's name of weights to timm's tag of its copy: https://huggingface.co/timm/resnet18.tv_in1k
TIMM_TAGS = {"IMAGENET1K_V1": "tv_in1k", "IMAGENET1K_V2": "tv2_in1k"}
_TORCHVISION_NAME = re.compile(r"ResNet(\d+)_Weights\.(\w+)")

Triple = tuple[float, float, float]
_ANY = Range(-1e6, 1e6)


@dataclass(frozen=True)
class Backbone:
    """Weights of a trained ResNet without its classifier, and the statistics of its images.

    Attributes:
        weights: float32, by our names within a `ResNet`.
        mean, std: mean and deviation of red, green and blue, in [0, 1], by which the training normalised images; None
            if the source does not say. ImageNet's are (0.485, 0.456, 0.406) and (0.229, 0.224, 0.225).
    """

    architecture: str
    weights: Mapping[str, np.ndarray]
    mean: Triple | None = None
    std: Triple | None = None


def read_backbone(
    source: str | Path,
    architecture: str,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> Backbone:
    """Read the weights of a trained ResNet from a file or folder.

    Args:
        source: a safetensors file; a folder with one; or a repo id of the Hub such as ``timm/resnet18.tv_in1k``, whose
            ``config.json`` and ``model.safetensors`` are fetched.
        architecture: one of `RESNETS`.
        on_progress: called with the progress of a download, see `jaxmodels.hub.fetch`.

    Raises:
        ConfigError: the architecture is not a ResNet, or the source is torchvision's name of weights to download.
        CheckpointError: the file is missing, malformed, a pickle, or of another architecture. `WeightsMismatch` lists
            all missing, unused and misshaped tensors.
        HubError: the repo cannot be fetched.
    """
    if architecture not in RESNETS:
        raise ConfigError(
            f"vision_backbone {architecture!r} has no weights to start from, but pretrained_backbone_weights is "
            f"{str(source)!r}; leave it out, or use one of {', '.join(RESNETS)}"
        )
    if named := _TORCHVISION_NAME.fullmatch(str(source)):
        raise ConfigError(_suggest_weights(str(source), *named.groups()))
    path = Path(source).expanduser()
    if not path.exists() and path.suffix not in (SAFETENSORS, *PICKLES):
        path = fetch(str(source), files=(CONFIG, WEIGHTS), on_progress=on_progress)
    said: dict[str, Any] = {}
    if path.is_dir():
        said = read_json(path / CONFIG) if (path / CONFIG).exists() else {}
        path = _only_file(path)
    _check_kind(path, architecture, said.get("architecture"))
    mean, std = _normalization(said)
    return Backbone(architecture, _read(path, architecture), mean, std)


def replace_backbone(backbone: Backbone, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's weights with its backbones, attributes ``backbone`` at any depth, replaced by a trained one.

    Raises:
        WeightsMismatch: the policy has another backbone or none.
    """
    stems = [name.removesuffix("stem.kernel") for name in weights if f".{name}".endswith(".backbone.stem.kernel")]
    if not stems:
        raise WeightsMismatch(f"the policy has 0 ResNets called backbone; wanted a {backbone.architecture}")
    renamed = {stem + name: array for stem in stems for name, array in backbone.weights.items()}
    expected = {name: np.shape(array) for name, array in weights.items() if name.startswith(tuple(stems))}
    check_fit({name: array.shape for name, array in renamed.items()}, expected, where=backbone.architecture)
    return {**weights, **renamed}


def _read(path: Path, architecture: str) -> dict[str, np.ndarray]:
    stored = find_floats(path, lambda name: not name.endswith(NEVER_USED) and not name.startswith(CLASSIFIER))
    shapes = blueprint(lambda rngs: ResNet(architecture, rngs=rngs)).shapes
    table = tuple(backbone_tensor(name) for name in shapes)
    check_fit(
        {name: tensor.shape for name, tensor in stored.items()},
        their_shapes(table, {name: shape.shape for name, shape in shapes.items()}),
        where=path.name,
        hint=f"wanted torchvision's or timm's tensors of a {architecture}",
    )
    weights = read_tensors(table, stored)
    if wrong := not_finite(weights):
        raise CheckpointError(f"{path.name}: a NaN or an infinity in {', '.join(sorted(wrong))}")
    return weights


def _only_file(folder: Path) -> Path:
    names = sorted(path.name for path in folder.iterdir() if path.suffix == SAFETENSORS)
    if WEIGHTS in names:
        return folder / WEIGHTS
    if len(names) != 1:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        others = f" ({', '.join(pickles)} can run code and is not opened)" if pickles else ""
        existing = ", ".join(names) or "no safetensors file"
        raise CheckpointError(f"{folder.name}: found {existing}; wanted {WEIGHTS} or one other{others}")
    return folder / names[0]


def _check_kind(path: Path, architecture: str, said: Any) -> None:
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path.name}: pickle files can run code and are never opened; where torch is: "
            f"safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), '{path.stem}{SAFETENSORS}')"
        )
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; wanted weights of a {architecture} as {SAFETENSORS}")
    if said is not None and said != architecture:
        raise CheckpointError(
            f"{CONFIG} next to {path.name} says {said!r}, but vision_backbone is {architecture!r}; make them the same"
        )


def _normalization(said: Mapping[str, Any]) -> tuple[Triple | None, Triple | None]:
    inner = said.get("pretrained_cfg")
    values = inner if isinstance(inner, dict) else said
    mean, std = values.get("mean"), values.get("std")
    if mean is None and std is None:
        return None, None

    def read(numbers: Any, allowed: Range) -> Triple:
        if not isinstance(numbers, list) or len(numbers) != 3 or not are_numbers(numbers, allowed):
            raise CheckpointError(f"{CONFIG}: mean and std are {mean!r} and {std!r}; wanted three numbers each")
        red, green, blue = map(float, numbers)
        return red, green, blue

    return read(mean, _ANY), read(std, POSITIVE)


def _suggest_weights(name: str, size: str, weights: str) -> str:
    tag = TIMM_TAGS.get(weights)
    repo = f"the Hub's timm/resnet{size}.{tag} (timm's copy of them), or " if tag else ""
    return (
        f"pretrained_backbone_weights {name!r} is what torchvision would download, which is not used here; "
        f"give {repo}a safetensors file, made where torchvision is: safetensors.torch.save_file("
        f"torchvision.models.resnet{size}(weights={weights!r}).state_dict(), 'resnet{size}{SAFETENSORS}'); or null, "
        "to begin with random weights"
    )
