"""Orbax checkpoints, always restored into a tree of known shapes and dtypes.

Without such a tree, an edited shape could allocate any amount of memory, and an edited path could read other folders.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxmodels.checkpoints.folder import check_tree, unchanged_tree
from jaxmodels.errors import CheckpointError
from jaxmodels.weights import check_fit

if TYPE_CHECKING:
    from orbax.checkpoint import StandardCheckpointer

SHARE = 0.02  # Largest share of the bytes of a checkpoint that `restore_parts` reads together.
UNREADABLE = (ValueError, KeyError, TypeError, OSError, AttributeError)  # Orbax raises these for edited files.

Tree = TypeVar("Tree")


class Writer:
    """Writer of Orbax checkpoints in the background, one at a time.

    Each folder appears whole or not at all and replaces an existing one. Arrays may be overwritten after `save`.

    Raises:
        OSError: a checkpoint cannot be written; raised by the next call or at the end.
    """

    def __init__(self) -> None:
        self._checkpointer = _checkpointer()
        self._folder: Path | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A full disk also raises here, and must not hide an earlier error.
        with suppress(OSError) if kind is not None else nullcontext(), self._explain_errors():
            self._checkpointer.close()

    def save(self, folder: Path, tree: Any) -> None:
        """Begin to write a tree after the previous tree is written."""
        self.wait()
        self._folder = folder
        with self._explain_errors():
            self._checkpointer.save(folder.resolve(), _flatten(tree), force=True)

    def wait(self) -> None:
        """Block until everything is written."""
        with self._explain_errors():
            self._checkpointer.wait_until_finished()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # TensorStore reports a full disk as a ValueError.
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            name = "" if self._folder is None else f" {self._folder.name}"
            raise OSError(f"checkpoint{name} cannot be written ({reason})") from error


def restore(folder: Path, target: Tree) -> Tree:
    """Read an Orbax checkpoint into a tree like `target`, whose leaves are `jax.ShapeDtypeStruct` or arrays.

    Each array is placed by the ``sharding`` of its `jax.ShapeDtypeStruct`, or else on the default device.

    Raises:
        CheckpointError: the checkpoint is missing or unreadable. `WeightsMismatch` lists all names, shapes and dtypes
            that differ from the target.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder.name}: no Orbax checkpoint there")
    flat = _flatten(target)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {}
    for name, x in flat.items():
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        abstract[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or device)
    with unchanged_tree(folder), _explain_unreadable(folder), _checkpointer() as checkpointer:
        _check(folder, checkpointer, abstract)
        restored = _flatten(checkpointer.restore(folder.resolve(), abstract))
    return jax.tree.unflatten(jax.tree.structure(target), [restored[name] for name in flat])


def restore_parts(folder: Path, target: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, np.ndarray]]:
    """Read the arrays of another program's checkpoint onto the host a few at a time, the largest first.

    Orbax holds each array twice while it reads it; in parts, this needs little more memory than the arrays.

    Args:
        target: paths in the tree, joined by ``/``, to arrays as `float_shapes` found them.

    Raises:
        CheckpointError: files are unreadable, or were changed while they were read.
    """
    import orbax.checkpoint as ocp

    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    sizes = {name: x.size * x.dtype.itemsize for name, x in target.items()}
    most = SHARE * sum(sizes.values())
    batches: list[list[str]] = []
    room = 0.0
    for name in sorted(target, key=lambda name: -sizes[name]):
        if not batches or sizes[name] > room:
            batches, room = [*batches, []], most
        batches[-1].append(name)
        room -= sizes[name]
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    with unchanged_tree(folder), _explain_unreadable(folder), reader as checkpointer:
        for names in batches:
            item = unflatten_dict({name: target[name] for name in names}, sep="/")
            how = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=host, global_shape=x.shape, dtype=x.dtype), item)
            arguments = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
            arrays = _flatten(checkpointer.restore(folder.resolve(), args=arguments))
            yield {name: np.asarray(arrays[name]) for name in names}


def float_shapes(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of an Orbax checkpoint's arrays by name, as its files state them.

    Raises:
        CheckpointError: the checkpoint is missing or unreadable, or has arrays that are not floats (all listed).
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder.name}: no Orbax checkpoint there")
    check_tree(folder)
    with _explain_unreadable(folder), _checkpointer() as checkpointer:
        shapes = {
            name: jax.ShapeDtypeStruct(tuple(entry.shape), np.dtype(entry.dtype))
            for name, entry in _metadata(folder, checkpointer).items()
        }
    others = [f"{name} ({x.dtype})" for name, x in shapes.items() if not jnp.issubdtype(x.dtype, jnp.floating)]
    if others:
        raise CheckpointError(f"{folder.name}: arrays that are no floats: {', '.join(others)}")
    return shapes


@contextmanager
def _explain_unreadable(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # For a truncated file, TensorStore raises a plain Exception, whose text is a page of its settings.
        if not isinstance(error, UNREADABLE) and type(error) is not Exception:
            raise
        reason = "a file is damaged" if type(error) is Exception else type(error).__name__
        raise CheckpointError(f"{folder.name}: unreadable Orbax checkpoint ({reason})") from error


def _checkpointer() -> "StandardCheckpointer":
    # Imported here, because Orbax takes 0.12 s to import and most policies are safetensors.
    from orbax.checkpoint import StandardCheckpointer

    return StandardCheckpointer()


def _metadata(folder: Path, checkpointer: "StandardCheckpointer") -> dict[str, Any]:
    metadata = checkpointer.metadata(folder.resolve())
    tree: Any = getattr(metadata, "item_metadata", metadata)
    return _flatten(dict(getattr(tree, "tree", tree)))


def _check(folder: Path, checkpointer: "StandardCheckpointer", target: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raise CheckpointError with all differences; Orbax casts dtypes silently and names only the first difference."""
    stored = _metadata(folder, checkpointer)
    check_fit(
        {name: tuple(entry.shape) for name, entry in stored.items()},
        {name: shape.shape for name, shape in target.items()},
        where=folder.name,
    )
    wrong = [
        f"{name} (found {np.dtype(entry.dtype)}, wanted {np.dtype(target[name].dtype)})"
        for name, entry in stored.items()
        if np.dtype(entry.dtype) != np.dtype(target[name].dtype)
    ]
    if wrong:
        raise CheckpointError(f"{folder.name}: arrays of other dtypes: {', '.join(wrong)}")


def _flatten(tree: Any) -> dict[str, Any]:
    # With one level of names, Orbax cannot turn tuples and classes into dictionaries.
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
