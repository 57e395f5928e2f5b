"""Safetensors files, with the header looked at before the library sees it.

A legal file of 67 MB can hold a header of a million empty tensors, which costs the library seconds and a gigabyte; so
the length of the header and the number of tensors are bounded first.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxmodels.errors import CheckpointError

HEADER_LIMIT = 8 << 20  # bytes
TENSOR_LIMIT = 10_000
FLOATS = ("F64", "F32", "F16", "BF16")


def read_floats(path: Path, *, but: str | None = None) -> dict[str, np.ndarray]:
    """Every tensor of a file, in its own dtype (bfloat16 as ml_dtypes' type).

    Args:
        but: leave out tensors whose name ends so.

    Raises:
        CheckpointError: no such file, a header beyond the limits, not a safetensors file, or tensors that are not
            floating-point (all listed).
    """
    header, start = _read_header(path)
    names = [name for name in header if but is None or not name.endswith(but)]
    others = [f"{name} ({header[name].get('dtype')})" for name in names if header[name].get("dtype") not in FLOATS]
    if others:
        raise CheckpointError(f"{path.name}: tensors of other dtypes than {', '.join(FLOATS)}: {', '.join(others)}")
    tensors: dict[str, np.ndarray] = {}
    try:
        with safe_open(path, framework="np") as file:  # checks offsets, lengths and overlaps
            for name in names:
                # NumPy has no bfloat16, so the library refuses such a tensor.
                is_half = header[name]["dtype"] == "BF16"
                tensors[name] = _read_bfloat16(path, header[name], start) if is_half else file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: not a readable safetensors file ({error})") from error
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes contiguous copies; PyTorch's loaders look for the format's name in the metadata."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # Not save_file: what it writes only its owner may read, whatever the umask says.
    path.write_bytes(save(contiguous, metadata={"format": "pt"}))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path.name}: {len(prefix)} bytes long; wanted a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > HEADER_LIMIT:
                raise CheckpointError(
                    f"{path.name}: its header claims {length} bytes; a safetensors header has at most {HEADER_LIMIT}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror}); wanted a safetensors file") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its header is malformed; wanted a safetensors file") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise CheckpointError(f"{path.name}: its header is no object of tensors; wanted a safetensors file")
    header.pop("__metadata__", None)
    if len(header) > TENSOR_LIMIT:
        raise CheckpointError(f"{path.name}: {len(header)} tensors; wanted at most {TENSOR_LIMIT}")
    return header, 8 + length


def _read_bfloat16(path: Path, entry: Mapping[str, Any], start: int) -> np.ndarray:
    begin, end = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(start + begin)
        raw = file.read(end - begin)
    return np.frombuffer(raw, ml_dtypes.bfloat16).reshape(entry["shape"])
