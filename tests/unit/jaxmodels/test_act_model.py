"""ACT's module, and its forward pass over serving weights."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmodels.layers.vision import RESNETS, measure_feature_map
from jaxmodels.policies.act import model
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act, act
from jaxmodels.policies.act.weights import prepare
from jaxmodels.policy import Policy
from jaxmodels.types import Feature, Observation
from jaxmodels.weights import blueprint_of


@pytest.fixture
def short_resnets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep one block of each kind: with and without a projection, and dilated."""
    monkeypatch.setitem(RESNETS, "resnet18", (False, (2, 1, 1, 2)))
    monkeypatch.setitem(RESNETS, "resnet50", (True, (1, 2, 1, 2)))
    blueprint_of.cache_clear()
    yield
    blueprint_of.cache_clear()


def normalised(config: ActConfig, batch: int = 2, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> jax.Array:
        return jax.device_put(rng.standard_normal((batch, *shape)).astype(np.float32))

    return Observation(
        images=tuple(numbers(*camera.shape[1:], 3) for camera in config.cameras),
        state=None if config.state is None else numbers(*config.state.shape),
        environment_state=None if config.environment_state is None else numbers(*config.environment_state.shape),
    )


def resized(config: ActConfig, *sizes: tuple[int, int]) -> ActConfig:
    pairs = zip(config.cameras, sizes, strict=True)
    cameras = tuple(Feature(camera.name, "VISUAL", (3, *size)) for camera, size in pairs)
    others = tuple(feature for feature in config.input_features if feature.type != "VISUAL")
    return dataclasses.replace(config, input_features=(*others, *cameras))


VARIANTS = {
    "three_small": {"cameras": ("a", "b", "c"), "environment": 3},
    "three_large": {"cameras": ("a", "b", "c")},
    "odd_sizes": {"cameras": ("a", "b"), "vision_backbone": "resnet18", "state": None},
    "dilated": {"cameras": ("a",), "vision_backbone": "resnet50", "replace_final_stride_with_dilation": True},
    "pre_norm_three_decoder_layers": {"pre_norm": True, "n_decoder_layers": 3, "cameras": ("front",)},
    "gelu_two_decoder_layers": {"feedforward_activation": "gelu", "n_decoder_layers": 2},
    "glu_no_state": {"feedforward_activation": "glu", "state": None},
}


@pytest.mark.usefixtures("short_resnets")
@pytest.mark.parametrize("name", VARIANTS)
def test_serving_weights_give_the_same_chunk(name: str, small, checkpoint_of, monkeypatch) -> None:
    config = small(**VARIANTS[name])
    if name == "three_large":
        monkeypatch.setattr(model, "STACKED_PIXELS", 0)
    if name == "odd_sizes":
        config = resized(config, (72, 41), (33, 64))
    checkpoint = checkpoint_of(config)
    observation = normalised(config)
    plan = blueprint_of(Act, config)
    weights = jax.device_put(dict(checkpoint.weights))
    wanted = jax.jit(lambda weights, seen: plan.assemble(weights)(seen))(weights, observation)
    for platform in ("cpu", "gpu"):  # The weights for both platforms run on a CPU.
        serving = jax.device_put(dict(prepare(config, checkpoint.weights, platform)))
        assert not any(key.startswith("latent_encoder") for key in serving)
        if platform == "gpu" and config.vision_backbone == "small_cnn":
            continue
        found = jax.jit(lambda weights, seen: act(config.architecture(), weights, seen))(serving, observation)
        np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.usefixtures("short_resnets")
def test_swapped_weights_for_a_gpu_give_the_same_chunk(small, checkpoint_of, observation_of) -> None:
    config = small(cameras=("a",), vision_backbone="resnet18")
    wanted = Policy(checkpoint_of(config, seed=1), device="cpu").act(observation_of(config))
    for_gpu = Policy(checkpoint_of(config), device="cpu", platform="gpu")
    found = for_gpu.with_weights(checkpoint_of(config, seed=1))
    np.testing.assert_allclose(found.act(observation_of(config)), wanted, atol=1e-5 * np.abs(wanted).max())
    shapes = {name: array.shape for name, array in found.get_serving_weights().items() if "backbone" in name}
    assert shapes["backbone.stem.kernel.OHWI"] == (64, 7, 7, 3)
    assert {name.rpartition(".")[2] for name in shapes} == {"OHWI", "bias"}


@pytest.mark.parametrize(
    ("backbone", "size"), [("small_cnn", (50, 33)), ("resnet18", (75, 101)), ("resnet50", (64, 96))]
)
def test_feature_map_has_the_expected_size(small, backbone, size) -> None:
    config = resized(small(cameras=("a",), vision_backbone=backbone), size)
    shape = nnx.eval_shape(lambda: Act(config, rngs=nnx.Rngs(0)).backbone(jnp.zeros((1, *size, 3)))).shape
    assert shape[1:3] == measure_feature_map(backbone, size)


def test_batch_norm_statistics_are_not_parameters(small) -> None:
    names = blueprint_of(Act, small(cameras=("a",), vision_backbone="resnet18", use_vae=True)).learned
    assert not [name for name in names if "norm" in name and "backbone" in name]
    assert "latent_encoder.positions" not in names
    assert "backbone.stem.kernel" in names
