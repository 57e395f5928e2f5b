"""Verification of the files of an Orbax checkpoint, without JAX and Orbax.

A hostile checkpoint may have metadata of any length, arrays of any shape, and chunks that take a thousand times their
size when they are decoded. This module reads all of them with tensorstore, as Orbax does, in a process with limits.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmodels.checkpoints.files import TENSOR_LIMIT
from jaxmodels.checkpoints.folder import JSON_BYTES, unchanged_tree
from jaxmodels.errors import CheckpointError

if TYPE_CHECKING:
    import tensorstore

# Files of Orbax in the top folder and in `array_metadatas`; 1,000 arrays need 400 kB.
METADATA_BYTES = 8 << 20
# CPU seconds for reading such a file, and for reading all shapes.
METADATA_SECONDS = 10.0
# A chunk is in memory as it is stored, as it is decoded, and as the result.
MEMORY_PER_CHUNK = 4
# Arrays may declare this many bytes, and a multiple of the bytes on the disk.
DECLARED_BYTES, DECLARED_PART = 256 << 20, 16
# Arrays up to this size are read at once, larger ones in chunks.
PIECE_BYTES = 16 << 20
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
_MANIFEST = "manifest.ocdbt"


def verify_tree(
    tree: Path,
    begin_step: Callable[[str, float], None] = lambda what, seconds: None,
    allow_memory: Callable[[int], None] = lambda count: None,
) -> tuple[int, int]:
    """Read an Orbax checkpoint to its end.

    Args:
        begin_step: called before each step with a description, and with the CPU seconds that the step may take.
        allow_memory: called with the bytes that the largest chunk needs, before arrays are read.

    Returns:
        The number of arrays, and their bytes.

    Raises:
        CheckpointError: a file is malformed or too long, or arrays declare more bytes than the files can hold.
    """
    with unchanged_tree(tree) as identities:
        sizes = {name.partition("/")[2]: identity[2] for name, identity in identities.items() if len(identity) > 2}
        for name, size in sizes.items():
            folder, _, file = name.rpartition("/")
            if folder in ("", "array_metadatas") and file != _MANIFEST:
                begin_step(f"{tree.name}/{name[:100]}: reading it", METADATA_SECONDS)
                _check_metadata(tree / name, f"{tree.name}/{name}", size)
            elif file in _DRIVERS and size > JSON_BYTES:
                raise CheckpointError(f"{tree.name}/{name}: {size} bytes; wanted at most {JSON_BYTES}")
        begin_step(f"{tree.name}: reading the shapes of its arrays", METADATA_SECONDS)
        where = tree.name
        try:
            arrays = _find_arrays(tree, sizes)
            if arrays:
                chunks = (_get_bytes(array, _get_chunk_shape(array)) for array in arrays.values())
                allow_memory(MEMORY_PER_CHUNK * max(chunks))
            begin_step(f"{tree.name}: reading its arrays", math.inf)
            total = 0
            for where, array in arrays.items():  # noqa: B007 - the name is for the message
                total += _read_array(array)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # tensorstore raises ValueError, and Exception for damaged files.
            raise CheckpointError(f"{where}: unreadable Orbax checkpoint ({_summarize(error)})") from error
    return len(arrays), total


def _summarize(error: Exception) -> str:
    """Return the kind of an error, whose text may have paths and a page of settings."""
    text = str(error)
    return "a chunk is longer than the array declares" if "End of data expected" in text else type(error).__name__


def _find_arrays(tree: Path, sizes: Mapping[str, int]) -> "dict[str, tensorstore.TensorStore]":
    """Return the arrays of a checkpoint by name, unread; raises CheckpointError for shapes that the files cannot hold.

    Args:
        sizes: bytes of each file.
    """
    import tensorstore

    stores = [{"driver": "file", "path": f"{tree}/"}]
    if _MANIFEST in sizes:
        stores.append({"driver": "ocdbt", "base": f"file://{tree}/"})
    # Every thread reserves memory, so there is one of each kind.
    context = tensorstore.Context({f"{kind}_concurrency": {"limit": 1} for kind in ("file_io", "data_copy")})
    arrays: dict[str, tensorstore.TensorStore] = {}
    declared, most = 0, DECLARED_BYTES + DECLARED_PART * sum(sizes.values())
    for store in stores:
        for name, driver in _list_arrays(store, context):
            where = f"{tree.name}/{name}"
            spec = {"driver": driver, "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"}}
            try:
                array = tensorstore.open(spec, context=context, open=True, read=True).result()
            except Exception as error:
                raise CheckpointError(f"{where}: unreadable Orbax checkpoint ({_summarize(error)})") from error
            chunk = _get_chunk_shape(array)
            if any(part > max(length, 1) for part, length in zip(chunk, array.shape, strict=True)):
                raise CheckpointError(
                    f"{where}: has chunks of shape {list(chunk)} and the shape {list(array.shape)}; wanted chunks that "
                    "are not larger than the array"
                )
            declared += _get_bytes(array, array.shape)
            if declared > most:
                raise CheckpointError(
                    f"{where}: the arrays up to this one declare {declared} bytes; wanted at most {most} for files of "
                    f"{sum(sizes.values())} bytes"
                )
            arrays[where] = array
            if len(arrays) > TENSOR_LIMIT:
                raise CheckpointError(f"{tree.name}: over {TENSOR_LIMIT} arrays; wanted the weights of a policy")
    return arrays


def _check_metadata(path: Path, where: str, size: int) -> None:
    if size > METADATA_BYTES:
        raise CheckpointError(f"{where}: {size} bytes; wanted at most {METADATA_BYTES} bytes of metadata")
    try:
        with suppress(ValueError):  # Some of the files are not JSON; Orbax refuses the others.
            json.loads(path.read_bytes())
    except RecursionError as error:
        raise CheckpointError(f"{where}: malformed JSON (nested too deeply)") from error


def _list_arrays(store: dict[str, str], context: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the driver of each array in a store."""
    import tensorstore

    for key in sorted(tensorstore.KvStore.open(store, context=context).result().list().result()):
        folder, _, file = key.decode(errors="replace").rpartition("/")
        if file in _DRIVERS and folder:
            yield folder, _DRIVERS[file]


def _get_chunk_shape(array: "tensorstore.TensorStore") -> Sequence[int]:
    """Return the shape of what is decoded at once."""
    shape = array.chunk_layout.write_chunk.shape or array.shape
    return [length if part is None else part for part, length in zip(shape, array.shape, strict=True)]


def _get_bytes(array: "tensorstore.TensorStore", shape: Sequence[int]) -> int:
    return array.dtype.numpy_dtype.itemsize * math.prod(shape)


def _read_array(array: "tensorstore.TensorStore") -> int:
    """Read an array in pieces, keep none of them, and return the bytes of the array."""
    size = _get_bytes(array, array.shape)
    piece = array.shape if size <= PIECE_BYTES else _get_chunk_shape(array)
    for corner in product(*(range(0, length, part or 1) for length, part in zip(array.shape, piece, strict=True))):
        array[
            tuple(
                slice(at, min(at + part, length)) for at, part, length in zip(corner, piece, array.shape, strict=True)
            )
        ].read().result()
    return size
