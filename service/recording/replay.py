"""Open-loop comparison of a recording with a policy; plots."""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels import Requirements
from jaxmodels.types import TASK
from service.control.joints import have_same_joints
from service.inference.loaded_policy import Policy, task_input
from service.recording.dataset import IMAGES, STATE
from service.recording.steps import NO_STEPS, RecordingError, SourceInfo, Step, StepSource

_NUMBERED = re.compile(r"(joint|action)_\d+")  # Names of joints without names.


class PolicyMismatch(Exception):
    """The policy does not fit the recording; the text lists all reasons."""


@dataclass
class ReplayEpisode:
    """One episode.

    Attributes:
        recorded: recorded actions (n, a).
        predicted: actions (n, a) of the policy for the same ticks, or NaN.
        queried: ticks at which the policy ran.
    """

    recorded: np.ndarray
    predicted: np.ndarray
    queried: list[int]


@dataclass(frozen=True)
class JointError:
    """Error of one joint, in its unit and in % of its range (None if the range is unknown)."""

    name: str
    mean: float
    largest: float
    mean_percent: float | None
    largest_percent: float | None


@dataclass
class ReplayReport:
    """Comparison of a recording with a policy; ``seconds`` are the durations of all inferences."""

    info: SourceInfo
    episodes: list[ReplayEpisode] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of compared ticks."""
        return sum(int(np.isfinite(episode.predicted).all(1).sum()) for episode in self.episodes)

    def joint_errors(self) -> list[JointError]:
        """Return the error of each joint over all episodes."""
        errors = np.concatenate([np.abs(episode.predicted - episode.recorded) for episode in self.episodes])
        mean, largest = np.nanmean(errors, 0), np.nanmax(errors, 0)
        span = np.asarray(self.info.high, float) - np.asarray(self.info.low, float)
        if not np.isfinite(span).all():
            done = np.concatenate([episode.recorded for episode in self.episodes])
            # An unknown range is replaced by the range of the joint in this recording.
            span = np.where(np.isfinite(span), span, np.ptp(done, axis=0))

        def percent(error: float, width: float) -> float | None:
            return float(100 * error / width) if width > 0 else None

        return [
            JointError(name, float(one), float(most), percent(one, width), percent(most, width))
            for name, one, most, width in zip(self.info.joints, mean, largest, span, strict=True)
        ]

    @property
    def mean_percent(self) -> float | None:
        """Mean error over all joints that have a range, in % of it."""
        known = [joint.mean_percent for joint in self.joint_errors() if joint.mean_percent is not None]
        return sum(known) / len(known) if known else None


def check_policy(info: SourceInfo, requirements: Requirements) -> None:
    """Raise PolicyMismatch if the policy cannot run on this recording."""
    problems = []
    if requirements.action != len(info.joints):
        problems.append(f"its actions have {requirements.action} values, the recording's {len(info.joints)}")
    elif (
        requirements.joint_names is not None
        and not have_same_joints(requirements.joint_names, info.joints)
        and not all(_NUMBERED.fullmatch(name) for name in info.joints)
    ):
        problems.append(f"its joints are {list(requirements.joint_names)}, the recording's {list(info.joints)}")
    if requirements.state not in (None, len(info.joints)):
        problems.append(f"it reads a state of {requirements.state} values, the recording has {len(info.joints)}")
    if missing := sorted(set(requirements.cameras) - set(info.cameras)):
        have = ", ".join(info.cameras) or "none"
        problems.append(f"it needs the cameras {', '.join(missing)}, the recording has the cameras {have}")
    if requirements.language and not info.task.strip():
        problems.append("it reads an instruction, and the recording has none")
    if problems:
        raise PolicyMismatch("; ".join(problems))


def replay_recording(
    source: StepSource,
    policy: Policy,
    *,
    every: int | None = None,
    on_step: Callable[[Step, np.ndarray | None], None] = lambda step, chunk: None,
) -> ReplayReport:
    """Run the policy at regular ticks, and compare its chunks with the recorded actions of the next ticks.

    Args:
        every: ticks between two inferences. Defaults to the policy's ``action_steps``.
        on_step: called with every step, and with the chunk (t, a) of an inference.

    Raises:
        PolicyMismatch: the policy does not fit the recording.
        RecordingError: the recording cannot be read, or is empty.
    """
    stride = every or policy.requirements.action_steps
    report = ReplayReport(source.info)
    actions: list[np.ndarray] = []
    chunks: dict[int, np.ndarray] = {}
    episode: int | None = None
    for step, observation in read_observations(source, policy.requirements, stride):
        if step.episode != episode:
            _finish_episode(report, actions, chunks, stride)
            actions, chunks, episode = [], {}, step.episode
        chunk = None
        if observation is not None:
            began = time.perf_counter()
            chunk = policy.act(observation)[0]
            report.seconds.append(time.perf_counter() - began)
            chunks[len(actions)] = chunk
        actions.append(step.action)
        on_step(step, chunk)
    _finish_episode(report, actions, chunks, stride)
    if not report.episodes:
        raise RecordingError(f"there is nothing to play: {NO_STEPS}")
    return report


def read_observations(
    source: StepSource, requirements: Requirements, stride: int
) -> Iterator[tuple[Step, dict[str, np.ndarray] | None]]:
    """Yield every step, with the policy's observation at each ``stride``-th tick of an episode.

    Raises:
        PolicyMismatch: the policy does not fit the recording.
        RecordingError: the recording cannot be read.
    """
    check_policy(source.info, requirements)
    # The recording may have several ticks per step of the policy.
    ticks_per_step = max(round(source.info.rate / (requirements.rate or source.info.rate)), 1)
    observations: deque[dict[str, np.ndarray]] = deque(maxlen=(requirements.observation_steps - 1) * ticks_per_step + 1)
    episode, tick = None, 0
    for step in source.steps():
        if step.episode != episode:
            episode, tick = step.episode, 0
            observations.clear()
        is_due = tick % stride == 0
        if requirements.observation_steps > 1 or is_due:
            observations.append(_build_observation(step, requirements))
        yield step, _with_history(observations, requirements, ticks_per_step) if is_due else None
        tick += 1


def _finish_episode(
    report: ReplayReport, actions: list[np.ndarray], chunks: Mapping[int, np.ndarray], stride: int
) -> None:
    if not actions:
        return
    recorded = np.stack(actions).astype(np.float64)
    predicted = np.full_like(recorded, np.nan)
    for start, chunk in chunks.items():
        part = chunk[: min(stride, len(actions) - start)]
        predicted[start : start + len(part)] = part
    report.episodes.append(ReplayEpisode(recorded, predicted, sorted(chunks)))


def _build_observation(step: Step, requirements: Requirements) -> dict[str, np.ndarray]:
    observation = {f"{IMAGES}{camera}": step.pictures[camera].pixels[None] for camera in requirements.cameras}
    if requirements.state is not None:
        observation[STATE] = step.state[None].astype(np.float32)
    return observation | task_input(step.task) if requirements.language else observation


def _with_history(
    observations: Sequence[dict[str, np.ndarray]], requirements: Requirements, ticks_per_step: int
) -> dict[str, np.ndarray]:
    """Return the policy's newest observations, stacked on an axis of time if it reads several.

    The first observation of an episode also replaces earlier observations, as in LeRobot.
    """
    if requirements.observation_steps == 1:
        return observations[-1]
    moments = [
        observations[max(len(observations) - 1 - back * ticks_per_step, 0)]
        for back in reversed(range(requirements.observation_steps))
    ]
    return {
        name: value if name == TASK else np.stack([moment[name] for moment in moments], axis=1)
        for name, value in observations[-1].items()
    }


WIDTH, ROW_HEIGHT = 11.0, 1.7  # Inches.


def save_plot(path: Path, report: ReplayReport, title: str) -> None:
    """Plot recorded and predicted actions, in the format of the file's ending.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the format.
    """
    # A figure without pyplot needs no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    joints, rate = report.joint_errors(), report.info.rate
    figure = Figure(figsize=(WIDTH, ROW_HEIGHT * len(joints) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(joints), 1, sharex=True, squeeze=False)[:, 0]
    ends = np.cumsum([len(episode.recorded) for episode in report.episodes])
    for number, (joint, axis) in enumerate(zip(joints, axes, strict=True)):
        start = 0
        for end, episode in zip(ends, report.episodes, strict=True):
            seconds = np.arange(start, end) / rate
            is_first = start == 0
            axis.plot(seconds, episode.recorded[:, number], color="C0", label="recorded" if is_first else None)
            axis.plot(seconds, episode.predicted[:, number], color="C1", lw=1, label="policy" if is_first else None)
            axis.plot(seconds[episode.queried], episode.predicted[episode.queried, number], ".", color="C1", ms=3)
            if end != ends[-1]:
                axis.axvline(end / rate, color="0.7", lw=0.8, ls="--")
            start = int(end)
        share = "" if joint.mean_percent is None else f" ({joint.mean_percent:.1f} %)"
        axis.set_ylabel(joint.name)
        axis.set_title(f"mean error {joint.mean:.2f}{share}, largest {joint.largest:.2f}", loc="right", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper left", fontsize=8)
    axes[-1].set_xlabel("seconds")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


INSTALL = "pip install -e '.[rerun]'"


class RerunViewer:
    """Rerun viewer that shows steps as they are replayed."""

    def __init__(self, info: SourceInfo, save: Path | None):
        """Open a viewer, or write a file for the viewer.

        Raises:
            ImportError: Rerun is not installed.
            RuntimeError: the viewer does not start.
        """
        import rerun  # pyright: ignore[reportMissingImports] - an extra

        self._rerun: Any = rerun
        self._info = info
        self._step = 0
        rerun.init("robojax replay", spawn=save is None)
        if save is not None:
            rerun.save(save)

    def show(self, step: Step, chunk: np.ndarray | None) -> None:
        """Show one step, and the policy's chunk if the policy ran."""
        rerun, rate = self._rerun, self._info.rate
        rerun.set_time("tick", duration=self._step / rate)
        for camera, picture in step.pictures.items():
            rerun.log(f"cameras/{camera}", rerun.Image(picture.pixels).compress(jpeg_quality=85))
        for number, joint in enumerate(self._info.joints):
            rerun.log(f"joints/{joint}/measured", rerun.Scalars(float(step.state[number])))
            rerun.log(f"joints/{joint}/recorded", rerun.Scalars(float(step.action[number])))
        if chunk is not None:
            for ahead, action in enumerate(chunk):
                rerun.set_time("tick", duration=(self._step + ahead) / rate)
                for number, joint in enumerate(self._info.joints):
                    rerun.log(f"joints/{joint}/policy", rerun.Scalars(float(action[number])))
        self._step += 1
