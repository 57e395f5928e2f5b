"""ACT compared with outputs of LeRobot 0.4.4 (tests/golden/lerobot_act/README.md)."""

from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmodels
from jaxmodels.policies.act.model import Act
from jaxmodels.program import Scales, normalize
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint_of
from tests.testing.compiling import compiling_quickly
from tests.testing.models import relative_error

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot_act"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
assert len(NAMES) == 5
OPTIMIZED = ("act_one_camera", "act_state_only")  # Compiled like users do.
pytestmark = pytest.mark.fully_compiled
TOLERANCE = 1e-5  # Share of the largest magnitude; another order of float32 summation gives about 2e-6.


def steps(name: str):
    with np.load(GOLDEN / name / "io.npz") as file:
        arrays = dict(file)
    for step in range(1 + max(int(key.split(".")[1]) for key in arrays)):
        start = f"in.{step}."
        observation = {key.removeprefix(start): array for key, array in arrays.items() if key.startswith(start)}
        yield observation, {key.removeprefix(f"out.{step}."): array for key, array in arrays.items()}


@pytest.mark.parametrize("name", NAMES)
def test_chunks_equal_lerobot(name: str, golden_folder) -> None:
    policy = jaxmodels.load_policy(golden_folder(name))
    checkpoint, recorded = policy.checkpoint, list(steps(name))
    with nullcontext() if name in OPTIMIZED else compiling_quickly():
        for observation, wanted in recorded:
            assert relative_error(policy.act(observation), wanted["chunk"]) < TOLERANCE
    config, inputs = checkpoint.config, checkpoint.normalization.inputs
    scales = Scales(
        images=tuple(inputs.get_affine(feature) for feature in config.cameras),
        state=inputs.get_affine(config.state),
        environment_state=config.environment_state and inputs.get_affine(config.environment_state),
        action=inputs.get_affine(config.action),
    )
    plan = blueprint_of(Act, config)
    sizes = tuple(camera.shape[1:] for camera in config.cameras)

    @jax.jit
    def act(weights, observation: Observation):
        return plan.assemble(weights)(normalize(observation, scales, sizes))

    weights = jax.device_put(dict(checkpoint.weights))
    for observation, wanted in recorded:
        seen = Observation(
            images=tuple(jnp.asarray(observation[camera.name]) for camera in config.cameras),
            state=jnp.asarray(observation["observation.state"]),
            environment_state=observation.get("observation.environment_state"),
        )
        with compiling_quickly():
            found = np.asarray(act(weights, seen))
        assert relative_error(found, wanted["chunk_normalized"]) < TOLERANCE, "of the trained module"


@pytest.mark.usefixtures("quick_compilation")
def test_ensembled_actions_equal_lerobot_over_many_steps(golden_folder) -> None:
    policy = jaxmodels.load_policy(golden_folder("act_temporal_ensemble"))
    needs = policy.requirements
    ensembler = jaxmodels.TemporalEnsembler(needs.temporal_ensemble_coeff, needs.chunk)
    recorded = list(steps("act_temporal_ensemble"))
    assert len(recorded) > needs.chunk  # Long enough to use each weight of the mean.
    for observation, wanted in recorded:
        assert relative_error(ensembler.update(policy.act(observation)), wanted["select_action"]) < TOLERANCE
    ensembler.reset()
    observation, wanted = recorded[0]
    assert relative_error(ensembler.update(policy.act(observation)), wanted["select_action"]) < TOLERANCE
