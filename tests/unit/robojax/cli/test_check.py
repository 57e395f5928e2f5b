import itertools

import jax
import pytest

import jaxmodels
from jaxmodels import Requirements
from jaxmodels.roofline import Accelerator
from robojax.cli.check import (
    Speed,
    _show_roofline,
    assess_speed,
    compare_roofline,
    make_observation,
    measure_policy,
)
from tests.testing.doubles import ScriptedPolicy


def needs(**more) -> Requirements:
    return Requirements(**{"policy_type": "act", "action": 6, "chunk": 20, "action_steps": 5} | more)


def speed(p99: float) -> Speed:
    return Speed(compile=0.0, p50=p99 / 2, p99=p99, stages={}, runs=10)


@pytest.mark.parametrize(
    ("p99", "rate", "fit"),
    [
        (0.010, 25, "fits"),
        (0.190, 25, "fits"),  # 5 steps at 25 Hz take 200 ms.
        (0.210, 25, "fits, thinking less often"),
        (0.350, 25, "fits, thinking less often"),  # 2 x 350 + 2 x 40 ms of the chunk's 800 ms.
        (0.370, 25, "does not fit"),
        (0.190, 200, "does not fit"),
    ],
)
def test_policy_fits_if_its_chunk_outlasts_the_next_inference(p99, rate, fit):
    verdict = assess_speed(needs(), speed(p99), rate)
    assert verdict.fit == fit
    assert verdict.budget == pytest.approx(5 / rate)
    assert verdict.covered == pytest.approx(20 / rate)


@pytest.mark.parametrize(
    ("changes", "p99", "fit"),
    [
        ({"temporal_ensemble_coeff": 0.01}, 0.1, "fits, thinking less often"),
        ({"chunk": 1, "action_steps": 1}, 0.04, "fits"),
        ({"chunk": 1, "action_steps": 1}, 0.06, "does not fit"),
    ],
)
def test_ensembled_and_single_action_policies_have_one_tick(changes, p99, fit):
    verdict = assess_speed(needs(**changes), speed(p99), 20)
    assert (verdict.budget, verdict.fit) == (0.05, fit)


def test_observation_has_the_inputs_of_the_policy():
    found = make_observation(needs(cameras={"top": (48, 64)}, state=6, environment_state=3))
    assert {name: (array.shape, array.dtype.name) for name, array in found.items()} == {
        "observation.images.top": ((1, 48, 64, 3), "uint8"),
        "observation.state": ((1, 6), "float32"),
        "observation.environment_state": ((1, 3), "float32"),
    }


def test_inference_is_timed_after_compilation_and_warmup():
    policy = ScriptedPolicy()
    ticks = itertools.count()
    found = measure_policy(policy, runs=20, warm_up=4, seconds=1e9, clock=lambda: float(next(ticks)))
    assert (policy.acted, len(policy.compiled)) == (24, 1)
    assert (found.p50, found.p99, found.runs, found.compile) == (1.0, 1.0, 20, 1.0)
    assert set(found.stages) == {"to_device", "compute", "to_host"}
    ticks = itertools.count(step=10)
    assert measure_policy(ScriptedPolicy(), runs=100, seconds=1, clock=lambda: float(next(ticks))).runs == 5


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """List the peaks of this machine's processor."""
    kind = jax.devices("cpu")[0].device_kind
    machine = Accelerator("here", (kind,), {"float32": 1e12, "int8": 4e12}, 1e11, 64e9)
    monkeypatch.setattr(jaxmodels, "ACCELERATORS", (*jaxmodels.ACCELERATORS, machine))


@pytest.mark.usefixtures("listed")
def test_listed_accelerator_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    policy = jaxmodels.load_policy("robojax/sim/policy", device="cpu")
    found = compare_roofline(policy, [1, 2], runs=5)
    for batch in found["batches"]:
        measured, least = batch["measured"], batch["least"]["here"]
        assert measured["accelerator"] == "here"
        assert measured["ratio"] == pytest.approx(measured["chunk_ms"] / least["chunk_ms"])
        assert measured["ratio"] > 1, "faster than the peaks"
        assert measured["parts_ms"]["chunk"] > least["parts_ms"]["chunk"]
    _show_roofline(found)
    printed = capsys.readouterr().out
    assert printed.count("measured") == 2
    assert printed.count(" times") == 2 * 2
    assert "not measured" not in printed
