"""Bounded, strict readers and writers of JSON and safetensors files.

The length of a header and the number of tensors are limited, because a file of 67 MB can hold a million empty tensors,
which cost the library seconds and a gigabyte. Format: https://github.com/huggingface/safetensors#format

Shards have diffusers' names. Source: diffusers 0.42.1, models/modeling_utils.py and utils/hub_utils.py.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from jaxmodels.checkpoints.folder import JSON_BYTES as LIMIT
from jaxmodels.checkpoints.folder import PLAIN, SHARD, Folder, Source, list_names, open_source
from jaxmodels.checkpoints.tensor_layouts import Shape, Stored
from jaxmodels.errors import CheckpointError

HEADER_LIMIT = 8 << 20  # Bytes.
TENSOR_LIMIT = 10_000
DIMENSIONS = 64  # NumPy's limit for an array.
METADATA = "__metadata__"
# First bytes of a pointer, which replaces a large file in a git repository (https://git-lfs.com).
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NEVER_USED = ".num_batches_tracked"  # torchvision's FrozenBatchNorm2d also drops it.
# The NumPy interface of safetensors does not support bfloat16.
FLOATS: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Bits of every dtype of the format.
BITS: Mapping[str, int] = MappingProxyType(
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 16)
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8)
)
# Dtypes of serving weights.
SERVED: Mapping[str, np.dtype[Any]] = {
    **FLOATS,
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
CODES = {dtype: code for code, dtype in SERVED.items()}


def find_floats(
    path: Source, is_selected: Callable[[str], bool] = lambda name: True, dtypes: Mapping[str, np.dtype[Any]] = FLOATS
) -> dict[str, Stored]:
    """Return position, dtype and shape of the selected tensors of a safetensors file, without reading them.

    Args:
        dtypes: accepted dtypes by their names in the format.

    Raises:
        CheckpointError: the file is missing or malformed, or selected tensors have other dtypes (all listed).
    """
    header, start, end = _read_header(path)
    header.pop(METADATA, None)
    if wrong := _describe_layout_error(header, end - start):
        raise CheckpointError(f"{path.name}: not a readable safetensors file ({wrong})")
    selected = {name: entry for name, entry in header.items() if is_selected(name)}
    others = [f"{name} ({entry.get('dtype')})" for name, entry in selected.items() if entry.get("dtype") not in dtypes]
    if others:
        raise CheckpointError(f"{path.name}: tensors of other dtypes than {', '.join(dtypes)}: {', '.join(others)}")
    return {
        name: Stored(path, dtypes[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in selected.items()
    }


def read_metadata(path: Source) -> dict[str, str]:
    """Return the metadata of a safetensors file; raises CheckpointError if it is missing or malformed."""
    header, _, _ = _read_header(path)
    return {name: text for name, text in header.get(METADATA, {}).items() if isinstance(text, str)}


def read_floats(path: Source) -> dict[str, np.ndarray]:
    """Return every tensor in its own dtype; raises what `find_floats` raises."""
    return {name: stored.read() for name, stored in find_floats(path).items()}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a safetensors file that PyTorch's loaders also read."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # `save_file` ignores the umask, so that only the owner could read the file.
    path.write_bytes(save(contiguous, metadata={"format": "pt"}))


def write_floats(
    path: Path, described: Mapping[str, tuple[np.dtype[Any], Shape]], tensor: Callable[[str], Any]
) -> None:
    """Write tensors to a safetensors file one at a time, so that only one tensor is in memory.

    Args:
        described: dtype and shape of every tensor, in the order of the file.
        tensor: returns the tensor of a name.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}  # PyTorch's loaders require it.
    end = 0
    for name, (dtype, shape) in described.items():
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # Data begins at a multiple of eight bytes.
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, (dtype, _) in described.items():
            file.write(np.ascontiguousarray(tensor(name), dtype=dtype).reshape(-1).view(np.uint8).data)


def _describe_layout_error(header: Mapping[str, Any], size: int) -> str | None:
    """Return an error text unless the tensors fill the file one after the other.

    The library's check maps the file into memory, so that truncating the file would end this process.
    """
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        shape, offsets, bits = entry.get("shape"), entry.get("data_offsets"), BITS.get(str(entry.get("dtype")))
        if bits is None:
            return f"{name[:80]}: no known dtype"
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            return f"{name[:80]}: shape or data_offsets are not lists of counts"
        begin, end = offsets
        if (end - begin) * 8 != math.prod(shape) * bits:
            return f"{name[:80]}: {end - begin} bytes do not hold {entry['dtype']} of this shape"
        ranges.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(ranges):
        if begin != at:
            return f"{name[:80]}: begins at {begin} and not at {at}, where the tensor before it ends"
        at = end
    return None if at == size else f"tensors have {at} bytes, the file {size}"


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= DIMENSIONS
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def _read_header(path: Source) -> tuple[dict[str, Any], int, int]:
    """Return the entries of a safetensors header by name, the offset of the first tensor, and the size of the file."""
    try:
        with open_source(path) as file:
            size = file.size
            check_lfs_pointer(path.name, file.read(0, len(LFS_POINTER)))
            prefix = file.read(0, 8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path.name}: {len(prefix)} bytes long; wanted a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > HEADER_LIMIT:
                raise CheckpointError(
                    f"{path.name}: its header claims {length} bytes; a safetensors header has at most {HEADER_LIMIT}"
                )
            raw = file.read(8, length)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror}); wanted a safetensors file") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its header is malformed; wanted a safetensors file") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise CheckpointError(f"{path.name}: its header is not an object of tensors; wanted a safetensors file")
    count = len(header) - (METADATA in header)
    if count > TENSOR_LIMIT:
        raise CheckpointError(f"{path.name}: {count} tensors; wanted at most {TENSOR_LIMIT}")
    return header, 8 + length, size


def check_lfs_pointer(name: str, content: bytes) -> None:
    """Raise CheckpointError if a file's first bytes are a pointer that Git LFS puts in place of the file."""
    if content.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{name}: a pointer of Git LFS and not the file itself; run `git lfs pull` in its repository, or download "
            "the repository with `hf download`"
        )


def read_bounded(path: Source, name: str, limit: int) -> bytes:
    """Return the content of a file `name` of a checkpoint.

    Raises:
        CheckpointError: the file is missing, not regular, longer than `limit` bytes, or a pointer of Git LFS.
    """
    try:
        with open_source(path) as file:
            raw = file.read(0, limit + 1)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({error.strerror}); wanted it in the folder") from error
    check_lfs_pointer(name, raw)
    if len(raw) > limit:
        raise CheckpointError(f"{name}: longer than {limit} bytes; wanted a checkpoint's description")
    return raw


def read_json(path: Source, limit: int = LIMIT) -> dict[str, Any]:
    """Read a JSON file that holds an object; pipes and devices are refused.

    Raises:
        CheckpointError: the file is missing, too long, or not a JSON object of finite numbers and unique names.
    """
    name, raw = path.name, read_bounded(path, path.name, limit)
    try:
        value = json.loads(
            raw, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unique_object
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{name}: malformed JSON ({reason})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: holds a {type(value).__name__}; wanted a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any], indent: int, *, end: str = "") -> None:
    """Write an object as JSON, followed by `end`."""
    path.write_text(json.dumps(value, indent=indent, allow_nan=False) + end)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large")
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return value


STEM = "diffusion_pytorch_model"
SHARD_BYTES = 10 * 10**9  # diffusers' "10GB"
VARIANT = re.compile(r"[A-Za-z0-9_]+")
ANY = re.compile(rf"{STEM}(?:\.(\w+))?\.safetensors|{STEM}\.safetensors\.index(?:\.(\w+))?\.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def get_weights_name(variant: str | None) -> str:
    """Return the file name of a model's weights in one file."""
    return f"{STEM}.{_check_variant(variant)}.safetensors" if variant else f"{STEM}.safetensors"


def list_index_names(variant: str | None) -> tuple[str, ...]:
    """Return the possible file names of a sharded model's index, the current name first."""
    if not variant:
        return (f"{STEM}.safetensors.index.json",)
    return (f"{STEM}.safetensors.index.{_check_variant(variant)}.json", f"{STEM}.safetensors.{variant}.index.json")


def list_shard_patterns(variant: str | None) -> tuple[str, ...]:
    """Return the patterns of all file names of a model's weights; ``?`` is any letter."""
    middle = f".{variant}" if variant else ""
    numbers = "-?????-of-?????"
    # Older diffusers put the variant after the numbers.
    shards = {f"{STEM}{middle}{numbers}.safetensors": None, f"{STEM}{numbers}{middle}.safetensors": None}
    return (get_weights_name(variant), *list_index_names(variant), *shards)


def find_shards(
    folder: Path, variant: str | None = None, is_selected: Callable[[str], bool] = lambda name: True
) -> dict[str, Stored]:
    """Return position, dtype and shape of a model's selected tensors, in shards or one file; an index takes precedence.

    Raises:
        CheckpointError: files are missing (the message names the existing variants) or unreadable, or the index
            does not fit them or names files outside of the folder.
    """
    for name in list_index_names(variant):
        if (folder / name).is_file():
            return _find_in_shards(folder, name, is_selected)
    if not (folder / get_weights_name(variant)).is_file():
        raise CheckpointError(_describe_missing_weights(folder, variant))
    return find_floats(folder / get_weights_name(variant), is_selected)


def write_shards(
    folder: Path,
    described: Mapping[str, tuple[np.dtype[Any], Shape]],
    tensor: Callable[[str], Any],
    *,
    variant: str | None = None,
    max_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model's tensors into an empty folder, as one file, or as shards of at most `max_bytes` and their index.

    A tensor larger than `max_bytes` has a separate shard.
    """
    shards = list(_split(described, max_bytes))
    if len(shards) == 1:
        write_floats(folder / get_weights_name(variant), described, tensor)
        return
    middle = f".{variant}" if variant else ""
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{STEM}{middle}-{number:05}-of-{len(shards):05}.safetensors"
        write_floats(folder / name, shard, tensor)
        index |= dict.fromkeys(shard, name)
    size = sum(_bytes(*entry) for entry in described.values())
    write_json(folder / list_index_names(variant)[0], {"metadata": {"total_size": size}, "weight_map": index}, indent=2)


WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def write_policy_weights(folder: Path, weights: Mapping[str, np.ndarray], max_bytes: int = 1 << 30) -> None:
    """Write arrays as the weights of a policy's folder: one file, or shards of at most `max_bytes` and their index."""
    described = {name: (array.dtype, array.shape) for name, array in weights.items()}
    shards = list(_split(described, max_bytes))
    if len(shards) == 1:
        write_floats(folder / WEIGHTS, described, weights.__getitem__)
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_floats(folder / name, shard, weights.__getitem__)
        index |= dict.fromkeys(shard, name)
    size = sum(array.nbytes for array in weights.values())
    write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": size}, "weight_map": index}, indent=2)


def has_policy_weights(folder: Folder) -> bool:
    """Return whether a policy's folder has a file of weights: one file, or at least one shard."""
    is_there = any((folder / name).exists() for name in (WEIGHTS, WEIGHTS_INDEX))
    return is_there or any(SHARD.fullmatch(name) for name in list_names(folder))


def find_policy_weights(
    folder: Folder, is_selected: Callable[[str], bool] = lambda name: True, dtypes: Mapping[str, np.dtype[Any]] = FLOATS
) -> dict[str, Stored]:
    """Return position, dtype and shape of a policy's selected tensors, in one file or in shards, without reading them.

    Shards are named as transformers names them (``model-00001-of-00002.safetensors``), and each is in the index.

    Raises:
        CheckpointError: as of `find_floats`; weights in one file and in shards, or shards that the index does not name.
    """
    shards = {name for name in list_names(folder) if SHARD.fullmatch(name)}
    if not (folder / WEIGHTS_INDEX).exists() and not shards:
        return find_floats(folder / WEIGHTS, is_selected, dtypes)
    if (folder / WEIGHTS).exists():
        other = WEIGHTS_INDEX if (folder / WEIGHTS_INDEX).exists() else min(shards)
        raise CheckpointError(f"{folder.name}: weights in {WEIGHTS} and in shards ({other}); keep one of them")
    if not (folder / WEIGHTS_INDEX).exists():
        raise CheckpointError(f"{folder.name}: {', '.join(sorted(shards))} without {WEIGHTS_INDEX}, which is missing")
    found = _find_in_shards(folder, WEIGHTS_INDEX, is_selected, SHARD, dtypes)
    if unnamed := sorted(shards - set(_read_weight_map(folder, WEIGHTS_INDEX, SHARD).values())):
        raise CheckpointError(f"{WEIGHTS_INDEX}: names no tensor of {', '.join(unnamed)}; get all files from one place")
    return found


def _read_weight_map(folder: Folder, index: str, pattern: re.Pattern[str]) -> dict[str, str]:
    files = read_json(folder / index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: has no weight_map; wanted an object of tensors and their files")
    if len(files) > TENSOR_LIMIT:
        raise CheckpointError(f"{index}: names {len(files)} tensors; wanted at most {TENSOR_LIMIT}")
    # The file is untrusted, so its names must not lead out of the folder.
    wrong = sorted(
        {str(name)[:80] for name in files.values() if not isinstance(name, str) or not pattern.fullmatch(name)}
    )
    if wrong:
        example = "model-00001-of-00002.safetensors" if pattern is SHARD else "model.safetensors"
        raise CheckpointError(
            f"{index}: weight_map names {', '.join(wrong[:20])}; wanted plain names of .safetensors files, "
            f"e.g. {example}"
        )
    return files


def _find_in_shards(
    folder: Folder,
    index: str,
    is_selected: Callable[[str], bool],
    pattern: re.Pattern[str] = PLAIN,
    dtypes: Mapping[str, np.dtype[Any]] = FLOATS,
) -> dict[str, Stored]:
    files = _read_weight_map(folder, index, pattern)
    if missing := sorted(name for name in set(files.values()) if not (folder / name).exists()):
        raise CheckpointError(
            f"{', '.join(missing[:20])}: cannot be read (not there); {index} names it, get all files from one place"
        )
    tensors: dict[str, Stored] = {}
    wrong: list[str] = []
    for file in sorted(set(files.values())):
        inside = find_floats(folder / file, is_selected, dtypes)
        wrong += [f"{name} is in {file}, not in {files.get(name)}" for name in inside if files.get(name) != file]
        tensors |= inside
    wrong += [f"{name} is not in {file}" for name, file in files.items() if is_selected(name) and name not in tensors]
    if wrong:
        raise CheckpointError(f"{index}: does not fit its files; get all of them from one place: {'; '.join(wrong)}")
    return tensors


def _split(
    described: Mapping[str, tuple[np.dtype[Any], Shape]], max_bytes: int
) -> Iterator[dict[str, tuple[np.dtype[Any], Shape]]]:
    shard: dict[str, tuple[np.dtype[Any], Shape]] = {}
    size = 0
    for name, entry in described.items():
        if shard and size + _bytes(*entry) > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += _bytes(*entry)
    yield shard


def _bytes(dtype: np.dtype[Any], shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _check_variant(variant: str | None) -> str:
    if not variant or not VARIANT.fullmatch(variant):
        raise CheckpointError(f"variant is {variant!r}; wanted letters and digits, e.g. 'fp16'")
    return variant


def _describe_missing_weights(folder: Path, variant: str | None) -> str:
    names = sorted(path.name for path in folder.iterdir())
    expected = get_weights_name(variant)
    variants = {match.group(1) or match.group(2) for name in names if (match := ANY.fullmatch(name))}
    if others := sorted(name for name in variants if name):
        plain = ", or leave it out" if None in variants else ""
        return f"{folder.name}: no {expected}; variants there: {', '.join(others)}; pass one as variant{plain}"
    if variants:
        return f"{folder.name}: no {expected}; leave variant out, the files there have none"
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{folder.name}: only {', '.join(pickles)} and no {expected}; pickle files can run code and are never "
            "opened. Load the model with diffusers where you trust it, and save it with "
            "save_pretrained(folder, safe_serialization=True)"
        )
    return f"{folder.name}: no {expected}; wanted a folder as diffusers' save_pretrained writes it"
