"""Orbax checkpoints, always restored into a stated tree of shapes and dtypes.

Restoring without one believes the files: an edited shape asks for any amount of memory and ends the process, an
edited path reads outside the folder. With one, both are refused; and only the operator's own folders are read at all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxmodels.errors import CheckpointError

FOLDER = "orbax"

Tree = TypeVar("Tree")


def save(folder: Path, tree: Any) -> None:
    """Writes a tree of arrays; the folder appears whole or not at all, and replaces one that is there."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), _as_tree(tree), force=True)


def restore(folder: Path, wanted: Tree) -> Tree:
    """Reads the arrays of `wanted`, a tree of `jax.ShapeDtypeStruct` (or arrays), onto the default device.

    Raises:
        CheckpointError: no such checkpoint, or its names, shapes or dtypes are not those wanted.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder.name}: no Orbax checkpoint there")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), wanted)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder.resolve(), _as_tree(target))
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{folder.name}: the Orbax checkpoint does not fit what is wanted ({reason})") from error
    return _like(wanted, restored)


def _as_tree(tree: Any) -> Any:
    # Orbax splits names at dots when it writes files of its own; a list keeps any tree's structure out of its hands.
    return dict(tree) if isinstance(tree, Mapping) else tree


def _like(wanted: Tree, restored: Any) -> Tree:
    return jax.tree.unflatten(jax.tree.structure(wanted), jax.tree.leaves(restored))
