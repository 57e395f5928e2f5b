"""Diffusion Policy compared with outputs, losses and gradients of LeRobot 0.6.1."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmodels
from jaxmodels.checkpoints.tensor_layouts import write_tensors
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.diffusion.policy import POLICY
from jaxmodels.program import prepare_pixels
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint, blueprint_of
from tests.testing.models import relative_error

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot_diffusion"
LOSSES = GOLDEN.parent / "lerobot_losses" / "diffusion"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
BATCH_NORM = "diffusion_batch_norm_ddim"
OPTIMIZED = (BATCH_NORM, "cpu")  # Compiled like users do.
pytestmark = pytest.mark.fully_compiled
# The program runs once and has hundreds of tensors, so optimizing it takes longer than it saves.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOLERANCE = 1e-4  # Share of the largest magnitude; the same weights in other torch kernels differ by 3e-6.


def chunks(name: str):
    """Yield (observation with history, noises, recorded arrays) of each frame at which LeRobot predicted a chunk."""
    with np.load(GOLDEN / name / "io.npz") as file:
        io = dict(file)
    steps = json.loads((GOLDEN / name / "config.json").read_text())["n_obs_steps"]
    features = [key.removeprefix("in.0.") for key in io if key.startswith("in.0.observation.")]
    for frame in (int(key.split(".")[1]) for key in io if key.endswith(".noise") and key.startswith("in.")):
        # The history before the first frame repeats the first frame.
        window = [max(frame - back, 0) for back in reversed(range(steps))]
        seen = {key: np.stack([io[f"in.{at}.{key}"] for at in window], axis=1) for key in features}
        observation = seen if steps > 1 else {key: array[:, 0] for key, array in seen.items()}
        noises = {key: io[f"in.{frame}.{key}"] for key in ("noise", "step_noise") if f"in.{frame}.{key}" in io}
        yield observation, noises, {key.removeprefix(f"out.{frame}."): array for key, array in io.items()}


@pytest.mark.parametrize(("name", "platform"), [*((name, "cpu") for name in NAMES), (BATCH_NORM, "gpu")])
def test_chunks_equal_lerobot(name: str, platform: str, golden_folder, request: pytest.FixtureRequest) -> None:
    if (name, platform) != OPTIMIZED:
        request.getfixturevalue("quick_compilation")
    policy = jaxmodels.load_policy(golden_folder(name), platform=platform)
    found = list(chunks(name))
    assert len(found) == 2
    for observation, noises, recorded in found:
        assert relative_error(policy.act(observation, **noises), recorded["chunk"]) < TOLERANCE


@pytest.mark.usefixtures("quick_compilation")
def test_loss_and_gradients_equal_lerobot(golden_folder) -> None:
    case = json.loads((LOSSES / "case.json").read_text())["case"].partition("/")[2]
    checkpoint = lerobot_folder.read_checkpoint(golden_folder(case))
    config, inputs = checkpoint.config, checkpoint.normalization.inputs
    with np.load(LOSSES / "io.npz") as file:
        io = dict(file)
    batch = {name: jnp.asarray(array) for name, array in io.items() if name.startswith("in.0.")}
    cameras = [(batch[f"in.0.{camera.name}"], camera, inputs.get_affine(camera)) for camera in config.cameras]
    observation = Observation(
        images=tuple(prepare_pixels(frames, camera.shape[1:], scale, np.float32) for frames, camera, scale in cameras),
        state=inputs.get_affine(config.state).normalize(batch["in.0.observation.state"]),
    )
    actions = inputs.get_affine(config.action).normalize(batch["in.0.action"])
    np.testing.assert_allclose(actions, io["mid.0.action_normalized"], atol=1e-6)
    draws = {"noise": batch["in.0.noise"], "timesteps": batch["in.0.timesteps"].astype(jnp.int32)}

    def loss(parameters, *, is_masked: bool):
        plan = blueprint(lambda rngs: POLICY.model(replace(config, do_mask_loss_for_padding=is_masked), rngs=rngs))
        model = plan.assemble({**jax.tree.map(jnp.asarray, dict(checkpoint.weights)), **parameters})
        return model.loss(observation, actions, batch["in.0.action_is_pad"], **draws)[0]

    plan = blueprint_of(POLICY.model, config)
    parameters = {name: jnp.asarray(checkpoint.weights[name]) for name in plan.learned}

    @partial(jax.jit, compiler_options=QUICKLY)
    def both(parameters):
        return *jax.value_and_grad(partial(loss, is_masked=False))(parameters), loss(parameters, is_masked=True)

    value, gradient, masked = jax.device_get(both(parameters))
    assert float(value) == pytest.approx(io["out.0.loss"], rel=TOLERANCE)
    assert float(masked) == pytest.approx(io["out.0.loss_masked"], rel=TOLERANCE)
    found = write_tensors([tensor for tensor in POLICY.tensors(plan.shapes) if tensor.ours[0] in gradient], gradient)
    norms = dict(zip(io["out.0.grad_names"].tolist(), io["out.0.grad_norms"], strict=True))
    assert found.keys() == norms.keys(), "the trained weights must be the weights with a gradient in lerobot"
    largest = max(norms.values())
    assert max(abs(np.linalg.norm(found[name]) - norm) for name, norm in norms.items()) < TOLERANCE * largest
    for name in (key.removeprefix("out.0.grad.") for key in io if key.startswith("out.0.grad.")):
        assert relative_error(np.asarray(found[name]), io[f"out.0.grad.{name}"]) < TOLERANCE, name
