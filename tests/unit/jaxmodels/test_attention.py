"""Each path of the attention, compared with the formula in float64."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array

from jaxmodels.layers import attention
from jaxmodels.layers.attention import attend

# Path on a CPU -> batch, queries, keys, heads, channels per head.
SHAPES = {
    "in one product": (2, 5, 7, 3, 4),
    "head by head": (2, 300, 256, 2, 8),
    "many heads in one product": (3, 300, 256, 6, 4),
    "in a loop over heads": (3, 1000, 256, 6, 4),
    "in loops over blocks": (1, 601, 8192, 1, 8),  # 3 blocks of 201, the last of them partial.
}
# Axes of the bias: batch, heads, queries.
BIASES = {"keys": (False,) * 3, "batch": (True, False, False), "heads": (False, True, True), "all": (True,) * 3}

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]


# Tests share its programs, and give it arrays of NumPy, because JAX would compile a program for each conversion.
run = jax.jit(attend, static_argnames=("scale", "rate"))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(batch: int, queries: int, keys: int, heads: int, size: int) -> Inputs:
    lengths = (queries, keys, keys)
    q, k, v = (numbers(batch, length, heads, size, seed=seed) for seed, length in enumerate(lengths))
    return q, k, v


def bias_for(name: str, batch: int, queries: int, keys: int, heads: int) -> np.ndarray:
    sizes = (batch, heads, queries)
    return numbers(*(size if own else 1 for size, own in zip(sizes, BIASES[name], strict=True)), keys, seed=3)


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    q64, k64, v64 = (np.swapaxes(x, 1, 2).astype(np.float64) for x in (q, k, v))
    scores = q64 @ np.swapaxes(k64, 2, 3) / np.sqrt(q.shape[-1])
    if bias is not None:
        scores += np.asarray(bias, np.float64)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.swapaxes(powers / powers.sum(-1, keepdims=True) @ v64, 1, 2)


@cache
def formula_of(shape: tuple[int, ...]) -> np.ndarray:
    """Return the formula for the inputs of a shape, which several tests compare with."""
    return formula(*inputs(*shape))


def plain(q: Array, k: Array, v: Array) -> Array:
    weights = jax.nn.softmax(jnp.einsum("bnhk,bmhk->bhnm", q, k) / np.float32(np.sqrt(q.shape[-1])), axis=-1)
    return jnp.einsum("bhnm,bmhk->bnhk", weights, v)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_softmax_of_scaled_products(shape: tuple[int, ...]) -> None:
    q, k, v = inputs(*shape)
    np.testing.assert_allclose(run(q, k, v), formula_of(shape), atol=2e-6)
    # The scores are as large as above, because rounding errors grow with them.
    scaled = q / np.float32(np.sqrt(shape[-1]))
    np.testing.assert_allclose(run(scaled, k, v, scale=1.0), formula_of(shape), atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BIASES)
def test_bias_is_added_to_its_scores(shape: tuple[int, ...], name: str) -> None:
    q, k, v = inputs(*shape)
    bias = bias_for(name, *shape[:4])
    np.testing.assert_allclose(run(q, k, v, bias), formula(q, k, v, bias), atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_masked_keys_have_no_effect_unless_all_are_masked(shape: tuple[int, ...]) -> None:
    q, k, v = inputs(*shape)
    bias = np.where(np.arange(shape[2]) < shape[2] - 2, 0.0, -np.inf)[None, None, None].astype(np.float32)
    np.testing.assert_allclose(run(q, k, v, bias), run(q, k[:, :-2], v[:, :-2]), atol=1e-6)
    # Floats near -10000 are a thousandth apart.
    bias = np.full((shape[0], 1, 1, shape[2]), -10000.0, np.float32)
    np.testing.assert_allclose(run(q, k, v, bias), formula_of(shape), atol=1e-3)


WAYS: dict[str, Callable[..., Array]] = {
    "straight": attend,
    "recomputed": jax.checkpoint(attend),
    "looped": lambda q, k, v: jax.lax.scan(lambda x, _: (attend(x, k, v), None), q, None, length=1)[0],
    "mapped": lambda q, k, v: jax.vmap(attend)(*(jnp.stack((x, x)) for x in (q, k, v)))[1],
}


@cache
def gradients(function: Callable[..., Array], shape: tuple[int, ...]) -> Inputs:
    weights = numbers(shape[0], shape[1], shape[3], shape[4], seed=9)
    return jax.jit(jax.grad(lambda *x: (function(*x) * weights).sum(), argnums=(0, 1, 2)))(*inputs(*shape))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("function", WAYS.values(), ids=WAYS)
def test_gradients_equal_the_formula(shape: tuple[int, ...], function: Callable[..., Array]) -> None:
    for found, wanted in zip(gradients(function, shape), gradients(plain, shape), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_no_gradient_flows_to_a_bias() -> None:
    gradient = jax.jit(jax.grad(lambda bias, *x: attend(*x, bias).sum()))
    assert not np.asarray(gradient(np.zeros((1, 1, 3, 4), np.float32), *inputs(1, 3, 4, 1, 2))).any()


@pytest.mark.parametrize("way", ["forwards", "backwards"])
def test_scores_of_a_stable_diffusion_block_are_never_all_in_memory(way: str) -> None:
    token = jax.ShapeDtypeStruct((2, 4096, 8, 40), jnp.float32)
    function = attend if way == "forwards" else jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))
    memory = jax.jit(function).lower(token, token, token).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 100e6  # All scores take 1.07 GB, inputs and outputs 21 MB.


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bfloat16_is_rounded_only_at_input_and_output(shape: tuple[int, ...]) -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(*shape))
    bias = bias_for("batch", *shape[:4]).astype(jnp.bfloat16)
    found = run(q, k, v, bias)
    assert found.dtype == jnp.bfloat16
    # Half a unit in the last of 8 bits, twice for the probabilities that the second product reads.
    np.testing.assert_allclose(np.asarray(found, np.float64), formula(q, k, v, bias), atol=2e-2)


def test_sum_over_thousands_of_keys_is_exact_in_bfloat16() -> None:
    # Added one by one in bfloat16, ones would stop at 256.
    q, k, v = np.zeros((1, 40, 1, 8)), np.zeros((1, 4000, 1, 8)), np.ones((1, 4000, 1, 8))
    found = run(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    np.testing.assert_array_equal(np.asarray(found, np.float32), 1.0)


@pytest.mark.parametrize("shape", [SHAPES["in one product"], SHAPES["in loops over blocks"]], ids=str)
def test_dropout_removes_probabilities_and_keeps_the_mean_sum(shape: tuple[int, ...]) -> None:
    q, k, _ = inputs(*shape)
    ones = np.ones_like(k)
    drop = jax.jit(lambda *x: attend(*x, rate=0.25, rngs=nnx.Rngs(dropout=0)))
    dropped = np.asarray(drop(q, k, ones))
    assert np.std(dropped) > 0.01
    assert abs(float(dropped.mean()) - 1.0) < 0.1
    np.testing.assert_array_equal(dropped, drop(q, k, ones))
    np.testing.assert_allclose(run(q, k, ones, rate=0.25), 1.0, atol=1e-5)


@pytest.mark.parametrize("name", BIASES)
def test_attention_in_parts_equals_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 11, 7, 3, 4)
    bias = bias_for(name, 2, 11, 7, 3)
    monkeypatch.setattr(attention, "WHOLE_SCORES", 100)
    found = jax.jit(attention.attend_in_parts)(q * 0.5, k, v, bias)
    np.testing.assert_allclose(found, formula(q, k, v, bias), atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_of_these_tests_reach_their_code_paths(shape: tuple[int, ...]) -> None:
    name = next(name for name, other in SHAPES.items() if other == shape)
    program = str(jax.make_jaxpr(lambda q, k, v: attention.attend_blocked(q, k, v, None))(*inputs(*shape)))
    blocks = 4 if name == "head by head" else int("loop" in name)
    assert (program.count("remat2["), program.count("scan[")) == (blocks, 2 * ("loop" in name))
    assert ("length=3" in program) == (name == "in loops over blocks")
