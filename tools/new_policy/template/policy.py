"""example_policy: a network of one hidden layer predicts a chunk from joints and cameras.

Sources: the paper and the code that this type follows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxmodels.checkpoints.tensor_layouts import SAME, Tensor
from jaxmodels.layers.vision import SmallCnn
from jaxmodels.policies import PolicyType, as_stages
from jaxmodels.policies.config import PolicyConfig
from jaxmodels.ranges import CHUNK, POSITIVE, WIDTH, Range
from jaxmodels.types import Feature, Observation
from jaxmodels.weights import blueprint_of


@dataclass(frozen=True)
class ExamplePolicyConfig(PolicyConfig):
    """Config of example_policy, with LeRobot's names where LeRobot has them.

    Attributes:
        chunk_size: actions that are predicted together.
        n_action_steps: number of actions to execute.
        dim_model: width of the hidden layer.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    type: ClassVar[str] = "example_policy"
    # Policies that differ only in these fields share a compiled program.
    indifferent: ClassVar[tuple[str, ...]] = ("device", "normalization_mapping", "optimizer_")

    input_features: tuple[Feature, ...] = ()
    output_features: tuple[Feature, ...] = ()
    normalization_mapping: tuple[tuple[str, str], ...] = (
        ("VISUAL", "MEAN_STD"),
        ("STATE", "MEAN_STD"),
        ("ENV", "MEAN_STD"),
        ("ACTION", "MEAN_STD"),
    )
    device: str | None = None
    chunk_size: Annotated[int, Range(1, CHUNK)] = 16
    n_action_steps: Annotated[int, Range(1, CHUNK)] = 8
    dim_model: Annotated[int, Range(1, WIDTH)] = 256
    optimizer_lr: Annotated[float, POSITIVE] = 1e-3

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        if not (self.cameras or self.state or self.environment_state):
            wrong.append("input_features has neither an image nor a state; wanted at least one of them")
        return wrong

    def architecture(self) -> "ExamplePolicyConfig":
        return self._with_defaults(n_action_steps=1)


class ExamplePolicy(nnx.Module):
    """Network from a normalised observation to a normalised chunk of actions."""

    def __init__(self, config: ExamplePolicyConfig, *, rngs: nnx.Rngs):
        self.shape = (config.chunk_size, config.action.shape[0])
        vectors = [feature for feature in (config.state, config.environment_state) if feature is not None]
        width = sum(feature.shape[0] for feature in vectors)
        if config.cameras:
            self.backbone = SmallCnn(rngs=rngs)
            width += self.backbone.width * len(config.cameras)
        self.hidden = nnx.Linear(width, config.dim_model, rngs=rngs)
        self.out = nnx.Linear(config.dim_model, config.chunk_size * config.action.shape[0], rngs=rngs)

    def __call__(self, observation: Observation) -> Float[Array, "b t a"]:
        parts = [part for part in (observation.state, observation.environment_state) if part is not None]
        parts += [self.backbone(image).mean(axis=(1, 2)) for image in observation.images]
        hidden = nnx.gelu(self.hidden(jnp.concatenate(parts, axis=1)))
        return self.out(hidden).reshape(-1, *self.shape)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean absolute error of the actions that are not padded, and the parts of the loss."""
        del rngs  # This network needs no noise and no dropout.
        errors = jnp.abs(self(observation) - actions).mean(axis=2)
        loss = jnp.mean(errors, where=~is_pad)
        return loss, {"l1": loss}


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """Return the table of weights: tensors of the file, the arrays of the network, and their layouts."""
    return tuple(Tensor(f"model.{name}", (name,), SAME) for name in names)


def act(
    config: ExamplePolicyConfig,
    weights: Mapping[str, jax.Array],
    observation: Observation,
) -> Float[Array, "b t a"]:
    """Predict a normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    return blueprint_of(ExamplePolicy, config).assemble(weights)(observation)


POLICY = PolicyType(
    config=ExamplePolicyConfig.from_json,
    model=ExamplePolicy,
    tensors=tensors,
    stages=as_stages(act),
    parts={"backbone.": "vision", "": "network"},
    small={"chunk_size": 20, "n_action_steps": 5, "dim_model": 128},
)
