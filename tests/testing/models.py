"""Policies for tests, and a check for silent dtype promotion.

The conftests of `unit/jaxmodels` and `parity` import all fixtures of this module.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmodels.layers.embeddings import sinusoidal
from jaxmodels.normalization import build_normalization
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar
from jaxmodels.types import Feature
from jaxmodels.weights import blueprint_of
from tests.testing.compiling import PROGRAMS, compiling_quickly, use_programs

GOLDEN = Path(__file__).parents[1] / "golden"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object] | None = None, **values: Any) -> None:
    """Change the object of a JSON file with a function, or replace the values of these names."""
    content = json.loads(path.read_text())
    if change is not None:
        change(content)
    path.write_text(json.dumps(content | values))


@pytest.fixture(scope="module", autouse=True)
def compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile quickly for a whole module including its fixtures, unless its tests need the programs that users run."""
    is_full = request.node.get_closest_marker("fully_compiled") is not None
    if is_full:
        jax.clear_caches()  # Drop programs that other modules compiled quickly.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOJAX_COMPILE_CACHE", "off")  # Child processes use the cache of the run, or none.
        with nullcontext() if is_full else compiling_quickly():
            yield


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the largest expected magnitude; shapes and dtypes must agree."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    with compiling_quickly():
        yield


@pytest.fixture
def no_programs() -> Iterator[None]:
    """Remove the folder of compiled programs from the configuration."""
    use_programs(None)
    yield
    use_programs(os.environ[PROGRAMS])


@pytest.fixture(autouse=True)
def strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


def seeded_weights(keys: dict[str, Any], io: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Draw weights by the rule of tests/golden/lerobot_act/README.md; ``fixed`` tensors of `io` are used unchanged."""
    weights = {}
    for name, entry in keys["keys"].items():
        shape = tuple(entry["shape"])
        rng = np.random.default_rng([keys["seed"], zlib.crc32(name.encode())])
        if f"fixed.{name}" in (io or {}):
            weights[name] = (io or {})[f"fixed.{name}"]
        elif name.endswith("num_batches_tracked"):
            weights[name] = np.zeros(shape, np.int64)
        elif name in keys["fixed"]:
            weights[name] = sinusoidal(*shape[1:])[None]
        elif name.endswith("running_var"):
            weights[name] = np.float32(0.5 + rng.random(shape))
        else:
            weights[name] = seeded_tensor(rng, name, shape)
    return weights


def seeded_tensor(rng: np.random.Generator, name: str, shape: Sequence[int]) -> np.ndarray:
    x = rng.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return x / np.float32(np.sqrt(np.prod(shape[1:])))
    return np.float32(1) * name.endswith("weight") + np.float32(0.1) * x


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            golden = GOLDEN / f"lerobot_{name.partition('_')[0]}" / name
            # Do not copy permissions, because the golden files may be read-only.
            shutil.copytree(golden, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
            if not (folder / "model.safetensors").exists():
                keys = json.loads((folder / "keys.json").read_text())
                with np.load(folder / "io.npz") as io:
                    save_file(seeded_weights(keys, io), folder / "model.safetensors")
            made[name] = folder
        return made[name]

    return make


def small_config(
    *, cameras: tuple[str, ...] = (), state: int | None = 6, environment: int | None = None, **fields: Any
) -> ActConfig:
    """Return the config of an ACT with a few thousand parameters and cameras of 32x32."""
    inputs = [Feature(f"observation.images.{name}", "VISUAL", (3, 32, 32)) for name in cameras]
    if state is not None:
        inputs.insert(0, Feature("observation.state", "STATE", (state,)))
    if environment is not None or not cameras:
        inputs.append(Feature("observation.environment_state", "ENV", (environment or 4,)))
    values: dict[str, Any] = {
        "input_features": tuple(inputs),
        "output_features": (Feature("action", "ACTION", (5,)),),
        "vision_backbone": "small_cnn",
        "dim_model": 16,
        "n_heads": 2,
        "dim_feedforward": 24,
        "n_encoder_layers": 2,
        "latent_dim": 4,
        "n_vae_encoder_layers": 1,
        "chunk_size": 6,
        "n_action_steps": 3,
    }
    return ActConfig(**{**values, **fields})


def random_stats(features: tuple[Feature, ...], seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    stats = {}
    for feature in features:
        shape = (3, 1, 1) if feature.type == "VISUAL" else feature.shape
        mean, std = rng.uniform(0.2, 0.8, shape), rng.uniform(0.1, 0.6, shape)
        values = {"mean": mean, "std": std, "min": mean - 2 * std, "max": mean + 3 * std}
        values |= {"q01": mean - 1.9 * std, "q99": mean + 2.1 * std, "q10": mean - std, "q90": mean + 1.2 * std}
        stats[feature.name] = {name: value.astype(np.float32) for name, value in values.items()}
    return stats


def lively_weights(config: ActConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw random weights of initial magnitude, where biases, norms and statistics differ from 0 and 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, array in blueprint_of(Act, config).shapes.items():
        x = rng.standard_normal(array.shape).astype(np.float32)
        if name.endswith("latent_encoder.positions"):
            weights[name] = sinusoidal(*array.shape[1:])[None]
        elif len(array.shape) == 1:
            weights[name] = np.float32(name.endswith((".scale", ".variance"))) + np.float32(0.1) * np.abs(x)
        elif name.endswith(".kernel"):
            size = 0.6 if len(array.shape) == 2 else 1.4  # Dense layers, convolutions.
            weights[name] = x * np.float32(size / np.sqrt(np.prod(array.shape[:-1])))
        else:
            weights[name] = x
    return weights


def make_checkpoint(config: ActConfig, seed: int = 0, **sidecar: Any) -> Checkpoint:
    features = (*config.input_features, *config.output_features)
    normalization = build_normalization(
        config.input_features, config.output_features, config.normalization_mapping, random_stats(features, seed)
    )
    return Checkpoint(config, lively_weights(config, seed), normalization, Sidecar(**sidecar))


def make_observation(config: ActConfig, batch: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    observation = {}
    for feature in config.input_features:
        if feature.type == "VISUAL":
            observation[feature.name] = rng.integers(0, 256, (batch, *feature.shape[1:], 3), np.uint8)
        else:
            observation[feature.name] = rng.standard_normal((batch, *feature.shape)).astype(np.float32)
    return observation


@pytest.fixture(scope="session")
def small() -> Callable[..., ActConfig]:
    return small_config


@pytest.fixture(scope="session")
def checkpoint_of() -> Callable[..., Checkpoint]:
    return make_checkpoint


@pytest.fixture
def observation_of() -> Callable[..., dict[str, np.ndarray]]:
    return make_observation
