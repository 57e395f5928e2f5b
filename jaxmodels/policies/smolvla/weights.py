"""SmolVLA's weights: LeRobot's tensor names and layouts."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxmodels.checkpoints.tensor_layouts import LINEAR, SAME, Shape, Tensor
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.vlm.decoder import DecoderSizes, decoder_tensor
from jaxmodels.vlm.siglip import vision_tensor

_BOTH = "model.vlm_with_expert."
_VLM, _EXPERT = f"{_BOTH}vlm.model.", f"{_BOTH}lm_expert."
_TEXT = f"{_VLM}text_model."
EMBEDDING, HEAD = f"{_TEXT}embed_tokens.weight", f"{_BOTH}vlm.lm_head.weight"
# A file may have the embedding of words only as the head, whose weight it then is.
TIED = {EMBEDDING: HEAD}
_LINEARS = {
    "state_in": "model.state_proj",
    "action_in": "model.action_in_proj",
    "action_out": "model.action_out_proj",
    "time_in": "model.action_time_mlp_in",
    "time_out": "model.action_time_mlp_out",
    "vlm.connector": f"{_VLM}connector.modality_projection.proj",
}


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """The table for the weights of one config, given our names of them."""
    names = tuple(names)
    last = sum(name.startswith("vlm.layers.") and name.endswith("attention.key.weight") for name in names)
    return tuple(_tensor(name, last) for name in names)


def _tensor(name: str, last: int) -> Tensor:
    """``last``: number of the language model's last layer."""
    match name.split(".", 3):
        case ["vlm", "vision", *_]:
            return vision_tensor(name.removeprefix("vlm.vision."), ours="vlm.vision.", theirs=f"{_VLM}vision_model.")
        case ["vlm", "embedding"]:
            return Tensor(EMBEDDING, (name,), SAME)
        case ["vlm", "layers", number, inside]:
            return decoder_tensor(inside, ours=f"vlm.layers.{number}.", theirs=f"{_TEXT}layers.{number}.")
        case ["vlm", "last", *_]:
            return decoder_tensor(name.removeprefix("vlm.last."), ours="vlm.last.", theirs=f"{_TEXT}layers.{last}.")
        case ["layers", number, *_]:
            ours = f"layers.{number}."
            return decoder_tensor(name.removeprefix(ours), ours=ours, theirs=f"{_EXPERT}{ours}")
        case ["norm", _]:
            return Tensor(f"{_EXPERT}norm.weight", (name,), SAME)
    module, _, kind = name.rpartition(".")
    is_kernel = kind == "kernel"
    return Tensor(f"{_LINEARS[module]}.{'weight' if is_kernel else 'bias'}", (name,), LINEAR if is_kernel else SAME)


def find_unused(config: SmolVlaConfig) -> dict[str, Shape]:
    """Tensors of LeRobot's files that no action depends on, and their shapes.

    The head and the last norm of the language model; of its last layer that the action expert looks at, all but keys
    and values; and the layers behind that one.
    """
    text, last = config.vlm.text, config.expert_steps[-1].vlm_layer
    unused: dict[str, Shape] = {HEAD: (config.vocabulary, text.width), f"{_TEXT}norm.weight": (text.width,)}
    for number in range(last, config.vlm_layers):
        for name, shape in _list_shapes(text).items():
            if number > last or name not in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj"):
                unused[f"{_TEXT}layers.{number}.{name}.weight"] = shape
    return unused


def _list_shapes(text: DecoderSizes) -> dict[str, Shape]:
    """Tensors of one layer of the language model."""
    inner, keys, width, hidden = text.heads * text.head_width, text.kv_heads * text.head_width, text.width, text.hidden
    return {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (inner, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, inner),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }


def prepare(config: Any, weights: Mapping[str, np.ndarray], platform: str) -> dict[str, np.ndarray]:
    """The weights as they are."""
    del config, platform
    return dict(weights)
