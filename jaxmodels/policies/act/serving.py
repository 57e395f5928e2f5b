"""ACT for serving: trained weights to serving weights, and the forward pass over those."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint

# Fields that neither a program nor its weights depend on.
INDIFFERENT = (
    "device",
    "use_amp",
    "use_peft",
    "push_to_hub",
    "repo_id",
    "private",
    "tags",
    "license",
    "pretrained_path",
    "normalization_mapping",
    "pretrained_backbone_weights",
    "n_vae_encoder_layers",
    "temporal_ensemble_coeff",
    "dropout",
    "kl_weight",
    "optimizer_lr",
    "optimizer_weight_decay",
    "optimizer_lr_backbone",
)


def architecture(config: ActConfig) -> ActConfig:
    """The config with every indifferent field at its default: equal ones share programs."""
    defaults = {field.name: field.default for field in fields(ActConfig) if field.name in INDIFFERENT}
    return replace(config, **{**defaults, "use_vae": False, "n_action_steps": 1})


def prepare(config: ActConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in weights.items() if not name.startswith("latent_encoder.")}


def act(config: ActConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    plan = blueprint(lambda: Act(config, rngs=nnx.Rngs(0)))
    return plan.assemble(weights)(observation)
