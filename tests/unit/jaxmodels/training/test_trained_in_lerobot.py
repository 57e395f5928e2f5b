"""An ACT that was trained here loads in LeRobot 0.4.4 and returns the same chunk."""

from pathlib import Path

import numpy as np
import pytest

import jaxmodels
from jaxmodels.data import Dataset
from jaxmodels.training import new_policy, train
from tests.testing.lerobots_python import LEROBOT, WITHOUT, lerobot
from tests.unit.jaxmodels.training.conftest import TINY, MakeConfig

pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(LEROBOT is None, reason=WITHOUT)]
TOLERANCE = 1e-4  # Share of the chunk's largest magnitude; another order of summation gives about 1e-6.
STATE, FRONT = "observation.state", "observation.images.front"

# A chunk for each observation, through the processors in the policy's folder.
ACT = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
folder, seen, chunks = sys.argv[1:]
policy = ACTPolicy.from_pretrained(folder).eval()
before, after = make_pre_post_processors(policy.config, pretrained_path=folder)
with np.load(seen) as arrays:
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
for name in policy.config.image_features:
    batch[name] = batch[name].permute(0, 3, 1, 2).contiguous().float() / 255
with torch.no_grad():
    np.save(chunks, after(policy.predict_action_chunk(before(batch))).numpy())
"""


def test_lerobot_loads_a_policy_that_was_trained_here(dataset: Dataset, tmp_path: Path, config: MakeConfig) -> None:
    values = {**TINY["act"], "vision_backbone": "resnet18", "pretrained_backbone_weights": None}
    start = new_policy(dataset, "act", image_size=(32, 32), values=values)
    folder = train(dataset, start, config(steps=2, log_freq=2), tmp_path / "run")
    draw = np.random.default_rng(0)
    seen = {
        STATE: draw.uniform(-50, 50, (3, 2)).astype(np.float32),
        FRONT: draw.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8),
    }
    np.savez(tmp_path / "seen.npz", **seen)
    lerobot("-W", "ignore", "-c", ACT, folder, tmp_path / "seen.npz", tmp_path / "chunks.npy", timeout=1500)
    theirs, ours = np.load(tmp_path / "chunks.npy"), jaxmodels.load_policy(folder).act(seen)
    assert ours.shape == theirs.shape == (3, 4, 2)
    assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()
