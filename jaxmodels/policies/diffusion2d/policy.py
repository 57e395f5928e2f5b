"""diffusion2d: action chunks by flow matching or diffusion on the 2D transformer.

The chunk (b, t, a) is an image of `a` channels, `t` high and 1 wide; each action is a patch with a position, as in
PixArt.

Sources: https://arxiv.org/abs/2303.04137 (diffusion policy), https://arxiv.org/abs/2310.00426 (the transformer's
modulation), https://arxiv.org/abs/2506.07339 and https://arxiv.org/abs/2512.05964 (real-time chunking, without and
with training).
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
from jaxmodels.transformer2d.block import BlockKeyValues
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.types import Observation, Prefix

OBJECTIVES, SOLVERS, STRATEGIES = ("flow", "diffusion"), ("euler", "heun"), ("uniform", "beta")


@dataclass(frozen=True)
class Diffusion2dConfig(Transformer2dPolicyConfig):
    """Config of a policy that denoises a chunk of actions with a 2D transformer over cameras and joints.

    Attributes:
        objective: flow matching, or diffusion (cosine schedule).
        prediction_type: prediction of a diffusion's model: the noise (epsilon), the chunk (sample) or the velocity of
            both (v_prediction). A flow's model predicts its velocity.
        timestep_sampling_strategy: distribution of a flow's times in training: uniform, or Beta(1.5, 1) with more
            times close to the noise (https://arxiv.org/abs/2410.24164).
        flow_solver: solver of a flow; a diffusion uses DDIM.
        num_inference_steps: steps of the sampler.
        noise_seed: seed of the first noise, which is the same for each observation.
        trained_prefix: longest delay, in actions, after which a flow is trained to continue a plan
            (`jaxmodels.samplers.real_time_chunking`); guidance is used for longer delays.
        trained_prefix_decay: each delay is ``exp(-decay)`` as frequent in training as the previous delay.
        prefix_bound: maximum pull of guidance (`jaxmodels.samplers.continuing`).
        prefix_through_model: whether guidance takes the model's gradient.

    Further attributes and errors as in `Transformer2dPolicyConfig`.
    """

    type: ClassVar[str] = "diffusion2d"
    indifferent: ClassVar[tuple[str, ...]] = (
        *Transformer2dPolicyConfig.indifferent,
        "timestep_sampling_strategy",
        "trained_prefix_decay",
    )

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Transformer2dPolicyConfig.choices,
        "objective": OBJECTIVES,
        "prediction_type": PREDICTION_TYPES,
        "timestep_sampling_strategy": STRATEGIES,
        "flow_solver": SOLVERS,
    }

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
            wrong.append("trained_prefix is for objective 'flow'; set it to 0, and guidance continues plans")
        if self.objective == "diffusion" and self.prediction_type == "epsilon" and not self._is_bounded:
            wrong.append(
                "prediction_type epsilon wants actions in [-1, 1] (normalization_mapping ACTION: MIN_MAX): its first "
                "steps predict the chunk imprecisely and must be clipped; otherwise use v_prediction or sample"
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
            prediction_type=cast(Any, self.prediction_type),  # `choices` checks it.
            timestep_spacing="trailing",
            clip_sample=self._is_bounded,
        )


BETA = 1.5  # Parameter of Beta(1.5, 1), as in openpi (lerobot/policies/pi0/modeling_pi0.py).
MIN_SIGMA = 0.001  # Minimum of a flow's time, because there is nothing to learn at 0.
EVALUATION = 0  # Seed of the noise of an evaluation.
SLOW, MAX_SLOW = 3, 0.25  # Number of slow waves of the first noise, and their limit in standard deviations.


def make_first_noise(config: Diffusion2dConfig) -> Float[Array, "t a"]:
    """Return the noise that every chunk is sampled from; its slowest waves along time are limited.

    A wave as slow as the chunk would bias all uncertain actions to one side.
    """
    shape = (config.chunk_size, config.action.shape[0])
    noise = jax.random.normal(jax.random.key(config.noise_seed), shape, jnp.float32)
    waves = jnp.asarray(make_slow_waves(config.chunk_size))
    strength = waves @ noise
    return noise + waves.T @ (jnp.clip(strength, -MAX_SLOW, MAX_SLOW) - strength)


def make_slow_waves(steps: int) -> Float[np.ndarray, "k {steps}"]:
    """Return the `SLOW` slowest cosines over `steps`, with the constant; orthonormal."""
    time, wave = np.arange(steps) + 0.5, np.arange(min(SLOW, steps))
    cosines = np.cos(np.pi * wave[:, None] * time / steps)
    return (cosines / np.linalg.norm(cosines, axis=1, keepdims=True)).astype(np.float32)


def add_training_noise(config: Diffusion2dConfig, actions: Float[Array, "b t a"], rngs: nnx.Rngs | None) -> Example:
    """Return a training example of normalised actions with noise at a random time per chunk.

    Args:
        rngs: stream ``noise``; None takes the same noise and times in every call.

    Returns:
        The example. Its `timestep` is (b,), or (b, t) if a prefix is trained.
    """
    key = jax.random.key(EVALUATION) if rngs is None else rngs.noise()
    first, noise_key, delay_key = jax.random.split(key, 3)
    batch, schedule = actions.shape[0], config.schedule
    noise = jax.random.normal(noise_key, actions.shape, jnp.float32)
    # Times are evenly spread over the batch for less noise (arXiv 2107.00630, appendix I.1).
    start = jnp.float32(0.5 / batch) if rngs is None else jax.random.uniform(first)
    share = (start + jnp.arange(batch, dtype=jnp.float32) / batch) % 1
    if not isinstance(schedule, FlowSchedule):
        timestep = jnp.floor(share * schedule.num_train_timesteps).astype(jnp.int32)
        x, target = schedule.add_noise(actions, noise, timestep), schedule.target(actions, noise, timestep)
        return Example(x, timestep, target, jnp.ones(actions.shape[:2], bool))
    if config.timestep_sampling_strategy == "beta":
        share = share ** (1 / BETA)  # The inverse of the distribution function.
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
        initialize_plain(self.transformer)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean squared error of the predictions for noisy chunks, and its parts.

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
        # The sum is not 0, because a delay is less than a chunk.
        counted = example.counts.astype(jnp.float32)[..., None]
        value = (error * counted).sum() / (counted.sum() * actions.shape[2])
        return value, {"mse": value}


def initialize_plain(transformer: Transformer2DModel) -> None:
    """Initialize weights for training from scratch: outputs of 0 as in DiT, and blocks that time does not modulate.

    DiT's gates begin closed, for many layers; here they begin open, as in a plain pre-norm transformer.
    """
    for layer in (transformer.proj_out, transformer.adaln_single.linear):
        for weight in (layer.kernel, layer.bias):
            assert weight is not None  # Both layers have a bias.
            weight[...] = jnp.zeros_like(weight[...])
    head, blocks = transformer.scale_shift_table, transformer.transformer_blocks.scale_shift_table
    head[...] = jnp.zeros_like(head[...])
    shift_scale_gate = jnp.asarray([0, 0, 1, 0, 0, 1], blocks[...].dtype)[:, None]
    blocks[...] = jnp.broadcast_to(shift_scale_gate, blocks[...].shape)


def prepare_modulations(
    transformer: Transformer2DModel, timestep: Float[Array, "b *t"] | Int[Array, "b *t"]
) -> Modulations:
    """Return the transformer's modulations for timesteps, per element or per action."""
    modulations = transformer.prepare_modulations(timestep.reshape(-1).astype(jnp.float32))
    if timestep.ndim == 1:
        return modulations
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-3], *timestep.shape, part.shape[-1]), modulations)


def predict(
    transformer: Transformer2DModel,
    context: BlockKeyValues,
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
    key = jax.random.key(config.noise_seed)  # Unused, because these samplers draw no further noise.
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
    """Return `denoise` for chunks that continue a plan; `knowing` was trained with plans and a time per action."""
    schedule = config.schedule
    guided = continuing(denoise, prefix, schedule, bound=config.prefix_bound, through_model=config.prefix_through_model)
    if knowing is None or not isinstance(schedule, FlowSchedule):
        return guided
    is_longer = jnp.minimum(prefix.delay, prefix.length) > config.trained_prefix
    return Partial(_predict_by_delay, given(knowing, prefix, schedule), guided, is_longer)


def _predict_by_delay(trained: Partial, guided: Partial, is_longer: Bool[Array, " b"], x: Array, *rest: Any) -> Array:
    """Return the trained prediction for delays as in training, and the guided prediction for longer delays."""

    def mixed() -> Array:
        return jnp.where(is_longer[:, None, None], guided(x, *rest), trained(x, *rest))

    return lax.cond(jnp.any(is_longer), mixed, lambda: jnp.asarray(trained(x, *rest), jnp.float32))


def _predict_rest(
    transformer: Transformer2DModel,
    context: BlockKeyValues,
    mask: Bool[Array, "b n"] | None,
    clean: Modulations,
    x: Float[Array, "b t a"],
    t: Float[Array, "b t"],
    modulations: Modulations,
) -> Float[Array, "b t a"]:
    """Predict for a chunk whose first actions have no noise; `clean` modulates time 0, `modulations` other actions."""
    is_known = (t == 0)[..., None]
    mixed = jax.tree.map(lambda known, others: jnp.where(is_known, known, others), clean, modulations)
    return predict(transformer, context, mask, x, t, mixed)


POLICY = transformer2d_policy_type(Diffusion2dConfig, Diffusion2d, act)
