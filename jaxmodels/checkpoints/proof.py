"""Every byte of a policy's files looked at without JAX, so that a process of its own can do it before any other does.

What is wrong with a stranger's files then ends that process and no other: a library that asks for all memory there is,
or that aborts.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.json_file import read_json
from jaxmodels.checkpoints.safetensors_file import Stored, find_floats
from jaxmodels.errors import CheckpointError, JaxModelsError

NEVER_USED = ".num_batches_tracked"  # torchvision's frozen batch norm drops it while loading, too
PIECE = 16 << 20  # bytes that are in memory at a time
WEIGHTS = "model.safetensors"
_JSON = re.compile(r"config\.json|robojax\.json|policy_(pre|post)processor\.json")
_TENSORS = re.compile(r"model\.safetensors|policy_(pre|post)processor_step_[\w.-]+\.safetensors")


def prove(folder: Path) -> dict[str, int]:
    """Read what a policy's folder holds, each file to its end; how much that was.

    Raises:
        CheckpointError: a file is malformed, cut off or not readable, or a weight is not finite.
    """
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if _JSON.fullmatch(name):
            read_json(folder / name)
    tensors = size = 0
    broken: list[str] = []
    for name in names:
        if not _TENSORS.fullmatch(name):
            continue
        for tensor, stored in find_floats(folder / name, lambda name: not name.endswith(NEVER_USED)).items():
            count, is_finite = _read(stored)
            tensors, size = tensors + 1, size + count
            if name == WEIGHTS and not is_finite:
                broken.append(tensor)
    if broken:
        others = f" and {len(broken) - 20} more" if len(broken) > 20 else ""
        raise CheckpointError(f"{WEIGHTS}: a NaN or an infinity in {', '.join(broken[:20])}{others}")
    return {"tensors": tensors, "bytes": size}


def _read(stored: Stored) -> tuple[int, bool]:
    """How many bytes a tensor has, and whether all its numbers are finite."""
    left = total = int(np.prod(stored.shape, dtype=np.int64))
    each = max(PIECE // stored.dtype.itemsize, 1)
    is_finite = True
    while left:
        start = stored.start + (total - left) * stored.dtype.itemsize
        piece = Stored(stored.path, stored.dtype, (min(left, each),), start).read()
        left -= piece.size
        is_finite = is_finite and bool(np.isfinite(piece).all())
    return total * stored.dtype.itemsize, is_finite


def main(folder: str) -> None:
    """Print what was found as JSON: ``tensors`` and ``bytes``, or ``error``, or ``out_of_memory``."""
    found: dict[str, Any]
    try:
        found = dict(prove(Path(folder)))
    except JaxModelsError as error:
        found = {"error": str(error)}
    except OSError as error:
        found = {"error": f"its files cannot be read ({error.strerror})"}
    except MemoryError:
        found = {"out_of_memory": True}
    sys.stdout.write(json.dumps(found))
