"""One step of training: augment, normalise, loss, gradient, update; a pure function, compiled once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from jaxmodels.data.batches import Batch
from jaxmodels.normalization import Affine
from jaxmodels.program import Scales, Size, normalize
from jaxmodels.training.config import TrainingConfig
from jaxmodels.types import Observation


class State(NamedTuple):
    """Everything that a step changes: a tree of arrays."""

    step: Any
    parameters: Any
    optimizer: Any


def optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """AdamW behind a clip, with a linear warm-up and a cosine decay; norms and biases are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        min(config.warmup, config.steps // 2),
        config.steps,
        config.final_share * config.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule,
            weight_decay=config.weight_decay,
            mask=lambda parameters: jax.tree.map(lambda x: x.ndim > 1, parameters),
        ),
    )


def augment(frames: UInt8[Array, "b h w 3"], config: TrainingConfig, key: PRNGKeyArray) -> UInt8[Array, "b h w 3"]:
    """Brightness, contrast and noise, rounded back to pixels: what a codec and a lamp do to a picture."""
    light, contrast, grain = jax.random.split(key, 3)
    x = frames.astype(jnp.float32)
    shape = (frames.shape[0], 1, 1, 1)
    gain = 1 + config.brightness * jax.random.uniform(contrast, shape, minval=-1, maxval=1)
    shift = 255 * config.brightness * jax.random.uniform(light, shape, minval=-1, maxval=1)
    x = x * gain + shift + 255 * config.noise * jax.random.normal(grain, frames.shape, jnp.float32)
    return jnp.clip(jnp.round(x), 0, 255).astype(jnp.uint8)


def make_step(
    graph: nnx.GraphDef[Any],
    buffers: Any,
    scales: Scales,
    action: Affine,
    sizes: tuple[Size, ...],
    config: TrainingConfig,
    rule: optax.GradientTransformation,
) -> Callable[[State, Batch], tuple[State, dict[str, Float[Array, ""]]]]:
    """The compiled step: state and batch in, next state and metrics out. The state's memory is reused.

    Args:
        graph, buffers: what `nnx.split` leaves of a model beside its parameters.
        scales: normalisation of the observation.
        action: normalisation of actions, in the forward direction.
    """

    def loss(parameters: Any, batch: Batch, key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
        model = nnx.merge(graph, parameters, buffers)
        picture, vector, dropout, latent = jax.random.split(key, 4)
        keys = jax.random.split(picture, max(1, len(batch.images)))
        images = tuple(augment(jnp.asarray(frames), config, k) for frames, k in zip(batch.images, keys, strict=False))
        observation = normalize(Observation(images=images, state=batch.state), scales, sizes)
        if observation.state is not None:
            jitter = config.state_noise * jax.random.normal(vector, observation.state.shape, jnp.float32)
            observation = observation._replace(state=observation.state + jitter)
        actions = action.normalize(batch.actions)
        rngs = nnx.Rngs(dropout=dropout, latent=latent)
        value, parts = model.loss(observation, actions, batch.is_pad, rngs)
        return value, {"loss": value, **parts}

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        gradient, metrics = jax.grad(loss, has_aux=True)(state.parameters, batch, key)
        updates, memory = rule.update(gradient, state.optimizer, state.parameters)
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        return State(state.step + 1, optax.apply_updates(state.parameters, updates), memory), metrics

    return jax.jit(step, donate_argnums=0)
