"""ACT as a module: its loss, and that the serving program computes what was trained."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmodels.layers.vision import measure_feature_map
from jaxmodels.policies.act import Act, ActConfig, model
from jaxmodels.policies.act.model import act
from jaxmodels.policies.act.weights import fold
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.types import Feature, Observation
from jaxmodels.weights import blueprint_of, flatten

# Chance is not the subject here, and the default generator takes XLA longer to compile than a policy.
key_of = partial(jax.random.key, impl="unsafe_rbg")


def normalised(config: ActConfig, batch: int = 2, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> jax.Array:
        return jax.device_put(rng.standard_normal((batch, *shape)).astype(np.float32))

    return Observation(
        images=tuple(numbers(*camera.shape[1:], 3) for camera in config.cameras),
        state=None if config.state is None else numbers(*config.state.shape),
        environment_state=None if config.environment_state is None else numbers(*config.environment_state.shape),
    )


def demonstration(config: ActConfig, batch: int = 2) -> tuple[jax.Array, jax.Array]:
    actions = jax.random.normal(key_of(7), (batch, config.chunk_size, config.action.shape[0]))
    return actions, jnp.arange(config.chunk_size)[None] >= jnp.array([[4], [config.chunk_size]])


def assembled(checkpoint: Checkpoint) -> Act:
    plan = blueprint_of(Act, checkpoint.config)
    return plan.assemble(jax.device_put(dict(checkpoint.weights)))


def resized(config: ActConfig, *sizes: tuple[int, int]) -> ActConfig:
    cameras = tuple(
        Feature(camera.name, "VISUAL", (3, *size)) for camera, size in zip(config.cameras, sizes, strict=True)
    )
    others = tuple(feature for feature in config.input_features if feature.type != "VISUAL")
    return dataclasses.replace(config, input_features=(*others, *cameras))


VARIANTS = {
    "small_cnn": {"cameras": ("front",)},
    "three_small": {"cameras": ("a", "b", "c"), "environment": 3},
    "three_large": {"cameras": ("a", "b", "c")},
    "resnet18": {"cameras": ("a",), "vision_backbone": "resnet18"},
    "odd_sizes": {"cameras": ("a", "b"), "vision_backbone": "resnet18", "state": None},
    "dilated": {"cameras": ("a",), "vision_backbone": "resnet50", "replace_final_stride_with_dilation": True},
    "pre_norm": {"pre_norm": True},
    "pre_norm_three_decoder_layers": {"pre_norm": True, "n_decoder_layers": 3, "cameras": ("front",)},
    "two_decoder_layers": {"n_decoder_layers": 2},
    "gelu": {"feedforward_activation": "gelu"},
    "glu": {"feedforward_activation": "glu"},
    "no_state": {"state": None},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_folded_weights_give_the_same_chunk(name: str, small, checkpoint_of, monkeypatch) -> None:
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
    for platform in ("cpu", "gpu"):  # the folding for either; both run here
        folded = jax.device_put(dict(fold(config, checkpoint.weights, platform)))
        assert not any(key.startswith("latent_encoder") for key in folded)
        if platform == "gpu" and name != "resnet18":
            continue
        found = jax.jit(lambda weights, seen: act(config.architecture(), weights, seen))(folded, observation)
        np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize(
    ("backbone", "size"), [("small_cnn", (50, 33)), ("resnet18", (75, 101)), ("resnet50", (64, 96))]
)
def test_the_feature_map_has_the_size_that_folding_expects(small, backbone, size) -> None:
    config = resized(small(cameras=("a",), vision_backbone=backbone), size)
    shape = nnx.eval_shape(lambda: Act(config, rngs=nnx.Rngs(0)).backbone(jnp.zeros((1, *size, 3)))).shape
    assert shape[1:3] == measure_feature_map(backbone, size)


def test_without_random_keys_the_loss_is_the_error_alone(small, checkpoint_of) -> None:
    config = small(use_vae=True)
    model = assembled(checkpoint_of(config))
    observation = normalised(config)
    actions, is_pad = demonstration(config)
    (loss, parts), found = jax.jit(lambda seen: (model.loss(seen, actions, is_pad), model(seen)))(observation)
    error = np.abs(np.asarray(found - actions))
    error[np.asarray(is_pad)] = 0  # padded steps count as zero, but they count
    np.testing.assert_allclose(loss, error.mean(), rtol=1e-6)
    assert set(parts) == {"l1"}


def test_in_training_the_divergence_of_the_latent_is_added(small, checkpoint_of) -> None:
    config = small(use_vae=True, dropout=0.0, kl_weight=3.0)
    model = assembled(checkpoint_of(config))
    observation = normalised(config)
    actions, is_pad = demonstration(config)

    def both(state):
        loss = model.loss(observation, actions, is_pad, nnx.Rngs(latent=key_of(1), dropout=key_of(2)))
        return loss, model.latent_encoder(state, actions, is_pad)

    (loss, parts), posterior = jax.jit(both)(observation.state)
    mean, log_variance = np.asarray(posterior.mean), np.asarray(posterior.log_variance)
    divergence = (-0.5 * (1 + log_variance - mean**2 - np.exp(log_variance))).sum(-1).mean()
    np.testing.assert_allclose(parts["kl"], divergence, rtol=1e-5)
    np.testing.assert_allclose(loss, parts["l1"] + 3.0 * parts["kl"], rtol=1e-6)


def test_padded_actions_do_not_reach_the_latent(small, checkpoint_of) -> None:
    config = small(use_vae=True)
    model = assembled(checkpoint_of(config))
    actions, is_pad = demonstration(config)
    state = normalised(config).state
    spoilt = jnp.where(is_pad[..., None], actions + 1.0, actions)
    encode = jax.jit(lambda actions, is_pad: model.latent_encoder(state, actions, is_pad).mean)
    before, after = (encode(given, is_pad) for given in (actions, spoilt))
    np.testing.assert_allclose(before, after, rtol=1e-6)
    unmasked = encode(spoilt, jnp.zeros_like(is_pad))
    assert not np.allclose(before, unmasked)


def test_statistics_of_batch_norm_are_no_parameters(small) -> None:
    config = small(cameras=("a",), vision_backbone="resnet18", use_vae=True)
    model = nnx.eval_shape(lambda: Act(config, rngs=nnx.Rngs(0)))
    trained = nnx.state(model, nnx.Param)
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(trained)}
    assert not [name for name in names if "norm" in name and "backbone" in name]
    assert "latent_encoder/positions" not in names
    assert "backbone/stem/kernel" in names


def test_the_small_policy_is_small_and_learns(small) -> None:
    config = small(
        cameras=("front",), dim_model=128, n_heads=4, dim_feedforward=256, chunk_size=20, use_vae=False, dropout=0.0
    )
    # In one program: drawn one by one, each shape of weights would compile its own.
    model = nnx.eval_shape(lambda: Act(config, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.jit(lambda: nnx.state(Act(config, rngs=nnx.Rngs(key_of(0)))))())
    assert 0.5e6 < sum(array.size for array in flatten(model).values()) < 0.7e6
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    observation = normalised(config)
    actions = jnp.zeros((2, 20, 5)) + 0.5
    is_pad = jnp.zeros((2, 20), bool)

    optimizer = optax.adam(2e-3)

    @jax.jit
    def step(parameters, state):
        def loss(parameters):
            return nnx.merge(graph, parameters, rest).loss(observation, actions, is_pad, nnx.Rngs(dropout=key_of(0)))[0]

        value, slopes = jax.value_and_grad(loss)(parameters)
        with jax.numpy_dtype_promotion("standard"):  # Optax promotes
            updates, state = optimizer.update(slopes, state)
        return value, optax.apply_updates(parameters, updates), state

    losses = []
    state = jax.jit(optimizer.init)(parameters)
    for _ in range(15):
        value, parameters, state = step(parameters, state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
