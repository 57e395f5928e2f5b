"""ACT's training compared with LeRobot 0.4.4 (tests/golden/lerobot_act_training/README.md)."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmodels.checkpoints.tensor_layouts import align_array, write_tensors
from jaxmodels.policies.act import weights as names
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act
from jaxmodels.training.optimizers import make_optimizer, optimizer_preset, scheduler_preset
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint_of
from tests.testing.lerobots_python import LEROBOT, WITHOUT, lerobot
from tests.testing.models import seeded_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot_act_training"
SCRIPT = GOLDEN.parents[2] / "tools" / "golden" / "lerobot_act_training.py"
SLOW = pytest.mark.timeout(900)
CASES = ("no_vae", "vae", pytest.param("camera_and_vae", marks=SLOW))
RUNS = ("preset", "fast")
PARTS = ("l1", "kl")  # Parts of the loss.
TOLERANCE = 1e-4  # Share of the largest magnitude; another order of float32 summation gives about 1e-6.
MOVED = 1e-2  # Share of a weight's total change; Adam amplifies rounding errors of small gradients.
# Compared steps with the ResNet: LeRobot's own runs diverge after some steps if the last bit of a weight differs.
CAMERA_STEPS = {"preset": 10, "fast": 8}
ROUNDING = 1e-5  # Share of a weight, after a hundred float32 additions.
ENTRIES = 64  # Recorded entries of a large tensor, see the README.
# Optimizing these programs takes longer than it saves in a hundred runs.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Steps:
    """Results of a training; weights have lerobot's names."""

    loss: np.ndarray
    parts: dict[str, np.ndarray]
    gradient_norm: np.ndarray
    weights: dict[str, np.ndarray]


class Training:
    """A recorded training of lerobot, and our model with the same weights, batches and noise."""

    def __init__(self, folder: Path):
        self.config = ActConfig.from_json(json.loads((folder / "config.json").read_text()))
        keys = json.loads((folder / "keys.json").read_text())
        self.optimizer = keys["optimizer"]
        self.plan = blueprint_of(Act, self.config)
        theirs, table = seeded_weights(keys), names.tensors(self.plan.shapes)
        converted = [(entry.ours, entry.layout.read(theirs[entry.theirs])) for entry in table]
        self.start = {
            name: align_array(part) for ours, parts in converted for name, part in zip(ours, parts, strict=True)
        }
        with np.load(folder / "batches.npz") as batches, np.load(folder / "training.npz") as found:
            self.batches, self.found = dict(batches), dict(found)
        self.noise = self.batches.pop("noise")

    def recorded(self, what: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(f"{what}."): x for name, x in self.found.items() if name.startswith(f"{what}.")}

    def parameters(self) -> dict[str, jax.Array]:
        return {name: jnp.asarray(self.start[name]) for name in self.plan.learned}

    def by_their_names(self, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
        table = [tensor for tensor in names.tensors(self.plan.shapes) if tensor.ours[0] in arrays]
        return write_tensors(table, {name: np.asarray(array) for name, array in arrays.items()})

    @cached_property
    def slope(self) -> Any:
        """Loss, parts and gradient for given parameters and a batch; compiled once."""
        fixed = {name: jnp.asarray(x) for name, x in self.start.items() if name not in self.plan.learned}

        def loss(parameters: Any, batch: Any, noise: Any) -> Any:
            frames = (batch["frames"].astype(jnp.float32) / 127.5 - 1,) if "frames" in batch else ()
            seen = Observation(frames, batch["state"], batch.get("environment_state"))
            rngs = nnx.Rngs(0)  # Unused: there is no dropout, and the noise is lerobot's.
            model = self.plan.assemble({**fixed, **parameters})
            noise = noise if self.config.use_vae else None
            return model.loss(seen, batch["actions"], batch["is_pad"], rngs, noise=noise)

        return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICKLY)

    def batch(self, number: int) -> dict[str, np.ndarray]:
        return {name: array[number % len(array)] for name, array in self.batches.items()}

    def train(self, run: str, steps: int) -> Steps:
        """Run the first steps of `robojax train` with LeRobot's preset and these rates."""
        rate, backbone_rate = self.optimizer["rates"][run]
        policy = replace(self.config, optimizer_lr=rate, optimizer_lr_backbone=backbone_rate)
        count = len(self.noise)
        rule = make_optimizer(optimizer_preset(policy), scheduler_preset(policy), count, self.plan.learned)

        def update(gradient: Any, memory: Any, parameters: Any) -> Any:
            updates, memory = rule.update(gradient, memory, parameters)
            return optax.apply_updates(parameters, updates), memory, optax.tree.norm(gradient)

        update = jax.jit(update, donate_argnums=(1, 2), compiler_options=QUICKLY)
        parameters, seen = self.parameters(), []
        memory = rule.init(parameters)
        for number in range(steps):
            value, gradient = self.slope(parameters, self.batch(number), self.noise[number])
            with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power.
                parameters, memory, norm = update(gradient, memory, parameters)
            seen.append((*value, norm))
        losses, parts, norms = zip(*jax.device_get(seen), strict=True)
        together = {name: np.array([each[name] for each in parts]) for name in parts[0]}
        return Steps(np.array(losses), together, np.array(norms), self.by_their_names(parameters))


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest) -> Training:
    return Training(GOLDEN / request.param)


@pytest.fixture(scope="module")
def lerobots_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a training now, with other weights and batches than the golden training."""
    if LEROBOT is None:
        pytest.skip(WITHOUT)
    folder = tmp_path_factory.mktemp("lerobot")
    lerobot("-W", "ignore", "-B", SCRIPT, folder, 1, timeout=900)
    return folder


def recorded_part(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the recorded part of a tensor."""
    if found.shape == expected.shape:
        return found
    return found.reshape(-1)[np.linspace(0, found.size - 1, ENTRIES).astype(int)]


def effective(name: str, tensor: np.ndarray) -> np.ndarray:
    """Return a tensor without the numbers that do not affect actions, whose gradient consists of rounding errors.

    These are biases of keys, and queries and keys of the decoder's first self-attention, which mixes equal values.
    """
    if not name.endswith(("in_proj_weight", "in_proj_bias")):
        return tensor
    query, key, value = np.split(tensor, 3)
    if name.startswith("model.decoder.layers.0.self_attn"):
        return value
    return np.concatenate((query, value)) if name.endswith("bias") else np.concatenate((query, key, value))


def check_first_step(training: Training) -> None:
    (value, parts), gradient = training.slope(training.parameters(), training.batch(0), training.noise[0])
    ours, theirs = training.by_their_names(gradient), training.recorded("gradient")
    assert set(ours) == set(theirs), "the trained weights must be the weights with a gradient in lerobot"
    assert float(value) == pytest.approx(training.found["preset.loss"][0], rel=TOLERANCE)
    for name, expected in zip(PARTS, training.found["preset.parts"][0], strict=True):
        assert float(parts.get(name, 0.0)) == pytest.approx(expected, rel=TOLERANCE)
    scale = max(np.abs(array).max() for array in theirs.values())
    for name, expected in theirs.items():
        found, expected = (effective(name, array) for array in (recorded_part(ours[name], expected), expected))
        # A gradient that consists of rounding errors has no scale of its own.
        error = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6 * scale)
        assert error < TOLERANCE, (name, error)
    for name, expected in training.recorded("gradient_norm").items():
        assert np.linalg.norm(ours[name]) == pytest.approx(expected, rel=TOLERANCE), name


def check_steps(training: Training, run: str) -> None:
    expected, count = training.recorded(run), len(training.noise)
    assert expected["loss"][-5:].mean() < expected["loss"][:5].mean(), "the loss must fall"
    count = CAMERA_STEPS[run] if training.config.cameras else count
    found = training.train(run, count)
    assert len(found.loss) == count
    np.testing.assert_allclose(found.loss, expected["loss"][:count], rtol=TOLERANCE)
    np.testing.assert_allclose(found.gradient_norm, expected["gradient_norm"][:count], rtol=TOLERANCE)
    for name, column in zip(PARTS, expected["parts"].T, strict=True):
        np.testing.assert_allclose(found.parts.get(name, np.zeros(count)), column[:count], rtol=TOLERANCE)
    if training.config.cameras:
        return
    before = training.by_their_names(training.parameters())
    for name, end in training.recorded(f"{run}.final").items():
        ours, start = (effective(name, recorded_part(arrays[name], end)) for arrays in (found.weights, before))
        theirs = effective(name, end)
        error, way, scale = np.abs(ours - theirs).max(), np.abs(theirs - start).max(), np.abs(theirs).max()
        assert error <= TOLERANCE * scale, (name, error)
        assert error <= MOVED * way + ROUNDING * scale, (name, error, way)


def test_loss_and_gradients_equal_lerobot(golden: Training) -> None:
    check_first_step(golden)


@pytest.mark.parametrize("run", RUNS)
def test_training_steps_follow_lerobot(golden: Training, run: str) -> None:
    check_steps(golden, run)


def test_recorded_runs_include_clipped_and_unclipped_gradients() -> None:
    norms = [np.load(path)["preset.gradient_norm"] for path in sorted(GOLDEN.glob("*/training.npz"))]
    clip = json.loads((GOLDEN / "vae" / "keys.json").read_text())["optimizer"]["clip"]
    assert any((norm > clip).any() for norm in norms)
    assert any((norm < clip).any() for norm in norms)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ["no_vae", "vae", "camera_and_vae"])
def test_live_lerobot_agrees_for_other_weights(lerobots_own: Path, case: str) -> None:
    training = Training(lerobots_own / case)
    check_first_step(training)
    for run in RUNS if not training.config.cameras else ():  # The weights determine when a ResNet diverges.
        check_steps(training, run)
