"""Real-time chunking: lerobot's numbers, one program for all delays, and its effect on chunks."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from benchmarks import real_time_chunking
from jaxmodels.errors import ConfigError, InputError
from jaxmodels.samplers import (
    FlowSchedule,
    NoiseSchedule,
    begin_with,
    continuing,
    ddim,
    draw_delays,
    example,
    flow_euler,
    flow_heun,
    given,
    pull,
    soft_mask,
)
from jaxmodels.types import Prefix

GOLDEN = Path(__file__).parents[3] / "golden" / "rtc"
CASES = json.loads((GOLDEN / "cases.json").read_text())
FLOW = FlowSchedule(spacing="uniform")
KEY = jax.random.key(0, impl="unsafe_rbg")  # The default generator compiles slowly.
SHAPE = (3, 8, 2)
# Name: sampler, its schedule, steps.
SAMPLERS: dict[str, tuple[Any, Any, int]] = {
    "euler": (flow_euler, FLOW, 5),
    "heun": (flow_heun, FLOW, 3),
    "ddim": (ddim, NoiseSchedule(prediction_type="v_prediction"), 8),
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "cases.npz") as file:
        return dict(file)


def prefix(delay: Any, length: Any, actions: Any = 0.7) -> Prefix:
    return Prefix(
        jnp.broadcast_to(jnp.asarray(actions, jnp.float32), SHAPE),
        jnp.broadcast_to(jnp.asarray(delay, jnp.int32), SHAPE[:1]),
        jnp.broadcast_to(jnp.asarray(length, jnp.int32), SHAPE[:1]),
    )


def mixed(weight: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
    """Return a prediction in which each action depends on all actions of its chunk."""
    return jnp.tanh(jnp.einsum("st,bta->bsa", weight, x)) + 0.1 * x


def gaussian(schedule: FlowSchedule | NoiseSchedule) -> Partial:
    """The exact model of actions with mean 0 and variance 0.25."""

    is_flow = isinstance(schedule, FlowSchedule)

    def predict(alphas: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
        signal, noise = (1 - t / 1000, t / 1000) if is_flow else (jnp.sqrt(alphas[t]), jnp.sqrt(1 - alphas[t]))
        sample = signal * 0.25 / (signal**2 * 0.25 + noise**2) * x
        return (x - sample) / noise if is_flow else (signal * x - sample) / noise

    return Partial(predict, None if is_flow else jnp.asarray(schedule.alphas))


WEIGHT = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)) / 3, jnp.float32)
MODEL = Partial(mixed, WEIGHT)
masks = jax.jit(soft_mask, static_argnums=2)
pulls = jax.jit(pull, static_argnums=1)


@pytest.mark.parametrize("index", range(len(CASES["masks"])), ids=lambda index: str(CASES["masks"][index]))
def test_soft_mask_equals_lerobot(arrays: dict[str, np.ndarray], index: int) -> None:
    delay, length, chunk = CASES["masks"][index]
    ours = masks(jnp.array([delay]), jnp.array([length]), chunk)[0]
    np.testing.assert_allclose(ours, arrays[f"mask.{index}"], atol=1e-6)


def test_guidance_weight_follows_the_paper_and_is_bounded() -> None:
    tau = np.array([0.1, 0.3, 0.5, 0.8], np.float32)
    r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
    np.testing.assert_allclose(pulls(jnp.asarray(1 - tau), 100.0), (1 - tau) / (tau * r2), rtol=1e-5)
    np.testing.assert_array_equal(pulls(jnp.array([0.0, 1e-6, 1.0]), 5.0), 5)


@pytest.mark.parametrize("index", range(len(CASES["cases"])), ids=lambda index: str(CASES["cases"][index]))
def test_guided_sampling_equals_lerobot(arrays: dict[str, np.ndarray], index: int) -> None:
    case = CASES["cases"][index]
    plan = arrays["plan"]
    batch = len(plan)

    def predict(x: jax.Array, t: jax.Array) -> jax.Array:
        mixed = jnp.einsum("st,bta->bsa", arrays["across_time"], x) @ arrays["across_joints"]
        return jnp.tanh(mixed + t / 1000) - 0.3 * x

    going_on = Prefix(plan, jnp.full(batch, case["delay"]), jnp.full(batch, case["length"]))
    guided = continuing(predict, going_on, FLOW, bound=case["bound"], through_model=case["connected"])
    sample = flow_euler(guided, plan.shape, KEY, FLOW, steps=case["steps"], start=arrays["noise"])
    np.testing.assert_allclose(sample, arrays[f"sample.{index}"], atol=1e-5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_plan_is_continued_and_members_without_one_are_unchanged(name: str) -> None:
    sampler, schedule, steps = SAMPLERS[name]
    model = gaussian(schedule)
    plain = sampler(model, SHAPE, KEY, schedule, steps=steps)
    ways = [continuing(model, prefix(2, length), schedule) for length in (0, [0, 6, 0])]
    unguided, one = (sampler(way, SHAPE, KEY, schedule, steps=steps) for way in ways)
    np.testing.assert_allclose(unguided, plain, atol=1e-6)  # Equal except for reordered operations.
    np.testing.assert_allclose(one[::2], plain[::2], atol=1e-6)
    away, before = (np.abs(np.asarray(sample)[1, :2] - 0.7).mean() for sample in (one, plain))
    assert away < before / 3


def test_diffusion_is_guided_like_the_equivalent_flow() -> None:
    plan, t = prefix(3, 7), 400
    alpha = float(NoiseSchedule().alphas[t])
    signal, noise = alpha**0.5, (1 - alpha) ** 0.5
    x = jax.random.normal(KEY, SHAPE)
    weight = WEIGHT @ WEIGHT.T / 4

    def sample(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("st,bta->bsa", weight, x))

    predictions = {
        "sample": lambda x, t: sample(x),
        "epsilon": lambda x, t: (x - signal * sample(x)) / noise,
        "v_prediction": lambda x, t: (signal * x - sample(x)) / noise,
    }
    whole = signal + noise
    sigma = jnp.float32(noise / whole)

    def corrected(x: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        found = []
        for kind, predict in predictions.items():
            schedule = NoiseSchedule(prediction_type=kind, clip_sample=False)  # type: ignore[arg-type]
            guided = continuing(predict, plan, schedule)(x, jnp.int32(t))
            found.append(schedule.split(guided, x, jnp.float32(alpha)))
        # The flow's x is x / whole, and its velocity is (x - sample) / sigma.
        flow = continuing(lambda z, t: (z - sample(z * whole)) / sigma, plan, FLOW)(x / whole, sigma * 1000)
        return [*found, (x / whole - sigma * flow, x / whole + (1 - sigma) * flow)]

    found = jax.jit(corrected)(x)
    assert jnp.abs(found[0][0] - sample(x)).max() > 0.1
    for clean, left in found:
        np.testing.assert_allclose(clean, found[0][0], atol=2e-5)
        np.testing.assert_allclose(left, found[0][1], atol=2e-5)


def test_values_beyond_the_plan_are_not_read() -> None:
    actions = np.full(SHAPE, np.nan, np.float32)
    actions[:, :4] = 0.7
    sample = flow_euler(continuing(MODEL, prefix(2, 4, actions), FLOW), SHAPE, KEY, FLOW, steps=3)
    assert np.isfinite(sample).all()
    np.testing.assert_array_equal(begin_with(prefix([0, 2, 6], 4, actions), sample)[1:, :2], np.float32(0.7))
    np.testing.assert_array_equal(begin_with(prefix([0, 2, 6], 4, actions), sample)[2, 4:], sample[2, 4:])


def test_invalid_plan_shape_and_zero_bound_are_refused() -> None:
    with pytest.raises(InputError, match=r"prefix has actions of \[3, 8, 2\]; wanted \[3, 9, 2\]"):
        flow_euler(continuing(MODEL, prefix(1, 2), FLOW), (3, 9, 2), KEY, FLOW, steps=2)
    with pytest.raises(ConfigError, match="bound of the guidance is 0"):
        continuing(MODEL, prefix(1, 2), FLOW, bound=0.0)


@pytest.mark.parametrize("delay", [0, 3, 6])
def test_chunks_stay_on_the_side_of_the_plan(delay: int) -> None:
    unguided, rtc = (real_time_chunking.seams(way, delay, 64) for way in ("unguided", "rtc"))
    assert unguided.changes > 0.4
    assert rtc.jump < unguided.jump / 3
    assert rtc.changes < unguided.changes / 1.8


@pytest.mark.parametrize("delay", [1, 6])
def test_trained_model_always_stays_on_the_side_of_the_plan(delay: int) -> None:
    found = real_time_chunking.seams("trained prefix", delay, 64)
    assert (found.jump, found.changes) < (0.02, 0.02)


def test_training_examples_have_a_prefix_without_noise() -> None:
    actions, noise = jnp.full(SHAPE, 2.0), jnp.full(SHAPE, -1.0)
    made = example(FLOW, actions, noise, jnp.array([0.5, 1.0, 0.0]), jnp.array([0, 3, 8]))
    np.testing.assert_array_equal(made.counts.sum(1), [8, 5, 0])
    np.testing.assert_array_equal(made.timestep[1], [0, 0, 0, 1000, 1000, 1000, 1000, 1000])
    np.testing.assert_array_equal(made.x[:, :, 0], [[0.5] * 8, [2.0] * 3 + [-1.0] * 5, [2.0] * 8])
    np.testing.assert_array_equal(made.target, -3)


def test_given_prefix_is_returned_unchanged() -> None:
    def predict(x: jax.Array, t: jax.Array) -> jax.Array:
        assert t.shape == SHAPE[:2]
        return mixed(WEIGHT, x, t)

    sample = flow_euler(given(predict, prefix([0, 2, 5], [8, 8, 3]), FLOW), SHAPE, KEY, FLOW, steps=4)
    for member, past in enumerate((0, 2, 3)):
        np.testing.assert_allclose(sample[member, :past], 0.7, atol=1e-5)
        assert np.abs(np.asarray(sample)[member, past:] - 0.7).min() > 1e-4


def test_delays_for_training_are_rarer_with_decay() -> None:
    even, decaying = (np.bincount(draw_delays(KEY, 4000, 4, decay), minlength=5) for decay in (0.0, 1.0))
    assert len(even) == len(decaying) == 5
    assert np.ptp(even) < 200
    np.testing.assert_allclose(decaying[1:] / decaying[:-1], np.exp(-1), atol=0.12)
