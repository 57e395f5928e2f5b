"""diffusion2d: action chunks by flow matching or diffusion on the 2D transformer.

The chunk (b, t, a) is an image of `a` channels, `t` high and 1 wide, each action a patch with a position of its own:
the path of PixArt. (The path for whole images would normalise the scale of the actions away.)

Sources: https://arxiv.org/abs/2303.04137 (diffusion policy), https://arxiv.org/abs/2310.00426 (the transformer's
modulation), https://arxiv.org/abs/2506.07339 and https://arxiv.org/abs/2512.05964 (real-time chunking, without and
with training).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import lax
from jax.tree_util import Partial
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.policies.transformer2d_policy import (
    Transformer2dPolicy,
    Transformer2dPolicyConfig,
    build_model,
    transformer2d_policy_type,
)
from jaxmodels.ranges import CHUNK, NOT_NEGATIVE, POSITIVE, Range
from jaxmodels.samplers import (
    Example,
    FlowSchedule,
    NoiseSchedule,
    begin_with,
    continuing,
    ddim,
    draw_delays,
    example,
    flow_euler,
    flow_heun,
    given,
)
from jaxmodels.samplers.diffusion import PREDICTION_TYPES, TIMESTEPS
from jaxmodels.samplers.sampling import STEPS
from jaxmodels.transformer2d import Conditioning, Modulations, Transformer2DModel
from jaxmodels.transformer2d.block import KeyValues
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.types import Observation, Prefix

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

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **Transformer2dPolicyConfig.choices,
            "objective": OBJECTIVES,
            "prediction_type": PREDICTION_TYPES,
            "timestep_sampling_strategy": STRATEGIES,
            "flow_solver": SOLVERS,
        }
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

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
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


BETA = 1.5  # of Beta(1.5, 1), openpi's; lerobot/policies/pi0/modeling_pi0.py
MIN_SIGMA = 0.001  # a flow's time is never quite 0, where there is nothing to learn; as there
EVALUATION = 0  # seed of the noise of an evaluation
SLOW, MAX_SLOW = 3, 0.25  # waves of the first noise that are held to so many standard deviations


def make_first_noise(config: Diffusion2dConfig) -> Float[Array, "t a"]:
    """Return the noise that every chunk is sampled from; its slowest waves along time are small.

    It is the same for all observations. A wave as slow as the chunk biases all uncertain actions to one side: the
    demo's policy was wrong by 1.6 degrees with plain noise and by 0.8 with this. The waves are not 0, so that there
    is a side when two ways are equally good.
    """
    shape = (config.chunk_size, config.action.shape[0])
    noise = jax.random.normal(jax.random.key(config.noise_seed), shape, jnp.float32)
    waves = jnp.asarray(make_slow_waves(config.chunk_size))
    strength = waves @ noise
    return noise + waves.T @ (jnp.clip(strength, -MAX_SLOW, MAX_SLOW) - strength)


def make_slow_waves(steps: int) -> Float[np.ndarray, "k {steps}"]:
    """The `SLOW` slowest cosines over this many steps, with the constant; orthonormal."""
    time, wave = np.arange(steps) + 0.5, np.arange(min(SLOW, steps))
    cosines = np.cos(np.pi * wave[:, None] * time / steps)
    return (cosines / np.linalg.norm(cosines, axis=1, keepdims=True)).astype(np.float32)


def add_training_noise(config: Diffusion2dConfig, actions: Float[Array, "b t a"], rngs: nnx.Rngs | None) -> Example:
    """Normalised actions with noise at a random time per chunk, and the targets for them.

    Args:
        rngs: stream ``noise``; None takes the same noise and times in every call.

    Returns:
        The example. Its `timestep` is (b,) unless a prefix is trained: then each action has its own (b, t).
    """
    key = jax.random.key(EVALUATION) if rngs is None else rngs.noise()
    first, noise_key, delay_key = jax.random.split(key, 3)
    batch, schedule = actions.shape[0], config.schedule
    noise = jax.random.normal(noise_key, actions.shape, jnp.float32)
    # Spread evenly over the batch for a less noisy loss: https://arxiv.org/abs/2107.00630, appendix I.1.
    start = jnp.float32(0.5 / batch) if rngs is None else jax.random.uniform(first)
    share = (start + jnp.arange(batch, dtype=jnp.float32) / batch) % 1
    if not isinstance(schedule, FlowSchedule):
        timestep = jnp.floor(share * schedule.num_train_timesteps).astype(jnp.int32)
        x, target = schedule.add_noise(actions, noise, timestep), schedule.target(actions, noise, timestep)
        return Example(x, timestep, target, jnp.ones(actions.shape[:2], bool))
    if config.timestep_sampling_strategy == "beta":
        share = share ** (1 / BETA)  # the inverse of its distribution function
    sigma = MIN_SIGMA + (1 - MIN_SIGMA) * share
    if config.trained_prefix:
        delay = draw_delays(delay_key, batch, config.trained_prefix, config.trained_prefix_decay)
        return example(schedule, actions, noise, sigma, delay)
    return Example(
        schedule.add_noise(actions, noise, sigma),
        sigma * schedule.num_train_timesteps,
        schedule.target(actions, noise),
        jnp.ones(actions.shape[:2], bool),
    )


class Diffusion2d(Transformer2dPolicy):
    """Network that predicts velocity (flow), or noise, chunk or velocity (diffusion) of a normalised chunk."""

    def __init__(self, config: Diffusion2dConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.config = config
        self.transformer = Transformer2DModel(**config.transformer.to_json(), dtype=dtype, rngs=rngs)
        initialize_plain(self.transformer)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Mean squared error of the predictions for noisy chunks, and its parts.

        With `do_mask_loss_for_padding` errors of padded steps count as zero and are divided by all steps, as in
        LeRobot; no attention sees those steps. Actions of a plan (`trained_prefix`) are excluded from the mean.

        Args:
            rngs: streams ``noise`` and ``dropout``; None evaluates, with the same noise and times in every call.
        """
        config, transformer = self.config, self.transformer
        dropout = rngs if config.dropout else None
        tokens, mask = self.observation_tokens(observation, dropout)
        example = add_training_noise(config, actions, rngs)
        prediction = predict(
            transformer,
            transformer.prepare_context(tokens),
            mask,
            example.x,
            example.timestep,
            prepare_modulations(transformer, example.timestep),
            is_real=~is_pad if config.do_mask_loss_for_padding else None,
            rngs=dropout,
        )
        error = jnp.square(prediction - example.target)
        if config.do_mask_loss_for_padding:
            error = jnp.where(is_pad[..., None], 0.0, error)
        # never nothing: a delay is less than a chunk
        counted = example.counts.astype(jnp.float32)[..., None]
        value = (error * counted).sum() / (counted.sum() * actions.shape[2])
        return value, {"mse": value}


def initialize_plain(transformer: Transformer2DModel) -> None:
    """Initialize weights for training from scratch: outputs of 0 as in DiT, and blocks that time does not modulate.

    DiT's gates begin closed, for many layers; here they begin open, as in a plain pre-norm transformer.
    """
    for layer in (transformer.proj_out, transformer.adaln_single.linear):
        for weight in (layer.kernel, layer.bias):
            assert weight is not None  # both have a bias
            weight[...] = jnp.zeros_like(weight[...])
    head, blocks = transformer.scale_shift_table, transformer.transformer_blocks.scale_shift_table
    head[...] = jnp.zeros_like(head[...])
    shift_scale_gate = jnp.asarray([0, 0, 1, 0, 0, 1], blocks[...].dtype)[:, None]
    blocks[...] = jnp.broadcast_to(shift_scale_gate, blocks[...].shape)


def prepare_modulations(
    transformer: Transformer2DModel, timestep: Float[Array, "b *t"] | Int[Array, "b *t"]
) -> Modulations:
    """Modulations of the transformer for timesteps: one per element, or one per action."""
    modulations = transformer.prepare_modulations(timestep.reshape(-1).astype(jnp.float32))
    if timestep.ndim == 1:
        return modulations
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-3], *timestep.shape, part.shape[-1]), modulations)


def predict(
    transformer: Transformer2DModel,
    context: KeyValues,
    mask: Bool[Array, "b n"] | None,
    x: Float[Array, "b t a"],
    t: Array,
    modulations: Modulations,
    *,
    is_real: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
) -> Float[Array, "b t a"]:
    """Return the transformer's prediction for a noisy chunk.

    Args:
        context: result of ``prepare_context``; `mask` marks its valid tokens, all when None.
        modulations: of `prepare_modulations` for `t`.
        is_real: actions that attention sees; all when None.
    """
    del t
    image = rearrange(x, "b t a -> b a t 1").astype(transformer.dtype)
    (answer,) = transformer(
        image,
        attention_mask=is_real,
        encoder_attention_mask=mask,
        conditioning=Conditioning(context, modulations),
        return_dict=False,
        rngs=rngs,
    )
    return rearrange(answer, "b a t 1 -> b t a").astype(jnp.float32)


def act(config: Diffusion2dConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """Sample a normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    model = build_model(Diffusion2d, config, weights)
    transformer, schedule, steps = model.transformer, config.schedule, config.num_inference_steps
    tokens, mask = model.observation_tokens(observation)
    context = transformer.prepare_context(tokens)
    shape = (tokens.shape[0], config.chunk_size, config.action.shape[0])
    noise = jnp.broadcast_to(make_first_noise(config), shape)
    denoise, prefix = Partial(predict, transformer, context, mask), observation.prefix
    if prefix is not None:
        knowing = None
        if config.trained_prefix:
            clean = prepare_modulations(transformer, jnp.zeros(1))
            knowing = Partial(_predict_rest, transformer, context, mask, clean)
        denoise = _continue_plan(config, denoise, knowing, prefix)
    key = jax.random.key(config.noise_seed)  # of noise along the way; these samplers draw none
    options: dict[str, Any] = {"steps": steps, "start": noise}
    modulate = jax.vmap(transformer.prepare_modulations)
    if not isinstance(schedule, FlowSchedule):
        times = jnp.asarray(schedule.timesteps(steps), jnp.float32)
        chunk = ddim(denoise, shape, key, schedule, extras=modulate(times), **options)
    elif config.flow_solver == "heun":
        times = jnp.asarray(schedule.heun_rows(steps).timestep)
        chunk = flow_heun(denoise, shape, key, schedule, extras=modulate(times), **options)
    else:
        times = jnp.asarray(schedule.euler_rows(steps).timestep)
        chunk = flow_euler(denoise, shape, key, schedule, extras=modulate(times), **options)
    return chunk if prefix is None else begin_with(prefix, chunk)


def _continue_plan(config: Diffusion2dConfig, denoise: Partial, knowing: Partial | None, prefix: Prefix) -> Partial:
    """`denoise` for chunks that continue a plan; `knowing` was trained with plans and takes a time for each action."""
    schedule = config.schedule
    guided = continuing(denoise, prefix, schedule, bound=config.prefix_bound, through_model=config.prefix_through_model)
    if knowing is None or not isinstance(schedule, FlowSchedule):
        return guided
    is_longer = jnp.minimum(prefix.delay, prefix.length) > config.trained_prefix
    return Partial(_predict_by_delay, given(knowing, prefix, schedule), guided, is_longer)


def _predict_by_delay(trained: Partial, guided: Partial, is_longer: Bool[Array, " b"], x: Array, *rest: Any) -> Array:
    """The trained prediction for delays as in training, the guided one for longer delays."""

    def mixed() -> Array:
        return jnp.where(is_longer[:, None, None], guided(x, *rest), trained(x, *rest))

    return lax.cond(jnp.any(is_longer), mixed, lambda: jnp.asarray(trained(x, *rest), jnp.float32))


def _predict_rest(
    transformer: Transformer2DModel,
    context: KeyValues,
    mask: Bool[Array, "b n"] | None,
    clean: Modulations,
    x: Float[Array, "b t a"],
    t: Float[Array, "b t"],
    modulations: Modulations,
) -> Float[Array, "b t a"]:
    """Answer a chunk whose first actions have no noise; `clean` modulates time 0, `modulations` all other actions."""
    is_known = (t == 0)[..., None]
    mixed = jax.tree.map(lambda known, others: jnp.where(is_known, known, others), clean, modulations)
    return predict(transformer, context, mask, x, t, mixed)


# Its `small` has about 1.5 M parameters with one 96x96 camera.
POLICY = transformer2d_policy_type(Diffusion2dConfig, Diffusion2d, act)
