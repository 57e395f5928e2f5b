"""Safetensors files, with the header looked at before the library sees it.

A legal file of 67 MB can hold a header of a million empty tensors, which costs the library seconds and a gigabyte; so
the length of the header and the number of tensors are bounded first.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from jaxmodels.checkpoints.folder import Source, opened
from jaxmodels.checkpoints.layouts import Shape
from jaxmodels.errors import CheckpointError

HEADER_LIMIT = 8 << 20  # bytes
TENSOR_LIMIT = 10_000
DIMENSIONS = 64  # of a tensor; NumPy has no more
METADATA = "__metadata__"
NEVER_USED = ".num_batches_tracked"  # torchvision's frozen batch norm drops it while loading, too
# NumPy has no bfloat16 of its own, so the library's NumPy side refuses such tensors.
FLOATS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
    }
)
# Of every dtype of the format, read here or not.
BITS: Mapping[str, int] = MappingProxyType(
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 16)
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8)
)
CODES = {dtype: code for code, dtype in FLOATS.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor where it lies in a file."""

    path: Source
    dtype: np.dtype[Any]
    shape: Shape
    start: int

    @property
    def bytes(self) -> int:
        """How many it has."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """
        Raises:
            CheckpointError: the file can no longer be read, or is shorter than it was.
        """
        try:
            with opened(self.path) as file:
                raw = file.array(self.start, self.bytes)
            return raw.view(self.dtype).reshape(self.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path.name}: cannot be read to its end ({error})") from error


def find_floats(path: Source, is_wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Stored]:
    """Where each tensor of a file lies that is wanted; none is read.

    Raises:
        CheckpointError: no such file, a header beyond the limits, not a safetensors file, or wanted tensors that are
            not floating-point (all listed).
    """
    header, start, end = _read_header(path)
    header.pop(METADATA, None)
    if wrong := _misplaced(header, end - start):
        raise CheckpointError(f"{path.name}: not a readable safetensors file ({wrong})")
    wanted = {name: entry for name, entry in header.items() if is_wanted(name)}
    others = [f"{name} ({entry.get('dtype')})" for name, entry in wanted.items() if entry.get("dtype") not in FLOATS]
    if others:
        raise CheckpointError(f"{path.name}: tensors of other dtypes than {', '.join(FLOATS)}: {', '.join(others)}")
    return {
        name: Stored(path, FLOATS[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in wanted.items()
    }


def read_metadata(path: Source) -> dict[str, str]:
    """What a file says beside its tensors.

    Raises:
        CheckpointError: no such file, or not a safetensors file.
    """
    header, _, _ = _read_header(path)
    return {name: text for name, text in header.get(METADATA, {}).items() if isinstance(text, str)}


def read_floats(path: Source, *, but: str | None = None) -> dict[str, np.ndarray]:
    """Every tensor of a file, in its own dtype (bfloat16 as ml_dtypes' type).

    Args:
        but: leave out tensors whose name ends so.

    Raises:
        CheckpointError: as `find_floats`.
    """
    found = find_floats(path, lambda name: but is None or not name.endswith(but))
    return {name: stored.read() for name, stored in found.items()}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes contiguous copies; PyTorch's loaders look for the format's name in the metadata."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # Not save_file: what it writes only its owner may read, whatever the umask says.
    path.write_bytes(save(contiguous, metadata={"format": "pt"}))


def write_floats(path: Path, wanted: Mapping[str, tuple[np.dtype[Any], Shape]], tensor: Callable[[str], Any]) -> None:
    """Writes tensors one after the other, so that no more than one of them need be in memory.

    Args:
        wanted: dtype and shape of every tensor, in the order they are written.
        tensor: gives the tensor of a name.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}  # PyTorch's loaders look for it
    end = 0
    for name, (dtype, shape) in wanted.items():
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # data begins at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, (dtype, _) in wanted.items():
            file.write(np.ascontiguousarray(tensor(name), dtype=dtype).reshape(-1).view(np.uint8).data)


def _misplaced(header: Mapping[str, Any], size: int) -> str | None:
    """What is wrong with where tensors lie: they have to fill the file, one after the other.

    Not the library's own check, which maps the file into memory: one that is cut off meanwhile would end this process.
    """
    places: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        shape, offsets, bits = entry.get("shape"), entry.get("data_offsets"), BITS.get(str(entry.get("dtype")))
        if bits is None:
            return f"{name[:80]}: no known dtype"
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            return f"{name[:80]}: shape or data_offsets are no lists of counts"
        begin, end = offsets
        if (end - begin) * 8 != math.prod(shape) * bits:
            return f"{name[:80]}: {end - begin} bytes do not hold {entry['dtype']} of this shape"
        places.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(places):
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
    """What is there, where the tensors begin, and where the file ends."""
    try:
        with opened(path) as file:
            size = file.size
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
        raise CheckpointError(f"{path.name}: its header is no object of tensors; wanted a safetensors file")
    count = len(header) - (METADATA in header)
    if count > TENSOR_LIMIT:
        raise CheckpointError(f"{path.name}: {count} tensors; wanted at most {TENSOR_LIMIT}")
    return header, 8 + length, size
