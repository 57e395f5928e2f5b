"""A 2D transformer as an Orbax checkpoint: ``config.json`` as diffusers writes it, and its arrays in a folder.

For training, where arrays lie on many devices: each process writes and reads its own parts of them.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxmodels.checkpoints import diffusers_config, diffusers_names, orbax
from jaxmodels.checkpoints.json_file import read_json, write_json
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.weights import check_fit

CONFIG = "config.json"


def save(folder: Path, config: Transformer2DConfig, weights: Mapping[str, Any]) -> None:
    """Writes a model; what was there before is replaced.

    Args:
        weights: by our names (`jaxmodels.weights.flatten`), in any dtype and on any devices.

    Raises:
        WeightsMismatch: the weights are not those of the config.
        OSError: it cannot be written; the arrays that were there before are as they were.
    """
    shapes = {name: tuple(np.shape(array)) for name, array in weights.items()}
    check_fit(shapes, _shapes(config), where="weights to be written")
    folder.mkdir(parents=True, exist_ok=True)
    orbax.save(folder / orbax.FOLDER, dict(weights))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as draft:
        write_json(Path(draft) / CONFIG, diffusers_config.dump_model_config(config), indent=2, end="\n")
        os.replace(Path(draft) / CONFIG, folder / CONFIG)


def restore(
    folder: Path, *, dtype: DTypeLike | None = None, shardings: Mapping[str, Sharding] | None = None
) -> tuple[Transformer2DConfig, dict[str, jax.Array]]:
    """A model's config, and its weights by our names.

    Args:
        dtype: what the arrays must be; when None, floats of any width are taken as they are.
        shardings: where to put arrays, by name; others go onto the default device.

    Raises:
        ConfigError: the config is of another model, or has values that make no sense.
        CheckpointError: no such checkpoint, unreadable, or it does not fit the config (`WeightsMismatch`) or dtype.
    """
    config = diffusers_config.read_model_config(read_json(folder / CONFIG))
    return config, restore_arrays(folder, config, dtype=dtype, shardings=shardings)


def restore_arrays(
    folder: Path,
    config: Transformer2DConfig,
    *,
    dtype: DTypeLike | None = None,
    shardings: Mapping[str, Sharding] | None = None,
) -> dict[str, jax.Array]:
    """`restore` for a config that is known."""
    shapes = _shapes(config)
    found = orbax.float_dtypes(folder / orbax.FOLDER) if dtype is None else dict.fromkeys(shapes, np.dtype(dtype))
    where = shardings or {}
    wanted = {
        name: jax.ShapeDtypeStruct(shape, found.get(name, np.float32), sharding=where.get(name))
        for name, shape in shapes.items()
    }
    arrays: Any = orbax.restore(folder / orbax.FOLDER, wanted)
    return arrays


def _shapes(config: Transformer2DConfig) -> dict[str, tuple[int, ...]]:
    return {place.ours: place.whole for place in diffusers_names.places(config)}
