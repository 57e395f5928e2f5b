"""A Python that has lerobot 0.4.4, when there is one: this one, or what ROBOJAX_LEROBOT_PYTHON names."""

import os
import subprocess
import sys
from importlib.util import find_spec

LEROBOT = os.environ.get("ROBOJAX_LEROBOT_PYTHON") or (sys.executable if find_spec("lerobot") else None)
WITHOUT = "no lerobot; ROBOJAX_LEROBOT_PYTHON names a Python that has it"


def lerobot(*arguments: object, timeout: float | None = None) -> str:
    """What that Python prints, run with these arguments without a network or a GPU; it has to end well."""
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
