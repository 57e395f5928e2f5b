"""The policy that a training made, as a folder that is served, evaluated, or loaded by LeRobot."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from jaxmodels.checkpoints import lerobot
from jaxmodels.checkpoints.backbones import Backbone
from jaxmodels.checkpoints.contents import Checkpoint, Sidecar
from jaxmodels.data import Dataset
from jaxmodels.errors import TrainingError
from jaxmodels.normalization import Normalization, from_stats
from jaxmodels.training.start import Start
from jaxmodels.weights import not_finite

# Of torchvision's ResNets, and of nearly everything else that was trained on ImageNet.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def normalization_of(dataset: Dataset, start: Start, *, use_imagenet_stats: bool) -> Normalization:
    """A policy's normalisation, from a dataset's statistics.

    Args:
        use_imagenet_stats: cameras by the mean and spread that a trained backbone wants, ImageNet's if it does not say.
    """
    policy, stats = start.policy, dict(dataset.statistics())
    if use_imagenet_stats:
        mean, std = _colours(start.backbone)
        for camera in policy.cameras:
            stats[camera.name] = {**stats[camera.name], "mean": mean, "std": std}
    known = {feature.name for feature in (*policy.input_features, *policy.output_features)}
    wanted = {name: values for name, values in stats.items() if name in known}
    return from_stats(policy.input_features, policy.output_features, policy.normalization_mapping, wanted)


def write_policy(
    folder: Path, weights: Mapping[str, np.ndarray], start: Start, normalization: Normalization, dataset: Dataset
) -> None:
    """Writes LeRobot's layout.

    Raises:
        TrainingError: weights are no numbers any more.
    """
    if wrong := not_finite(weights):
        raise TrainingError(f"weights hold a NaN or an infinity: {', '.join(sorted(wrong)[:5])}; nothing is written")
    policy = start.policy
    if any(field.name == "pretrained_backbone_weights" for field in fields(policy)):
        # LeRobot would ask torchvision for this before it reads the weights, which are here.
        policy = replace(policy, pretrained_backbone_weights=None)
    sidecar = Sidecar(rate=dataset.fps, joint_names=dataset.joint_names)
    lerobot.write(folder, Checkpoint(policy, weights, normalization, sidecar, start.tokenizer))


def _colours(backbone: Backbone | None) -> tuple[np.ndarray, np.ndarray]:
    mean, std = IMAGENET
    if backbone is not None and backbone.mean is not None and backbone.std is not None:
        mean, std = backbone.mean, backbone.std
    return np.asarray(mean, np.float32).reshape(3, 1, 1), np.asarray(std, np.float32).reshape(3, 1, 1)
