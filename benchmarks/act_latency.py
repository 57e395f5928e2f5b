"""How long does ACT of LeRobot's default size take from NumPy frames to NumPy actions, compared with torch?

    python -m benchmarks.act_latency --lerobot-python VENV/bin/python

The peer is a Python with lerobot 0.4.4 (see act_latency_peer.py). Without it, only this package is measured. Each side
is a process of its own; they take turns and never run at the same time. Batch 1, float32, all processor cores. A
measurement starts with uint8 frames and float32 states in NumPy arrays and ends when the un-normalised chunk is a NumPy
array.

Last figure, AMD EPYC (Zen 4), 2 cores: 65 ms with two 224x224 cameras; LeRobot eager 87 ms, torch.compile 100 ms.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import latency
from benchmarks.measured import RESULTS

if TYPE_CHECKING:
    from jaxmodels.policies.lerobot_folder import Checkpoint

CASES = {
    "1 camera 480x640": (1, 480, 640),
    "2 cameras 480x640": (2, 480, 640),
    "2 cameras 224x224": (2, 224, 224),
}
STATE = ACTION = 14


def observation(cameras: int, height: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    frames = {
        f"observation.images.camera{i}": rng.integers(0, 256, (1, height, width, 3), np.uint8) for i in range(cameras)
    }
    return {"observation.state": rng.standard_normal((1, STATE)).astype(np.float32), **frames}


def write_policy(folder: Path, cameras: int, height: int, width: int) -> None:
    """A policy of LeRobot's default size with random weights, as LeRobot's files."""
    from jaxmodels.policies import lerobot_folder

    lerobot_folder.write_checkpoint(folder, build_checkpoint(cameras, height, width))


def build_checkpoint(
    cameras: int,
    height: int,
    width: int,
    draw: Callable[[str, tuple[int, ...]], np.ndarray] | None = None,
    **sizes: Any,
) -> "Checkpoint":
    """The same in memory.

    Args:
        draw: an array of weights by its name and shape, instead of what a training starts with.
        sizes: fields of the config that differ from LeRobot's defaults.
    """
    from flax import nnx

    from jaxmodels.normalization import build_normalization
    from jaxmodels.policies.act.config import ActConfig
    from jaxmodels.policies.act.model import Act
    from jaxmodels.policies.lerobot_folder import Checkpoint, model_blueprint
    from jaxmodels.types import Feature
    from jaxmodels.weights import flatten

    images = tuple(Feature(f"observation.images.camera{i}", "VISUAL", (3, height, width)) for i in range(cameras))
    inputs = (Feature("observation.state", "STATE", (STATE,)), *images)
    outputs = (Feature("action", "ACTION", (ACTION,)),)
    config = ActConfig(
        input_features=inputs, output_features=outputs, device="cpu", pretrained_backbone_weights=None, **sizes
    )
    stats = {
        feature.name: {
            "mean": np.full((3, 1, 1) if feature.type == "VISUAL" else feature.shape, 0.4, np.float32),
            "std": np.full((3, 1, 1) if feature.type == "VISUAL" else feature.shape, 0.25, np.float32),
        }
        for feature in (*inputs, *outputs)
    }
    if draw is None:
        weights = {name: np.asarray(array) for name, array in flatten(Act(config, rngs=nnx.Rngs(0))).items()}
    else:
        weights = {name: draw(name, shape.shape) for name, shape in model_blueprint(config).shapes.items()}
    return Checkpoint(config, weights, build_normalization(inputs, outputs, config.normalization_mapping, stats))


def load(folder: str, case: str) -> Callable[[], np.ndarray]:
    """Load the policy in this process."""
    import jaxmodels

    policy, seen = jaxmodels.load_policy(folder), observation(*CASES[case])
    return lambda: policy.act(seen)


def main() -> None:
    latency.run(
        "act_latency",
        __doc__,
        CASES,
        load,
        lambda folder, case: write_policy(folder, *CASES[case]),
        lerobot="0.4.4",
        output=RESULTS / "act_latency.json",
    )


if __name__ == "__main__":
    main()
