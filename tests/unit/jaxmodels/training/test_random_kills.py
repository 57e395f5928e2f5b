"""A run that is killed many times, at moments that are drawn, ends with the weights of one that never was.

Twenty take some minutes, so they run when they are asked for: ``ROBOJAX_KILLS=20 pytest
tests/unit/jaxmodels/training/test_random_kills.py``. What `make test` kills, at chosen moments, is in
``test_training.py``.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.testing.compiling import process_environment

KILLS = int(os.environ.get("ROBOJAX_KILLS", "0"))
STEPS = 40 * KILLS  # more than that many kills let it do
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not KILLS, reason="takes minutes; ROBOJAX_KILLS says how many"),
]
# Most of the time goes into checkpoints, so most of the kills come in the middle of one.
SCRIPT = """
import os, signal, sys, threading, time
from dataclasses import replace
from pathlib import Path
from jaxmodels.data import open_dataset
from jaxmodels.training import new_policy, train
from tests.unit.jaxmodels.training.conftest import CONFIG, TINY

demos, output, steps, after, delay = sys.argv[1:]
begun = []

def die():
    time.sleep(float(delay))
    os.kill(os.getpid(), signal.SIGKILL)

def watch(progress):
    begun.append(progress.step)
    if len(begun) == int(after):
        threading.Thread(target=die).start()

dataset = open_dataset(Path(demos))
config = replace(CONFIG, steps=int(steps), log_freq=1, save_freq=2)
train(dataset, new_policy(dataset, "act", values=TINY["act"]), config, Path(output), resume=True, on_progress=watch)
"""


def run(demos: Path, output: Path, after: int, delay: float) -> int:
    """One life of the run, which is killed so many steps and seconds after its first; never where `after` is 0."""
    arguments = (str(demos), str(output), str(STEPS), str(after), str(delay))
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=process_environment(quick=True),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr[-2000:]
    return ended.returncode


def is_within_a_checkpoint(output: Path) -> bool:
    steps = [path for path in (output / "checkpoints").glob("[0-9]*") if path.is_dir()]
    return any(not (path / "training_state").is_dir() for path in steps)


def losses(output: Path) -> list[Any]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_kills_at_any_moment_change_no_bit(demos: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    killed, never = tmp_path / "killed", tmp_path / "never"
    within = 0
    for number in range(KILLS):
        ended = run(demos, killed, int(draw.integers(1, 9)), float(draw.uniform(0, 0.2)))
        assert ended == -signal.SIGKILL, f"it was done before kill {number + 1}"
        within += is_within_a_checkpoint(killed)
    assert within, "no kill came in the middle of a checkpoint"
    assert run(demos, killed, 0, 0) == run(demos, never, 0, 0) == 0
    for file in ("policy/model.safetensors", "checkpoints/last/pretrained_model/model.safetensors"):
        assert (killed / file).read_bytes() == (never / file).read_bytes(), file
    assert losses(killed) == losses(never)
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == sorted(
        path.name for path in (never / "checkpoints").iterdir()
    )
