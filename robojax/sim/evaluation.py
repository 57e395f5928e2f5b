"""Closed-loop evaluation of a policy without a server, and its JSON report."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels import Policy, list_policy_files
from jaxmodels.types import TASK
from robojax.sim.arm import CAMERA, FRAME, HORIZON, LIFTED, RATE, Arm
from robojax.sim.tasks import PICK, Outcome, Score, Task
from robojax.sim.videos import film_name, save_film

REPORT, FILMS = "eval.json", "films"
PACKAGES = ("robojax", "jax", "jaxlib", "flax", "numpy", "mujoco", "aiortc", "av")


@dataclass
class Evaluation:
    """Settings and `results` of an evaluation; `policy` is a folder or a repo id of the Hub."""

    policy: str
    revision: str | None
    task: Task
    seeds: Sequence[int]
    is_filmed: bool
    score: Score = field(default_factory=Score)
    results: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The report: settings, results, episodes, versions."""
        outcomes = self.score.outcomes
        return {
            "is_complete": len(outcomes) == len(self.seeds),
            "policy": {"path": self.policy, "revision": self.revision, "files": hash_policy_files(self.policy)},
            "task": {
                "name": self.task.name,
                "instructions": self.task.instructions,
                "ticks": HORIZON,
                "rate": RATE,
                "lifted_above_m": LIFTED,
            },
            "seeds": {"first": self.seeds[0], "last": self.seeds[-1]},
            "run": self.results,
            "machine": {
                "system": platform.platform(),
                "processors": os.cpu_count(),
                "python": platform.python_version(),
                "drawn_with": os.environ.get("MUJOCO_GL"),
                "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
            },
            "all": summarize_score(self.score),
            "by_instruction": {name: summarize_score(score) for name, score in self.score.by_instruction().items()},
            "episodes": [
                asdict(outcome) | ({"film": f"{FILMS}/{film_name(outcome)}"} if self.is_filmed else {})
                for outcome in outcomes
            ],
        }

    def save(self, folder: Path) -> Path:
        """Write the report, which appears whole; raises OSError if it cannot be written."""
        path = folder / REPORT
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")
        os.replace(partial, path)
        return path


def summarize_score(score: Score) -> dict[str, Any]:
    """Counts, success rate and its confidence interval."""
    return {
        "episodes": score.done,
        "lifted": score.lifted,
        "wrong": score.wrong,
        "share": score.lifted / score.done if score.done else None,
        "wilson_95": score.interval,
    }


def hash_policy_files(policy: str) -> Mapping[str, str] | None:
    """SHA-256 of the files in a policy's folder; None for a repository, whose commit identifies it."""
    folder = Path(policy)
    if not folder.is_dir():
        return None
    return {name: _digest(folder / name) for name in list_policy_files(folder)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def evaluate(
    policy: Policy,
    seeds: Sequence[int],
    *,
    task: Task = PICK,
    delay: int = 0,
    films: Path | None = None,
) -> Iterator[Outcome]:
    """Play one episode per seed, as fast as possible.

    Args:
        delay: ticks between an observation and the first action of its chunk, as in a real loop: the arm executes as
            many actions of the chunk before, and as many actions of the new chunk are dropped.
        films: a folder for a video of each episode, which costs a picture per tick; None draws only what is seen.

    Raises:
        ObservationError: the policy needs something that this arm does not have.
        RuntimeError: nothing here can draw without a screen.
        ValueError: fewer actions come of a chunk than are to be executed.
    """
    steps = policy.requirements.action_steps
    if steps + delay > policy.requirements.chunk:
        raise ValueError(
            f"{steps} actions of each chunk after a delay of {delay} are more than the {policy.requirements.chunk} "
            "there are; give a shorter delay"
        )
    arm = Arm(task)
    try:
        for number, seed in enumerate(seeds, 1):
            arm.reset(seed)
            frames = _play(arm, policy, steps, delay, films is not None)
            outcome = Outcome(number, seed, arm.target_cube.instruction, arm.is_lifted, arm.wrong, HORIZON)
            if films is not None:
                save_film(films, frames, outcome)
            yield outcome
    finally:
        arm.close()


def _play(arm: Arm, policy: Policy, steps: int, delay: int, is_filmed: bool) -> list[np.ndarray]:
    """One episode; what the camera saw at every tick if it is filmed."""
    plan: list[np.ndarray] = []
    frames: list[np.ndarray] = []
    for tick in range(HORIZON):
        is_due = tick % steps == 0
        if is_due or is_filmed:
            frames.append(arm.picture(CAMERA, *FRAME))
        if is_due:
            chunk = list(policy.act(_observation(arm, frames[-1], policy.requirements.language))[0])
            plan = plan[:delay] + chunk[delay:] if plan else chunk
        arm.step(plan.pop(0))
    return frames


def _observation(arm: Arm, picture: np.ndarray, reads_language: bool) -> dict[str, np.ndarray]:
    observation = {
        "observation.state": arm.joints[None].astype(np.float32),
        f"observation.images.{CAMERA}": picture[None],
    }
    return observation | ({TASK: np.array([arm.target_cube.instruction])} if reads_language else {})
