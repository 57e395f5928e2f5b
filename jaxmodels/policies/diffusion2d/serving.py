"""diffusion2d for serving: samples a chunk from noise in one program, also one that continues a plan."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float

from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.diffusion2d.model import Diffusion2d, make_first_noise, predict, prepare_modulations
from jaxmodels.policies.transformer2d_policy import build_model
from jaxmodels.samplers import FlowSchedule, begin_with, continuing, ddim, flow_euler, flow_heun, given
from jaxmodels.transformer2d import Modulations, Transformer2DModel
from jaxmodels.transformer2d.block import KeyValues
from jaxmodels.types import Observation, Prefix


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
    """`denoise` for chunks that continue a plan.

    Args:
        knowing: the same of a model that was trained with plans; it takes a time for each action.
    """
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
    """The answer to a chunk whose first actions have no noise, at time 0.

    Args:
        clean, modulations: of time 0, and of the time of all other actions.
    """
    is_known = (t == 0)[..., None]
    mixed = jax.tree.map(lambda known, others: jnp.where(is_known, known, others), clean, modulations)
    return predict(transformer, context, mask, x, t, mixed)
