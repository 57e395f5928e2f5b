"""Demonstrations to train on, and tiny policies."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmodels.data import Dataset, DatasetWriter, open_dataset
from jaxmodels.policies import get_policy_type, trained_types
from jaxmodels.training import OptimizerConfig, SchedulerConfig, Start, TrainingConfig, new_policy

MakeStart = Callable[..., Start]
MakeConfig = Callable[..., TrainingConfig]
SIZES: dict[str, Any] = {"chunk_size": 4, "n_action_steps": 2, "dim_model": 16, "n_heads": 2, "n_encoder_layers": 1}
TINY_ACT: dict[str, Any] = {**SIZES, "vision_backbone": "small_cnn", "dim_feedforward": 32}
TINY_ACT |= {"latent_dim": 4, "n_vae_encoder_layers": 1}
# Without pictures and randomness, there are a third of the operations to trace and compile.
TINY_STATES: dict[str, Any] = {**TINY_ACT, "use_vae": False, "dropout": 0.0}
TINY_2D: dict[str, Any] = {**SIZES, "n_layers": 1, "num_inference_steps": 2}
# Other types take the values that their `PolicyType` has for a CPU.
TINY: dict[str, Any] = {kind: get_policy_type(kind).small for kind in trained_types()} | {
    "act": TINY_ACT,
    "diffusion": {
        "horizon": 8,
        "n_action_steps": 4,
        "drop_n_last_frames": 3,
        "pretrained_backbone_weights": None,
        "down_dims": (16, 32),
        "n_groups": 4,
        "kernel_size": 3,
        "diffusion_step_embed_dim": 16,
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 10,
    },
    "diffusion2d": TINY_2D,
    "tokens2d": {**TINY_2D, "bins": 16, "neighbours": 2},
}
CONFIG = TrainingConfig(
    steps=24,
    batch_size=8,
    seed=3,
    optimizer=OptimizerConfig(lr=3e-3, weight_decay=1e-4),
    scheduler=SchedulerConfig("diffuser", "cosine", 4),
    log_freq=4,
    save_freq=8,
    num_workers=1,
)


@pytest.fixture(autouse=True)
def strict_dtypes() -> None:
    """Allow promotion of dtypes, because optax multiplies step counts by floats."""


@pytest.fixture(autouse=True)
def frame_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate cache of frames instead of the user's."""
    monkeypatch.setenv("ROBOJAX_FRAME_CACHE", str(tmp_path_factory.getbasetemp() / "frames"))


def write_demos(
    folder: Path, *, tasks: tuple[str, ...] = ("go there",), camera: bool = True, environment: bool = False
) -> Path:
    """Write demonstrations whose goal is the brightness of the picture, or the state of the environment.

    The second task moves in the opposite direction.
    """
    random = np.random.default_rng(0)
    cameras = ("front",) if camera else ()
    seen = {"environment_state": ("goal",)} if environment else {}
    with DatasetWriter(folder, fps=10, joint_names=("x", "y"), cameras=cameras, **seen) as writer:
        for episode in range(6):
            goal = random.uniform(0.2, 0.8)
            way = 1 - 2 * (episode % len(tasks))
            frame = np.full((16, 16, 3), int(255 * goal), np.uint8)
            for share in np.linspace(0, goal, 8, dtype=np.float32):
                action = np.array([100 * share * way, -100 * share * way], np.float32)
                step = {"observation.state": action * np.float32(0.9), "action": action}
                step |= {"observation.environment_state": np.array([goal], np.float32)} if environment else {}
                writer.add({**step, "observation.images.front": frame} if camera else step)
            writer.end_episode(tasks[episode % len(tasks)])
    return folder


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demos(tmp_path_factory.mktemp("data") / "demos")


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return demonstrations without pictures; the state of the environment is the goal."""
    return write_demos(tmp_path_factory.mktemp("data") / "states", camera=False, environment=True)


@pytest.fixture(scope="session")
def dataset(demos: Path) -> Dataset:
    return open_dataset(demos)


@pytest.fixture(scope="session")
def places(states: Path) -> Dataset:
    return open_dataset(states)


@pytest.fixture(scope="session")
def tiny(dataset: Dataset) -> MakeStart:
    """Return a function that creates a policy of a few thousand parameters for the demonstrations."""

    def make(kind: str = "act", **values: Any) -> Start:
        return new_policy(dataset, kind, values={**TINY[kind], **values})

    return make


@pytest.fixture(scope="session")
def config() -> MakeConfig:
    """Return a function that creates a config for a training of seconds."""

    def make(**changes: Any) -> TrainingConfig:
        return replace(CONFIG, **changes)

    return make
