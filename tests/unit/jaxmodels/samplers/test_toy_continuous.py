"""A small transformer learns chunks of two kinds, and flow matching and DDIM sample both as often as they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import Partial

from jaxmodels.samplers import FlowSchedule, Known, NoiseSchedule, ddim, ddpm, flow_euler, flow_heun, guide
from jaxmodels.transformer2d import Conditioning, Transformer2DModel

pytestmark = pytest.mark.slow

CHANNELS, LENGTH, WIDTH = 4, 8, 32
SHARE = 0.7  # of the first kind
SPREAD = 0.05
COUNT = 500
TIMES = np.linspace(0, 1, LENGTH)
KINDS = np.stack(
    [
        0.7 * np.sin(np.pi * TIMES + 0.4 * np.arange(CHANNELS)[:, None]),
        -0.5 * np.cos(2 * np.pi * TIMES - 0.3 * np.arange(CHANNELS)[:, None]),
    ]
).astype(np.float32)[..., None]  # kind c h 1
FLOW = FlowSchedule(spacing="uniform")
NOISE = NoiseSchedule(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
NOBODY = 2  # the condition that says nothing
STEPS = 400


def build(rngs: nnx.Rngs) -> Transformer2DModel:
    return Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        in_channels=CHANNELS,
        num_layers=2,
        sample_size=LENGTH,
        patch_size=1,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        attention_bias=True,
        activation_fn="gelu-approximate",
        cross_attention_dim=WIDTH,
        caption_channels=3,
        use_additional_conditions=False,
        rngs=rngs,
    )


def words(kind: jax.Array) -> jax.Array:
    """The condition as one token (b 1 3)."""
    return jax.nn.one_hot(kind, 3, dtype=jnp.float32)[:, None]


def draw(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    kind_key, spread_key = jax.random.split(key)
    kind = (jax.random.uniform(kind_key, (count,), jnp.float32) > SHARE).astype(jnp.int32)
    noise = jax.random.normal(spread_key, (count, *KINDS.shape[1:]), jnp.float32)
    return jnp.asarray(KINDS)[kind] + SPREAD * noise, kind


def batch(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Chunks, what is said of them (nothing, of every other one), noise, and a uniform number each."""
    chunk_key, noise_key, time_key, drop_key = jax.random.split(key, 4)
    chunks, kind = draw(chunk_key, 64)
    kind = jnp.where(jax.random.bernoulli(drop_key, 0.5, kind.shape), NOBODY, kind)
    noise = jax.random.normal(noise_key, chunks.shape, jnp.float32)
    return chunks, words(kind), noise, jax.random.uniform(time_key, kind.shape, jnp.float32)


def flow_loss(model: Transformer2DModel, key: jax.Array) -> jax.Array:
    chunks, condition, noise, sigma = batch(key)
    velocity = model(FLOW.add_noise(chunks, noise, sigma), condition, 1000 * sigma).sample
    return jnp.mean((velocity - FLOW.target(chunks, noise)) ** 2)


def noise_loss(model: Transformer2DModel, key: jax.Array) -> jax.Array:
    chunks, condition, noise, uniform = batch(key)
    times = (uniform * 100).astype(jnp.int32)
    prediction = model(NOISE.add_noise(chunks, noise, times), condition, times.astype(jnp.float32)).sample
    return jnp.mean((prediction - NOISE.target(chunks, noise, times)) ** 2)


@pytest.fixture(scope="module")
def flow_model(trained: Callable[..., Any]) -> Any:
    return trained(build, flow_loss, steps=STEPS)


@pytest.fixture(scope="module")
def noise_model(trained: Callable[..., Any]) -> Any:
    return trained(build, noise_loss, steps=STEPS)


def prepared(model: Any, kind: Any, times: Any) -> tuple[Partial, Any]:
    """A predictor whose context and modulations are prepared, the latter for each step."""
    whole = model.plan.assemble(model.weights)

    def predict(weights: Any, context: Any, x: jax.Array, t: jax.Array, modulations: Any) -> jax.Array:
        return model.plan.assemble(weights)(x, conditioning=Conditioning(context, modulations)).sample

    context = whole.prepare_context(words(jnp.asarray(kind)))
    return Partial(predict, model.weights, context), jax.vmap(whole.prepare_modulations)(times)


def nearest(chunks: Any) -> tuple[np.ndarray, np.ndarray]:
    """Which kind each chunk is nearest to, and how far it is, root mean square per number."""
    off = np.asarray(chunks)[:, None] - KINDS
    distances = np.sqrt((off**2).mean((2, 3, 4)))
    return distances.argmin(1), distances.min(1)


def energy_distance(one: Any, other: Any) -> float:
    one, other = (np.asarray(x).reshape(len(x), -1) for x in (one, other))

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.sqrt(((a[:, None] - b) ** 2).sum(-1)).mean())

    return 2 * mean(one, other) - mean(one, one) - mean(other, other)


SHAPE = (COUNT, CHANNELS, LENGTH, 1)
EVERYBODY = np.full(COUNT, NOBODY)
KEY = jax.random.key(1)


def assert_like_the_data(chunks: Any) -> None:
    """Both kinds as often as they are, each chunk as near to its kind, and no other difference to speak of."""
    kinds, off = nearest(chunks)
    assert abs((kinds == 0).mean() - SHARE) < 0.08
    assert 0.6 * SPREAD < np.sqrt((off**2).mean()) < 2.2 * SPREAD
    # 0.002 between two draws of the data, 2 between them and noise
    assert energy_distance(chunks, draw(jax.random.key(99), COUNT)[0]) < 0.06


@pytest.mark.parametrize("name", ["flow_model", "noise_model"])
def test_losses_fall(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    assert model.mean_loss(STEPS - 50, STEPS) < 0.25 * model.mean_loss(0, 10)
    assert model.mean_loss(STEPS - 50, STEPS) < model.mean_loss(STEPS // 3, STEPS // 2)


@pytest.mark.parametrize("sample", [flow_euler, flow_heun])
def test_flow_matching_samples_both_kinds_in_ten_steps(flow_model: Any, sample: Callable[..., Any]) -> None:
    rows = FLOW.euler_rows(10) if sample is flow_euler else FLOW.heun_rows(10)
    predict, extras = prepared(flow_model, EVERYBODY, rows.timestep)
    assert_like_the_data(sample(predict, SHAPE, KEY, FLOW, steps=10, extras=extras))


@pytest.mark.parametrize(("sample", "steps"), [(ddim, 10), (ddpm, 50)])
def test_diffusion_samples_both_kinds(noise_model: Any, sample: Callable[..., Any], steps: int) -> None:
    predict, extras = prepared(noise_model, EVERYBODY, NOISE.timesteps(steps))
    assert_like_the_data(sample(predict, SHAPE, KEY, NOISE, steps=steps, extras=extras))


def test_guidance_samples_the_kind_that_is_asked_for(flow_model: Any) -> None:
    asked = np.arange(COUNT) % 2
    predict, extras = prepared(flow_model, np.append(EVERYBODY, asked), FLOW.euler_rows(10).timestep)
    x = flow_euler(guide(predict, 2.0), SHAPE, KEY, FLOW, steps=10, extras=extras)
    kinds, off = nearest(x)
    assert (kinds == asked).mean() > 0.99
    assert np.sqrt((off**2).mean()) < 2.2 * SPREAD


def test_a_known_beginning_is_continued_in_its_kind(flow_model: Any) -> None:
    begun = np.arange(COUNT) % 2
    known = Known(jnp.asarray(KINDS[begun]), jnp.arange(LENGTH)[:, None] < 3)
    predict, extras = prepared(flow_model, EVERYBODY, FLOW.euler_rows(10).timestep)
    x = flow_euler(predict, SHAPE, KEY, FLOW, steps=10, extras=extras, known=known)
    assert (np.asarray(x)[:, :, :3] == KINDS[begun][:, :, :3]).all()
    assert (nearest(x)[0] == begun).mean() > 0.98


def test_what_is_prepared_gives_the_samples_of_what_is_not(flow_model: Any) -> None:
    predict, extras = prepared(flow_model, EVERYBODY[:4], FLOW.euler_rows(5).timestep)
    model = flow_model.plan.assemble(flow_model.weights)

    def plain(x: jax.Array, t: jax.Array) -> jax.Array:
        return model(x, words(jnp.asarray(EVERYBODY[:4])), t).sample

    shape = (4, *SHAPE[1:])
    one = flow_euler(predict, shape, KEY, FLOW, steps=5, extras=extras)
    np.testing.assert_allclose(one, flow_euler(plain, shape, KEY, FLOW, steps=5), atol=1e-5)


def test_data_pass_for_samples_and_noise_does_not() -> None:
    """The data themselves pass the test that samples must pass, and noise does not."""
    assert_like_the_data(draw(jax.random.key(5), COUNT)[0])
    with pytest.raises(AssertionError):
        assert_like_the_data(jax.random.normal(KEY, SHAPE, jnp.float32))
