"""Verification of all files of a policy, without JAX and in a process of its own.

What is wrong with a stranger's files then ends that process and no other: a library that asks for all memory there is,
or that aborts. The other one opened them (jaxmodels/checkpoints/folder.py) and hands over their descriptors: what is
proved here is what is read there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.files import (
    NEVER_USED,
    WEIGHTS,
    Stored,
    find_floats,
    find_policy_weights,
    has_policy_weights,
    read_json,
)
from jaxmodels.checkpoints.folder import NORM_STATS, TOKENIZER_BYTES, Folder, PolicyFolder, is_state_file, list_names
from jaxmodels.errors import CheckpointError, JaxModelsError
from jaxmodels.policies import ARCHITECTURE_FILES, VLM_NAME, lerobot_processors, openpi_configs
from jaxmodels.policies.lerobot_processors import POST, PRE, read_processors
from jaxmodels.types import Feature

PIECE = 16 << 20  # bytes that are in memory at a time
# Of what is told, and of an error that lists the names of a stranger: characters.
ANSWER = 100_000
ERROR = 10_000
CONFIG = "config.json"
SIDECAR = "robojax.json"
PROCESSORS = (f"{PRE}.json", f"{POST}.json")
# SmolVLM's special tokens around an image.
IMAGE_TOKENS = ("<fake_token_around_image>", "<global-img>")
MAX_ACTION_WIDTH = 256  # values of an action whose range is reported; a session has no more joints
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def verify_files(folder: Folder) -> dict[str, int]:
    """Read every file of a policy's folder to its end; returns counts of what was read.

    Files of statistics, too, whatever they are called: those that are named like LeRobot's, and those that its
    processors name.

    Raises:
        CheckpointError: a file is malformed, cut off or not readable, or a weight is not finite.
    """
    names = list_names(folder)
    for name in (CONFIG, SIDECAR, *PROCESSORS, *(name for name in names if name.endswith(f"/{NORM_STATS}"))):
        if name in names:
            read_json(folder / name)
    if any(name in names for name in PROCESSORS):
        read_processors(folder)
    read = [
        _read(stored)
        for name in names
        if name.startswith((f"{PRE}_", f"{POST}_")) and is_state_file(name)
        for stored in find_floats(folder / name, _is_used).values()
    ]
    broken: dict[str, str] = {}
    for tensor, stored in find_policy_weights(folder, _is_used).items() if has_policy_weights(folder) else ():
        read.append(_read(stored))
        if not read[-1][1]:
            broken[tensor] = stored.path.name
    if broken:
        others = f" and {len(broken) - 20} more" if len(broken) > 20 else ""
        where = ", ".join(sorted(set(broken.values())))
        raise CheckpointError(f"{where}: a NaN or an infinity in {', '.join(list(broken)[:20])}{others}")
    return {"tensors": len(read), "bytes": sum(count for count, _ in read)}


def _is_used(tensor: str) -> bool:
    return not tensor.endswith(NEVER_USED)


def read_description(folder: Folder) -> dict[str, Any]:
    """Read a folder without its weights, as JSON: ``config``, ``sidecar`` (or None) and ``renames``.

    The config has the sizes of the model that the policy is built on, where they are in a file of their own.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    values = read_config(folder)
    is_modern = any((folder / name).exists() for name in PROCESSORS)
    renames = dict(read_processors(folder).renames) if is_modern else {}
    sidecar = read_json(folder / SIDECAR) if (folder / SIDECAR).exists() else None
    if openpi_configs.is_openpi(folder, sidecar):
        renames = openpi_configs.read_openpi_config((sidecar or {})[openpi_configs.KEY]).renames
    return {"config": values, "sidecar": sidecar, "renames": renames}


def describe_folder(folder: Folder) -> dict[str, Any]:
    """Read what `read_description` reads, and the smallest and largest values of the actions in the training data.

    ``action_range`` is None where no file but the weights has such statistics.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    small, action_range = read_description(folder), None
    if (folder / f"{POST}.json").exists():
        outputs = read_processors(folder).outputs
        smallest = outputs.stats.get("action", {}).get("min", np.zeros(0))
        if 0 < smallest.size <= MAX_ACTION_WIDTH:
            action_range = outputs.get_range(Feature("action", "ACTION", (smallest.size,)))
    return small | {"action_range": action_range}


def read_config(folder: Folder) -> dict[str, Any]:
    """Read ``config.json`` with what other files add to it, as the policy's type reads it.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    sidecar = read_json(folder / SIDECAR) if (folder / SIDECAR).exists() else None
    if openpi_configs.is_openpi(folder, sidecar):
        if openpi_configs.KEY not in (sidecar or {}):
            raise CheckpointError(openpi_configs.describe_missing_config(folder.name))
        values = openpi_configs.read_openpi_config((sidecar or {})[openpi_configs.KEY]).build_values()
    else:
        values = lerobot_processors.upgrade_config(read_json(folder / CONFIG))
    field, pattern = ARCHITECTURE_FILES.get(str(values.get("type")), ("", ""))
    name = pattern.replace(VLM_NAME, str(values.get("vlm_model_name", "")))
    if name and (folder / name).exists():
        values[field] = read_json(folder / name)
    if values.get("add_image_special_tokens") is True and field == "vlm":
        tokenizer = name.replace("config.json", "tokenizer.json")
        if (folder / tokenizer).exists():
            values["vlm_tokens"] = _read_image_tokens(read_json(folder / tokenizer, TOKENIZER_BYTES))
    return values


def _read_image_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Numbers of the special tokens around images, by name, out of a ``tokenizer.json``."""
    added = tokenizer.get("added_tokens")
    entries = [entry for entry in (added if isinstance(added, list) else []) if isinstance(entry, dict)]
    tokens: dict[Any, Any] = {str(entry.get("content")): entry.get("id") for entry in entries}
    return {name: tokens[name] for name in IMAGE_TOKENS if isinstance(tokens.get(name), int)}


def check_weights(folder: Folder, *, has_orbax: bool) -> None:
    """Refuse a folder that has no file of weights.

    Raises:
        CheckpointError: there is none.
    """
    if not has_policy_weights(folder) and not has_orbax:
        raise CheckpointError(describe_missing_weights(folder))


def describe_missing_weights(folder: Folder) -> str:
    """Error text for a folder without weights."""
    pickles = [name for name in list_names(folder) if name.endswith(PICKLES)]
    if pickles:
        return (
            f"{folder.name}: only {', '.join(pickles[:20])} and no {WEIGHTS}; pickle files can run code and are never "
            "opened. Load the policy where you trust it and save it as safetensors (LeRobot's save_pretrained does)"
        )
    return f"{folder.name}: no {WEIGHTS}; wanted a folder as LeRobot's save_pretrained writes it"


def _read(stored: Stored) -> tuple[int, bool]:
    """Read a tensor's bytes; returns their count, and whether all numbers are finite."""
    left = total = int(np.prod(stored.shape, dtype=np.int64))
    numbers = max(PIECE // stored.dtype.itemsize, 1)
    is_finite = True
    while left:
        start = stored.start + (total - left) * stored.dtype.itemsize
        piece = Stored(stored.path, stored.dtype, (min(left, numbers),), start).read()
        left -= piece.size
        is_finite = is_finite and bool(np.isfinite(piece).all())
    return total * stored.dtype.itemsize, is_finite


def main(request: str) -> None:
    """Verify or describe a folder for a parent process: prints JSON, or ``error``, or ``out_of_memory``.

    Args:
        request: JSON with what to ``do`` (``prove``, ``describe``), the folder's ``name``, and descriptors of its
            ``files`` by name, and why others are ``refused``.
    """
    answer: dict[str, Any]
    task = json.loads(request)
    try:
        folder = PolicyFolder.of_descriptors(Path(task["name"]), task["files"], task["refused"])
        answer = dict(verify_files(folder)) if task["do"] == "prove" else describe_folder(folder)
    except JaxModelsError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"its files cannot be read ({error.strerror})"}
    except MemoryError:
        answer = {"out_of_memory": True}
    text = json.dumps(answer)
    if len(text) > ANSWER:
        error = str(answer.get("error", f"what it says of itself has {len(text)} bytes; wanted at most {ANSWER}"))
        text = json.dumps({"error": error if len(error) <= ERROR else f"{error[:ERROR]} ..."})
    sys.stdout.write(text)
