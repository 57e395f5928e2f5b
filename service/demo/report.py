"""What an evaluation found and all that is needed to repeat it, as JSON."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from service.demo.arm import HORIZON, LIFTED, RATE
from service.demo.episodes import Score
from service.demo.film import film_name
from service.demo.tasks import Task

REPORT, FILMS = "eval.json", "films"
PACKAGES = ("robojax", "jax", "jaxlib", "flax", "numpy", "mujoco", "aiortc", "av")


@dataclass
class Evaluation:
    """An evaluation: what was asked for, what came of it so far.

    Attributes:
        policy: a folder, or a repo id of the Hub.
        found: of the policy and of the way its answers took, as it becomes known.
    """

    policy: str
    revision: str | None
    task: Task
    seeds: Sequence[int]
    is_filmed: bool
    score: Score = field(default_factory=Score)
    found: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        outcomes = self.score.outcomes
        return {
            "is_complete": len(outcomes) == len(self.seeds),
            "policy": {"path": self.policy, "revision": self.revision, "files": digests(self.policy)},
            "task": {
                "name": self.task.name,
                "instructions": self.task.instructions,
                "ticks": HORIZON,
                "rate": RATE,
                "lifted_above_m": LIFTED,
            },
            "seeds": {"first": self.seeds[0], "last": self.seeds[-1]},
            "run": self.found,
            "machine": {
                "system": platform.platform(),
                "processors": os.cpu_count(),
                "python": platform.python_version(),
                "drawn_with": os.environ.get("MUJOCO_GL"),
                "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
            },
            "all": summary(self.score),
            "by_instruction": {name: summary(score) for name, score in self.score.by_instruction().items()},
            "episodes": [
                asdict(outcome) | ({"film": f"{FILMS}/{film_name(outcome)}"} if self.is_filmed else {})
                for outcome in outcomes
            ],
        }

    def save(self, folder: Path) -> Path:
        """Writes it; the file is there only when it is whole.

        Raises:
            OSError: the disk does not take it.
        """
        path = folder / REPORT
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")
        os.replace(partial, path)
        return path


def summary(score: Score) -> dict[str, Any]:
    """Counts, and the share with its interval."""
    return {
        "episodes": score.done,
        "lifted": score.lifted,
        "wrong": score.wrong,
        "share": score.lifted / score.done if score.done else None,
        "wilson_95": score.interval,
    }


def digests(policy: str) -> Mapping[str, str] | None:
    """SHA-256 of the files of a policy's folder; None for a repo of the Hub, whose commit says as much."""
    folder = Path(policy)
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return {path.name: _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
