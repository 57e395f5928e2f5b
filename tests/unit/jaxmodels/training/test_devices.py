"""Training over several devices or processes gives the weights of one device."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmodels.devices import find_layout
from jaxmodels.errors import ConfigError
from jaxmodels.policies import lerobot_folder
from jaxmodels.training import TrainingConfig
from tests.testing.compiling import process_environment
from tests.unit.jaxmodels.training.conftest import TINY_STATES

# Wide enough to spread weights over devices.
POLICY = {**TINY_STATES, "dim_model": 64, "dim_feedforward": 64, "pretrained_backbone_weights": None}
TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
import jax
from jaxmodels.data import open_dataset
from jaxmodels.training import OptimizerConfig, SchedulerConfig, TrainingConfig, join, new_policy, train

if {address!r}:
    join({address!r}, 2, int(sys.argv[1]))
dataset = open_dataset(Path({data!r}))
start = new_policy(dataset, "act", values={policy!r})
config = TrainingConfig(steps=4, batch_size=16, optimizer=OptimizerConfig(lr=1e-2, eps=1e-3),
                        scheduler=SchedulerConfig(), log_freq=2, save_freq=4, num_workers=1, ema_decay=0.9)
for name, changes in {meshes!r}.items():
    train(dataset, start, replace(config, **changes), Path({output!r}) / name)
"""
MESHES = {
    "one": {"data": 1},
    "fsdp": {"fsdp": None},
    "both": {"data": 2, "fsdp": 2, "gradient_accumulation_steps": 2},
}


def script(states: Path, output: Path, meshes: dict[str, Any], address: str = "") -> str:
    return TRAIN.format(data=str(states), output=str(output), policy=POLICY, meshes=meshes, address=address)


@pytest.fixture(scope="module")
def trained(states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of trainings on one CPU device and on meshes of four."""
    output = tmp_path_factory.mktemp("runs")
    code = script(states, output, MESHES)
    options = {"env": process_environment(devices=4, quick=True), "capture_output": True, "text": True}
    result = subprocess.run([sys.executable, "-c", code], timeout=500, check=False, **options)
    assert result.returncode == 0, result.stderr[-4000:]
    return output


def same_weights(one: Path, other: Path) -> None:
    ours, theirs = (lerobot_folder.read_checkpoint(folder / "policy").weights for folder in (one, other))
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        np.testing.assert_allclose(theirs[name], array, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("name", ["fsdp", "both"])
def test_four_devices_train_the_same_policy_as_one(name: str, trained: Path) -> None:
    same_weights(trained / "one", trained / name)


def test_two_processes_train_the_same_policy_as_one(states: Path, trained: Path, tmp_path: Path) -> None:
    """Each process has one device, so that batches are split between the processes and parameters are not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = script(states, tmp_path, {"processes": {}}, address)
    environment = process_environment(quick=True)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], env=environment, stderr=subprocess.PIPE)
        for number in range(2)
    ]
    errors = [process.communicate(timeout=500)[1].decode()[-4000:] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    same_weights(trained / "one", tmp_path / "processes")


def test_batch_that_is_not_divisible_by_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh of 2 x 1 devices; found 1"):
        find_layout(None, 2, 1, 8, 1)
    with pytest.raises(ConfigError, match=r"batch_size is 8; wanted a multiple of 3: 1 devices .* and 3 parts"):
        find_layout("cpu", None, 1, 8, 3)
    with pytest.raises(ConfigError, match="wanted a multiple of gradient_accumulation_steps, 3"):
        TrainingConfig(batch_size=8, gradient_accumulation_steps=3)
