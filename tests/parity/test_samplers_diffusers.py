"""Samplers give diffusers' numbers for the same predictions and the same noise."""

import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.samplers import (
    FlowSchedule,
    MaskSchedule,
    NoiseSchedule,
    ddim,
    ddim_step,
    ddpm_step,
    flow_euler,
    flow_heun,
    maskgit_step,
)
from tests.testing.peers import require_peers

Cases = dict[str, dict[str, Any]]
GOLDEN = Path(__file__).parents[1] / "golden" / "samplers"
SCRIPT = GOLDEN.parents[2] / "tools" / "golden" / "samplers.py"
TOLERANCE = 1e-5  # Share of the largest number.
DDIM = ["ddim_defaults", "ddim_stable_diffusion", "ddim_policy", "ddim_velocity_zero_snr"]
DDIM_ETA = ["ddim_sample_eta", "ddim_eta_one"]
DDPM = ["ddpm_defaults", "ddpm_every_step", "ddpm_large_offset", "ddpm_large"]
DDPM += ["ddpm_velocity_linspace", "ddpm_sample_trailing"]
EULER = ["euler_defaults", "euler_shifted", "euler_uniform", "euler_uniform_shifted", "euler_one_step"]
HEUN = ["heun_defaults", "heun_shifted", "heun_one_step"]
AMUSED = ["amused_defaults", "amused_linear", "amused_greedy", "amused_inpainting"]


@pytest.fixture(scope="module")
def cases() -> Cases:
    found: Cases = json.loads((GOLDEN / "cases.json").read_text())
    with np.load(GOLDEN / "cases.npz") as arrays:
        for name, array in arrays.items():
            case, part = name.split("/")
            found[case][part] = array
    return found


def same(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    scale = max(1.0, float(np.abs(theirs).max()))
    assert float(np.abs(ours - theirs).max()) <= tolerance * scale


def row_of(rows: Any, k: int) -> Any:
    return jax.tree.map(lambda column: jnp.asarray(column[k]), rows)


def test_each_recorded_case_is_compared(cases: Cases) -> None:
    assert set(cases) == {*DDIM, *DDIM_ETA, *DDPM, *EULER, *HEUN, *AMUSED}


@pytest.mark.parametrize("name", [*DDIM, *DDIM_ETA, *DDPM])
def test_noise_schedule_equals_diffusers(cases: Cases, name: str) -> None:
    case = cases[name]
    schedule = NoiseSchedule(**case["fields"])
    steps = len(case["predictions"])
    same(schedule.alphas, case["alphas"], 1e-6)
    assert schedule.timesteps(steps).tolist() == case["timesteps"].tolist()
    clean, noise = jnp.asarray(case["training.clean"]), jnp.asarray(case["training.noise"])
    times = jnp.asarray(case["training.timesteps"])
    same(schedule.add_noise(clean, noise, times), case["training.noisy"], 1e-6)
    targets = {"epsilon": noise, "sample": clean, "v_prediction": case["training.velocity"]}
    same(schedule.target(clean, noise, times), targets[schedule.prediction_type], 1e-6)


@pytest.mark.parametrize("name", [*DDIM, *DDIM_ETA, *DDPM])
def test_step_of_ddim_or_ddpm_equals_diffusers(cases: Cases, name: str) -> None:
    case = cases[name]
    schedule, steps = NoiseSchedule(**case["fields"]), len(case["predictions"])
    rows = schedule.ddpm_rows(steps) if name in DDPM else schedule.ddim_rows(steps)
    for k in range(steps):
        given = schedule, jnp.asarray(case["predictions"][k]), jnp.asarray(case["x"][k]), row_of(rows, k)
        noise = None if name in DDIM else jnp.asarray(case["noise"][k])
        found = ddpm_step(*given, noise) if name in DDPM else ddim_step(*given, noise, case["eta"])
        same(found, case["x"][k + 1])


def run_recorded(sample: Any, case: dict[str, Any], schedule: Any, steps: int, predictions: np.ndarray) -> jax.Array:
    """Sample from the recorded start with a model that returns recorded predictions."""
    start = case["x"][0]
    key = jax.random.key(0)
    return sample(
        lambda x, t, prediction: prediction, start.shape, key, schedule, steps=steps, extras=predictions, start=start
    )


@pytest.mark.parametrize("name", DDIM)
def test_all_steps_of_ddim_equal_diffusers(cases: Cases, name: str) -> None:
    case = cases[name]
    schedule, predictions = NoiseSchedule(**case["fields"]), case["predictions"]
    same(run_recorded(ddim, case, schedule, len(predictions), predictions), case["x"][-1])


@pytest.mark.parametrize("name", [*EULER, *HEUN])
def test_all_steps_of_flow_matching_equal_diffusers(cases: Cases, name: str) -> None:
    case = cases[name]
    schedule = FlowSchedule(**case["fields"])
    evaluations = len(case["predictions"])
    steps = evaluations if name in EULER else (evaluations + 1) // 2
    rows, sample = (schedule.euler_rows(steps), flow_euler) if name in EULER else (schedule.heun_rows(steps), flow_heun)
    same(rows.timestep, case["timesteps"], 1e-6)
    for count in (evaluations,) if name in HEUN else range(1, evaluations + 1):
        # Velocities of zero after the first steps give the result of a shorter run.
        predictions = case["predictions"] * (np.arange(evaluations) < count)[:, None, None, None]
        same(run_recorded(sample, case, schedule, steps, predictions.astype(np.float32)), case["x"][count])


@pytest.mark.parametrize("name", AMUSED)
def test_step_of_maskgit_equals_diffusers(cases: Cases, name: str) -> None:
    case = cases[name]
    schedule = MaskSchedule(**{**case["fields"], "temperature": tuple(map(float, case["fields"]["temperature"]))})
    steps = len(case["logits"])
    rows = schedule.rows(steps)
    assert rows.timestep.tolist() == case["timesteps"].tolist()
    masked_at_first = jnp.sum(jnp.asarray(case["x"][0]) == schedule.mask, axis=1)
    for k in range(steps):
        tokens, is_new, _ = maskgit_step(
            schedule,
            jnp.asarray(case["logits"][k]),
            jnp.asarray(case["x"][k]),
            row_of(rows, k),
            masked_at_first,
            jnp.asarray(case["class_gumbel"][k]),
            jnp.asarray(case["order_gumbel"][k]),
        )
        assert tokens.tolist() == case["x"][k + 1].tolist()
        assert is_new.tolist() == ((case["x"][k] == schedule.mask) & (case["x"][k + 1] != schedule.mask)).tolist()


@pytest.mark.needs_peers
def test_installed_diffusers_gives_the_recorded_numbers(cases: Cases) -> None:
    require_peers("torch", "diffusers")
    fresh = runpy.run_path(str(SCRIPT))["record"]()
    assert set(fresh) == set(cases)
    for name, case in fresh.items():
        assert set(case) == set(cases[name])
        for part, value in case.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(value, cases[name][part], rtol=1e-5, atol=1e-5, err_msg=f"{name}/{part}")
            else:
                assert value == cases[name][part]


@pytest.mark.needs_peers
@pytest.mark.parametrize("masking", ["cosine", "linear"])
def test_number_of_remasked_tokens_equals_diffusers(masking: Any) -> None:
    require_peers("torch", "diffusers")
    import torch
    from diffusers import schedulers

    for tokens, steps in [(16, 12), (96, 8), (96, 12), (112, 12), (24, 24), (256, 10)]:
        theirs = schedulers.AmusedScheduler(mask_token_id=4, masking_schedule=masking)
        theirs.set_timesteps(steps)
        ours = MaskSchedule(num_classes=5, masking=masking)
        x = torch.full((1, tokens), 4)
        for k, t in enumerate(theirs.timesteps):
            before = int((x == 4).sum())
            x = theirs.step(torch.zeros(1, tokens, 4), t, x).prev_sample
            if t > 0:
                count = jnp.floor(jnp.asarray(tokens, jnp.float32) * ours.rows(steps).share[k])
                assert int((x == 4).sum()) == max(1, min(int(count), before - 1)), (tokens, steps, k)
