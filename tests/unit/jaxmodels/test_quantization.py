"""Quantized matrices: errors of products, of policies' actions, resident bytes, and the gate before a policy serves."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmodels
from jaxmodels import gates, loading, quantization
from jaxmodels.errors import ConfigError
from jaxmodels.gates import compare_actions, make_observations
from jaxmodels.policies import get_policy_type, lerobot_folder
from jaxmodels.policy import Policy
from jaxmodels.quantization import AUTO_DTYPES, WEIGHT_DTYPES, QuantizedMatrix, list_quantized, multiply, quantize
from jaxmodels.types import Requirements
from tests.unit.jaxmodels.test_ranges import VALUES

SHIPPED = Path(jaxmodels.__file__).parents[1] / "robojax/sim/policy"
pytestmark = pytest.mark.usefixtures("quick_compilation")


def make_matrix(kernel: np.ndarray, name: str, dtype: Any = jnp.float32) -> QuantizedMatrix:
    values, scale = quantize(kernel.T, WEIGHT_DTYPES[name])
    return QuantizedMatrix(values, scale[:, 0], dtype, name != quantization.INT8_WEIGHTS)


def largest_rounding(x: np.ndarray, axis: int, name: str) -> np.ndarray:
    """Return the largest error of each number after rounding to 8 bits."""
    if name == "fp8":  # Three bits after the leading one; below the smallest exponent the step is 2^-9.
        return np.abs(x) / 16 + np.abs(x).max(axis, keepdims=True) / 448 / 1024
    return np.broadcast_to(np.abs(x).max(axis, keepdims=True) / 127 / 2, x.shape)


@pytest.mark.parametrize(("name", "share"), [("int8", 0.012), ("fp8", 0.045), ("int8-weights", 0.008)])
def test_products_are_within_the_rounding_of_8_bits(name: str, share: float) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 50, 256)).astype(np.float32)
    x[0, 0] = 0  # A token of zeros has no scale.
    kernel = random.normal(size=(256, 96)).astype(np.float32) * random.uniform(0.01, 10, 96).astype(np.float32)
    kernel[:, 5] = 0
    matrix = make_matrix(kernel, name)
    product = np.asarray(jax.jit(multiply, static_argnums=2)(x, matrix, 0), np.float64)
    exact = x.astype(np.float64) @ kernel
    off = 0 * x if name == "int8-weights" else largest_rounding(x, -1, name)
    weight_off = largest_rounding(kernel, 0, name)
    bound = np.abs(x) @ weight_off + off @ (np.abs(kernel) + weight_off)
    assert (np.abs(product - exact) <= 1.001 * bound + 1e-6).all()
    assert np.sqrt(np.mean((product - exact) ** 2) / np.mean(exact**2)) < share


def test_plain_arrays_are_multiplied_as_before() -> None:
    x, weight = jnp.ones((2, 5, 8)), jnp.ones((4, 8))
    expected = jax.make_jaxpr(lambda x, weight: jnp.einsum("...d,ed->...e", x, weight))(x, weight)
    assert str(jax.make_jaxpr(lambda x, weight: multiply(x, weight, 1))(x, weight)) == str(expected)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(("name", "numbers", "sums"), [("int8", "i8", "i32"), ("fp8", "f8E4M3FN", "f32")])
def test_accelerators_multiply_8_bits(platform: str, name: str, numbers: str, sums: str) -> None:
    matrix = make_matrix(np.ones((64, 32), np.float32), name, jnp.bfloat16)
    run = jax.jit(lambda x, matrix: multiply(x, matrix, 0))
    text = jax.export.export(run, platforms=[platform])(jnp.ones((2, 16, 64), jnp.bfloat16), matrix).mlir_module()
    (product,) = re.findall(r"stablehlo\.dot_general .*?: (\(.*?) loc", text)
    assert product == f"(tensor<2x16x64x{numbers}>, tensor<32x64x{numbers}>) -> tensor<2x16x32x{sums}>"


# Root mean square of the errors as a share of the actions', with random weights, which amplify errors: in bfloat16 they
# are 0.007, 0.026, 0.075, 0.004 and 0.005.
POLICIES = {
    "act_state_only": {"int8": 0.02, "fp8": 0.06, "int8-weights": 0.015},
    "diffusion_env_state_ddim": {"int8": 0.06},
    "pi0_two_cameras": {"int8": 0.22},
    "pi05_two_cameras": {"int8": 0.015, "fp8": 0.05},
    "smolvla_two_cameras": {"int8": 0.012},
}


@pytest.mark.parametrize("name", POLICIES)
def test_actions_of_quantized_policies_are_near(name: str, golden_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "SMALLEST", 1)
    reference = jaxmodels.load_policy(golden_folder(name))
    seen = make_observations(reference.checkpoint, reference.requirements, 3)
    expected = np.concatenate([reference.act(observation) for observation in seen])
    for dtype, share in POLICIES[name].items():
        policy = Policy(reference.checkpoint, dtype=dtype)
        assert policy.dtype == dtype
        error = np.concatenate([policy.act(observation) for observation in seen]) - expected
        assert 0 < np.sqrt(np.mean(error**2) / np.mean(expected**2)) < share


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla"])
def test_resident_bytes_halve(kind: str) -> None:
    config = get_policy_type(kind).config({"type": kind, **VALUES})
    shapes = {name: shape.shape for name, shape in lerobot_folder.model_blueprint(config).shapes.items()}
    quantized = list_quantized(shapes, "int8")
    before = 2 * sum(map(math.prod, shapes.values()))  # bfloat16
    after = before - sum(math.prod(shape) - 4 * shape[0] for shape in quantized.values())
    assert before > 7e8
    assert before / after > 1.91


def test_needs_count_the_bytes_on_the_device() -> None:
    policy = Policy(lerobot_folder.read_checkpoint(SHIPPED), dtype="int8", device="cpu")
    stored = sum(array.nbytes for array in policy._weights.arrays)
    assert policy.needs.weights == stored
    assert stored < 0.43 * Policy(policy.checkpoint, device="cpu").needs.weights


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gates, "use_compile_cache", lambda: tmp_path)
    return tmp_path / "gates"


def test_the_gate_measures_once_for_all_limits(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"int8 fails the gate of actions: Jaw differs from float32 by .* 16 seeded"):
        jaxmodels.load_policy(SHIPPED, dtype="int8", device="cpu")
    (file,) = kept.iterdir()
    monkeypatch.setattr(gates, "measure_action_gate", None)
    first = jaxmodels.load_policy(SHIPPED, dtype="int8", device="cpu", action_error=0.05)
    assert first.dtype == "int8"
    again = jaxmodels.load_policy(SHIPPED, dtype="int8", device="cpu", action_error=0.05, like=first)
    assert again._programs is first._programs
    file.write_text("{}")
    with pytest.raises(TypeError):
        jaxmodels.load_policy(SHIPPED, dtype="int8", device="cpu", action_error=0.05)


def test_auto_takes_the_first_dtype_that_passes(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(loading, "AUTO_DTYPES", {"cpu": AUTO_DTYPES["gpu"]})
    for limit, dtype in ((0.05, "int8"), (0.008, "int8-weights"), (0.001, "float32")):
        caplog.clear()
        assert jaxmodels.load_policy(SHIPPED, dtype="auto", device="cpu", action_error=limit).dtype == dtype
        assert any(f"dtype {'auto: ' * (dtype == 'float32')}{dtype}" in message for message in caplog.messages)


def test_a_policy_without_large_matrices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "SMALLEST", 1 << 20)
    with pytest.raises(ConfigError, match=r"dtype is int8, and the policy has no matrix .*use float32 or bfloat16"):
        jaxmodels.load_policy(SHIPPED, dtype="int8", device="cpu")
    monkeypatch.setattr(loading, "AUTO_DTYPES", {"cpu": AUTO_DTYPES["gpu"]})
    assert jaxmodels.load_policy(SHIPPED, dtype="auto", device="cpu").dtype == "float32"


def test_the_gate_compares_errors_with_ranges_of_joints() -> None:
    needs = Requirements("act", action=3, chunk=2, action_range=((0.0, -5.0, 7.0), (10.0, 5.0, 7.0)))
    expected = np.full((1, 2, 3), 7, np.float32)
    actual = expected + np.array([[[0.04, 0, 0], [0, -0.06, 1e-6]]], np.float32)

    def gate(actual: np.ndarray, needs: Requirements = needs) -> gates.ActionGate:
        return compare_actions([expected], [actual], needs, dtypes=("int8", "float32"))

    result = gate(actual)
    assert [joint.share for joint in result.joints] == pytest.approx([0.004, 0.006, 0], rel=1e-4)
    assert not result.passed
    assert "joint 1 differs from float32 by up to 0.06, 0.60 % of its range (at most 0.5 %)" in result.describe()
    assert gate(expected).passed
    assert not gate(np.full_like(expected, np.nan)).passed
    assert not gate(expected + np.float32(0.1)).passed  # The third joint never moved.
    # Without a range of the data, the reference's actions are the range.
    assert not gate(actual, Requirements("act", action=3, chunk=2)).passed
