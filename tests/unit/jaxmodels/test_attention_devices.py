"""Choice of the attention kernel for devices that are absent, and parity of the kernels that run here."""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas import tpu
from jaxtyping import Array

from jaxmodels.layers import attention
from jaxmodels.layers.attention import attend

LONG = (1, 1024, 2, 40)


def has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())


def lowered(
    platform: str, shape: tuple[int, ...], dtype: jnp.dtype, bias: tuple[int, ...] | None = None, *, backwards: bool
) -> str:
    """Return the lowered program of attention, or of its gradient, for a platform as text."""
    tokens = jax.ShapeDtypeStruct(shape, dtype)
    added = None if bias is None else jax.ShapeDtypeStruct(bias, dtype)

    def total(q: Array, k: Array, v: Array, bias: Array | None) -> Array:
        return attend(q, k, v, bias).astype(jnp.float32).sum()

    function: Callable[..., object] = jax.grad(total, argnums=(0, 1, 2)) if backwards else attend
    return jax.jit(function).trace(tokens, tokens, tokens, added).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a cuDNN version where the library is missing, which is sufficient to lower programs."""
    if not has_gpu():
        version = SimpleNamespace(cudnn_get_version=lambda: 91000)
        monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", version)


def test_only_tpus_use_the_flash_kernel_for_long_sequences() -> None:
    for backwards in (False, True):
        assert "tpu_custom_call" in lowered("tpu", LONG, jnp.float32.dtype, backwards=backwards)
        assert "tpu_custom_call" not in lowered("cpu", LONG, jnp.float32.dtype, backwards=backwards)
    for shape, bias in (((1, 512, 2, 40), None), ((1, 1030, 2, 40), None), (LONG, (1, 1, 1, 1024))):
        text = lowered("tpu", shape, jnp.float32.dtype, bias, backwards=False)
        assert "tpu_custom_call" not in text
        assert "dot_general" in text


def test_flash_kernel_computes_attention() -> None:
    size, lengths = 40, (1024, 1280, 1280)  # Blocks have 512 queries and 256 keys.
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, n, 1, size)) for seed, n in enumerate(lengths))
    assert attention.is_flash_supported(q, k, None)

    def loss(function: Callable[..., Array]) -> Callable[..., Array]:
        return lambda q, k, v: jnp.sin(function(q, k, v)).sum()

    scaled = q / np.float32(np.sqrt(size))
    with tpu.force_tpu_interpret_mode():
        found = attention.attend_flash(scaled, k, v)
        gradients = jax.grad(loss(attention.attend_flash), argnums=(0, 1, 2))(scaled, k, v)
    np.testing.assert_allclose(found, attend(q, k, v), atol=2e-6)
    wanted = jax.grad(loss(lambda q, k, v: attend(q, k, v, scale=1.0)), argnums=(0, 1, 2))(scaled, k, v)
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize("bias", [None, (2, 1, 1, 64), (1, 8, 64, 64)], ids=str)
def test_half_precision_uses_cudnn_only_on_a_gpu(bias: tuple[int, ...] | None) -> None:
    shape, kind = (2, 64, 8, 40), "__cudnn$fmhaSoftmax" if bias is None else "__cudnn$fmhaScaleBiasSoftmax"
    assert kind in lowered("cuda", shape, jnp.bfloat16.dtype, bias, backwards=False)
    assert f"{kind}Backward" in lowered("cuda", shape, jnp.bfloat16.dtype, bias, backwards=True)
    assert "cudnn" not in lowered("cpu", shape, jnp.bfloat16.dtype, bias, backwards=True)
    assert "cudnn" not in lowered("rocm", shape, jnp.bfloat16.dtype, bias, backwards=True)


@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize(
    ("dtype", "shape", "bias"),
    [
        (jnp.float32, (2, 64, 8, 40), None),
        (jnp.bfloat16, (2, 64, 8, 44), None),
        (jnp.bfloat16, (2, 64, 8, 264), None),
        (jnp.bfloat16, (2, 77, 8, 40), (2, 1, 1, 77)),
    ],
    ids=["float32", "head size not a multiple of 8", "head size too large", "bias over an odd length"],
)
def test_cases_without_cudnn_support_use_products(
    dtype: type, shape: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    for backwards in (False, True):
        assert "cudnn" not in lowered("cuda", shape, jnp.dtype(dtype), bias, backwards=backwards)


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_missing_cudnn_is_not_used() -> None:
    tokens = jnp.zeros((2, 48, 8, 40), jnp.bfloat16)  # A unique shape, because JAX caches traces.
    assert not attention.is_cudnn_supported(tokens, tokens, None)
    assert "cudnn" not in lowered("cuda", tokens.shape, tokens.dtype, backwards=False)


@pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA card")
@pytest.mark.parametrize("bias", [None, (2, 1, 1, 256), (1, 8, 256, 256)], ids=str)
def test_cudnn_computes_attention(bias: tuple[int, ...] | None) -> None:
    q, k, v = (jax.random.normal(jax.random.key(seed), (2, 256, 8, 40), jnp.bfloat16) for seed in range(3))
    added = None if bias is None else jax.random.normal(jax.random.key(3), bias, jnp.bfloat16)
    found = jax.jit(attend)(q, k, v, added)
    q, k, v, added = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v, added))
    wanted = attend(q, k, v, added)
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=2e-2)
