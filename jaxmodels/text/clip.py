"""CLIP's text encoder, read from a transformers folder.

Source of names and semantics: transformers/models/clip (CLIPTextModel, or the whole CLIPModel, whose other tower and
projections are not read).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.files import find_floats, read_json
from jaxmodels.checkpoints.tensor_layouts import LINEAR, SAME, Tensor, read_tensors, their_shapes
from jaxmodels.errors import CheckpointError
from jaxmodels.layers.norm import EPSILON
from jaxmodels.text import TextConfig, text_encoder
from jaxmodels.text.encoder import CLIP
from jaxmodels.text.tokenizers import read_tokenizer
from jaxmodels.weights import blueprint, check_fit, not_finite

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# How the names of all that is read begin, and of what there may be besides.
TOWER = "text_model."
OTHERS = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale")
_TABLE = "text_model.embeddings.position_ids"  # 0, 1, 2, ... of older versions
_PARTS = {
    "tokens": "embeddings.token_embedding.weight",
    "positions": "embeddings.position_embedding.weight",
    "norm": "final_layer_norm",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}


@dataclass(frozen=True)
class ClipText:
    """Config, weights and tokenizer of a CLIP text encoder.

    Attributes:
        weights: our flat names within a `TextEncoder` to float32 arrays.
        tokenizer: the content of ``tokenizer.json``.
    """

    config: TextConfig
    weights: dict[str, np.ndarray]
    tokenizer: bytes | None


def read_clip_text(folder: Path) -> ClipText:
    """Read the text encoder of a CLIP folder.

    Raises:
        CheckpointError: a file is missing or malformed, or this is no CLIP.
        ConfigError: the config's numbers make no sense.
        WeightsMismatch: the weights do not fit the config.
    """
    config = text_config(read_json(folder / CONFIG))
    plan = blueprint(lambda rngs: text_encoder(config, rngs=rngs))
    shapes = {name: shape.shape for name, shape in plan.shapes.items()}
    table = tensors(shapes)
    available = find_floats(folder / WEIGHTS, lambda name: not name.startswith(OTHERS) and name != _TABLE)
    check_fit({name: stored.shape for name, stored in available.items()}, their_shapes(table, shapes), where=WEIGHTS)
    weights = read_tensors(table, lambda name: available[name].read())
    if wrong := not_finite(weights):
        raise CheckpointError(f"{folder.name}: weights hold a NaN or an infinity: {', '.join(sorted(wrong))}")
    return ClipText(config, weights, read_tokenizer(folder))


def text_config(values: dict[str, Any]) -> TextConfig:
    """Config of the text encoder in a ``config.json`` of transformers: its own, or of a whole CLIP.

    Raises:
        CheckpointError: it is of another model, or needs what is not done here.
        ConfigError: its numbers make no sense.
    """
    said = values.get("text_config") if isinstance(values.get("text_config"), dict) else values
    assert isinstance(said, dict)
    kind = values.get("model_type")
    if kind not in ("clip", "clip_text_model"):
        raise CheckpointError(f"{CONFIG}: model_type is {kind!r}; wanted clip or clip_text_model")
    epsilon = said.get("layer_norm_eps", EPSILON)
    if epsilon != EPSILON:
        raise CheckpointError(f"{CONFIG}: layer_norm_eps is {epsilon!r}; wanted {EPSILON}, which every known CLIP has")
    # What a file leaves out has transformers' default (configuration_clip.py, CLIPTextConfig).
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


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """transformers' tensors for our weights of a text encoder."""
    return tuple(_tensor(name) for name in names)


def _tensor(name: str) -> Tensor:
    if name in ("tokens", "positions"):
        return Tensor(TOWER + _PARTS[name], (name,), SAME)
    part, _, last = name.rpartition(".")
    layer = ""
    if part.startswith("layers."):
        _, number, part = part.split(".", 2)
        layer = f"encoder.layers.{number}."
    theirs = f"{TOWER}{layer}{_PARTS[part]}.{'bias' if last == 'bias' else 'weight'}"
    return Tensor(theirs, (name,), LINEAR if last == "kernel" else SAME)
