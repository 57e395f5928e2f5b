"""Config of a diffusion2d policy."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

from jaxmodels.policies.transformer2d_config import Transformer2dPolicyConfig
from jaxmodels.ranges import CHUNK, NOT_NEGATIVE, POSITIVE, Range
from jaxmodels.samplers import FlowSchedule, NoiseSchedule
from jaxmodels.samplers.diffusion import PREDICTION_TYPES, TIMESTEPS
from jaxmodels.samplers.sampling import STEPS
from jaxmodels.transformer2d.config import Transformer2DConfig

OBJECTIVES, SOLVERS, STRATEGIES = ("flow", "diffusion"), ("euler", "heun"), ("uniform", "beta")


@dataclass(frozen=True)
class Diffusion2dConfig(Transformer2dPolicyConfig):
    """Config of a policy that denoises a chunk of actions with a 2D transformer over cameras and joints.

    Attributes:
        objective: flow matching, or diffusion (cosine schedule).
        prediction_type: what a diffusion's model predicts: the noise (epsilon), the chunk (sample) or the velocity of
            both (v_prediction). A flow's always predicts its own velocity.
        timestep_sampling_strategy: how a flow's times are drawn in training: all alike, or as Beta(1.5, 1), more of
            them close to the noise, where the course of a chunk is decided (https://arxiv.org/abs/2410.24164).
        flow_solver: how a flow is followed; a diffusion is by DDIM.
        num_inference_steps: of the sampler.
        noise_seed: of the noise that every chunk is made from. It is always the same noise, so that the same
            observation has the same answer, whenever it comes and with whomever it shares a batch.
        trained_prefix: the longest delay, in actions, that a flow is trained to continue a plan after
            (`jaxmodels.samplers.real_time_chunking`); 0 for none: every plan is then held on to by guidance, without
            training. A longer delay than this one still is.
        trained_prefix_decay: how much rarer than the delay before each delay is in training; 0 for all alike.
        prefix_bound: how firmly guidance holds on to a plan (`jaxmodels.samplers.continuing`).
        prefix_through_model: whether that takes the model's gradient.

    Further attributes, and errors, as of `Transformer2dPolicyConfig`.
    """

    type: ClassVar[str] = "diffusion2d"
    indifferent: ClassVar[tuple[str, ...]] = (
        *Transformer2dPolicyConfig.indifferent,
        "timestep_sampling_strategy",
        "trained_prefix_decay",
    )

    objective: str = "flow"
    prediction_type: str = "epsilon"
    timestep_sampling_strategy: str = "beta"
    flow_solver: str = "euler"
    num_train_timesteps: Annotated[int, TIMESTEPS] = 1000
    num_inference_steps: Annotated[int, STEPS] = 10
    noise_seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    trained_prefix: Annotated[int, Range(0, CHUNK)] = 0
    trained_prefix_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    prefix_bound: Annotated[float, POSITIVE] = 5.0
    prefix_through_model: bool = True

    def find_errors(self) -> list[str]:
        wrong = [
            *self.describe_unknown("objective", OBJECTIVES),
            *self.describe_unknown("prediction_type", PREDICTION_TYPES),
            *self.describe_unknown("timestep_sampling_strategy", STRATEGIES),
            *self.describe_unknown("flow_solver", SOLVERS),
        ]
        if self.num_inference_steps > self.num_train_timesteps:
            wrong.append(f"num_inference_steps is {self.num_inference_steps}; wanted 1 to {self.num_train_timesteps}")
        if not 0 <= self.trained_prefix < self.chunk_size:
            wrong.append(
                f"trained_prefix is {self.trained_prefix}; wanted 0 (none) to {self.chunk_size - 1}, less than a chunk"
            )
        if self.objective == "diffusion" and self.trained_prefix:
            wrong.append("trained_prefix is for objective 'flow'; leave it 0, and guidance continues plans")
        if self.objective == "diffusion" and self.prediction_type == "epsilon" and not self._is_bounded:
            wrong.append(
                "prediction_type epsilon wants actions in [-1, 1] (normalization_mapping ACTION: MIN_MAX): its first "
                "steps know next to nothing of the chunk and must be clipped; else take v_prediction or sample"
            )
        return wrong

    @property
    def _is_bounded(self) -> bool:
        """Whether normalised actions lie in [-1, 1]."""
        return dict(self.normalization_mapping).get("ACTION") == "MIN_MAX"

    @property
    def transformer(self) -> Transformer2DConfig:
        """Config of the 2D transformer, in which each action of a chunk is a patch."""
        return Transformer2DConfig(
            num_attention_heads=self.n_heads,
            attention_head_dim=self.dim_model // self.n_heads,
            in_channels=self.action.shape[0],
            out_channels=self.action.shape[0],
            num_layers=self.n_layers,
            dropout=self.dropout,
            cross_attention_dim=self.dim_model,
            attention_bias=True,
            sample_size=self.chunk_size,
            patch_size=1,
            activation_fn="gelu-approximate",
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            interpolation_scale=1,
            use_additional_conditions=False,
        )

    @property
    def schedule(self) -> FlowSchedule | NoiseSchedule:
        """Noise schedule of training and sampling."""
        if self.objective == "flow":
            return FlowSchedule(self.num_train_timesteps, spacing="uniform")
        return NoiseSchedule(
            num_train_timesteps=self.num_train_timesteps,
            beta_schedule="squaredcos_cap_v2",
            prediction_type=cast(Any, self.prediction_type),  # one of PREDICTION_TYPES: checked above
            timestep_spacing="trailing",
            clip_sample=self._is_bounded,
        )
