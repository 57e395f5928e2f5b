"""Folder of a training run with LeRobot's names: its claim, checkpoints, exported policy.

``checkpoints/<step>`` has ``training_state`` (Orbax) and ``pretrained_model``; ``checkpoints/last`` links to a step.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmodels.checkpoints import orbax
from jaxmodels.checkpoints.backbones import Backbone
from jaxmodels.data import Dataset
from jaxmodels.errors import TrainingError
from jaxmodels.normalization import Normalization, build_normalization
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar
from jaxmodels.training.initial_policy import Start
from jaxmodels.weights import not_finite

SETUP, METRICS, POLICY_FOLDER = "training.json", "metrics.jsonl", "policy"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def claim_folder(output: Path, setup: dict[str, Any], *, resume: bool) -> None:
    """Write a new run's settings to its folder, or compare a resumed run's.

    Raises:
        TrainingError: the folder holds a run and `resume` is False, or its set-up differs (all differences).
    """
    path = output / SETUP
    text = json.dumps(setup, indent=2) + "\n"
    if not path.exists():
        if output.is_dir() and any(entry != _draft_path(path) for entry in output.iterdir()):
            raise TrainingError(f"{output}: exists and holds no training; choose another --output_dir")
        output.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
        return
    if not resume:
        raise TrainingError(f"{output}: holds a training; add --resume=true to continue it, or choose another folder")
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise TrainingError(f"{path}: unreadable ({error}); choose another --output_dir") from error
    if differing := _list_differences("", stored, json.loads(text)):
        raise TrainingError(
            f"{output}: holds a run with another set-up ({'; '.join(differing)}); choose another folder"
        )
    for draft in output.glob(f".{POLICY_FOLDER}-*"):  # Remove drafts of a killed run.
        shutil.rmtree(draft, ignore_errors=True)


def _list_differences(where: str, stored: Any, requested: Any) -> list[str]:
    if isinstance(stored, dict) and isinstance(requested, dict):
        names = sorted({*stored, *requested})
        return [
            line
            for name in names
            for line in _list_differences(f"{where}.{name}", stored.get(name), requested.get(name))
        ]
    return [] if stored == requested else [f"{where.removeprefix('.')}: was {stored!r}, now {requested!r}"]


def cut_metrics(output: Path, step: int) -> float:
    """Drop lines of metrics after the last checkpoint of a killed run; returns the seconds of the other lines."""
    path = output / METRICS
    if not path.exists():
        return 0.0
    # A kill may have truncated the last line.
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    remaining = [line for line in lines if line["step"] <= step]
    _replace(path, "".join(json.dumps(line) + "\n" for line in remaining))
    return float(remaining[-1]["seconds"]) if remaining else 0.0


@contextmanager
def explain_write_errors(output: Path) -> Iterator[None]:
    """Context that re-raises OSErrors of a full disk with the run and the next step in their text."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.errno not in FULL:
            raise
        raise OSError(
            f"{output}: cannot be written ({error.strerror or error}); free space or grant write access, then continue "
            "the run (--resume=true): its checkpoints are complete"
        ) from error


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    draft = _draft_path(path)
    draft.write_text(text)
    os.replace(draft, path)


def _draft_path(path: Path) -> Path:
    return path.with_name(f".{path.name}")


STATE, POLICY, LAST = "training_state", "pretrained_model", "last"

REMOVED = ".removed-"  # Prefix of folders that are being removed.

Tree = TypeVar("Tree")


class Snapshots:
    """Checkpoints of a run, of which the newest `keep` stay; removes incomplete checkpoints of killed runs.

    Raises:
        OSError: a checkpoint cannot be written; raised by the next `save` or at the end.
    """

    def __init__(self, folder: Path, *, keep: int):
        self._folder, self._keep = folder, keep
        self._writer = orbax.Writer()
        self._pending: int | None = None

    def __enter__(self) -> "Snapshots":
        if jax.process_index() == 0:
            self._remove_incomplete()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._writer.__exit__(kind, *details)
        if kind is None:
            self._finish_pending()

    def folder(self, step: int) -> Path:
        return self._folder / f"{step:06}"

    @property
    def newest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self._list_complete_steps(), default=None)

    def save(self, step: int, state: Any) -> None:
        """Begin to write a checkpoint, after the previous checkpoint is complete."""
        self._writer.wait()
        self._finish_pending()
        self._writer.save(self.folder(step) / STATE, _leaves(state))
        self._pending = step

    def restore(self, step: int, target: Tree) -> Tree:
        """Return a step's state as a tree like `target` with its shardings; raises CheckpointError on a misfit."""
        leaves = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in _leaves(target).items()
        }
        restored = orbax.restore(self.folder(step) / STATE, leaves)
        self._pending = step  # The link to it may be missing.
        return jax.tree.unflatten(jax.tree.structure(target), [restored[name] for name in sorted(restored)])

    def _list_complete_steps(self) -> list[int]:
        # Orbax renames a folder when it is complete.
        return sorted(int(path.parent.name) for path in self._folder.glob(f"*/{STATE}") if path.parent.name.isdigit())

    def _finish_pending(self) -> None:
        """Link to the pending checkpoint, which is complete, and remove the oldest checkpoints."""
        if self._pending is None or jax.process_index() != 0:
            return
        link = self._folder / f".{LAST}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder(self._pending).name)
        os.replace(link, self._folder / LAST)
        self._pending = None
        for step in self._list_complete_steps()[: -self._keep]:
            self._remove(self.folder(step))

    def _remove(self, folder: Path) -> None:
        # Renamed first, because a partly removed folder would look complete.
        removed = folder.with_name(f"{REMOVED}{folder.name}")
        shutil.rmtree(removed, ignore_errors=True)
        os.replace(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _remove_incomplete(self) -> None:
        for draft in (*self._folder.glob(f"{REMOVED}*"), *self._folder.glob(f"*/.{POLICY}-*")):
            shutil.rmtree(draft, ignore_errors=True)
        for folder in self._folder.glob("[0-9]*"):
            if folder.name.isdigit() and not (folder / STATE).is_dir():
                self._remove(folder)


def _leaves(state: Any) -> dict[str, Any]:
    # Names are positions, because Orbax would create a folder for each part of optax's structure.
    return {f"{i:05}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


# Mean and standard deviation of ImageNet.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def derive_normalization(dataset: Dataset, start: Start, *, use_imagenet_stats: bool) -> Normalization:
    """Return a policy's normalization from a dataset's statistics.

    `use_imagenet_stats` takes cameras' mean and spread from the backbone, or else from ImageNet.
    """
    policy, stats = start.policy, dict(dataset.statistics())
    if use_imagenet_stats:
        mean, std = _colours(start.backbone)
        for camera in policy.cameras:
            stats[camera.name] = {**stats[camera.name], "mean": mean, "std": std}
    known = {feature.name for feature in (*policy.input_features, *policy.output_features)}
    selected = {name: values for name, values in stats.items() if name in known}
    return build_normalization(policy.input_features, policy.output_features, policy.normalization_mapping, selected)


def write_policy(
    folder: Path, weights: Mapping[str, np.ndarray], start: Start, normalization: Normalization, dataset: Dataset
) -> None:
    """Write a trained policy in LeRobot's layout; raises TrainingError if weights are not finite."""
    if wrong := not_finite(weights):
        raise TrainingError(f"weights hold a NaN or an infinity: {', '.join(sorted(wrong)[:5])}; nothing is written")
    policy = start.policy
    if policy.pretrained_backbone_weights is not None:
        # LeRobot would download these weights before it reads the policy's.
        policy = replace(policy, pretrained_backbone_weights=None)
    sidecar = Sidecar(rate=dataset.fps, joint_names=dataset.joint_names)
    lerobot_folder.write_checkpoint(folder, Checkpoint(policy, weights, normalization, sidecar, start.tokenizer))


def _colours(backbone: Backbone | None) -> tuple[np.ndarray, np.ndarray]:
    mean, std = IMAGENET
    if backbone is not None and backbone.mean is not None and backbone.std is not None:
        mean, std = backbone.mean, backbone.std
    return np.asarray(mean, np.float32).reshape(3, 1, 1), np.asarray(std, np.float32).reshape(3, 1, 1)
