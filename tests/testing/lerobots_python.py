"""A Python with lerobot 0.4.4, if available: this one, or the value of ROBOJAX_LEROBOT_PYTHON."""

import os
import subprocess
import sys
from importlib.util import find_spec

LEROBOT = os.environ.get("ROBOJAX_LEROBOT_PYTHON") or (sys.executable if find_spec("lerobot") else None)
WITHOUT = "no lerobot; ROBOJAX_LEROBOT_PYTHON names a Python that has it"


def lerobot(*arguments: object, timeout: float | None = None) -> str:
    """Run that Python with these arguments, without network or GPU, and return its output; it must exit with 0."""
    run = subprocess.run(
        [str(LEROBOT), *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout
