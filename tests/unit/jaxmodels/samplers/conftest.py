"""A real, small training run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from jaxmodels.transformer2d import Transformer2DModel
from jaxmodels.weights import Blueprint, blueprint, flatten
from tests.testing.compiling import compiling_quickly


class Trained(NamedTuple):
    """A model's plan, its weights, and the loss of each step."""

    plan: Blueprint[Transformer2DModel]
    weights: dict[str, jax.Array]
    losses: np.ndarray

    def mean_loss(self, first: int, last: int) -> float:
        return float(self.losses[first:last].mean())


Loss = Callable[[Transformer2DModel, jax.Array], jax.Array]


def train(build: Callable[[nnx.Rngs], Transformer2DModel], loss: Loss, *, steps: int, rate: float = 3e-3) -> Trained:
    """Adam with a cosine decay, all steps in one program; `loss` makes its own batch from a key."""
    plan = blueprint(build)
    with compiling_quickly():  # it runs once
        weights = jax.jit(lambda: flatten(build(nnx.Rngs(0))))()  # one program instead of dozens
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(rate, steps)))

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        weights, memory = state
        value, gradient = jax.value_and_grad(lambda weights: loss(plan.assemble(weights), key))(weights)
        updates, memory = rule.update(gradient, memory, weights)
        return (optax.apply_updates(weights, updates), memory), value

    keys = jax.random.split(jax.random.key(0), steps)
    program = jax.jit(lambda state, keys: lax.scan(step, state, keys))
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies counts with floats
        (weights, _), losses = program((weights, rule.init(weights)), keys)
    return Trained(plan, weights, np.asarray(losses))


@pytest.fixture(scope="session")
def trained() -> Callable[..., Trained]:
    """Trains a model on a loss."""
    return train
