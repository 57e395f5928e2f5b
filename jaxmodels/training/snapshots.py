"""Checkpoints of a training: written while it goes on, the newest few kept, read back exactly.

``checkpoints/<step>/training_state`` is an Orbax checkpoint, ``checkpoints/<step>/pretrained_model`` a policy, and
``checkpoints/last`` a link to the newest: LeRobot's names.
"""

import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

from jaxmodels.checkpoints import orbax

STATE, POLICY, LAST = "training_state", "pretrained_model", "last"

REMOVED = ".removed-"  # begins the name of what is being removed, in which files are missing already

Tree = TypeVar("Tree")


class Snapshots:
    """The checkpoints of a folder; what a killed run began and nobody will finish is removed.

    Args:
        keep: how many of the newest stay.

    Raises:
        OSError: one cannot be written; when the next is, or at the end.
    """

    def __init__(self, folder: Path, *, keep: int):
        self._folder, self._keep = folder, keep
        self._writer = orbax.Writer()
        self._pending: int | None = None

    def __enter__(self) -> "Snapshots":
        if jax.process_index() == 0:
            self._tidy()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)
        if kind is None:
            self._settle()

    def folder(self, step: int) -> Path:
        return self._folder / f"{step:06}"

    @property
    def newest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return max(self._whole(), default=None)

    def save(self, step: int, state: Any) -> None:
        """Begins to write; what was begun before is whole now."""
        self._writer.wait()
        self._settle()
        self._writer.save(self.folder(step) / STATE, _leaves(state))
        self._pending = step

    def restore(self, step: int, wanted: Tree) -> Tree:
        """The state of a step, as a tree like `wanted`, whose shardings it gets.

        Raises:
            CheckpointError: unreadable, or of other shapes than wanted.
        """
        leaves = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in _leaves(wanted).items()
        }
        found = orbax.restore(self.folder(step) / STATE, leaves)
        self._pending = step  # the link to it may not have been made
        return jax.tree.unflatten(jax.tree.structure(wanted), [found[name] for name in sorted(found)])

    def _whole(self) -> list[int]:
        # Orbax writes into a folder with another name and renames it: what has the plain name is whole.
        return sorted(int(path.parent.name) for path in self._folder.glob(f"*/{STATE}") if path.parent.name.isdigit())

    def _settle(self) -> None:
        """After a checkpoint became whole: the link to it, and those that are too many."""
        if self._pending is None or jax.process_index() != 0:
            return
        link = self._folder / f".{LAST}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder(self._pending).name)
        os.replace(link, self._folder / LAST)
        self._pending = None
        for step in self._whole()[: -self._keep]:
            self._remove(self.folder(step))

    def _remove(self, folder: Path) -> None:
        # Under another name first: one that was removed in part would look whole.
        removed = folder.with_name(f"{REMOVED}{folder.name}")
        shutil.rmtree(removed, ignore_errors=True)
        os.replace(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _tidy(self) -> None:
        for draft in (*self._folder.glob(f"{REMOVED}*"), *self._folder.glob(f"*/.{POLICY}-*")):
            shutil.rmtree(draft, ignore_errors=True)
        for folder in self._folder.glob("[0-9]*"):
            if folder.name.isdigit() and not (folder / STATE).is_dir():
                self._remove(folder)


def _leaves(state: Any) -> dict[str, Any]:
    # By position: Orbax would make files and folders of optax's own structure otherwise.
    return {f"{i:05}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
