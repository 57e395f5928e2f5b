"""Files of version 0.1 in `tests/golden/files_of_0_1` can be read by this version."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmodels
from jaxmodels.data import open_dataset
from tests.testing.compiling import compiling_quickly, process_environment
from tests.testing.doubles import SO100_REQUIREMENTS
from tests.testing.rig import started

FILES = Path(__file__).parent / "golden" / "files_of_0_1"
DIRECT = {"policy_path": "user/act", "transport_server_url": "direct"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a copy of the files, because opening a database writes to it."""
    return shutil.copytree(FILES, tmp_path / "files", symlinks=True)


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "robojax.cli", *arguments]
    quick = process_environment(quick=True)
    process = subprocess.run(command, env=quick, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


async def test_the_state_of_a_killed_server_is_read(files: Path) -> None:
    (files / "keys.json").chmod(0o600)
    parts = {"read_requirements": lambda path, revision: SO100_REQUIREMENTS}
    headers = {"x-api-key": (files / "key.txt").read_text().strip()}
    settings: dict[str, Any] = {"state": str(files / "state"), "keys_file": str(files / "keys.json")}
    async with started(parts=parts, headers=headers, policy_owners=["user"], **settings) as server:
        found = {session["session_id"]: session for session in (await server.call("GET", "/sessions"))[1]}
        assert {name: session["status"] for name, session in found.items()} == dict.fromkeys(found, "interrupted")
        assert set(found) == {"arm", "latched", "direct"}
        assert found["latched"]["stats"]["emergency_stop"] == "of latched"
        assert found["arm"]["camera_names"] == ["front"]
        assert found["arm"]["rooms"]["joint_output_room_id"] == "arm-joint-output"
        assert (await server.create("deleted", **DIRECT))[0] == 200
        assert (await server.call("GET", "/sessions/deleted"))[1]["stats"]["emergency_stop"] == "of deleted"
        assert (await server.call("GET", "/deployments"))[0] == 200
    events = json.loads(
        run("webhooks", "events", "list", "--database", str(files / "state" / "events.sqlite3"), "--json")
    )
    assert [(event["repo"], event["status"]) for event in events] == [("lab/act", "done")]


def test_a_recording_and_a_dataset_are_read(files: Path) -> None:
    (recording,) = (files / "recordings").glob("*.mcap")
    assert "demo-arm" in run("recordings", "info", str(recording))
    dataset = open_dataset(files / "dataset")
    assert len(dataset.episodes) == 1
    assert dataset.fps == 25


def test_a_resumed_training_run_reaches_the_same_policy(files: Path) -> None:
    """The run continues from its checkpoint after two of four steps, with the original command."""
    (files / "run" / "policy").rename(files / "before")
    tiny = {
        "chunk_size": 4, "n_action_steps": 2, "vision_backbone": "small_cnn", "dim_model": 8, "n_heads": 2,
        "dim_feedforward": 8, "n_encoder_layers": 1, "latent_dim": 4, "n_vae_encoder_layers": 1,
    }  # fmt: skip
    run(
        "train", "--policy.type=act", f"--dataset.root={files / 'dataset'}", f"--output_dir={files / 'run'}",
        "--steps=4", "--save_freq=2", "--batch_size=2", "--image_size=32", "--log_freq=2", "--resume=true",
        *(f"--policy.{name}={value}" for name, value in tiny.items()),
    )  # fmt: skip
    expected = np.load(files / "run" / "chunk.npy")
    state, picture = np.zeros((1, 6), np.float32), np.zeros((1, 32, 32, 3), np.uint8)
    for folder in (files / "before", files / "run" / "policy"):
        with compiling_quickly():
            chunk = jaxmodels.load_policy(folder).act({"observation.state": state, "observation.images.front": picture})
        np.testing.assert_allclose(chunk, expected, atol=1e-4 * np.abs(expected).max())
