"""Everything that shapes a diffusion2d policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxmodels.errors import ConfigError
from jaxmodels.features import ACTION, ENVIRONMENT_STATE, MODES, STATE, TYPES, Feature
from jaxmodels.layers.resnet import RESNETS
from jaxmodels.policies.fields import dump_fields, read_fields
from jaxmodels.samplers import FlowSchedule, NoiseSchedule

SMALL_CNN = "small_cnn"
BACKBONES = (*RESNETS, SMALL_CNN)
OBJECTIVES, SOLVERS = ("flow", "diffusion"), ("euler", "heun")
COUNTS = ("chunk_size", "n_action_steps", "dim_model", "n_heads", "n_layers", "num_train_timesteps")


@dataclass(frozen=True)
class Diffusion2dConfig:
    """A chunk of actions out of noise, by a 2D transformer that looks at cameras and joints.

    Attributes:
        input_features: in the order of their tokens.
        chunk_size: actions that are sampled together.
        n_action_steps: how many of them are meant to be executed.
        vision_backbone: one of `BACKBONES`.
        dim_model: width of all tokens.
        n_layers: of the transformer.
        objective: flow matching, or diffusion (noise is predicted; cosine schedule).
        flow_solver: how a flow is followed; a diffusion is by DDIM.
        num_inference_steps: of the sampler.
        noise_seed: of the noise that every chunk is made from. It is always the same noise, so that the same
            observation has the same answer, whenever it comes and with whomever it shares a batch.
        prefix_bound: how firmly a plan is held on to (`jaxmodels.samplers.continuing`).
        prefix_through_model: whether that takes the model's gradient.

    Raises:
        ConfigError: a value makes no sense; all complaints together.
    """

    type: ClassVar[str] = "diffusion2d"
    temporal_ensemble_coeff: ClassVar[None] = None

    input_features: tuple[Feature, ...] = ()
    output_features: tuple[Feature, ...] = ()
    normalization_mapping: tuple[tuple[str, str], ...] = (
        ("VISUAL", "MEAN_STD"),
        ("STATE", "MIN_MAX"),
        ("ENV", "MIN_MAX"),
        ("ACTION", "MIN_MAX"),
    )
    device: str | None = None
    chunk_size: int = 16
    n_action_steps: int = 8
    vision_backbone: str = SMALL_CNN
    dim_model: int = 256
    n_heads: int = 8
    n_layers: int = 6
    dropout: float = 0.0
    objective: str = "flow"
    flow_solver: str = "euler"
    num_train_timesteps: int = 1000
    num_inference_steps: int = 10
    noise_seed: int = 0
    prefix_bound: float = 5.0
    prefix_through_model: bool = True

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value!r}; wanted an integer of 1 or more"
            for name, value in ((name, getattr(self, name)) for name in COUNTS)
            if not isinstance(value, int) or value < 1
        ]
        wrong = wrong or [*self._wrong_numbers(), *self._wrong_features()]
        if wrong:
            raise ConfigError("diffusion2d config: " + "; ".join(wrong))

    def _wrong_numbers(self) -> list[str]:
        wrong = []
        if self.n_action_steps > self.chunk_size:
            wrong.append(f"n_action_steps is {self.n_action_steps}, more than chunk_size {self.chunk_size}")
        if self.dim_model % (4 * self.n_heads):
            wrong.append(f"dim_model {self.dim_model} is not a multiple of 4 n_heads ({4 * self.n_heads})")
        if not 0 <= self.dropout < 1:
            wrong.append(f"dropout is {self.dropout}; wanted 0 <= dropout < 1")
        if not 1 <= self.num_inference_steps <= self.num_train_timesteps:
            wrong.append(f"num_inference_steps is {self.num_inference_steps}; wanted 1 to {self.num_train_timesteps}")
        if not 0 <= self.noise_seed < 2**31:
            wrong.append(f"noise_seed is {self.noise_seed}; wanted 0 to {2**31 - 1}")
        if not self.prefix_bound > 0:
            wrong.append(f"prefix_bound is {self.prefix_bound}; wanted more than 0, e.g. 5")
        for name, known in (("objective", OBJECTIVES), ("flow_solver", SOLVERS), ("vision_backbone", BACKBONES)):
            if getattr(self, name) not in known:
                wrong.append(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        return wrong

    def _wrong_features(self) -> list[str]:
        wrong = [
            f"normalization_mapping has {kind}: {mode}; wanted types {', '.join(TYPES)} and modes {', '.join(MODES)}"
            for kind, mode in self.normalization_mapping
            if kind not in TYPES or mode not in MODES
        ]
        if not any(feature.name == ACTION and feature.type == "ACTION" for feature in self.output_features):
            wrong.append(f"output_features has no feature {ACTION!r} of type ACTION")
        for kind, name in (("STATE", STATE), ("ENV", ENVIRONMENT_STATE)):
            found = [feature.name for feature in self.input_features if feature.type == kind]
            if found not in ([], [name]):
                wrong.append(f"features of type {kind} are {found}; wanted at most one, {name!r}")
        if not (self.cameras or self.state or self.environment_state):
            wrong.append("input_features has neither an image nor a state; there is nothing to look at")
        return wrong

    @property
    def cameras(self) -> tuple[Feature, ...]:
        """Image features in the order of their tokens."""
        return tuple(feature for feature in self.input_features if feature.type == "VISUAL")

    @property
    def state(self) -> Feature | None:
        return next((f for f in self.input_features if f.type == "STATE"), None)

    @property
    def environment_state(self) -> Feature | None:
        return next((f for f in self.input_features if f.type == "ENV"), None)

    @property
    def action(self) -> Feature:
        return next(f for f in self.output_features if f.type == "ACTION" and f.name == ACTION)

    @property
    def schedule(self) -> FlowSchedule | NoiseSchedule:
        """What it is trained with and sampled by."""
        if self.objective == "flow":
            return FlowSchedule(self.num_train_timesteps, spacing="uniform")
        return NoiseSchedule(
            num_train_timesteps=self.num_train_timesteps,
            beta_schedule="squaredcos_cap_v2",
            timestep_spacing="trailing",
            clip_sample=dict(self.normalization_mapping).get("ACTION") == "MIN_MAX",  # which lie in [-1, 1]
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Diffusion2dConfig":
        """Reads a ``config.json`` that was parsed already.

        Raises:
            ConfigError: unknown fields, or values that make no sense.
        """
        return cls(**read_fields(cls, values, "diffusion2d config", "the policy is of a newer version, or of another"))

    def to_json(self) -> dict[str, Any]:
        return dump_fields(self)
