"""Gradients for each kind of input compared with torch's autograd, also with scanned or recomputed layers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.parity.transformer2d.conftest import SINGLE, inputs_for, live_tolerance, model_of, small, to_torch
from tests.testing.peers import skip_reason

torch = pytest.importorskip("torch", reason=skip_reason("torch"))

pytestmark = pytest.mark.needs_peers
TOLERANCE = live_tolerance()  # Largest absolute difference of gradients of order 1.
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "continuous of many tokens": ("continuous", {"cross_attention_dim": 20, "num_layers": 1}),
    "continuous gated": ("continuous", {"cross_attention_dim": 20, "attention_type": "gated", "attention_bias": True}),
    "discrete": ("discrete", {"cross_attention_dim": 20, "norm_type": "ada_norm", "num_embeds_ada_norm": 9}),
    "zero": ("patches", {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 9, "norm_elementwise_affine": False}),
    "single": SINGLE,
}


def prepare_case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config and the arguments of a kind."""
    rng = np.random.default_rng(3)
    kind, fields = KINDS[name]
    config = small(kind, **fields)
    inputs = inputs_for(config)
    if "many" in name:  # Enough tokens for attention in blocks of queries.
        inputs["hidden_states"] = rng.standard_normal((2, 16, 37, 29)).astype(np.float32)
        inputs["attention_mask"] = rng.random((2, 37 * 29)) < 0.8
    if "gated" in name:
        objects = rng.standard_normal((2, 3, 20)).astype(np.float32)
        inputs["cross_attention_kwargs"] = {"gligen": {"objs": objects}}
    if "encoder_hidden_states" in inputs:
        inputs["encoder_attention_mask"] = np.array([[1] * 7, [1, 1, 1, 0, 1, 0, 0]])
    return config, inputs


def split(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments into those with gradients and the rest."""
    names = ("hidden_states", "encoder_hidden_states")
    varied = {name: inputs[name] for name in names if name in inputs and inputs[name].dtype == np.float32}
    return varied, {key: value for key, value in inputs.items() if key not in varied}


def draw_direction(shape: tuple[int, ...]) -> np.ndarray:
    direction = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return direction / np.float32(np.sqrt(direction.size))


def our_gradients(model: Any, inputs: dict[str, Any], direction: np.ndarray) -> Any:
    """Return the gradients of the weights and of the arguments, and the sample."""
    graph, state = nnx.split(model)
    varied, fixed = split(inputs)

    def loss(state: Any, varied: Any) -> tuple[jax.Array, jax.Array]:
        sample = nnx.merge(graph, state)(**varied, **fixed).sample
        return jnp.vdot(sample, direction), sample

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        state, {key: jnp.asarray(value) for key, value in varied.items()}
    )


@pytest.mark.parametrize("name", KINDS)
def test_gradients_equal_autograd(name: str, pair_of, tmp_path) -> None:
    config, inputs = prepare_case(name)
    pair = pair_of(config)
    varied, fixed = split(inputs)
    wanted_sample = pair.want(**inputs)
    direction = draw_direction(wanted_sample.shape)
    tensors = {key: value.requires_grad_() for key, value in to_torch(varied).items()}
    sample = pair.theirs(**tensors, **to_torch(fixed), return_dict=False)[0]
    (sample * torch.from_numpy(direction)).sum().backward()

    (weights, arrays), _ = our_gradients(pair.ours, inputs, direction)
    for key, tensor in tensors.items():
        assert np.abs(np.asarray(arrays[key]) - tensor.grad.numpy()).max() <= TOLERANCE
    # The writer maps our arrays to diffusers' tensors, for gradients as for weights.
    graph, _ = nnx.split(pair.ours)
    nnx.merge(graph, weights).save_pretrained(tmp_path)
    found = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    theirs = {key: parameter.grad for key, parameter in pair.theirs.named_parameters()}
    assert found.keys() == theirs.keys()
    for key, gradient in theirs.items():
        wanted = np.zeros_like(found[key]) if gradient is None else gradient.numpy()
        largest = max(1.0, float(np.abs(wanted).max()))
        assert np.abs(found[key] - wanted).max() <= TOLERANCE * largest, key
    assert sum(float(np.abs(gradient).max()) > 1e-4 for gradient in found.values()) > 0.9 * len(found)


def test_scanned_and_recomputed_layers_give_the_same_gradients() -> None:
    config, inputs = prepare_case("single")
    direction = draw_direction(jax.eval_shape(lambda: model_of(config)(**inputs).sample).shape)
    outcomes = []
    for options in ({"scan_layers": False}, {"scan_layers": True, "remat": True}):
        gradients, sample = our_gradients(model_of(config, **options), inputs, direction)
        outcomes.append((np.asarray(sample), jax.tree.leaves(gradients)))
    (sample, gradients), (scanned, recomputed) = outcomes
    assert np.abs(scanned - sample).max() <= TOLERANCE
    for found, wanted in zip(recomputed, gradients, strict=True):
        largest = max(1.0, float(np.abs(np.asarray(wanted)).max()))
        assert np.abs(np.asarray(found) - np.asarray(wanted)).max() <= TOLERANCE * largest


def test_dropout_draws_from_the_given_stream() -> None:
    config = small("continuous", cross_attention_dim=20, dropout=0.3)
    inputs = inputs_for(config)
    model = model_of(config)
    steady = np.asarray(model(**inputs).sample)
    drawn = [np.asarray(model(**inputs, rngs=nnx.Rngs(dropout=seed)).sample) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 1e-2
    assert np.abs(drawn[0] - steady).max() > 1e-2
    np.testing.assert_array_equal(np.asarray(model(**inputs).sample), steady)
    without = model_of(config | {"dropout": 0.0})
    np.testing.assert_array_equal(np.asarray(without(**inputs, rngs=nnx.Rngs(dropout=1)).sample), steady)
