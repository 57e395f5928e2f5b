"""Kernels and copies of weights of compiled policies on an H200, which is not there.

The figures hold for one version of JAX. A change that removes a kernel writes the smaller figure here; a larger
figure is a slower program.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.testing.peers import GPU_PYTHON, require_peers

pytestmark = pytest.mark.needs_peers
require_peers("jax-cuda13-plugin")
JAX = "0.10.2"
ROOT = Path(__file__).parents[3]
GEMMA = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256}
VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "patch_size": 14}


def count(folder: Path, *arguments: str) -> dict:
    """Run the tool in its own process, because XLA reads its flags and finds its plugins once."""
    output = folder / "figures.json"
    command = [str(GPU_PYTHON), "-m", "tools.gpu_programs", *arguments, "--json", str(output)]
    run = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(output.read_text())
    if found["jax"] != JAX:
        pytest.skip(f"jax is {found['jax']}; the figures hold for {JAX}")
    (policy,) = found["policies"].values()
    return policy["1"]


def count_pi05(folder: Path, layers: int) -> dict:
    """Count the programs of pi0.5 with its own widths and a few layers."""
    sizes = {
        "gemma_2b": GEMMA | {"width": 2048, "mlp_dim": 16_384, "depth": layers},
        "gemma_300m": GEMMA | {"width": 1024, "mlp_dim": 4096, "depth": layers},
        "vision": VISION | {"num_hidden_layers": layers},
        "vocab_size": 1024,
    }
    return count(folder, "--policy", "pi05", "--architecture", json.dumps(sizes))


def test_kernels_of_a_layer_of_pi05(tmp_path):
    two, three = count_pi05(tmp_path, 2), count_pi05(tmp_path, 3)
    plain, guided = ("denoise", "body"), ("denoise plan", "body")
    kernels = {
        place: [parts[place[0]]["regions"][place[1]]["kernels"] for parts in (two, three)]
        for place in (("vision", ""), ("prefix", ""), plain, guided)
    }
    assert kernels == {("vision", ""): [35, 50], ("prefix", ""): [23, 38], plain: [36, 50], guided: [109, 156]}
    outside = {name: part["regions"].get("body", part["regions"][""])["outside"] for name, part in three.items()}
    assert outside.keys() >= {"frames", "vision", "prefix", "denoise", "denoise plan"}
    assert not any(outside.values()), "a launch is in no command buffer"
    assert not any(part["weight_copies"] for part in three.values())


def test_kernels_of_act(tmp_path):
    chunk = count(tmp_path, "--policy", "act")["chunk"]
    found = chunk["regions"][""]
    # Convolutions are never in a command buffer. `prepare_resnets` folds norms into the 20 kernels, in cuDNN's layout.
    assert (found["kernels"], found["outside"], found["weight_only"], found["weight_copies"]) == (111, 22, 9, 1)
