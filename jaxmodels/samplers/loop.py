"""The loop that all samplers share: a prediction and a step, for each row of a table, in one scan."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float

from jaxmodels.errors import InputError
from jaxmodels.ranges import Range

Predict: TypeAlias = Callable[..., Any]
STEPS = Range(1, 1000)  # of a sampler; published ones take 1 to 100, and 1000 where each timestep is visited
State = TypeVar("State")
Rows = TypeVar("Rows")


class Known(NamedTuple):
    """What a continuous sample must contain; a pytree.

    It is put in at every step with the noise of that step, so that a model sees it and fits the rest in: cheap, but
    the rest leans towards it only in part. For more, pull the prediction by the gradient of the clean sample that it
    expects, as `jaxmodels.samplers.continuing` does for chunks of actions.

    Attributes:
        value: (..., like the sample), or something that broadcasts to it. Only what `mask` marks is read.
        mask: true where the sample must equal `value`; broadcasts likewise.
    """

    value: Float[Array, "..."]
    mask: Bool[Array, "..."]

    def spread(self, shape: tuple[int, ...]) -> "Known":
        """Both as large as the sample.

        Raises:
            InputError: they do not broadcast to it.
        """
        try:
            value, mask = (jnp.broadcast_to(jnp.asarray(array), shape) for array in self)
        except ValueError as error:
            found = [list(jnp.shape(array)) for array in self]
            raise InputError(f"known has shapes {found}; wanted {list(shape)}, or what broadcasts to it") from error
        return Known(value.astype(jnp.float32), mask.astype(bool))

    def put(self, x: Float[Array, "*x"], value: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """`x` with `value` where the sample is known."""
        return jnp.where(self.mask, value, x)


def with_operands(predict: Predict) -> Partial:
    """`predict` as JAX passes it to a compiled program: the arrays of a `Partial` are arguments of that program.

    Any other callable is a constant of it, and so are the arrays it closes over: each new closure compiles anew
    (unless it is called in somebody's own ``jit``, where closures are traced with the rest).
    """
    return predict if isinstance(predict, Partial) else Partial(predict)


def run_steps(
    predict: Predict, step: Callable[[Array, State, Rows], State], state: State, rows: Rows, extras: Any
) -> State:
    """`step(prediction, state, row)` for each row of the table; ``state[0]`` is what `predict` looks at.

    Args:
        predict: ``(x, t)``, or ``(x, t, extra)`` with that step's slice of `extras`. `t` is a scalar, ``row[0]``.
        rows: a NamedTuple of arrays with a leading axis of steps.
        extras: any pytree whose arrays have the same leading axis; None when `predict` wants none.

    Raises:
        InputError: an array of `extras` has another leading axis.
    """
    _check_extras(extras, len(jax.tree.leaves(rows)[0]))

    def body(state: Any, item: tuple[Any, Any]) -> tuple[Any, None]:
        row, extra = item
        prediction = predict(state[0], row[0]) if extra is None else predict(state[0], row[0], extra)
        return step(jnp.asarray(prediction, jnp.float32), state, row), None

    return lax.scan(body, state, (rows, extras))[0]


def check_prediction(prediction: Array, wanted: tuple[int, ...], advice: str) -> None:
    """Raises:
    InputError: the prediction has another shape; without this it could broadcast.
    """
    if prediction.shape != wanted:
        raise InputError(f"predict gave {list(prediction.shape)}; wanted {list(wanted)}: {advice}")


def _check_extras(extras: Any, steps: int) -> None:
    wrong = [jnp.shape(leaf) for leaf in jax.tree.leaves(extras) if jnp.shape(leaf)[:1] != (steps,)]
    if wrong:
        raise InputError(f"extras hold an array of shape {list(wrong[0])}; wanted a leading axis of {steps} steps")


def first_noise(start: Any, shape: tuple[int, ...], key: Any) -> Array:
    """The given noise, or standard normal noise.

    Raises:
        InputError: `start` has another shape.
    """
    if start is None:
        return jax.random.normal(key, shape, jnp.float32)
    if jnp.shape(start) != shape:
        raise InputError(f"start has shape {list(jnp.shape(start))}; wanted {list(shape)}, the shape of the sample")
    return jnp.asarray(start, jnp.float32)
