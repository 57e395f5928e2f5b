"""Weights of pi0 and pi0.5: LeRobot's tensor names and layouts."""

from collections.abc import Iterable, Mapping

from jaxmodels.checkpoints.tensor_layouts import SAME, Shape, Tensor, module_tensor
from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.vlm.gemma import gemma_tensor
from jaxmodels.vlm.siglip import vision_tensor

ROOT = "model."
_BOTH = f"{ROOT}paligemma_with_expert."
_PALIGEMMA, _EXPERT = f"{_BOTH}paligemma.", f"{_BOTH}gemma_expert."
_WORDS = f"{_PALIGEMMA}model.language_model."
EMBEDDING, HEAD = f"{_WORDS}embed_tokens.weight", f"{_PALIGEMMA}lm_head.weight"
_LINEARS = {
    "action_in": "action_in_proj",
    "action_out": "action_out_proj",
    "state_in": "state_proj",
    "paligemma.projector": "paligemma_with_expert.paligemma.model.multi_modal_projector.linear",
}
# A file may have the embedding of words only as the head, whose weight it is; where it has both, the embedding counts.
TIED = {EMBEDDING: HEAD}
# Of pi0's and of pi0.5's table.
TIMES = {
    "pi0": {"time_in": "action_time_mlp_in", "time_out": "action_time_mlp_out"},
    "pi05": {"time_in": "time_mlp_in", "time_out": "time_mlp_out"},
}


def tensors(names: Iterable[str], *, kind: str = "pi0") -> tuple[Tensor, ...]:
    """The table for the weights of one config, given our names of them."""
    return tuple(_tensor(name, _LINEARS | TIMES[kind]) for name in names)


def _tensor(name: str, linears: Mapping[str, str]) -> Tensor:
    part, _, inside = name.partition(".")
    if part == "expert":
        return gemma_tensor(inside, ours="expert.", theirs=f"{_EXPERT}model.")
    if part == "paligemma":
        first, _, rest = inside.partition(".")
        if first == "vision":
            return vision_tensor(rest, ours=f"{part}.vision.", theirs=f"{_PALIGEMMA}model.vision_tower.vision_model.")
        if first == "layers":
            return gemma_tensor(inside, ours=f"{part}.", theirs=_WORDS)
        if first == "embedding":
            return Tensor(EMBEDDING, (name,), SAME)
    return module_tensor(f"{ROOT}{linears[name.rpartition('.')[0]]}", name)


def rename(name: str) -> str:
    """The table's name of a tensor of a file: files that were converted from openpi's lack ``model.`` in front."""
    return name if name.startswith(ROOT) else f"{ROOT}{name}"


def find_unused(config: Pi0Config) -> dict[str, Shape]:
    """Tensors of LeRobot's files that no action depends on, and their shapes."""
    words, actions = config.vlm.width, config.expert.width
    return {
        HEAD: (config.vocabulary, words),
        f"{_EXPERT}lm_head.weight": (config.vocabulary, actions),
        f"{_WORDS}norm.weight": (words,),
    }
