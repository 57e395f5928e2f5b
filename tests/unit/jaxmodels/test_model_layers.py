"""Layers compared with plain formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmodels.layers import feed_forward, vision
from jaxmodels.layers.feed_forward import DIFFUSERS_ACTIVATIONS, LEROBOT_ACTIVATIONS, FeedForward, dropout
from jaxmodels.layers.norm import BatchNorm, LayerNorm
from jaxmodels.layers.vision import max_pool


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_winograd_convolution_equals_the_plain_convolution(batch: int, height: int, width: int, channels: int) -> None:
    x, kernel = numbers(batch, height, width, channels), numbers(3, 3, channels, 4, seed=1)
    transformed = jnp.asarray(vision.transform_winograd_kernel(np.asarray(kernel)))

    @jax.jit
    def both(x, kernel, transformed):
        axes = ("NHWC", "HWIO", "NHWC")
        plain = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)
        return plain, vision.convolve_winograd(x, transformed)

    wanted, found = both(x, kernel, transformed)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_gelu_is_exact_and_glu_gates_with_the_second_half() -> None:
    x = numbers(1, 1, 4)
    gelu = FeedForward(4, 4, LEROBOT_ACTIVATIONS["gelu"], rngs=nnx.Rngs(0))
    up = np.asarray(gelu.up(x), np.float64)
    erf = np.vectorize(math.erf)
    np.testing.assert_allclose(gelu.activation(gelu.up(x)), up * 0.5 * (1 + erf(up / np.sqrt(2))), atol=1e-6)
    glu = FeedForward(4, 6, LEROBOT_ACTIVATIONS["glu"], rngs=nnx.Rngs(0))
    assert glu.down.kernel.shape == (3, 4)
    up = np.asarray(glu.up(x))
    np.testing.assert_allclose(glu.activation(glu.up(x)), up[..., :3] / (1 + np.exp(-up[..., 3:])), atol=1e-6)


def test_layer_norm_keeps_its_digits_far_from_zero() -> None:
    x = numbers(1, 4, 64) + 1000.0
    wide = np.asarray(x, np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(LayerNorm(64)(x), wanted, atol=1e-3)


def test_batch_norm_learns_statistics_and_serves_with_them() -> None:
    """Like torch.nn.BatchNorm2d, normalize by the biased variance and store a tenth of the unbiased variance."""
    layer, x = BatchNorm(3), numbers(4, 2, 5, 3) * 3 + 1
    layer.scale[...] = jnp.full(3, 2.0)
    layer.train()
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    np.testing.assert_allclose(layer(x), 2 * (x - mean) / np.sqrt(variance + 1e-5), atol=1e-5)
    np.testing.assert_allclose(layer.mean[...], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(layer.variance[...], 0.9 + 0.1 * variance * 40 / 39, rtol=1e-5)
    layer.eval()
    served = 2 * (x - layer.mean[...]) / np.sqrt(layer.variance[...] + 1e-5)
    np.testing.assert_allclose(layer(x), served, rtol=1e-5, atol=1e-5)


def test_max_pool_passes_its_gradient_to_the_first_maximum() -> None:
    x = jnp.zeros((1, 4, 4, 1)).at[0, 2, 3, 0].set(1.0)
    slope = np.asarray(jax.jit(jax.grad(lambda x: max_pool(x).sum()))(x))[0, :, :, 0]
    assert slope.sum() == 4  # Four windows.
    assert slope[0, 0] == slope[0, 1] == slope[1, 0] == 1  # PyTorch does the same for equal values.
    assert slope[2, 3] == 1


def test_dropout_keeps_the_mean_and_zeroes_its_share() -> None:
    x = jnp.ones((100, 100))
    out = dropout(x, 0.25, nnx.Rngs(dropout=0))
    assert abs(float((out == 0).mean()) - 0.25) < 0.02
    assert abs(float(out.mean()) - 1.0) < 0.03
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, nnx.Rngs(dropout=0)) is x


def test_cpu_computes_many_tokens_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FeedForward(8, 64, DIFFUSERS_ACTIVATIONS["geglu"], rngs=nnx.Rngs(0))
    x = numbers(2, 15, 8)

    def run(layer: FeedForward, x: jax.Array) -> jax.Array:
        return jnp.square(layer(x)).sum()

    def pair() -> list[jax.Array]:
        return jax.tree.leaves((layer(x), nnx.grad(run)(layer, x)))

    whole = pair()
    monkeypatch.setattr(feed_forward, "HIDDEN", 100)
    monkeypatch.setattr(feed_forward, "ROWS", 7)  # The last part is not full.
    for part, other in zip(pair(), whole, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-5, atol=1e-5)
