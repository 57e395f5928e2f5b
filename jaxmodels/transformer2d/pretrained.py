"""From a folder or a repo of diffusers to weights on a device."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxmodels.checkpoints import diffusers
from jaxmodels.devices import find_device
from jaxmodels.errors import ConfigError
from jaxmodels.hub import fetch
from jaxmodels.transformer2d.config import Transformer2DConfig


def load(
    path_or_repo: str | Path,
    subfolder: str | None,
    revision: str | None,
    dtype: np.dtype,
    *,
    config: Transformer2DConfig | None = None,
    variant: str | None = None,
    prefix: str | None = None,
    device: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Transformer2DConfig, dict[str, jax.Array]]:
    """A checkpoint's config and weights; arguments and errors as `Transformer2DModel.from_pretrained`."""
    tell = on_progress or (lambda stage: None)
    where = find_device(device)
    folder = Path(os.path.expanduser(path_or_repo))
    if not str(path_or_repo) or not folder.is_dir():
        files = diffusers.files(subfolder=subfolder, variant=variant)
        folder = fetch(str(path_or_repo), revision, files=files, on_progress=tell)
    elif revision is not None:
        raise ConfigError(f"{folder.name} is a folder; a revision ({revision!r}) belongs to a repo of the Hub")
    tell("reading")
    config, weights = diffusers.read(
        folder, subfolder=subfolder, variant=variant, prefix=prefix, config=config, dtype=dtype
    )
    placed = {name: jax.device_put(weights.pop(name), where) for name in list(weights)}
    tell("ready")
    return config, placed
