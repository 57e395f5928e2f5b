"""New or pretrained policy that a training starts from."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.backbones import Backbone, read_backbone
from jaxmodels.checkpoints.files import find_floats, read_json
from jaxmodels.checkpoints.tensor_layouts import SAME, Tensor, module_tensor, read_tensors, their_shapes
from jaxmodels.checkpoints.tokenizer_files import read_tokenizer
from jaxmodels.data import Dataset
from jaxmodels.errors import CheckpointError, ConfigError, DatasetError
from jaxmodels.hub import find_policy
from jaxmodels.layers.norm import EPSILON
from jaxmodels.policies import get_policy_facts, get_policy_type, lerobot_folder, trained_types
from jaxmodels.policies.config import OTHER
from jaxmodels.text import TextConfig, TextEncoder
from jaxmodels.text.encoder import CLIP
from jaxmodels.types import ACTION, ENVIRONMENT_STATE, STATE, Feature, dump_features
from jaxmodels.vlm.siglip import PARTS
from jaxmodels.weights import blueprint, check_fit, not_finite

SMALL = "small"
# Features of any policy type, to list the fields of its config.
_ANY = {
    "input_features": {STATE: {"type": "STATE", "shape": [1]}, ENVIRONMENT_STATE: {"type": "ENV", "shape": [1]}},
    "output_features": {ACTION: {"type": "ACTION", "shape": [1]}},
}


@dataclass(frozen=True)
class Start:
    """Config, weights, backbone and tokenizer that a training starts from.

    Attributes:
        weights: weights by our names, of the policy or its text encoder; other weights are drawn.
        backbone: a trained vision backbone, which replaces the drawn backbone.
        tokenizer: content of ``tokenizer.json``.

    Example:
        >>> start = trained_policy("robojax/sim/policy").with_values({"n_action_steps": 10})
        >>> start.policy.n_action_steps
        10
    """

    policy: Any
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    backbone: Backbone | None = None
    tokenizer: bytes | None = None

    def with_values(self, values: Mapping[str, Any]) -> "Start":
        """Return this start with other values of config fields, as in ``config.json``.

        Raises:
            ConfigError: a field is unknown or makes no sense.
        """
        _check_known(self.policy.type, values)
        return replace(self, policy=get_policy_type(self.policy.type).config({**self.policy.to_json(), **values}))


def policy_fields(kind: str) -> dict[str, str]:
    """Return the fields of a policy type's config and their types in words; raises ConfigError for an unknown type.

    Example:
        >>> policy_fields("act")["use_vae"]
        "<class 'bool'>"
    """
    entries = fields(get_policy_type(kind).config(_ANY))
    return {entry.name: str(entry.type) for entry in entries if entry.name != OTHER}


def _check_known(kind: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown fields, even if they are off, which only files of newer versions may have."""
    if unknown := sorted(set(values) - set(policy_fields(kind))):
        raise ConfigError(
            f"{kind} config: unknown fields {', '.join(unknown)[:400]}; known: {', '.join(sorted(policy_fields(kind)))}"
        )


def new_policy(
    dataset: Dataset,
    kind: str,
    *,
    preset: str | None = None,
    image_size: tuple[int, int] | None = None,
    text_encoder: str | os.PathLike[str] | None = None,
    values: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Start:
    """Return a new policy for the features of a dataset.

    Args:
        preset: ``small`` for a policy that a CPU can train.
        image_size: (height, width) of the policy's images; the dataset's size when None.
        text_encoder: folder or Hub repo of transformers' CLIP, whose text tower reads instructions.
        values: values of config fields, as in ``config.json``, which replace the preset's.
        on_progress: called with the progress of downloads.

    Raises:
        ConfigError: a field is unknown or makes no sense, or the preset is not known.
        CheckpointError: weights of a trained part cannot be read.
        HubError: they cannot be fetched.

    Example:
        >>> import tempfile
        >>> from jaxmodels.data import DatasetWriter, open_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with DatasetWriter(f"{folder}/demos", fps=10, joint_names=["x"]) as writer:
        ...         pose = np.float32([0])
        ...         writer.add({"observation.state": pose, "action": pose})
        ...         writer.end_episode("stay")
        ...     dataset = open_dataset(f"{folder}/demos")
        >>> new_policy(dataset, "tokens2d", preset="small", values={"chunk_size": 8}).policy.chunk_size
        8
    """
    if not get_policy_facts(kind).is_trained:
        raise ConfigError(
            f"policy type {kind!r} is served and not trained here; train it with LeRobot, or train "
            f"{', '.join(trained_types())}"
        )
    chosen = get_policy_type(kind)
    if preset not in (None, SMALL):
        raise ConfigError(f"preset is {preset!r}; known: {SMALL}")
    _check_known(kind, values or {})
    read: dict[str, Any] = dict(_features(dataset, image_size))
    read |= dict(chosen.small) if preset == SMALL else {}
    read |= values or {}
    of_policy = (values or {}).get("text_encoder")
    if text_encoder is not None and of_policy is not None:
        raise ConfigError(
            f"text_encoder is {str(text_encoder)!r}, and {of_policy!r} among the policy's fields; "
            "wanted one of --text_encoder=<a CLIP> and --policy.text_encoder=small"
        )
    text = None
    if text_encoder is not None:
        text = read_clip_text(find_policy(os.fspath(text_encoder), on_progress=on_progress)[0])
        read["text_encoder"] = text.config.to_json()
    elif isinstance(read.get("text_encoder"), str):
        read["text_encoder"] = _text_encoder(read["text_encoder"])
    known = policy_fields(kind)
    if "pretrained_backbone_weights" in known and not str(read.get("vision_backbone", "resnet")).startswith("resnet"):
        read.setdefault("pretrained_backbone_weights", None)  # The default weights fit only a ResNet.
    if "push_to_hub" in known:
        read.setdefault("push_to_hub", False)  # LeRobot's default is true, but nothing is uploaded here.
    policy = chosen.config(read)
    if policy.push_to_hub:
        raise ConfigError(
            "push_to_hub is true; nothing is uploaded here, `hf upload` does that with the finished policy"
        )
    if text is None and policy.text_encoder is not None and policy.text_encoder.is_frozen:
        raise ConfigError("text_encoder stays as it is in training, but has no weights; give --text_encoder=<a CLIP>")
    source = policy.pretrained_backbone_weights
    backbone = None
    if source is not None and policy.cameras:
        backbone = read_backbone(source, policy.vision_backbone, on_progress=on_progress)
    weights = {} if text is None else {f"text.{name}": array for name, array in text.weights.items()}
    return Start(policy, weights, backbone, None if text is None else text.tokenizer)


def trained_policy(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Start:
    """Load a pretrained policy from a folder or the Hub; the dataset's statistics will replace its own.

    Raises:
        HubError: the repo cannot be fetched.
        ConfigError: its config has unknown fields or values that make no sense.
        CheckpointError: files are missing, malformed, or do not fit the config.

    Example:
        >>> trained_policy("robojax/sim/policy").policy.type
        'act'
    """
    folder, _ = find_policy(os.fspath(path_or_repo), revision, on_progress=on_progress)
    checkpoint = lerobot_folder.read_checkpoint(folder, needs_statistics=False)
    if checkpoint.bundle is not None:
        raise ConfigError(f"{folder.name} is a bundle for serving; train the folder that it was exported from")
    return Start(checkpoint.config, checkpoint.weights, tokenizer=checkpoint.tokenizer)


def _features(dataset: Dataset, image_size: tuple[int, int] | None) -> dict[str, Any]:
    """Return inputs and outputs of a policy for a dataset, as in ``config.json``, with one state as in LeRobot."""
    inputs, done = [], []
    for feature in dataset.features:
        if feature.type == "VISUAL":
            shape = feature.shape if image_size is None else (3, *image_size)
            inputs.append(Feature(feature.name, "VISUAL", shape))
        elif feature.name in (STATE, ENVIRONMENT_STATE):
            inputs.append(feature)
        elif feature.name == ACTION:
            done.append(feature)
    if not done:
        names = ", ".join(feature.name for feature in dataset.features)
        raise DatasetError(f"{dataset.folder.name} has no {ACTION}; it has {names}")
    return {"input_features": dump_features(inputs), "output_features": dump_features(done)}


def _text_encoder(name: str) -> dict[str, Any]:
    presets = {"small": TextConfig, "clip": TextConfig.clip}
    if name not in presets:
        raise ConfigError(
            f"text_encoder is {name!r}; known: {', '.join(presets)}, or an object of its fields, or null; the folder "
            "or repo of a CLIP is given as --text_encoder, without policy"
        )
    return presets[name]().to_json()


# Source of the text encoder's names: transformers/models/clip (CLIPTextModel, or the text part of a CLIPModel).
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# Prefixes of the tensors that are read, and of ignored tensors.
TOWER = "text_model."
OTHERS = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale")
_TABLE = "text_model.embeddings.position_ids"  # A constant in files of older versions.
_PARTS = {
    "tokens": "embeddings.token_embedding.weight",
    "positions": "embeddings.position_embedding.weight",
    "norm": "final_layer_norm",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    **PARTS,
}


@dataclass(frozen=True)
class ClipText:
    """Config, float32 weights by our names within a `TextEncoder`, and ``tokenizer.json`` of a CLIP text encoder."""

    config: TextConfig
    weights: dict[str, np.ndarray]
    tokenizer: bytes | None


def read_clip_text(folder: Path) -> ClipText:
    """Read the text encoder of a CLIP folder.

    Raises:
        CheckpointError: a file is missing or malformed, is not of a CLIP, or does not fit (`WeightsMismatch`).
        ConfigError: the config has wrong values.
    """
    config = _text_config(read_json(folder / CONFIG))
    plan = blueprint(lambda rngs: TextEncoder(config, rngs=rngs))
    shapes = {name: shape.shape for name, shape in plan.shapes.items()}
    table = tuple(map(_tensor, shapes))
    available = find_floats(folder / WEIGHTS, lambda name: not name.startswith(OTHERS) and name != _TABLE)
    check_fit({name: stored.shape for name, stored in available.items()}, their_shapes(table, shapes), where=WEIGHTS)
    weights = read_tensors(table, available)
    if wrong := not_finite(weights):
        raise CheckpointError(f"{folder.name}: weights hold a NaN or an infinity: {', '.join(sorted(wrong))}")
    return ClipText(config, weights, read_tokenizer(folder))


def _text_config(values: dict[str, Any]) -> TextConfig:
    """Return the text encoder's config in a ``config.json`` of transformers: its own, or of a whole CLIP.

    Raises CheckpointError for another or an unsupported model, ConfigError for wrong values.
    """
    said = values.get("text_config") if isinstance(values.get("text_config"), dict) else values
    assert isinstance(said, dict)
    kind = values.get("model_type")
    if kind not in ("clip", "clip_text_model"):
        raise CheckpointError(f"{CONFIG}: model_type is {kind!r}; wanted clip or clip_text_model")
    epsilon = said.get("layer_norm_eps", EPSILON)
    if epsilon != EPSILON:
        raise CheckpointError(f"{CONFIG}: layer_norm_eps is {epsilon!r}; wanted {EPSILON}, which every known CLIP has")
    # Missing fields have transformers' defaults (configuration_clip.py, CLIPTextConfig).
    return TextConfig(
        kind=CLIP,
        length=said.get("max_position_embeddings", 77),
        width=said.get("hidden_size", 512),
        n_layers=said.get("num_hidden_layers", 12),
        n_heads=said.get("num_attention_heads", 8),
        hidden=said.get("intermediate_size", 2048),
        vocabulary=said.get("vocab_size", 49408),
        activation=said.get("hidden_act", "quick_gelu"),
        is_frozen=True,
    )


def _tensor(name: str) -> Tensor:
    if name in ("tokens", "positions"):
        return Tensor(TOWER + _PARTS[name], (name,), SAME)
    part, layer = name.rpartition(".")[0], ""
    if part.startswith("layers."):
        _, number, part = part.split(".", 2)
        layer = f"encoder.layers.{number}."
    return module_tensor(f"{TOWER}{layer}{_PARTS[part]}", name)
