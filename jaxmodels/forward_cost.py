"""What a 2D transformer's forward pass costs, estimated from shapes before anything is compiled."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxmodels.transformer2d import Transformer2DConfig
from jaxmodels.transformer2d.arguments import token_count


class ForwardCost(NamedTuple):
    """Work, memory and size of the answer of one forward pass.

    Attributes:
        operations: additions and multiplications.
        memory: bytes of activations at the widest point of a block, where attention goes block by block (on a CPU).
        answer: bytes of the sample, float32.
    """

    operations: float
    memory: int
    answer: int


# Numbers per token and channel at the widest point of a block: a gated feed-forward's 8, and what is kept beside it.
_WIDTHS = 18
_SCORES = 1 << 22  # of an attention, at a time; longer ones go block by block
_FLOAT = 4


def forward_cost(
    config: Transformer2DConfig, matrices: int, shapes: Mapping[str, tuple[int, ...]], item: int = _FLOAT
) -> ForwardCost:
    """An estimate, meant to tell a second from an hour.

    Args:
        matrices: numbers in the weights that every token is multiplied with.
        shapes: of the arguments, by their flat names; that of hidden_states has its right rank.
        item: bytes of a number that the model computes in.
    """
    shape = shapes["hidden_states"]
    batch, tokens, width = shape[0], token_count(config, shape), config.inner_dim
    context = math.prod(shapes.get("encoder_hidden_states", (0, tokens, 0))[1:-1])
    products = 2.0 * batch * max(tokens, context) * matrices
    keys = tokens + (context if config.has_cross_attention else 0)
    scores = 4.0 * config.num_layers * batch * tokens * keys * width
    answer = batch * _numbers_out(config, shape)
    at_once = min(batch * config.num_attention_heads * tokens * max(tokens, context), _SCORES)
    memory = item * batch * _WIDTHS * max(tokens, context) * width + _FLOAT * (at_once + answer)
    return ForwardCost(products + scores, memory, _FLOAT * answer)


def _numbers_out(config: Transformer2DConfig, shape: tuple[int, ...]) -> int:
    if config.kind == "discrete":
        return ((config.num_vector_embeds or 1) - 1) * shape[1]
    if config.kind == "continuous":
        return math.prod(shape[1:])
    patch = config.patch_size or 1
    return (config.outputs or 0) * (shape[2] // patch * patch) * (shape[3] // patch * patch)
