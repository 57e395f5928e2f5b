"""Gate of quantized policies: the largest difference of an action from the unquantized policy's, joint by joint.

Without recorded observations, seeded ones are drawn from the policy's statistics. Results are kept next to compiled
programs by the content of the policy, so that a restart does not repeat them.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.devices import Placement, find_placement
from jaxmodels.errors import ConfigError
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.program import STILL
from jaxmodels.types import IMAGES, TASK, Requirements

logger = logging.getLogger(__name__)

LIMIT = 0.005  # Largest error of an action as a share of its joint's range.
SEEDED, COUNT = "seeded observations", 16
BLOCK = 16  # Pixels of one colour along each side, because cameras' images are smoother than noise.
TASKS = ("pick up the red cube", "open the drawer", "fold the towel", "put the cup on the plate")


@dataclass(frozen=True)
class JointDifference:
    """Largest error of a joint's action, in the unit of the policy's actions and as a share of the joint's range."""

    joint: str
    error: float
    share: float


@dataclass(frozen=True)
class ActionGate:
    """Comparison of a quantized policy with a reference.

    Attributes:
        dtype, reference: dtypes of both.
        observations: number of observations.
        source: where they come from.
        limit: largest accepted share.

    Example:
        >>> joints = (JointDifference("jaw", error=0.3, share=0.006),)
        >>> ActionGate("int8", "float32", 16, "seeded observations", 0.005, joints).passed
        False
    """

    dtype: str
    reference: str
    observations: int
    source: str
    limit: float
    joints: tuple[JointDifference, ...]

    @property
    def passed(self) -> bool:
        return all(joint.share <= self.limit for joint in self.joints)

    def describe(self) -> str:
        """Return the result in one sentence."""
        worst = max(self.joints, key=lambda joint: np.inf if np.isnan(joint.share) else joint.share)
        return (
            f"{self.dtype} {'passes' if self.passed else 'fails'} the gate of actions: {worst.joint} differs from "
            f"{self.reference} by up to {worst.error:.3g}, {100 * worst.share:.2f} % of its range (at most "
            f"{100 * self.limit:g} %), over {self.observations} {self.source}"
        )


def make_observations(checkpoint: Checkpoint, requirements: Requirements, count: int = COUNT) -> list[dict[str, Any]]:
    """Draw observations (batch of 1) from a policy's statistics: states within them, and images of coloured blocks.

    Numbers without statistics are in [-1, 1].
    """
    random, inputs = np.random.default_rng(0), checkpoint.normalization.inputs
    times = () if requirements.observation_steps == 1 else (requirements.observation_steps,)
    vectors = {"observation.state": (requirements.state, requirements.state_statistics)}
    if (environment := checkpoint.config.environment_state) is not None:
        vectors[environment.name] = (environment.shape[0], inputs.get_statistics(environment))
    observations = []
    for number in range(count):
        drawn: dict[str, Any] = {TASK: np.array([TASKS[number % len(TASKS)]])} if requirements.language else {}
        for name, (width, statistics) in vectors.items():
            if width is not None:
                vector = random.uniform(*_find_span(statistics), width)
                drawn[name] = np.broadcast_to(vector, (1, *times, width)).astype(np.float32)
        for camera, (height, width) in requirements.cameras.items():
            blocks = random.integers(0, 256, (-(-height // BLOCK), -(-width // BLOCK), 3), np.uint8)
            image = blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width]
            drawn[IMAGES + camera] = np.broadcast_to(image, (1, *times, height, width, 3)).copy()
        observations.append(drawn)
    return observations


def _find_span(statistics: Mapping[str, Sequence[float]] | None) -> tuple[Any, Any]:
    """Return the smallest and largest usual values."""
    for low, high in (("q01", "q99"), ("min", "max")):
        if statistics and low in statistics:
            return statistics[low], statistics[high]
    mean, spread = (np.asarray(statistics[name]) for name in ("mean", "std")) if statistics else (0.0, 0.5)
    return mean - 2 * spread, mean + 2 * spread


def compare_actions(
    expected: Sequence[np.ndarray],
    actual: Sequence[np.ndarray],
    requirements: Requirements,
    *,
    dtypes: tuple[str, str],
    source: str = SEEDED,
    limit: float = LIMIT,
) -> ActionGate:
    """Compare the actions of a quantized policy with a reference's.

    Args:
        expected, actual: chunk (1, t, a) of the reference and of the quantized policy for each observation.
        dtypes: names of the dtypes of the quantized policy and of the reference.

    Returns:
        The gate. A joint without a range in the checkpoint has the range of the reference's actions.
    """
    reference = np.concatenate(expected).astype(np.float64)
    errors = np.abs(np.concatenate(actual) - reference).max(axis=(0, 1))
    low, high = requirements.action_range or (reference.min(axis=(0, 1)), reference.max(axis=(0, 1)))
    rounding = STILL * (1 + np.abs(low))  # The whole range of a joint that never moved.
    shares = np.where(errors <= rounding, 0, errors / np.maximum(np.subtract(high, low), rounding))
    names = requirements.joint_names or [f"joint {number}" for number in range(len(errors))]
    joints = map(JointDifference, names, errors.tolist(), shares.tolist())
    return ActionGate(*dtypes, len(expected), source, limit, tuple(joints))


def measure_action_gate(
    policy: Any,
    reference: Any,
    observations: Iterable[Mapping[str, np.ndarray]] | None = None,
    *,
    source: str = SEEDED,
    limit: float = LIMIT,
) -> ActionGate:
    """Compare a quantized `Policy` with a reference.

    Args:
        observations: recorded observations; seeded ones when None. On this machine, `load_policy` uses the result over
            recorded observations from now on.
        source: where they come from.
        limit: largest share of a joint's range.

    Example:
        >>> from jaxmodels import Policy, load_policy
        >>> reference = load_policy("robojax/sim/policy", device="cpu")
        >>> gate = measure_action_gate(Policy(reference.checkpoint, dtype="int8", device="cpu"), reference, limit=0.05)
        >>> gate.dtype, gate.observations, gate.passed
        ('int8', 16, True)
    """
    needs, file = policy.requirements, _find_file(policy.checkpoint, policy.dtype, find_placement(policy.device))
    seen = make_observations(policy.checkpoint, needs) if observations is None else observations
    expected, actual = zip(*((reference.act(each), policy.act(each)) for each in seen), strict=True)
    dtypes = (policy.dtype, reference.dtype)
    gate = compare_actions(expected, actual, needs, dtypes=dtypes, source=source, limit=limit)
    if file is not None and (observations is not None or _read(file, limit) is None):
        try:
            file.parent.mkdir(exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(asdict(gate)))
            os.replace(partial, file)
        except OSError as error:
            logger.info("the result of a gate was not kept: %s", error)
    return gate


def _find_file(checkpoint: Checkpoint, dtype: str, placement: Placement) -> Path | None:
    """Return the file for a policy's result on a kind of device, by content; None without a folder for programs."""
    folder = use_compile_cache()
    if folder is None:
        return None
    with ThreadPoolExecutor() as pool:  # Hashing large arrays does not hold Python's lock.
        hashes = pool.map(
            lambda array: sha256(np.ascontiguousarray(array).data).hexdigest(), checkpoint.weights.values()
        )
    devices, normalization = placement.devices, checkpoint.normalization
    facts = (dtype, COUNT, devices[0].device_kind, len(devices), jax.__version__, version("robojax"))
    files = (*zip(checkpoint.weights, hashes, strict=True), checkpoint.config, checkpoint.tokenizer)
    content = repr((files, normalization.inputs, normalization.outputs, normalization.steps, facts))
    return folder / "gates" / f"{sha256(content.encode()).hexdigest()}.json"


def _read(file: Path | None, limit: float) -> ActionGate | None:
    """Return the kept result with this limit; None without one."""
    try:
        values = json.loads(file.read_bytes()) if file is not None else None
        joints = values and tuple(JointDifference(**joint) for joint in values["joints"])
        return values and ActionGate(**values | {"limit": limit, "joints": joints})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def build_gated(
    build: Callable[[str], Any],
    checkpoint: Checkpoint,
    names: Sequence[str],
    usual: str,
    placement: Placement,
    limit: float,
    *,
    may_fall_back: bool,
) -> Any:
    """Build a policy with the first of the dtypes `names` that passes the gate of actions.

    Args:
        build: builds the policy for a name of a dtype.
        usual: dtype of the reference, and of the policy if no other passes and it `may_fall_back`.

    Raises:
        ConfigError: the policy fails the gate, or has nothing to quantize.
    """
    reference, why = None, "8-bit numbers save no time on a CPU"
    for name in names:
        policy, gate = None, _read(_find_file(checkpoint, name, placement), limit)
        try:
            if gate is None:
                policy, reference = build(name), reference or build(usual)
                gate = measure_action_gate(policy, reference, limit=limit)
            why = gate.describe()
            if gate.passed:
                logger.info("dtype %s: %s", name, why)
                return policy or build(name)
        except ConfigError as error:  # There is nothing to quantize.
            why = str(error)
        if not may_fall_back:
            raise ConfigError(
                f"{why}; use dtype {usual} or a larger action_error_percent, or test it with recorded observations: "
                f"robojax check POLICY --dtype {name} --observations RECORDING"
            )
    logger.info("dtype auto: %s, because %s", usual, why)
    return reference or build(usual)
