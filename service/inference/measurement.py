"""Measured speed of a policy or a model on this machine, and whether it is enough for a rate."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxmodels import Requirements
from service.inference.loaded_policy import Policy, task_input

if TYPE_CHECKING:
    from jaxmodels import LoadedModel  # An import at runtime takes seconds, because it imports JAX.

Fit = Literal["fits", "fits, thinking less often", "does not fit"]


@dataclass(frozen=True)
class Speed:
    """Measured seconds of one inference or forward pass, numpy to numpy, after warm-up.

    Attributes:
        compile: seconds of the first inference of its shapes.
        stages: median seconds by stage.
        runs: number of measurements.
    """

    compile: float
    p50: float
    p99: float
    stages: Mapping[str, float]
    runs: int


@dataclass(frozen=True)
class Verdict:
    """Whether a policy is fast enough for ``rate`` actions per second.

    Attributes:
        budget: seconds between observations that the policy was made for.
        covered: seconds that one chunk covers.
    """

    rate: float
    fit: Fit
    budget: float
    covered: float


def make_observation(requirements: Requirements, seed: int = 0) -> dict[str, np.ndarray]:
    """Make an observation that the policy accepts: noise in the images, zeros elsewhere; batch of 1."""
    random, steps = np.random.default_rng(seed), requirements.observation_steps
    leading = (1,) if steps == 1 else (1, steps)
    observation: dict[str, np.ndarray] = {
        f"observation.images.{camera}": random.integers(0, 256, (*leading, height, width, 3), np.uint8)
        for camera, (height, width) in requirements.cameras.items()
    }
    if requirements.state is not None:
        observation["observation.state"] = np.zeros((*leading, requirements.state), np.float32)
    if requirements.environment_state is not None:
        observation["observation.environment_state"] = np.zeros((*leading, requirements.environment_state), np.float32)
    return observation | (task_input("go") if requirements.language else {})


def measure_policy(
    policy: Policy,
    *,
    runs: int = 100,
    seconds: float = 10.0,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Compile a policy for its own sizes, warm up, then time at most ``runs`` inferences or ``seconds``."""
    observation = make_observation(policy.requirements)
    started = clock()
    policy.compile(1)
    compiled = clock() - started
    return _time(lambda: policy.act(observation), lambda: policy.timings, compiled, runs, seconds, warm_up, clock)


def measure_model(
    model: "LoadedModel",
    *,
    runs: int = 100,
    seconds: float = 10.0,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Compile a model for one element of its own size, then time at most ``runs`` passes or ``seconds``."""
    inputs = model.example()
    compiled = model.compile(inputs)
    return _time(lambda: model.forward(inputs), lambda: model.timings, compiled, runs, seconds, warm_up, clock)


def _time(
    call: Callable[[], object],
    timings: Callable[[], Mapping[str, float]],
    compiled: float,
    runs: int,
    seconds: float,
    warm_up: int,
    clock: Callable[[], float],
) -> Speed:
    for _ in range(warm_up):
        call()
    samples: list[float] = []
    stages: dict[str, list[float]] = {}
    end = clock() + seconds
    while len(samples) < runs and (clock() < end or len(samples) < 5):
        started = clock()
        call()
        samples.append(clock() - started)
        for stage, spent in timings().items():
            stages.setdefault(stage, []).append(spent)
    p50, p99 = np.percentile(samples, (50, 99))
    medians = {stage: float(np.median(spent)) for stage, spent in stages.items()}
    return Speed(compiled, float(p50), float(p99), medians, len(samples))


def assess_speed(requirements: Requirements, speed: Speed, rate: float) -> Verdict:
    """Return whether a policy of this speed keeps up with ``rate`` actions per second.

    A chunk must last while its successor is asked for and computed, from a frame that is itself that old: twice an
    inference, and a tick for each of the two. Within the budget, the policy also looks as often as it was made for.
    """
    steps = 1 if requirements.temporal_ensemble_coeff is not None else requirements.action_steps
    budget, covered = steps / rate, requirements.chunk / rate
    fit: Fit
    if 2 * speed.p99 + 2 / rate > covered and requirements.chunk > 1:
        fit = "does not fit"
    elif speed.p99 > budget:
        fit = "does not fit" if requirements.chunk == 1 else "fits, thinking less often"
    else:
        fit = "fits"
    return Verdict(rate, fit, budget, covered)
