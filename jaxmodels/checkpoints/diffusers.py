"""diffusers' folders of a 2D transformer: ``config.json`` and ``diffusion_pytorch_model.safetensors``, or shards.

Reading is strict in both directions: every tensor that the config asks for must be there in its shape, and every
tensor that is there must be asked for. Tensors are read one after the other into the arrays that they end in.
"""

import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxmodels.checkpoints import diffusers_config, diffusers_names, orbax, shards, transformer2d_orbax
from jaxmodels.checkpoints.json_file import read_json, write_json
from jaxmodels.checkpoints.layouts import Place, Shape
from jaxmodels.checkpoints.safetensors_file import FLOATS, Stored
from jaxmodels.errors import CheckpointError
from jaxmodels.memory import check_host
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.weights import check_fit, not_finite

CONFIG = "config.json"
PIPELINE = "model_index.json"
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a subfolder; no pattern, no way out
NEVER_USED = ("pos_embed.pos_embed",)  # fixed positions that older files keep; they follow from the config
ALIGNMENT = 64  # bytes; JAX takes arrays that begin so as they are, without a copy, on a CPU


def read_config(folder: Path, *, subfolder: str | None = None, prefix: str | None = None) -> Transformer2DConfig:
    """The config of the model in a folder, or of the one under a prefix of a UNet.

    Raises:
        ConfigError: the config is of another model, or has values that make no sense.
        CheckpointError: no such folder or file, malformed JSON, or an unknown prefix.
    """
    folder = _inside(folder, subfolder)
    values = read_json(folder / CONFIG)
    return (
        diffusers_config.read_model_config(values)
        if prefix is None
        else diffusers_config.read_block_config(values, prefix)
    )


def files(*, subfolder: str | None = None, variant: str | None = None) -> tuple[str, ...]:
    """What to fetch of a repo to `read` it (jaxmodels/hub.py)."""
    if subfolder and not all(PART.fullmatch(part) for part in subfolder.split("/")):
        raise CheckpointError(f"subfolder {subfolder!r} is no folder of a repo; wanted e.g. 'transformer'")
    start = f"{subfolder}/" if subfolder else ""
    return (PIPELINE, *(f"{start}{name}" for name in (CONFIG, *shards.patterns(variant))))


def read(
    folder: Path,
    *,
    subfolder: str | None = None,
    variant: str | None = None,
    prefix: str | None = None,
    config: Transformer2DConfig | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[Transformer2DConfig, dict[str, np.ndarray]]:
    """A model's config, and its weights by our names (jaxmodels/weights.py).

    A folder without safetensors files may hold Orbax's arrays instead (jaxmodels/checkpoints/transformer2d_orbax.py).

    Args:
        subfolder: where in a pipeline's folder, e.g. ``transformer``.
        variant: e.g. ``fp16`` for ``diffusion_pytorch_model.fp16.safetensors``.
        prefix: read one transformer out of a larger model, e.g. ``down_blocks.0.attentions.1`` of a UNet; other tensors
            are left alone.
        config: instead of the folder's own.
        dtype: what weights become while they are read; that of the files when None (float64 becomes float32).

    Raises:
        ConfigError: the config is of another model, or has values that make no sense.
        CheckpointError: a file is missing or malformed, there is no such prefix, a weight is not finite, or the files
            do not fit the config (`WeightsMismatch`, all misfits in one message, by diffusers' names).
    """
    if config is None:
        config = read_config(folder, subfolder=subfolder, prefix=prefix)
    folder = _inside(folder, subfolder)
    if prefix is None and not shards.is_there(folder, variant) and (folder / orbax.FOLDER).is_dir():
        return config, _read_orbax(folder, config, None if dtype is None else np.dtype(dtype))
    stored = _find(folder, variant, prefix)
    table = diffusers_names.places(config)
    where = f"{folder.name}" + (f" under {prefix}" if prefix else "")
    check_fit(
        {name: tensor.shape for name, tensor in stored.items()},
        {place.theirs: place.shape for place in table},
        where=where,
    )
    size = sum(math.prod(place.shape) * _item(stored[place.theirs].dtype, dtype) for place in table)
    check_host(size, f"the weights of {where}, {len(table)} tensors")
    return config, _read_arrays(table, stored, None if dtype is None else np.dtype(dtype), where)


def write(
    folder: Path,
    config: Transformer2DConfig,
    weights: Mapping[str, Any],
    *,
    variant: str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a folder that diffusers loads. It appears whole; in one that is there, the model's files are replaced when
    all of them are written, and older ones of the same variant are removed.

    Args:
        weights: by our names; float32, float16 and bfloat16 are kept.
        max_shard_bytes: larger models are split; 10 GB, as in diffusers, when None.

    Raises:
        WeightsMismatch: the weights are not those of the config.
        OSError: it cannot be written, e.g. because the disk is full; what was there before is as it was.
    """
    table = diffusers_names.places(config)
    check_fit(
        {name: tuple(np.shape(array)) for name, array in weights.items()},
        {place.ours: place.whole for place in table},
        where="weights to be written",
    )
    dtypes = {name: np.dtype(array.dtype) for name, array in weights.items()}
    if wrong := [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in FLOATS.values()]:
        raise CheckpointError(f"weights to be written have other dtypes than floats: {', '.join(wrong)}")
    by_name = {place.theirs: place for place in table}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        draft = Path(temporary) / "draft"  # inside, because only its owner may read a temporary folder itself
        draft.mkdir()
        write_json(draft / CONFIG, diffusers_config.dump_model_config(config), indent=2, end="\n")
        shards.write(
            draft,
            {place.theirs: (dtypes[place.ours], place.shape) for place in table},
            lambda name: by_name[name].take(np.asarray(weights[by_name[name].ours])),
            variant=variant,
            max_bytes=shards.SHARD_BYTES if max_shard_bytes is None else max_shard_bytes,
        )
        _publish(draft, folder, variant)


def _find(folder: Path, variant: str | None, prefix: str | None) -> dict[str, Stored]:
    """The tensors of the model, by diffusers' names for it."""
    if prefix is None:
        return shards.find(folder, variant, lambda name: name not in NEVER_USED)
    start = f"{prefix}."
    found = shards.find(folder, variant, lambda name: name.startswith(start))
    if not found:
        end = f".{diffusers_names.BLOCKS}.0.attn1.to_out.0.bias"
        there = [name.removesuffix(end) for name in shards.find(folder, variant, lambda name: name.endswith(end))]
        raise CheckpointError(
            f"{folder.name}: no tensor under {prefix!r}; transformers there: {', '.join(sorted(there)) or 'none'}"
        )
    return {name.removeprefix(start): tensor for name, tensor in found.items()}


def _read_arrays(
    table: Sequence[Place], stored: Mapping[str, Stored], dtype: np.dtype[Any] | None, where: str
) -> dict[str, np.ndarray]:
    dtypes: dict[str, set[np.dtype[Any]]] = {}
    for place in table:
        dtypes.setdefault(place.ours, set()).add(stored[place.theirs].dtype)
    wholes = {place.ours: place.whole for place in table}
    arrays = {
        name: _aligned(whole, _common(dtypes[name]) if dtype is None else dtype) for name, whole in wholes.items()
    }
    broken: list[str] = []
    for place in sorted(table, key=lambda place: (stored[place.theirs].path.name, stored[place.theirs].start)):
        with np.errstate(over="ignore"):  # what is too large for a narrower dtype becomes an infinity, and is named
            tensor = stored[place.theirs].read().astype(arrays[place.ours].dtype, copy=False)
        if not np.isfinite(tensor).all():
            broken.append(place.theirs)
        place.put(tensor, arrays)
    if broken:
        raise CheckpointError(_not_finite_message(where, broken, dtype))
    return arrays


def _read_orbax(folder: Path, config: Transformer2DConfig, dtype: np.dtype[Any] | None) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    for name, array in transformer2d_orbax.restore_arrays(folder, config).items():
        with np.errstate(over="ignore"):
            weights[name] = np.asarray(array).astype(array.dtype if dtype is None else dtype, copy=False)
    if broken := not_finite(weights):
        raise CheckpointError(_not_finite_message(folder.name, broken, dtype))
    return weights


def _not_finite_message(where: str, names: Sequence[str], dtype: np.dtype[Any] | None) -> str:
    as_what = "" if dtype is None else f" (as {dtype})"
    return f"{where}: weights hold a NaN or an infinity{as_what}: {', '.join(sorted(names))}"


def _item(stored: np.dtype[Any], dtype: DTypeLike | None) -> int:
    """Bytes of a number in memory, of a tensor that is stored in another dtype."""
    return min(stored.itemsize, 4) if dtype is None else np.dtype(dtype).itemsize


def _common(dtypes: set[np.dtype[Any]]) -> np.dtype[Any]:
    """The narrowest dtype that holds what the layers of one array have; float32 at most."""
    return dtypes.pop() if len(dtypes) == 1 and not dtypes & {np.dtype(np.float64)} else np.dtype(np.float32)


def _aligned(shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def _publish(draft: Path, folder: Path, variant: str | None) -> None:
    new = {path.name for path in draft.iterdir()}
    if not folder.exists():
        draft.rename(folder)
        return
    # Readers look for an index first: it comes after what it names, and an old one goes before what it named.
    for name in sorted(new, key=lambda name: (name == CONFIG, name.endswith(".json"))):
        os.replace(draft / name, folder / name)
    old = [path for path in folder.iterdir() if shards.is_part(path.name, variant) and path.name not in new]
    for path in sorted(old, key=lambda path: not path.name.endswith(".json")):
        path.unlink()


def _inside(folder: Path, subfolder: str | None) -> Path:
    """The folder that is meant, with a config in it."""
    inside = folder / subfolder if subfolder else folder
    if not inside.is_dir():
        raise CheckpointError(f"{inside.name}: no such folder; wanted one with {CONFIG} and {shards.STEM}.safetensors")
    if not (inside / CONFIG).is_file() and (inside / PIPELINE).is_file():
        parts = sorted(path.parent.name for path in inside.glob(f"*/{CONFIG}"))
        raise CheckpointError(
            f"{inside.name}: a pipeline, not a model; give the subfolder of its 2D transformer, one of: "
            f"{', '.join(parts) or 'none is there'}"
        )
    return inside
