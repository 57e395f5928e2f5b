"""A policy that reads language gets an instruction before each episode of one session, through the real API."""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxmodels
from jaxmodels.normalization import build_normalization
from jaxmodels.policies.diffusion2d.policy import Diffusion2d, Diffusion2dConfig
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar
from jaxmodels.text import TextConfig
from jaxmodels.types import Feature
from jaxmodels.weights import blueprint_of
from robojax.sim.arm import CAMERA, HORIZON, JOINTS, RATE
from robojax.sim.demo import DemoRequest
from tests.testing.compiling import process_environment
from tests.unit.robojax.sim.conftest import run_robojax

CONFIG = Diffusion2dConfig(
    input_features=(
        Feature("observation.state", "STATE", (6,)),
        Feature(f"observation.images.{CAMERA}", "VISUAL", (3, 32, 32)),
    ),
    output_features=(Feature("action", "ACTION", (6,)),),
    normalization_mapping=(("VISUAL", "IDENTITY"), ("STATE", "IDENTITY"), ("ACTION", "IDENTITY")),
    chunk_size=8,
    n_action_steps=4,
    dim_model=16,
    n_heads=2,
    n_encoder_layers=0,
    n_layers=1,
    num_inference_steps=1,
    text_encoder=TextConfig(length=24, width=16, n_layers=1, n_heads=2, hidden=32),
)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrained policy that reads instructions."""
    random = np.random.default_rng(0)
    shapes = blueprint_of(Diffusion2d, CONFIG).shapes
    weights = {name: (random.normal(size=wanted.shape) * 0.1).astype(np.float32) for name, wanted in shapes.items()}
    normalization = build_normalization(CONFIG.input_features, CONFIG.output_features, CONFIG.normalization_mapping, {})
    folder = tmp_path_factory.mktemp("untrained")
    jaxmodels.Policy(Checkpoint(CONFIG, weights, normalization, Sidecar(RATE, JOINTS))).save(folder)
    return folder


@pytest.mark.usefixtures("can_draw")
def test_instruction_changes_between_episodes_of_one_session(untrained: Path, tmp_path: Path):
    ended = run_robojax(
        *("eval", "--whole-stack", "--task", "two-cubes", "--episodes", "2", "--seed", "4"),
        *("--policy.path", str(untrained), "--output", str(tmp_path)),
        env=process_environment(quick=True),
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["run"]["reads_language"] is True
    assert found["run"]["policy_type"] == "diffusion2d"
    instructions = [episode["instruction"] for episode in found["episodes"]]
    assert instructions == ["pick up the red cube", "pick up the blue cube"]
    session = found["run"]["session"]
    # The session was created for the red cube and sent the commands of more than one episode.
    assert session["language_instruction"] == "pick up the blue cube"
    assert session["commands_sent"] > HORIZON
    assert len([*(tmp_path / "films").iterdir()]) == 2


def test_curl_lines_name_the_instruction_of_a_language_policy():
    lines = DemoRequest("http://127.0.0.1:8001", "runs/two", None, "tokens2d", "pick up the blue cube").curl()
    assert '"policy_type": "tokens2d", "language_instruction": "pick up the blue cube"' in lines[0]
    assert lines[1].startswith("curl -X PATCH http://127.0.0.1:8001/sessions/demo-arm ")
    assert lines[1].endswith("""-d '{"language_instruction": "pick up the blue cube"}'""")
    lines = DemoRequest("http://127.0.0.1:8001", "runs/pick", None, "act").curl()
    assert not any("PATCH" in line or "language_instruction" in line or "policy_type" in line for line in lines)
