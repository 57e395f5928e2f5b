"""The safetensors files that diffusers keeps one model in: one file, or shards with an index; each in variants.

Source: diffusers 0.42.1, models/modeling_utils.py (save_pretrained) and utils/hub_utils.py (_add_variant).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.json_file import read_json, write_json
from jaxmodels.checkpoints.layouts import Shape
from jaxmodels.checkpoints.safetensors_file import Stored, find_floats, write_floats
from jaxmodels.errors import CheckpointError

STEM = "diffusion_pytorch_model"
SHARD_BYTES = 10 * 10**9  # diffusers' "10GB"
VARIANT = re.compile(r"[A-Za-z0-9_]+")
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
ANY = re.compile(rf"{STEM}(?:\.(\w+))?\.safetensors|{STEM}\.safetensors\.index(?:\.(\w+))?\.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def whole_name(variant: str | None) -> str:
    """The one file of a model that is not in shards."""
    return f"{STEM}.{_checked(variant)}.safetensors" if variant else f"{STEM}.safetensors"


def index_names(variant: str | None) -> tuple[str, ...]:
    """The index of a model in shards, today's name first."""
    if not variant:
        return (f"{STEM}.safetensors.index.json",)
    return (f"{STEM}.safetensors.index.{_checked(variant)}.json", f"{STEM}.safetensors.{variant}.index.json")


def patterns(variant: str | None) -> tuple[str, ...]:
    """Names of all files that a model's weights may be in, ``?`` for any letter."""
    middle = f".{variant}" if variant else ""
    numbers = "-?????-of-?????"
    # Older diffusers put the variant after the numbers.
    shards = {f"{STEM}{middle}{numbers}.safetensors": None, f"{STEM}{numbers}{middle}.safetensors": None}
    return (whole_name(variant), *index_names(variant), *shards)


def is_part(name: str, variant: str | None) -> bool:
    """Whether a file of this name is part of a model's weights."""
    return any(fnmatchcase(name, pattern) for pattern in patterns(variant))


def is_there(folder: Path, variant: str | None) -> bool:
    """Whether a folder has a model's weights."""
    return any((folder / name).is_file() for name in (whole_name(variant), *index_names(variant)))


def find(
    folder: Path, variant: str | None = None, is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Stored]:
    """Where the tensors of a model lie, those that are wanted; none is read. An index goes before a whole file.

    Raises:
        CheckpointError: no such files (the message names the variants there are, and never opens a pickle), unreadable
            ones, or an index that names files outside of the folder or does not fit them.
    """
    for name in index_names(variant):
        if (folder / name).is_file():
            return _find_in_shards(folder, name, is_wanted)
    if not (folder / whole_name(variant)).is_file():
        raise CheckpointError(_no_weights(folder, variant))
    return find_floats(folder / whole_name(variant), is_wanted)


def write(
    folder: Path,
    wanted: Mapping[str, tuple[np.dtype[Any], Shape]],
    tensor: Callable[[str], Any],
    *,
    variant: str | None = None,
    max_bytes: int = SHARD_BYTES,
) -> None:
    """Writes tensors one after the other into an empty folder: one file, or shards of at most `max_bytes` (a larger
    tensor has a shard of its own) and their index."""
    shards = list(_split(wanted, max_bytes))
    if len(shards) == 1:
        write_floats(folder / whole_name(variant), wanted, tensor)
        return
    middle = f".{variant}" if variant else ""
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{STEM}{middle}-{number:05}-of-{len(shards):05}.safetensors"
        write_floats(folder / name, shard, tensor)
        index |= dict.fromkeys(shard, name)
    size = sum(_bytes(*entry) for entry in wanted.values())
    write_json(folder / index_names(variant)[0], {"metadata": {"total_size": size}, "weight_map": index}, indent=2)


def _find_in_shards(folder: Path, index: str, is_wanted: Callable[[str], bool]) -> dict[str, Stored]:
    files = read_json(folder / index).get("weight_map")
    # Names come from a file of a stranger: they must not lead out of the folder.
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: has no weight_map; wanted an object of tensors and their files")
    wrong = sorted({str(name) for name in files.values() if not isinstance(name, str) or not PLAIN.fullmatch(name)})
    if wrong:
        raise CheckpointError(f"{index}: weight_map names {', '.join(wrong)}; wanted plain names of .safetensors files")
    found: dict[str, Stored] = {}
    wrong = []
    for file in sorted(set(files.values())):
        inside = find_floats(folder / file, is_wanted)
        wrong += [f"{name} is in {file}, not in {files.get(name)}" for name in inside if files.get(name) != file]
        found |= inside
    wrong += [f"{name} is not in {file}" for name, file in files.items() if is_wanted(name) and name not in found]
    if wrong:
        raise CheckpointError(f"{index}: does not fit its files; get all of them from one place: {'; '.join(wrong)}")
    return found


def _split(
    wanted: Mapping[str, tuple[np.dtype[Any], Shape]], max_bytes: int
) -> Iterator[dict[str, tuple[np.dtype[Any], Shape]]]:
    shard: dict[str, tuple[np.dtype[Any], Shape]] = {}
    size = 0
    for name, entry in wanted.items():
        if shard and size + _bytes(*entry) > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += _bytes(*entry)
    yield shard


def _bytes(dtype: np.dtype[Any], shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _checked(variant: str | None) -> str:
    if not variant or not VARIANT.fullmatch(variant):
        raise CheckpointError(f"variant {variant!r} is no part of a file name; wanted letters and digits, e.g. 'fp16'")
    return variant


def _no_weights(folder: Path, variant: str | None) -> str:
    names = sorted(path.name for path in folder.iterdir())
    wanted = whole_name(variant)
    found = {match.group(1) or match.group(2) for name in names if (match := ANY.fullmatch(name))}
    if others := sorted(name for name in found if name):
        plain = ", or leave it out" if None in found else ""
        return f"{folder.name}: no {wanted}; variants there: {', '.join(others)}; give one of them as variant{plain}"
    if found:
        return f"{folder.name}: no {wanted}; leave variant out, the files there have none"
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{folder.name}: only {', '.join(pickles)} and no {wanted}; pickle files can run code and are never "
            "opened. Load the model with diffusers where you trust it, and save it with "
            "save_pretrained(folder, safe_serialization=True)"
        )
    return f"{folder.name}: no {wanted}; wanted a folder as diffusers' save_pretrained writes it"
