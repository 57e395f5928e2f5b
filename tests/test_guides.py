"""Marked blocks of README and the guides run in order, as pasted by a reader with a fresh clone.

A block runs when the line before its fence is ``<!-- run -->``; with ``<!-- run: save app.py -->`` the block is written
to that file. All commands of a page run in one shell, and all its Python in one interpreter, so that a server started
in one block answers the next. Blocks of docs/start that repeat README.md, or a command that the tests of the demo run,
have no mark. The reader's Hub is a local stub that has the repositories which the guides name.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmodels.transformer2d.diffusers_config import read_block_config
from jaxmodels.transformer2d.diffusers_folder import tensor_names
from tests.testing.compiling import PROGRAMS, QUICK
from tests.testing.models import golden_folder as golden_folder
from tests.testing.stub_hub import StubHub

ROOT = Path(__file__).parent.parent
POLICY = ROOT / "robojax" / "sim" / "policy"
MARKED = re.compile(r"^<!-- run(?:: save (\S+))? -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if MARKED.search(page.read_text())]
# Repositories of a reader who has trained these policies: name to golden folder.
CHECKPOINTS = {
    "user/smolvla_so101": "lerobot_smolvla/smolvla_two_cameras",
    "user/pi05_so101": "lerobot_pi05/pi05_two_cameras",
    "user/diffusion_so101": "lerobot_diffusion/diffusion_two_cameras_ddpm",
}
TOKENIZERS = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": "lerobot_smolvla/smolvla_two_cameras/vlm/tokenizer.json",
    "google/paligemma-3b-pt-224": "lerobot_pi05/pi05_two_cameras/google/paligemma-3b-pt-224/tokenizer.json",
}
# Program that runs the files named on its standard input in one namespace.
INTERPRETER = """
import sys
answers, sys.stdout, names = sys.stdout, sys.stderr, {"__name__": "__main__"}
for line in sys.stdin:
    file = line.strip()
    exec(compile(open(file).read(), file, "exec"), names)
    print("done", file=answers, flush=True)
"""
UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [16],
    "down_block_types": ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"],
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
# Shorter commands with the same effect: few timed inferences, a short motion, two demonstrations.
SHORTER = {r"^(robojax check\b[^#\n]*)": r"\1 --runs 5 ", r"^sleep 5$": "sleep 1", r"--episodes 3\b": "--episodes 2"}
SERVES = re.compile(r"robojax serve|/sessions|\.session\(")
WAIT = 300  # Seconds that a page may take on a busy machine.


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def hub(golden_folder: Callable[[str], Path]) -> Iterator[StubHub]:
    with StubHub() as hub:
        hub.push("user/act_so101", files_in(POLICY), tag="v1.2")
        for name, golden in CHECKPOINTS.items():
            hub.push(name, files_in(golden_folder(golden.split("/")[1])))
        for name, file in TOKENIZERS.items():
            hub.push(name, {"tokenizer.json": (ROOT / "tests" / "golden" / file).read_bytes()})
        yield hub


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with the files of a clone that the guides read. The guides may write to it."""
    folder = tmp_path / "clone"
    shutil.copytree(POLICY, folder / "robojax" / "sim" / "policy")
    (folder / ".venv").symlink_to(sys.prefix)
    write_unet(folder / "stable-diffusion" / "unet")
    return folder


def write_unet(folder: Path) -> None:
    """Write the UNet of the guide to Transformer2DModel: a very small transformer and one other tensor."""
    prefix, random = "mid_block.attentions.0", np.random.default_rng(0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(UNET))
    tensors = {
        f"{prefix}.{name.theirs}": random.standard_normal(name.shape, np.float32)
        for name in tensor_names(read_block_config(UNET, prefix))
    }
    tensors["conv_in.bias"] = np.zeros(16, np.float32)
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")


def script_of(page: Path) -> str:
    """Return the marked blocks of a page as one shell script."""
    parts = [
        'set -euo pipefail; curl() { command curl --fail-with-body "$@"; }',
        "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT",
        f"coproc PYTHON {{ python -c '{INTERPRETER}'; }}",
    ]
    for number, (file, language, text) in enumerate(MARKED.findall(page.read_text()), 1):
        parts.append(f"echo '-- block {number}'")
        if file:
            parts.append(f"cat > {file} <<'END_OF_BLOCK'\n{text}END_OF_BLOCK")
        elif language == "python":
            parts.append(f"cat > block{number}.py <<'END_OF_BLOCK'\n{text}END_OF_BLOCK")
            # A reader may paste the first example more than once.
            for _ in range(2 if page.name == "README.md" else 1):
                parts.append(f"echo block{number}.py >&${{PYTHON[1]}}; read -r answer <&${{PYTHON[0]}}")
        else:
            assert language == "bash", f"block {number} of {page.name} cannot run: its language is {language!r}"
            parts.append(text)
    return "\n".join(parts)


def with_marks(page: Path) -> Any:
    """Return the parameter of a page; a server refuses robots when the machine is too slow for them."""
    return pytest.param(page, marks=[pytest.mark.timed] * bool(SERVES.search(script_of(page))))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands of the guides need curl")
@pytest.mark.parametrize("page", [*map(with_marks, PAGES)], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_marked_blocks_run_in_order(page: Path, hub: StubHub, clone: Path, unused_tcp_port_factory) -> None:
    port, webhooks, registry = (unused_tcp_port_factory() for _ in range(3))
    script = script_of(page)
    script = re.sub(r"\b(localhost|127\.0\.0\.1):8001\b", f"127.0.0.1:{port}", script)
    script = script.replace("7860", str(webhooks)).replace("7870", str(registry))
    for command, shorter in SHORTER.items():
        script = re.sub(command, shorter, script, flags=re.MULTILINE)
    # Exit code 1 means that this machine is too slow or lacks a package. Any other code of these commands is an error.
    script = re.sub(r"^(robojax (?:check|doctor)\b[^#\n]*)", r"\1 || [ $? = 1 ] ", script, flags=re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROBOJAX_", "HF_"))}
    environment |= QUICK | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]]),
        "HOME": str(clone.parent),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_of_the_reader",
        "JAX_PLATFORMS": "cpu",
        "MUJOCO_GL": "egl",
        "ROBOJAX_PORT": str(port),
        "ROBOJAX_COMPILE_CACHE": os.environ[PROGRAMS],
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=WAIT, check=False
    )
    printed = f"{page.name}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    assert run.returncode == 0, printed
    assert "Traceback" not in run.stdout + run.stderr, printed  # A crashed command exits with 1, too.


def test_pages_for_beginners_have_runnable_blocks() -> None:
    named = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "docs/start/first_session.md", "docs/robots/direct.md"} <= named
