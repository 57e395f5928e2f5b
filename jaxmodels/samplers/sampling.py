"""The sampling loop and the guidance that all samplers share."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.errors import InputError
from jaxmodels.ranges import Range

Predict: TypeAlias = Callable[..., Any]
# Published samplers take 1 to 100 steps, or 1000 if they visit every timestep.
STEPS = Range(1, 1000)
State = TypeVar("State")
Rows = TypeVar("Rows")


def make_partial(predict: Predict) -> Partial:
    """Return `predict` as a `Partial`, whose arrays are arguments of the program; each other closure compiles again."""
    return predict if isinstance(predict, Partial) else Partial(predict)


def run_steps(
    predict: Predict, step: Callable[[Array, State, Rows], State], state: State, rows: Rows, extras: Any
) -> State:
    """Run `step(prediction, state, row)` for each row of the table.

    Args:
        predict: called with ``(state[0], t)``, or ``(state[0], t, extra)`` with the slice of `extras` for the step. `t`
            is a scalar, ``row[0]``.
        rows: NamedTuple of arrays with a leading axis of steps.
        extras: pytree of arrays with the same leading axis, or None.

    Raises:
        InputError: an array of `extras` has another leading axis.
    """
    steps = len(jax.tree.leaves(rows)[0])
    if wrong := [jnp.shape(leaf) for leaf in jax.tree.leaves(extras) if jnp.shape(leaf)[:1] != (steps,)]:
        raise InputError(f"extras hold an array of shape {list(wrong[0])}; wanted a leading axis of {steps} steps")

    def body(state: Any, item: tuple[Any, Any]) -> tuple[Any, None]:
        row, extra = item
        prediction = predict(state[0], row[0]) if extra is None else predict(state[0], row[0], extra)
        return step(jnp.asarray(prediction, jnp.float32), state, row), None

    return lax.scan(body, state, (rows, extras))[0]


def check_prediction(prediction: Array, expected: tuple[int, ...], advice: str) -> None:
    """Raise InputError if a prediction has another shape than expected, which could broadcast unnoticed."""
    if prediction.shape != expected:
        raise InputError(f"predict gave {list(prediction.shape)}; wanted {list(expected)}: {advice}")


def first_noise(start: Any, shape: tuple[int, ...], key: Any) -> Array:
    """Return `start`, or standard normal noise if it is None; raises InputError if `start` has another shape."""
    if start is None:
        return jax.random.normal(key, shape, jnp.float32)
    if jnp.shape(start) != shape:
        raise InputError(f"start has shape {list(jnp.shape(start))}; wanted {list(shape)}, the shape of the sample")
    return jnp.asarray(start, jnp.float32)


def draw_for_each(key: Any, shape: tuple[int, ...], batch: int) -> Array:
    """Draw standard normal noise (batch, *shape), float32, the same for each member of the batch.

    The result for an observation then does not depend on the other observations of its batch.
    """
    return jnp.broadcast_to(jax.random.normal(key, shape, jnp.float32), (batch, *shape))


def combine(unconditional: Float[Array, "*x"], conditional: Float[Array, "*x"], scale: Any) -> Float[Array, "*x"]:
    """Return the classifier-free guidance of a prediction (formula 6 of https://arxiv.org/abs/2207.12598).

    Example:
        >>> combine(jnp.float32([1.0]), jnp.float32([2.0]), scale=3.0).tolist()
        [4.0]
    """
    return unconditional + scale * (conditional - unconditional)


def guide(predict: Predict, scale: Any) -> Partial:
    """Return a guided `predict` for a model that predicts with and without the condition in one batch.

    `predict` receives x twice, 2 b; the first half of its result is without the condition, as in diffusers. A `scale`
    of 1 is no guidance; other values do not compile the program again.

    Example:
        >>> def predict(x, t):  # 1 without the condition, 2 with it.
        ...     return jnp.repeat(jnp.float32([[1], [2]]), len(x) // 2, axis=0)
        >>> guide(predict, scale=3.0)(jnp.zeros((1, 1)), 0).tolist()
        [[4.0]]
    """
    return Partial(_guided, make_partial(predict), scale)


def _guided(predict: Predict, scale: Any, x: Array, *rest: Any) -> Array:
    both = jnp.asarray(predict(jnp.concatenate((x, x)), *rest), jnp.float32)
    if both.shape[0] != 2 * x.shape[0]:
        raise InputError(f"predict gave a batch of {both.shape[0]}; wanted {2 * x.shape[0]}, twice that of x")
    unconditional, conditional = jnp.split(both, 2)
    return combine(unconditional, conditional, scale)
