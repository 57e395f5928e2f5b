"""A kind of policy on the 2D transformer: all that does not depend on what a chunk of actions is made of.

A new kind is a config (`Transformer2dPolicyConfig`), a model (`Transformer2dPolicy`) with a ``transformer`` and a
``loss``, and an `act`; `transformer2d_policy_type` makes the entry of the registry out of them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.checkpoints.layouts import SAME, Tensor
from jaxmodels.policies import PolicyType
from jaxmodels.policies.observation_tokens import ObservationTokens
from jaxmodels.policies.policy_config import SMALL_CNN
from jaxmodels.policies.transformer2d_config import Transformer2dPolicyConfig
from jaxmodels.policies.transformer2d_sizes import sizes
from jaxmodels.text import text_encoder
from jaxmodels.types import Language
from jaxmodels.weights import blueprint

# For one 96x96 camera, and a CPU.
SMALL = MappingProxyType(
    {
        "chunk_size": 20,
        "n_action_steps": 5,
        "vision_backbone": SMALL_CNN,
        "dim_model": 128,
        "n_heads": 4,
        "n_encoder_layers": 1,
        "n_layers": 4,
        "optimizer_lr": 1e-3,
        "optimizer_lr_backbone": 1e-3,
        "optimizer_weight_decay": 1e-4,
        "scheduler_warmup_steps": 200,
    }
)


class Transformer2dPolicy(nnx.Module):
    """What is seen as tokens, and what is said as language; the model of a kind adds what makes a chunk of them."""

    def __init__(self, config: Transformer2dPolicyConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.observation_tokens = ObservationTokens(config, dtype=dtype, rngs=rngs)
        if config.text_encoder is not None:
            self.text = text_encoder(config.text_encoder, rngs=rngs)

    def read(self, ids: Int[Array, "b n"], mask: Bool[Array, "b n"]) -> Language:
        """What an instruction says, for observations of this policy.

        Args:
            ids, mask: of the tokenizer.
        """
        return Language(self.text(ids, mask), mask)


Model = TypeVar("Model", bound=Transformer2dPolicy)


def transformer2d_policy_type(
    config: type[Transformer2dPolicyConfig],
    model: type[Transformer2dPolicy],
    act: Callable[..., Float[Array, "b t a"]],
) -> PolicyType:
    """The kind of policy with this config and model.

    Args:
        act: as `PolicyType` says, over the model's own weights (`assemble`); it continues a plan.
    """
    return PolicyType(
        config=config.from_json,
        model=model,
        tensors=_tensors,
        architecture=config.architecture,
        prepare=_prepare,
        act=act,
        sizes=sizes,
        takes_prefix=True,
        read=partial(_read, model),
        small=SMALL,
    )


def assemble(model: Callable[..., Model], config: Transformer2dPolicyConfig, weights: Mapping[str, Array]) -> Model:
    """The model over weights that are served, in their precision."""
    dtype = next(iter(weights.values())).dtype
    return blueprint(lambda rngs: model(config, dtype=dtype, rngs=rngs)).assemble(weights)


def _tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """LeRobot has no such policy: its file has our names and layouts, under ``model`` as all of LeRobot's."""
    return tuple(Tensor(f"model.{name}", (name,), SAME) for name in names)


def _prepare(config: Any, weights: Mapping[str, np.ndarray], platform: str) -> dict[str, np.ndarray]:
    """The weights as they are."""
    del config, platform
    return dict(weights)


def _read(
    model: type[Transformer2dPolicy],
    config: Transformer2dPolicyConfig,
    weights: Mapping[str, Array],
    ids: Int[Array, "b n"],
    mask: Bool[Array, "b n"],
) -> Language:
    """What an instruction says: the text encoder, which is no part of `act`."""
    return assemble(model, config, weights).read(ids, mask)
