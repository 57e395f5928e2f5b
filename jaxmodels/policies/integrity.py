"""Verification of all files of a policy, without JAX and in a separate process.

A malicious file may abort a library or exhaust memory, which ends only that process. The parent process opens the files
(jaxmodels/checkpoints/folder.py) and passes the descriptors, so that both processes read the same files.
"""

import json
import math
import os
import resource
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.files import (
    LFS_POINTER,
    NEVER_USED,
    PICKLES,
    SERVED,
    SHARD,
    WEIGHTS,
    Stored,
    check_lfs_pointer,
    find_floats,
    find_policy_weights,
    find_shards,
    has_policy_weights,
    read_json,
)
from jaxmodels.checkpoints.folder import (
    BUNDLE,
    NORM_STATS,
    PLAIN,
    TOKENIZER_BYTES,
    Folder,
    PolicyFolder,
    list_names,
    open_source,
)
from jaxmodels.checkpoints.orbax_files import verify_tree
from jaxmodels.checkpoints.tokenizer_files import verify_tokenizers
from jaxmodels.errors import CheckpointError, JaxModelsError
from jaxmodels.normalization import Normalization, check_normalization
from jaxmodels.policies import (
    PolicyFacts,
    get_policy_facts,
    lerobot_processors,
    openpi_configs,
    policy_types,
)
from jaxmodels.policies.lerobot_processors import POST, PRE, read_processors
from jaxmodels.ranges import shorten_value
from jaxmodels.types import Feature

PIECE = 16 << 20  # Bytes that are read at once.
# Maximum characters of an answer and of an error, which may list many names.
ANSWER = 100_000
ERROR = 10_000
CONFIG = "config.json"
ADAPTER = "adapter_config.json"  # PEFT writes it next to the weights of an adapter.
SIDECAR = "robojax.json"
PROCESSORS = (f"{PRE}.json", f"{POST}.json")
# SmolVLM's special tokens around an image.
IMAGE_TOKENS = ("<fake_token_around_image>", "<global-img>")
MAX_ACTION_WIDTH = 256  # Largest action whose range is reported; a session has at most this number of joints.


def verify_files(
    folder: Folder, begin_step: Callable[[str, float], None] = lambda what, seconds: None
) -> dict[str, int]:
    """Read every file of a policy's folder to its end, and use its tokenizers.

    Args:
        begin_step: called before a step that may take long, with its description and the CPU seconds that it may take.

    Returns:
        Counts of ``tensors`` and ``bytes``.

    Raises:
        CheckpointError: a file is malformed, cut off or not readable, a weight is not finite, or a tokenizer
            multiplies its input.
    """
    names = list_names(folder)
    for name in (CONFIG, SIDECAR, *PROCESSORS, *(name for name in names if name.endswith(f"/{NORM_STATS}"))):
        if name in names:
            read_json(folder / name)
    processors = read_processors(folder) if any(name in names for name in PROCESSORS) else None
    verify_tokenizers(folder, _list_tokenizer_models(folder, processors), begin_step)
    begin_step("reading its files", math.inf)
    read = [
        _read(stored)
        for name in names
        if name.startswith((f"{PRE}_", f"{POST}_")) and PLAIN.fullmatch(name)
        for stored in find_floats(folder / name, _is_used).values()
    ]
    broken: dict[str, str] = {}
    if (folder / BUNDLE).exists():  # The loader compares the weights of a bundle with their SHA-256.
        weights = find_policy_weights(folder, dtypes=SERVED)
        return {"tensors": len(weights), "bytes": sum(stored.bytes for stored in weights.values())}
    for tensor, stored in find_policy_weights(folder, _is_used).items() if has_policy_weights(folder) else ():
        read.append(_read(stored))
        if not read[-1][1]:
            broken[tensor] = stored.path.name
    if broken:
        others = f" and {len(broken) - 20} more" if len(broken) > 20 else ""
        where = ", ".join(sorted(set(broken.values())))
        raise CheckpointError(f"{where}: a NaN or an infinity in {', '.join(list(broken)[:20])}{others}")
    return {"tensors": len(read), "bytes": sum(count for count, _ in read)}


def verify_model(folder: Path) -> dict[str, int]:
    """Read every file of a model in diffusers' format to its end; returns and raises as `verify_files`."""
    read_json(folder / CONFIG)
    read = [(name, _read(stored)) for name, stored in find_shards(folder).items()]
    if broken := [name for name, (_, is_finite) in read if not is_finite]:
        raise CheckpointError(f"{folder.name}: a NaN or an infinity in {', '.join(broken[:20])}")
    return {"tensors": len(read), "bytes": sum(size for _, (size, _) in read)}


def _list_tokenizer_models(folder: Folder, processors: Normalization | None) -> dict[str, None]:
    """Return the names of models whose tokenizers a policy may take from the Hub's cache."""
    values = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    step = None if processors is None else processors.find_step(lerobot_processors.TOKENIZE)
    names = (
        _find_facts(values).tokenizer,
        values.get("vlm_model_name"),
        None if step is None else step.fields.get("tokenizer_name"),
    )
    # A folder of openpi has no config.
    openpi = None if CONFIG in list_names(folder) else get_policy_facts(openpi_configs.MODELS[0]).tokenizer
    return {name: None for name in (*names, openpi) if isinstance(name, str)}


def _find_facts(values: Mapping[str, Any]) -> PolicyFacts:
    """Return the facts about the policy type in a ``config.json``; no facts for an unknown type."""
    kind = values.get("type")
    return get_policy_facts(kind) if kind in policy_types() else PolicyFacts()


def _is_used(tensor: str) -> bool:
    return not tensor.endswith(NEVER_USED)


def describe_folder(folder: Folder) -> dict[str, Any]:
    """Read a folder without its weights, as JSON.

    Returns:
        ``config`` with the sizes of the model that the policy is built on, ``sidecar`` and ``renames``.
        ``normalization`` has names of statistics without numbers, and the names in ``stats.json`` as ``dataset``. Older
        policies have ``buffers`` instead: names of statistics in the weights; None if there are no weights here.
        ``action_range``: the smallest and largest values of the actions in the training data; None if no file but the
        weights has them.

    Raises:
        CheckpointError: a file is missing or malformed, or statistics cannot be used.
    """
    sidecar = read_sidecar(folder)
    values = read_config(folder, sidecar)
    normalization, buffers, action_range = None, None, None
    if any((folder / name).exists() for name in PROCESSORS):
        normalization = read_processors(folder)
        check_normalization(normalization, (), ())
        outputs = normalization.outputs
        smallest = outputs.stats.get("action", {}).get("min", np.zeros(0))
        if 0 < smallest.size <= MAX_ACTION_WIDTH:
            action_range = outputs.get_range(Feature("action", "ACTION", (smallest.size,)))
    elif openpi_configs.is_openpi(folder, sidecar):
        openpi = openpi_configs.read_openpi_config((sidecar or {})[openpi_configs.KEY])
        normalization = openpi_configs.read_normalization(folder, openpi, sidecar)
    elif has_policy_weights(folder):
        buffers = sorted(find_policy_weights(folder, lerobot_processors.is_buffer))
    return {
        "config": values,
        "sidecar": sidecar,
        "renames": {} if normalization is None else dict(normalization.renames),
        "normalization": None if normalization is None else _describe(folder, normalization, values, sidecar),
        "buffers": buffers,
        "action_range": action_range,
    }


def _describe(
    folder: Folder, normalization: Normalization, values: dict[str, Any], sidecar: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the names of features and statistics of a policy, and the names in ``stats.json``."""
    sides = (values.get("input_features"), values.get("output_features"))
    own = [name for side in sides if isinstance(side, dict) for name in side]
    group = (sidecar or {}).get(lerobot_processors.GROUP)
    dataset = lerobot_processors.read_dataset_statistics(folder)
    return {
        **lerobot_processors.dump_names(normalization, [*own, *(f"{group}.{name}" for name in own)]),
        "dataset": {name: list(dataset[name]) for name in own if name in dataset},
    }


def read_sidecar(folder: Folder) -> dict[str, Any] | None:
    """Read ``robojax.json``, None without one; raises CheckpointError if it is malformed."""
    return read_json(folder / SIDECAR) if (folder / SIDECAR).exists() else None


def read_config(folder: Folder, sidecar: Mapping[str, Any] | None) -> dict[str, Any]:
    """Read ``config.json``, completed from `sidecar` and from the files of the policy's type.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    if openpi_configs.is_openpi(folder, sidecar):
        if openpi_configs.KEY not in (sidecar or {}):
            raise CheckpointError(openpi_configs.describe_missing_config(folder.name))
        values = openpi_configs.read_openpi_config((sidecar or {})[openpi_configs.KEY]).build_values()
    else:
        if not (folder / CONFIG).exists():
            raise CheckpointError(describe_missing_config(folder))
        values = lerobot_processors.upgrade_config(read_json(folder / CONFIG))
        if values.get("type") is None:
            raise CheckpointError(describe_missing_type(values))
    field, pattern = _find_facts(values).sizes or ("", "")
    name = pattern.format_map(defaultdict(str, values))
    if name and (folder / name).exists():
        values[field] = read_json(folder / name)
    if values.get("add_image_special_tokens") is True and field == "vlm":
        tokenizer = name.replace("config.json", "tokenizer.json")
        if (folder / tokenizer).exists():
            values["vlm_tokens"] = _read_image_tokens(read_json(folder / tokenizer, TOKENIZER_BYTES))
    return values


def _read_image_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of the special tokens around images by name, from a ``tokenizer.json``."""
    added = tokenizer.get("added_tokens")
    entries = [entry for entry in (added if isinstance(added, list) else []) if isinstance(entry, dict)]
    tokens: dict[Any, Any] = {str(entry.get("content")): entry.get("id") for entry in entries}
    return {name: tokens[name] for name in IMAGE_TOKENS if isinstance(tokens.get(name), int)}


def check_weights(folder: Folder, *, has_orbax: bool) -> None:
    """Raise CheckpointError if a folder has no file of weights, or a pointer of Git LFS in place of one."""
    for name in list_names(folder):
        if (name == WEIGHTS or SHARD.fullmatch(name)) and (folder / name).exists():
            with open_source(folder / name) as file:
                check_lfs_pointer(name, file.read(0, len(LFS_POINTER)))
    if not has_policy_weights(folder) and not has_orbax:
        raise CheckpointError(describe_missing_weights(folder))


def describe_missing_config(folder: Folder) -> str:
    """Return the error text for a folder without ``config.json``: its content, and where a policy is."""
    what = _describe_other_folder(folder) if isinstance(folder, PolicyFolder) else None
    return what or f"{folder.name}: no {CONFIG}; wanted a folder as LeRobot's save_pretrained writes it"


def describe_missing_type(values: Mapping[str, Any]) -> str:
    """Return the error text for a ``config.json`` without a type, which names the model that it describes."""
    if "_class_name" in values:
        what = f"It describes a model of diffusers ({shorten_value(values['_class_name'])}), which is not a policy"
        if values["_class_name"] == "Transformer2DModel":
            what += "; jaxmodels.load_model loads it"
    elif "model_type" in values or "architectures" in values:
        model = values.get("model_type", values.get("architectures"))
        what = f"It describes a model of transformers ({shorten_value(model)}), which is not a policy"
    else:
        what = 'If it is a policy, add its type, e.g. "type": "act"'
    return f'{CONFIG} has no "type"; wanted one of {", ".join(policy_types())}. {what}'


def _describe_other_folder(folder: PolicyFolder) -> str | None:
    """Describe a folder that is not a policy, and where a policy is; None if it is not recognized."""
    where = folder.path
    if not folder.names:
        return f"{where}: the folder is empty; wanted a folder as LeRobot's save_pretrained writes it"
    if ADAPTER in folder.names:
        return _describe_adapter(folder)
    if folder.has_file("model_index.json"):
        return f"{where}: a pipeline of diffusers (model_index.json), which is not a policy"
    if folder.has_file("meta/info.json"):
        return (
            f"{where}: a LeRobotDataset (meta/info.json), which is not a policy; train a policy on it "
            "(robojax train), or give the folder of a trained one"
        )
    found = folder.find_policies()
    is_cache = folder.name.startswith("models--") and "snapshots" in folder.names
    if is_cache and (main := folder.read_small_file("refs/main", 100)) is not None:
        found.sort(key=lambda path: path != f"snapshots/{main.decode(errors='replace').strip()}")
    if found:
        repo = folder.name.removeprefix("models--").replace("--", "/")
        what = f"the Hub's cache of {repo!r}" if is_cache else f"no {CONFIG}"
        others = f"; others are {', '.join(str(where / path) for path in found[1:3])}" if found[1:] else ""
        return f"{where}: {what}; the policy is in {where / found[0]}{others}"
    if folder.name.startswith("datasets--"):
        return f"{where}: the Hub's cache of a dataset, which is not a policy"
    if folder.has_file("training_step.json"):
        return (
            f"{where}: the state of a training; the policy of this training is in {where.parent / 'pretrained_model'}"
        )
    return _describe_pickles(folder)


def _describe_adapter(folder: PolicyFolder) -> str:
    """Return the error text for a folder with an adapter of PEFT and without the weights of its base."""
    base: Any = None
    with suppress(ValueError, RecursionError, AttributeError):
        base = json.loads(folder.read_small_file(ADAPTER) or b"").get("base_model_name_or_path")
    named = f" of {shorten_value(base)}" if isinstance(base, str) and base else ""
    return (
        f"{folder.path}: only an adapter{named} (PEFT, e.g. LoRA), without the weights that it changes; merge it into "
        "its base with PEFT's merge_and_unload, save the result with save_pretrained, and give that folder"
    )


def describe_missing_weights(folder: Folder) -> str:
    """Return the error text for a folder without weights."""
    what = None
    if isinstance(folder, PolicyFolder) and (ADAPTER in folder.names or CONFIG not in folder.names):
        what = _describe_other_folder(folder)
    elif CONFIG in list_names(folder):
        with suppress(CheckpointError):
            values = lerobot_processors.upgrade_config(read_json(folder / CONFIG))
            what = describe_missing_type(values) if values.get("type") is None else None
    lacking = WEIGHTS if CONFIG in list_names(folder) else f"{CONFIG} and no {WEIGHTS}"
    return (
        what
        or _describe_pickles(folder)
        or f"{folder.name}: no {lacking}; wanted a folder as LeRobot's save_pretrained writes it"
    )


def _describe_pickles(folder: Folder) -> str | None:
    """Return the error text for a folder whose weights are pickle files; None without such files."""
    pickles = [name for name in list_names(folder) if name.endswith(PICKLES)]
    if not pickles:
        return None
    return (
        f"{folder.name}: only {', '.join(pickles[:20])} and no {WEIGHTS}; pickle files can run code and are never "
        "opened. Load the policy where you trust it and save it as safetensors (LeRobot's save_pretrained does)"
    )


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
    """Verify or describe a folder for a parent process, in lines of JSON on the standard output.

    The last line has the result, or ``error``, or ``out_of_memory``. Earlier lines have ``step``, so that the
    parent process knows the last step of a killed process.

    Args:
        request: JSON with ``do`` (``prove``, ``describe`` or ``model``), ``name``, descriptors of ``files``, reasons of
            ``refused``, the Hub's cache as ``hub_cache``, and paths of ``trees``; for a model, its path as ``name``.
    """
    answer: dict[str, Any]
    task = json.loads(request)
    os.environ["HF_HUB_CACHE"] = task["hub_cache"]
    try:
        folder = PolicyFolder.of_descriptors(Path(task["name"]), task["files"], task["refused"])
        if task["do"] == "prove":
            answer = dict(verify_files(folder, _begin_step))
            for tree in task["trees"].values():
                arrays, size = verify_tree(Path(tree), _begin_step, _allow_memory)
                answer = {"tensors": answer["tensors"] + arrays, "bytes": answer["bytes"] + size}
        elif task["do"] == "model":
            answer = dict(verify_model(Path(task["name"])))
        else:
            answer = describe_folder(folder)
    except JaxModelsError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"its files cannot be read ({error.strerror})"}
    except MemoryError:
        answer = {"out_of_memory": True}
    text = json.dumps(answer)
    if len(text) > ANSWER:
        error = str(
            answer.get("error", f"the description of the policy has {len(text)} bytes; wanted at most {ANSWER}")
        )
        text = json.dumps({"error": error if len(error) <= ERROR else f"{error[:ERROR]} ..."})
    sys.stdout.write(text)


def _begin_step(what: str, seconds: float) -> None:
    """Report a step to the parent process; SIGPROF ends this process if the step takes more CPU seconds."""
    signal.setitimer(signal.ITIMER_PROF, 0 if math.isinf(seconds) else seconds)
    sys.stdout.write(json.dumps({"step": what, "seconds": None if math.isinf(seconds) else seconds}) + "\n")
    sys.stdout.flush()


def _allow_memory(count: int) -> None:
    """Raise this process' limit of memory by a number of bytes, at most to what the parent process allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (min(soft + count, hard), hard))
