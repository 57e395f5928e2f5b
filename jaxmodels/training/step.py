"""One step of training: augment, normalise, loss, gradient, update; a pure function, compiled once."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxmodels.data import Batch
from jaxmodels.normalization import Affine
from jaxmodels.program import Scales, Size, normalize
from jaxmodels.training.augmentation import augment
from jaxmodels.training.config import TrainingConfig
from jaxmodels.training.instructions import Instructions
from jaxmodels.training.layout import Layout
from jaxmodels.training.optimizers import averaged
from jaxmodels.types import Observation
from jaxmodels.weights import Blueprint

Weights = Mapping[str, Any]
COUNT = "count"


class State(NamedTuple):
    """Everything that a step changes: a tree of arrays.

    Attributes:
        step: how many were done.
        parameters: by our names, float32.
        optimizer: what it remembers of them.
        average: their moving average; None without one.
        sums: of what was measured since the last line of metrics, and `COUNT`, the steps that are in it. A resumed run
            so writes the lines that it would have written.
    """

    step: Any
    parameters: dict[str, Any]
    optimizer: Any
    average: dict[str, Any] | None
    sums: dict[str, Any]


class Fixed(NamedTuple):
    """Everything that a step reads and does not change, beside the batch.

    Attributes:
        weights: buffers and frozen parameters, by our names.
        scales: normalisation of the observation.
        action: normalisation of actions, in the forward direction.
        instructions: of the dataset's tasks, for policies that read them.
    """

    weights: Weights
    scales: Scales
    action: Affine
    instructions: Instructions | None


Loss = Callable[[Weights, Fixed, Batch, PRNGKeyArray], tuple[Array, dict[str, Array]]]
Step = Callable[[State, Fixed, Batch], tuple[State, Float[Array, ""]]]


def make_loss(plan: Blueprint[Any], sizes: tuple[Size, ...], config: TrainingConfig, layout: Layout) -> Loss:
    """The loss of a batch for these parameters, and its parts.

    Args:
        plan: the module, which computes in `config.dtype`.
        sizes: (height, width) the model wants per camera.
    """
    dtype = jnp.dtype(config.dtype)

    def loss(parameters: Weights, fixed: Fixed, batch: Batch, key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
        # Cast before they are gathered: half the traffic in bfloat16.
        weights = lower({**fixed.weights, **parameters}, dtype)
        weights = jax.lax.with_sharding_constraint(weights, layout.whole)
        model = plan.assemble({name: weights[name] for name in plan.shapes})
        picture, vector, *streams = jax.random.split(key, 5)
        keys = jax.random.split(picture, max(1, len(batch.images)))
        images = tuple(
            augment(jnp.asarray(frames), config.image_transforms, key)
            for frames, key in zip(batch.images, keys, strict=False)
        )
        seen = Observation(images=images, state=batch.state, environment_state=batch.environment_state)
        observation = normalize(seen, fixed.scales, sizes, dtype)
        if observation.state is not None and config.state_noise:
            noise = config.state_noise * jax.random.normal(vector, observation.state.shape, jnp.float32)
            observation = observation._replace(state=(observation.state + noise).astype(dtype))
        if fixed.instructions is not None:
            observation = observation._replace(language=fixed.instructions.of(model, jnp.asarray(batch.tasks), dtype))
        rngs = nnx.Rngs(**dict(zip(("dropout", "latent", "noise"), streams, strict=True)))
        value, parts = model.loss(observation, fixed.action.normalize(batch.actions), batch.is_pad, rngs)
        value = value.astype(jnp.float32)
        return value, {"loss": value, **{name: part.astype(jnp.float32) for name, part in parts.items()}}

    return loss


def make_step(
    loss: Loss, config: TrainingConfig, rule: optax.GradientTransformation, layout: Layout, shardings: State
) -> Step:
    """The compiled step: state and batch in, next state and the batch's loss out. The state's memory is reused.

    Args:
        shardings: where a state's arrays lie, before and after.
    """
    parts = config.gradient_accumulation_steps

    def gradient(parameters: Weights, fixed: Fixed, batch: Batch, key: PRNGKeyArray) -> tuple[Any, dict[str, Array]]:
        found = jax.grad(loss, has_aux=True)
        if parts == 1:
            return found(parameters, fixed, batch, key)

        def add(total: Any, part: tuple[Batch, PRNGKeyArray]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, found(parameters, fixed, *part)), None

        some = jax.tree.map(lambda x: _split(x, parts, layout), batch)
        shapes = jax.eval_shape(found, parameters, fixed, jax.tree.map(lambda x: x[0], some), key)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(add, nothing, (some, jax.random.split(key, parts)))
        return jax.tree.map(lambda x: x / parts, total)

    def step(state: State, fixed: Fixed, batch: Batch) -> tuple[State, Float[Array, ""]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        slope, values = gradient(state.parameters, fixed, batch, key)
        updates, memory = rule.update(slope, state.optimizer, state.parameters)
        parameters: Any = optax.apply_updates(state.parameters, updates)
        average = state.average
        if average is not None:
            average = averaged(average, parameters, state.step, config.ema_decay)
        measured = {**values, "gradient_norm": optax.tree.norm(slope), COUNT: jnp.ones((), jnp.float32)}
        is_first = state.step % config.log_freq == 0
        sums = {name: jnp.where(is_first, 0, state.sums[name]) + value for name, value in measured.items()}
        return State(state.step + 1, parameters, memory, average, sums), values["loss"]

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.whole))


def lower(weights: Weights, dtype: DTypeLike) -> dict[str, Any]:
    """Weights in the dtype that is computed in; what is no float stays."""
    return {
        name: array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
        for name, array in weights.items()
    }


def _split(x: Array, parts: int, layout: Layout) -> Array:
    """The batch in parts, of which each device keeps its share."""
    some = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
    return jax.lax.with_sharding_constraint(some, layout.parts)
