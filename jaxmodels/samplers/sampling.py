"""The sampling loop, guidance, and categorical distributions that samplers share.

The last class is the masked one; models give no probability for it, and nothing here draws it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.errors import InputError
from jaxmodels.ranges import Range

Predict: TypeAlias = Callable[..., Any]
STEPS = Range(1, 1000)  # of a sampler; published ones take 1 to 100, and 1000 where each timestep is visited
State = TypeVar("State")
Rows = TypeVar("Rows")


class Known(NamedTuple):
    """Known part of a continuous sample (inpainting): values and a mask; a pytree.

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
        """Broadcast both arrays to the shape of the sample.

        Raises:
            InputError: they do not broadcast to it.
        """
        try:
            value, mask = (jnp.broadcast_to(jnp.asarray(array), shape) for array in self)
        except ValueError as error:
            shapes = [list(jnp.shape(array)) for array in self]
            raise InputError(f"known has shapes {shapes}; wanted {list(shape)}, or what broadcasts to it") from error
        return Known(value.astype(jnp.float32), mask.astype(bool))

    def put(self, x: Float[Array, "*x"], value: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """`x` with the known values put in."""
        return jnp.where(self.mask, value, x)


def make_partial(predict: Predict) -> Partial:
    """`predict` as a `Partial`, whose arrays are arguments of the compiled program and not constants.

    Any other callable is a constant of it, and so are the arrays it closes over: each new closure compiles anew
    (unless it is called in somebody's own ``jit``, where closures are traced with the rest).
    """
    return predict if isinstance(predict, Partial) else Partial(predict)


def run_steps(
    predict: Predict, step: Callable[[Array, State, Rows], State], state: State, rows: Rows, extras: Any
) -> State:
    """Run `step(prediction, state, row)` for each row of the table; `predict` gets ``state[0]``.

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


def check_prediction(prediction: Array, expected: tuple[int, ...], advice: str) -> None:
    """Compare the shape of a prediction with the expected one; a wrong one could broadcast unnoticed.

    Raises:
        InputError: the prediction has another shape; without this it could broadcast.
    """
    if prediction.shape != expected:
        raise InputError(f"predict gave {list(prediction.shape)}; wanted {list(expected)}: {advice}")


def _check_extras(extras: Any, steps: int) -> None:
    wrong = [jnp.shape(leaf) for leaf in jax.tree.leaves(extras) if jnp.shape(leaf)[:1] != (steps,)]
    if wrong:
        raise InputError(f"extras hold an array of shape {list(wrong[0])}; wanted a leading axis of {steps} steps")


def first_noise(start: Any, shape: tuple[int, ...], key: Any) -> Array:
    """The noise to start from: what is given, or standard normal noise.

    Raises:
        InputError: `start` has another shape.
    """
    if start is None:
        return jax.random.normal(key, shape, jnp.float32)
    if jnp.shape(start) != shape:
        raise InputError(f"start has shape {list(jnp.shape(start))}; wanted {list(shape)}, the shape of the sample")
    return jnp.asarray(start, jnp.float32)


def draw_for_each(key: Any, shape: tuple[int, ...], batch: int) -> Array:
    """Standard normal noise (batch, *shape), float32, the same for each member: what a policy answers to an observation
    does not depend on those that it is batched with.
    """
    return jnp.broadcast_to(jax.random.normal(key, shape, jnp.float32), (batch, *shape))


CLASSES = Range(2, 1 << 20)  # with the masked one
LOWEST = -70.0  # of a log-probability: e^-70 never happens, and differences of it stay finite. VQ-Diffusion's number


class Tokens(NamedTuple):
    """Result of a discrete sampler: tokens and their probabilities; a pytree.

    Attributes:
        ids: classes, never the masked one.
        log_probability: what the model gave that class when it was chosen; 0 for tokens that were known.
        distribution: and what it gave every class then, zeros for tokens that were known; None unless asked for.
    """

    ids: Int[Array, "b n"]
    log_probability: Float[Array, "b n"]
    distribution: Float[Array, "b v n"] | None = None


def normalized(prediction: Float[Array, "b v n"]) -> Float[Array, "b v n"]:
    """Log-probabilities out of logits or log-probabilities, without infinities."""
    return jnp.maximum(jax.nn.log_softmax(prediction.astype(jnp.float32), axis=1), LOWEST)


def truncate(log_probabilities: Float[Array, "b v n"], rate: Any) -> Float[Array, "b v n"]:
    """Log-probabilities of the likeliest classes that hold a share `rate` of the probability; -inf for the others.

    Not made to sum to 1 again: what draws from them does not need it.

    Source: diffusers' VQDiffusionPipeline.truncate.
    """
    order = jnp.argsort(-log_probabilities, axis=1)
    ordered = jnp.exp(jnp.take_along_axis(log_probabilities, order, axis=1))
    before = jnp.cumsum(ordered, axis=1)[:, :-1]  # of the likelier classes: the first one has none
    is_kept = jnp.concatenate((jnp.ones_like(before[:, :1], bool), before < rate), axis=1)
    is_kept = jnp.take_along_axis(is_kept, jnp.argsort(order, axis=1), axis=1)
    return jnp.where(is_kept, log_probabilities, -jnp.inf)


def draw(log_probabilities: Float[Array, "b v n"], gumbel: Float[Array, "b v n"]) -> Int[Array, "b n"]:
    """Draw a class for each token: a sample with standard Gumbel noise, the likeliest class with zeros."""
    return jnp.argmax(log_probabilities + gumbel, axis=1).astype(jnp.int32)


def select_class(log_probabilities: Float[Array, "b v n"], ids: Int[Array, "b n"]) -> Float[Array, "b n"]:
    """Log-probability of each token's class."""
    return jnp.take_along_axis(log_probabilities, ids[:, None], axis=1)[:, 0]


def first_tokens(known: Any, shape: tuple[int, int], mask: int) -> Int[Array, "b n"]:
    """The tokens to start from: known ones, and the masked class elsewhere.

    Raises:
        InputError: `known` has another shape, or holds something else than integers.
    """
    if known is None:
        return jnp.full(shape, mask, jnp.int32)
    if jnp.shape(known) != shape or not jnp.issubdtype(jnp.result_type(known), jnp.integer):
        raise InputError(
            f"known is {jnp.result_type(known)} {list(jnp.shape(known))}; wanted integers {list(shape)}, "
            f"{mask} where a token is to be sampled"
        )
    return jnp.asarray(known, jnp.int32)


def check_known(known: Any, mask: int) -> None:
    """Refuse known tokens that are no classes. Values of tracers are unknown and left to the caller.

    Raises:
        InputError: a known token is no class. Tracers have no values to look at: there it is left to the caller.
    """
    if known is None or isinstance(known, Tracer):
        return
    tokens = np.asarray(known)
    wrong = tokens[(tokens < 0) | (tokens > mask)]
    if wrong.size:
        raise InputError(f"known holds {wrong[0]}; wanted classes 0 to {mask - 1}, or {mask} for a token to be sampled")


# Two impossible classes would differ by NaN; the lowest finite float32 would overflow once it is scaled.
IMPOSSIBLE = -1e4


def combine(unconditional: Float[Array, "*x"], conditional: Float[Array, "*x"], scale: Any) -> Float[Array, "*x"]:
    """Classifier-free guidance of a prediction of noise, sample or velocity; scale 1 is the conditional one (formula 6
    of https://arxiv.org/abs/2207.12598, with its w as scale - 1)."""
    return unconditional + scale * (conditional - unconditional)


def combine_log(
    unconditional: Float[Array, "b v n"], conditional: Float[Array, "b v n"], scale: Any
) -> Float[Array, "b v n"]:
    """Classifier-free guidance of log-probabilities, normalised over the classes (axis 1) as VQ-Diffusion does."""
    guided = combine(jnp.maximum(unconditional, IMPOSSIBLE), jnp.maximum(conditional, IMPOSSIBLE), scale)
    return jax.nn.log_softmax(guided, axis=1)


def guide(predict: Predict, scale: Any, *, log_probabilities: bool = False) -> Partial:
    """A guided `predict` out of one that answers with and without the condition at once.

    Args:
        predict: gets x twice in one batch, and answers without the condition in the first half and with it in the
            second (diffusers' order): prepare its conditioning for a batch of ``2 b``.
        scale: how far to go; 1 is no guidance. An argument of compiled programs: another one does not compile again.
        log_probabilities: the predictions are log-probabilities of classes (b v n), as for a discrete sampler.
    """
    return Partial(_guided_log if log_probabilities else _guided, make_partial(predict), scale)


def _guided(predict: Predict, scale: Any, x: Array, *rest: Any) -> Array:
    return combine(*_predict_both(predict, x, *rest), scale)


def _guided_log(predict: Predict, scale: Any, x: Array, *rest: Any) -> Array:
    return combine_log(*_predict_both(predict, x, *rest), scale)


def _predict_both(predict: Predict, x: Array, *rest: Any) -> tuple[Array, Array]:
    both = jnp.asarray(predict(jnp.concatenate((x, x)), *rest), jnp.float32)
    if both.shape[0] != 2 * x.shape[0]:
        raise InputError(f"predict gave a batch of {both.shape[0]}; wanted {2 * x.shape[0]}, twice that of x")
    unconditional, conditional = jnp.split(both, 2)
    return unconditional, conditional
