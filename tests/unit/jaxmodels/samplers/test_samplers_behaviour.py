"""Programs, keys, shapes, masks and refusals of samplers."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jaxmodels.errors import ConfigError, InputError
from jaxmodels.samplers import (
    FlowSchedule,
    MaskSchedule,
    NoiseSchedule,
    combine,
    ddim,
    ddpm,
    flow_euler,
    flow_heun,
    guide,
    maskgit,
)

key_of = partial(jax.random.key, impl="unsafe_rbg")  # The default generator compiles slowly.
KEY = key_of(0)
SHAPE = (2, 3)
CLASSES = 5
Sample = Callable[..., Any]
CONTINUOUS: dict[str, Sample] = {
    "ddim": partial(ddim, shape=SHAPE, schedule=NoiseSchedule(clip_sample=False)),
    "ddim with noise": partial(ddim, shape=SHAPE, schedule=NoiseSchedule(clip_sample=False), eta=0.5),
    "ddpm": partial(ddpm, shape=SHAPE, schedule=NoiseSchedule(clip_sample=False)),
    "euler": partial(flow_euler, shape=SHAPE, schedule=FlowSchedule()),
    "heun": partial(flow_heun, shape=SHAPE, schedule=FlowSchedule()),
}
ALL = {**CONTINUOUS, "maskgit": partial(maskgit, shape=(3, 6), schedule=MaskSchedule(CLASSES))}


def output(name: str, result: Any) -> np.ndarray:
    return np.asarray(result.ids if name == "maskgit" else result)


class Counter:
    """Predictor over one array that counts its traces."""

    def __init__(self, name: str):
        self.is_discrete = name == "maskgit"
        self.traces = 0

    def __call__(self, weight: jax.Array, x: jax.Array, t: jax.Array, *extra: jax.Array) -> jax.Array:
        self.traces += 1
        assert t.shape == ()
        if not self.is_discrete:
            return weight * x
        favourite = (jnp.arange(CLASSES - 1) == 1)[:, None].astype(jnp.float32)
        return jnp.broadcast_to(weight * favourite, (x.shape[0], CLASSES - 1, x.shape[1]))


@pytest.mark.parametrize("name", list(ALL))
def test_sampler_is_compiled_once_for_all_weights_and_keys(name: str) -> None:
    predict = Counter(name)
    for seed in range(3):
        weight = jnp.asarray(0.1 * seed, jnp.float32)
        ALL[name](Partial(predict, weight), key=key_of(seed), steps=4)
    assert predict.traces == 1
    ALL[name](Partial(predict, jnp.asarray(0.0, jnp.float32)), key=KEY, steps=5)
    assert predict.traces == 2


@pytest.mark.parametrize("name", list(ALL))
def test_key_is_the_only_source_of_randomness(name: str) -> None:
    predict = Partial(Counter(name), jnp.asarray(0.1, jnp.float32))
    one, same, other = (output(name, ALL[name](predict, key=key_of(seed), steps=4)) for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()


@pytest.mark.parametrize("name", ["ddim", "heun", "maskgit"])
def test_sampler_may_be_called_inside_another_program(name: str) -> None:
    counter = Counter(name)

    @jax.jit
    def program(weight: jax.Array, key: jax.Array) -> jax.Array:
        result = ALL[name](lambda x, t: counter(weight, x, t), key=key, steps=4)
        return result.ids if name == "maskgit" else result

    weight = jnp.asarray(0.1, jnp.float32)
    inside = [program(weight, key) for key in jax.random.split(KEY, 2)]
    outside = ALL[name](Partial(counter, weight), key=jax.random.split(KEY, 2)[1], steps=4)
    np.testing.assert_allclose(inside[1], output(name, outside), rtol=1e-5)
    assert counter.traces == 2


@pytest.mark.parametrize("name", [name for name in ALL if name != "ddim with noise"])
def test_extras_of_each_step_arrive_with_its_timestep(name: str) -> None:
    schedule, steps = ALL[name].keywords["schedule"], 4
    rows = {"euler": "euler_rows", "heun": "heun_rows", "maskgit": "rows"}
    times = getattr(schedule, rows[name])(steps).timestep if name in rows else schedule.timesteps(steps)
    counter, nothing = Counter(name), jnp.asarray(0.0, jnp.float32)

    def predict(x: jax.Array, t: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        # A NaN passes through a continuous sampler and is the first choice of argmax.
        return counter(nothing, x, t) + jnp.where(extra["time"] == t, 0.0, jnp.nan)

    extras = {"time": jnp.asarray(times), "unused": jnp.zeros((len(times), 2))}
    right = ALL[name](predict, key=KEY, steps=steps, extras=extras)
    plain = ALL[name](Partial(counter, nothing), key=KEY, steps=steps)
    np.testing.assert_allclose(output(name, right), output(name, plain), rtol=1e-6)
    if name in CONTINUOUS:
        shifted = ALL[name](predict, key=KEY, steps=steps, extras={"time": jnp.asarray(times[::-1].copy())})
        assert np.isnan(shifted).all()


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (ALL, {"extras": jnp.zeros((3, 7))}, r"extras hold an array of shape \[3, 7\]; wanted a leading axis of \d"),
        (ALL, {"steps": 0}, "steps is 0; wanted 1"),
        (ALL, {"steps": -1}, "steps is -1; wanted 1"),
        (("ddim", "ddpm"), {"steps": 1001}, "num_train_timesteps"),
        (ALL, {"predict": lambda x, t: jnp.zeros(1)}, r"predict gave \[1\]; wanted \["),
        (CONTINUOUS, {"start": jnp.zeros((3, 2))}, r"start has shape \[3, 2\]; wanted \[2, 3\]"),
        (("maskgit",), {"known": np.full((3, 6), 5)}, "known holds 5; wanted classes 0 to 3, or 4 for a token to be"),
        (("maskgit",), {"known": np.zeros((3, 5), np.int32)}, r"known is int32 \[3, 5\]; wanted integers \[3, 6\]"),
        (("maskgit",), {"known": np.zeros((3, 6), np.float32)}, "known is float32"),
    ],
)
def test_invalid_arguments_are_refused(names: Any, options: dict[str, Any], words: str) -> None:
    for name in names:
        values = {"predict": Partial(Counter(name), 0.0), "key": KEY, "steps": 4, **options}
        with pytest.raises(InputError, match=words):
            ALL[name](values.pop("predict"), **values)


@pytest.mark.parametrize("name", list(CONTINUOUS))
def test_samples_are_float32_for_any_model_dtype(name: str) -> None:
    x = CONTINUOUS[name](lambda x, t: (0.1 * x).astype(jnp.bfloat16), key=KEY, steps=3)
    assert x.dtype == jnp.float32
    assert np.isfinite(x).all()


def test_log_probabilities_belong_to_the_drawn_classes() -> None:
    table = jax.nn.log_softmax(jax.random.normal(KEY, (3, CLASSES - 1, 6), jnp.float32), axis=1)
    result = ALL["maskgit"](lambda x, t: table, key=KEY, steps=5)
    expected = np.take_along_axis(np.asarray(table), np.asarray(result.ids)[:, None], 1)[:, 0]
    np.testing.assert_allclose(result.log_probability, expected, rtol=1e-5)


def test_deterministic_maskgit_keeps_the_most_likely_tokens_first() -> None:
    sureness = jnp.asarray([0.3, 0.9, 0.5, 0.7])  # Probability of class 0; class 1 has the rest.
    seen: list[np.ndarray] = []

    def predict(tokens: jax.Array, t: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(np.asarray(x)[0]), tokens, ordered=True)
        return jnp.log(jnp.stack([sureness, 1 - sureness]))[None]

    schedule = MaskSchedule(3, masking="linear", temperature=(0.0, 0.0))
    result = maskgit(predict, (1, 4), KEY, schedule, steps=4)
    jax.effects_barrier()
    order = [set(np.flatnonzero(tokens != 2)) for tokens in seen]
    assert [len(known) for known in order] == [0, 1, 2, 3]
    assert all(earlier < later for earlier, later in itertools.pairwise(order))
    assert (result.ids < 2).all()


def test_guidance_scales_the_difference() -> None:
    one, other = jnp.asarray([1.0, 2.0]), jnp.asarray([2.0, 0.0])
    for scale, wanted in ((1.0, [2.0, 0.0]), (0.0, [1.0, 2.0]), (3.0, [4.0, -4.0])):
        assert combine(one, other, scale).tolist() == wanted


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_guided_sampler_goes_further_than_the_condition(scale: float) -> None:
    """Samples are -0.1 without and 0.2 with the condition, so scale 4 moves 4 times as far."""
    schedule = FlowSchedule(spacing="uniform")

    def predict(x: jax.Array, t: jax.Array) -> jax.Array:
        sample = jnp.repeat(jnp.asarray([-0.1, 0.2]), x.shape[0] // 2)[:, None]
        return (x - sample) / (t / 1000)

    x = flow_euler(guide(predict, scale), SHAPE, KEY, schedule, steps=5)
    np.testing.assert_allclose(x, np.full(SHAPE, -0.1 + 0.3 * scale), atol=1e-5)


def test_new_scale_does_not_compile_again() -> None:
    counter = Counter("maskgit")
    table = jnp.asarray(1.0, jnp.float32)
    for scale in (1.0, 2.0, 3.0):
        predict = guide(Partial(counter, table), scale)
        ids = maskgit(predict, (2, 4), KEY, MaskSchedule(CLASSES), steps=3).ids
        assert ids.shape == (2, 4)
    assert counter.traces == 1


def test_guided_predictor_with_half_a_batch_is_refused() -> None:
    with pytest.raises(InputError, match="predict gave a batch of 2; wanted 4, twice that of x"):
        flow_euler(guide(lambda x, t: x[:2], 2.0), SHAPE, KEY, FlowSchedule(), steps=2)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_training_masks_a_share_of_tokens_and_at_least_one(share: float) -> None:
    schedule = MaskSchedule(CLASSES)
    tokens = jnp.zeros((4, 10), jnp.int32)
    noisy = np.asarray(schedule.add_noise(tokens, jnp.full(4, share), jax.random.uniform(KEY, (4, 10), jnp.float32)))
    assert ((noisy == schedule.mask).sum(1) == max(1, np.ceil(np.float32(share) * 10))).all()
    assert set(np.unique(noisy)) <= {0, schedule.mask}


def test_flow_goes_from_the_sample_to_the_noise() -> None:
    schedule = FlowSchedule(shift=2.0)
    sample, noise = jax.random.normal(KEY, (2, 3, 4), jnp.float32)
    start, end = schedule.add_noise(sample, noise, jnp.zeros(3)), schedule.add_noise(sample, noise, jnp.ones(3))
    np.testing.assert_allclose(start, sample)
    np.testing.assert_allclose(end, noise)
    np.testing.assert_allclose(end - start, schedule.target(sample, noise), atol=1e-6)
    assert float(schedule.shifted(0.5)) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: NoiseSchedule(beta_schedule="cosine"), "beta_schedule is 'cosine'; known: linear"),  # type: ignore
        (lambda: NoiseSchedule(num_train_timesteps=0), "num_train_timesteps is 0"),
        (lambda: NoiseSchedule(beta_start=0.5, beta_end=0.1), "betas go from 0.5 to 0.1"),
        (lambda: NoiseSchedule(clip_sample_range=0.0), "clip_sample_range is 0.0"),
        (lambda: NoiseSchedule(steps_offset=-1), "steps_offset is -1"),
        (lambda: NoiseSchedule(rescale_betas_zero_snr=True), "train with v_prediction or sample"),
        (lambda: FlowSchedule(shift=0.0), "shift is 0.0; wanted a number above 0"),
        (lambda: MaskSchedule(1), "num_classes is 1"),
        (lambda: MaskSchedule(5, class_temperature=-1.0), "class_temperature is -1.0; wanted a number of 0 or more"),
        (
            lambda: MaskSchedule(5, temperature=(-1.0, 0.0)),
            "temperature is (-1.0, 0.0); wanted two numbers of 0 or more",
        ),
    ],
)
def test_invalid_schedule_is_refused(build: Callable[[], Any], words: str) -> None:
    # A type checker refuses values outside of Literal first.
    with pytest.raises((ConfigError, TypeError)) as error:
        build()
    assert isinstance(error.value, TypeError) or words in str(error.value)


def test_offset_beyond_the_last_timestep_is_refused() -> None:
    with pytest.raises(InputError, match="begin at timestep 1000; the last is 999; take fewer steps"):
        NoiseSchedule(steps_offset=1).timesteps(1000)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("steps", [1, 3, 7, 64, 999, 1000])
def test_timesteps_decrease_and_stay_within_the_schedule(spacing: Any, steps: int) -> None:
    times = NoiseSchedule(timestep_spacing=spacing).timesteps(steps)
    assert len(times) == steps
    assert (np.diff(times) < 0).all()
    assert times[0] <= 999
    assert times[-1] >= 0


@pytest.mark.parametrize("beta_schedule", ["linear", "squaredcos_cap_v2"])
def test_no_step_returns_a_nan(beta_schedule: Any) -> None:
    schedule = NoiseSchedule(beta_schedule=beta_schedule)
    predict = Partial(Counter("ddim"), jnp.asarray(0.5, jnp.float32))
    assert np.isfinite(ddim(predict, SHAPE, KEY, schedule, steps=1000, eta=1.0)).all()
    assert np.isfinite(ddpm(predict, SHAPE, KEY, schedule, steps=1000)).all()
