"""Closed-loop evaluation of a policy without a server, its JSON report, and videos of episodes."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import jaxmodels
from jaxmodels.types import TASK
from robojax.sim.arm import CAMERA, FRAME, HORIZON, LIFTED, RATE, SimulatedArm
from robojax.sim.tasks import PICK, Outcome, Score, Task, fisher

REPORT, FILMS = "eval.json", "films"
PACKAGES = ("robojax", "jax", "jaxlib", "flax", "numpy", "mujoco", "aiortc", "av")
STRIP = 40  # height in pixels of the caption below a picture
GREEN, RED = (30, 120, 50), (150, 40, 30)


@dataclass
class Evaluation:
    """Settings and ``results`` of an evaluation; ``policy`` is a folder or a Hub repo id."""

    policy: str
    revision: str | None
    task: Task
    seeds: Sequence[int]
    is_filmed: bool
    score: Score = field(default_factory=Score)
    results: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report: settings, results, episodes, versions."""
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
        """Write the report atomically; raise ``OSError`` if it cannot be written."""
        path = folder / REPORT
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")
        os.replace(partial, path)
        return path


def summarize_score(score: Score) -> dict[str, Any]:
    """Return counts, success rate and its confidence interval."""
    return {
        "episodes": score.done,
        "lifted": score.lifted,
        "wrong": score.wrong,
        "share": score.lifted / score.done if score.done else None,
        "wilson_95": score.interval,
    }


def hash_policy_files(policy: str) -> Mapping[str, str] | None:
    """Return the SHA-256 of the files in a policy's folder; None for a repository, which its commit identifies."""
    folder = Path(policy)
    if not folder.is_dir():
        return None
    return {name: _digest(folder / name) for name in jaxmodels.list_policy_files(folder)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def evaluate(
    policy: "jaxmodels.Policy",
    seeds: Sequence[int],
    *,
    task: Task = PICK,
    delay: int = 0,
    films: Path | None = None,
) -> Iterator[Outcome]:
    """Play one episode per seed, as fast as possible.

    Args:
        delay: ticks between an observation and the first action of its chunk, as in a real loop. During the delay, the
            arm executes actions of the previous chunk, and as many actions of the new chunk are dropped.
        films: folder for a video of each episode, which needs a picture per tick. None saves no videos.

    Raises:
        ObservationError: the policy needs an input that this arm lacks.
        RuntimeError: this machine cannot render without a screen.
        ValueError: a chunk has too few actions for ``action_steps`` and ``delay``.
    """
    steps = policy.requirements.action_steps
    if steps + delay > policy.requirements.chunk:
        raise ValueError(
            f"{steps} actions of each chunk after a delay of {delay} exceed its {policy.requirements.chunk} actions; "
            "give a shorter delay"
        )
    arm = SimulatedArm(task)
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


def _play(arm: SimulatedArm, policy: "jaxmodels.Policy", steps: int, delay: int, is_filmed: bool) -> list[np.ndarray]:
    """Play one episode; return its frames, one per tick if it is filmed."""
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


def _observation(arm: SimulatedArm, picture: np.ndarray, reads_language: bool) -> dict[str, np.ndarray]:
    observation = {
        "observation.state": arm.joints[None].astype(np.float32),
        f"observation.images.{CAMERA}": picture[None],
    }
    return observation | ({TASK: np.array([arm.target_cube.instruction])} if reads_language else {})


CHANCE = 0.05


@dataclass(frozen=True)
class SuccessGate:
    """Comparison of two policies' success in the same episodes.

    Attributes:
        lifted, reference_lifted: successes of the quantized policy and of the reference.
        probability: p value of `fisher`, if both are equally good.
    """

    episodes: int
    lifted: int
    reference_lifted: int
    probability: float

    @property
    def passed(self) -> bool:
        return self.probability >= CHANCE


def compare_success(policy: "jaxmodels.Policy", reference: "jaxmodels.Policy", seeds: Sequence[int]) -> SuccessGate:
    """Play the same episodes of the task ``pick`` with both policies; errors as in `evaluate`."""
    lifted, expected = (sum(outcome.lifted for outcome in evaluate(each, seeds)) for each in (policy, reference))
    count = len(seeds)
    return SuccessGate(count, lifted, expected, fisher(lifted, count, expected, count))


def film_name(outcome: Outcome) -> str:
    """Return the file name of an episode's video, which contains the result."""
    end = "lifted" if outcome.lifted else "missed" if outcome.wrong is None else "wrong"
    return f"{outcome.number:04d}-seed-{outcome.seed}-{end}.mp4"


def save_film(folder: Path, frames: Sequence[np.ndarray], outcome: Outcome) -> Path:
    """Write an episode's frames, uint8 (h, w, 3), one per tick, as H.264; the file is renamed when it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / film_name(outcome)
    partial = path.with_suffix(".partial")
    strip = _strip(frames[0].shape[1], outcome)
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            # Encode fast, because the next episode waits for it.
            quick = {"preset": "veryfast", "crf": "22"}
            stream: Any = container.add_stream("libx264", rate=Fraction(RATE), options=quick)
            stream.codec_context.thread_count = 1
            stream.height, stream.width, stream.pix_fmt = frames[0].shape[0] + STRIP, frames[0].shape[1], "yuv420p"
            for picture in frames:
                frame = av.VideoFrame.from_ndarray(np.concatenate((picture, strip)), "rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _strip(width: int, outcome: Outcome) -> np.ndarray:
    strip = Image.new("RGB", (width, STRIP), GREEN if outcome.lifted else RED)
    text = f"{outcome.instruction}\nseed {outcome.seed}: {outcome.verdict}"
    ImageDraw.Draw(strip).multiline_text((6, 4), text, font=ImageFont.load_default(12), spacing=3)
    return np.asarray(strip)
