"""Gate of quantized policies: the largest difference of an action from the unquantized policy's, joint by joint.

Without recorded observations, seeded ones are drawn from the policy's statistics. Results are kept next to compiled
programs by the content of the policy, so that a restart does not repeat them, and that a result over recorded
observations replaces one over seeded observations.
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
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.devices import Placement, find_placement
from jaxmodels.errors import ConfigError
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.program import STILL
from jaxmodels.quantization import AUTO, AUTO_DTYPES
from jaxmodels.types import IMAGES, TASK, Requirements

logger = logging.getLogger(__name__)

LIMIT = 0.005  # Largest error of an action as a share of its joint's range.
SEEDED = "seeded observations"
COUNT = 16
BLOCK = 16  # Pixels of one colour along each side, because cameras' images are smoother than noise.
TASKS = ("pick up the red cube", "open the drawer", "fold the towel", "put the cup on the plate")


class JointDifference(NamedTuple):
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
    """

    dtype: str
    reference: str
    observations: int
    source: str
    limit: float
    joints: tuple[JointDifference, ...]

    @property
    def worst(self) -> JointDifference:
        return max(self.joints, key=lambda joint: np.inf if np.isnan(joint.share) else joint.share)

    @property
    def passed(self) -> bool:
        return all(joint.share <= self.limit for joint in self.joints)

    def describe(self) -> str:
        """Return the result in one sentence."""
        joint, verdict = self.worst, "passes" if self.passed else "fails"
        return (
            f"{self.dtype} {verdict} the gate of actions: {joint.joint} differs from {self.reference} by up to "
            f"{joint.error:.3g}, {100 * joint.share:.2f} % of its range (at most {100 * self.limit:g} %), over "
            f"{self.observations} {self.source}"
        )


def make_observations(checkpoint: Checkpoint, requirements: Requirements, count: int = COUNT) -> list[dict[str, Any]]:
    """Draw observations (batch of 1) from a policy's statistics: states within them, and images of coloured blocks.

    Numbers without statistics are in [-1, 1].
    """
    random, config = np.random.default_rng(0), checkpoint.config
    times = () if requirements.observation_steps == 1 else (requirements.observation_steps,)
    environment = config.environment_state
    vectors = {
        "observation.state": (requirements.state, requirements.state_statistics),
        "observation.environment_state": (
            requirements.environment_state,
            None if environment is None else checkpoint.normalization.inputs.get_statistics(environment),
        ),
    }
    observations = []
    for number in range(count):
        drawn: dict[str, Any] = {TASK: np.array([TASKS[number % len(TASKS)]])} if requirements.language else {}
        for name, (width, statistics) in vectors.items():
            if width is not None:
                vector = random.uniform(*_find_span(statistics or {}, width)).astype(np.float32)
                drawn[name] = np.broadcast_to(vector, (1, *times, width)).copy()
        for camera, (height, width) in requirements.cameras.items():
            blocks = random.integers(0, 256, (-(-height // BLOCK), -(-width // BLOCK), 3), np.uint8)
            image = blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width]
            drawn[IMAGES + camera] = np.broadcast_to(image, (1, *times, height, width, 3)).copy()
        observations.append(drawn)
    return observations


def _find_span(statistics: Mapping[str, Sequence[float]], width: int) -> tuple[np.ndarray, np.ndarray]:
    for low, high in (("q01", "q99"), ("min", "max")):
        if low in statistics and high in statistics:
            return np.asarray(statistics[low]), np.asarray(statistics[high])
    if "mean" in statistics:
        mean, spread = np.asarray(statistics["mean"]), 2 * np.asarray(statistics["std"])
        return mean - spread, mean + spread
    return -np.ones(width), np.ones(width)


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
    differences = np.abs(np.concatenate(actual) - reference)
    errors = differences.max(axis=(0, 1))
    if requirements.action_range is not None:
        low, high = map(np.asarray, requirements.action_range)
    else:
        low, high = reference.min(axis=(0, 1)), reference.max(axis=(0, 1))
    rounding = STILL * (1 + np.abs(low))  # The whole range of a joint that never moved.
    shares = np.where(errors <= rounding, 0, errors / np.maximum(high - low, rounding))
    names = requirements.joint_names or [f"joint {number}" for number in range(len(errors))]
    joints = map(JointDifference, names, errors.tolist(), shares.tolist())
    return ActionGate(*dtypes, len(expected), source, limit, tuple(joints))


def find_gate_file(checkpoint: Checkpoint, dtype: str, placement: Placement) -> Path | None:
    """Return the file for a policy's result on a kind of device, by content; None without a folder for programs."""
    folder = use_compile_cache()
    if folder is None:
        return None
    devices = placement.devices
    with ThreadPoolExecutor() as pool:  # Hashing large arrays does not hold Python's lock.
        arrays = pool.map(
            lambda array: sha256(np.ascontiguousarray(array).data).hexdigest(), checkpoint.weights.values()
        )
        content = [*zip(checkpoint.weights, arrays, strict=True)]
    facts = (dtype, COUNT, devices[0].device_kind, len(devices), jax.__version__, version("robojax"))
    normalization = checkpoint.normalization.inputs, checkpoint.normalization.outputs, checkpoint.normalization.steps
    parts = (content, checkpoint.config, normalization, checkpoint.tokenizer, facts)
    return folder / "gates" / f"{sha256(repr(parts).encode()).hexdigest()}.json"


def read_gate(file: Path | None, limit: float) -> ActionGate | None:
    """Return the kept result with another limit; None without one."""
    try:
        values = json.loads(file.read_bytes()) if file is not None else None
        return values and ActionGate(
            **values | {"limit": limit, "joints": tuple(JointDifference(*row) for row in values["joints"])}
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep_gate(file: Path | None, gate: ActionGate) -> None:
    """Keep a result; a folder that cannot be written is logged."""
    if file is None:
        return
    try:
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(gate)))
        os.replace(partial, file)
    except OSError as error:
        logger.info("the result of a gate was not kept: %s", error)


def build_gated(
    build: Callable[[str], Any], checkpoint: Checkpoint, dtype: str, usual: str, placement: Placement, limit: float
) -> Any:
    """Build a quantized policy that passes the gate of actions; ``auto`` falls back to the usual dtype.

    The reference is built first and released, so that both sets of weights are never in memory together.

    Args:
        build: builds the policy for a name of a dtype.
        usual: dtype of the reference.

    Raises:
        ConfigError: the policy fails the gate, or has nothing to quantize.
    """
    seen: list[dict[str, Any]] = []
    expected: list[np.ndarray] = []
    why = "8-bit numbers save no time on a CPU"
    for name in AUTO_DTYPES.get(placement.platform, ()) if dtype == AUTO else (dtype,):
        file = find_gate_file(checkpoint, name, placement)
        gate = read_gate(file, limit)
        if gate is None and not expected:
            reference = build(usual)
            seen = make_observations(checkpoint, reference.requirements)
            expected = [reference.act(observation) for observation in seen]
            del reference
        try:
            policy = build(name) if gate is None or gate.passed else None
        except ConfigError as error:  # There is nothing to quantize.
            if dtype != AUTO:
                raise
            why = str(error)
            continue
        if gate is None and policy is not None:
            actual = [policy.act(observation) for observation in seen]
            gate = compare_actions(expected, actual, policy.requirements, dtypes=(name, usual), limit=limit)
            keep_gate(file, gate)
        assert gate is not None, "the result is kept or was measured"
        why = gate.describe()
        if gate.passed and policy is not None:
            logger.info("dtype %s: %s", name, why)
            return policy
        del policy
        if dtype != AUTO:
            raise ConfigError(
                f"{why}; use dtype {usual} or a larger action_error_percent, or test it with recorded observations: "
                f"robojax check POLICY --dtype {name} --observations RECORDING"
            )
    logger.info("dtype auto: %s, because %s", usual, why)
    return build(usual)


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
        observations: recorded observations; seeded ones when None. `load_policy` uses the result over recorded
            observations from now on, on this machine.
        source: where they come from.
        limit: largest share of a joint's range.

    Example:
        >>> from jaxmodels import Policy, load_policy
        >>> reference = load_policy("robojax/sim/policy", device="cpu")
        >>> gate = measure_action_gate(Policy(reference.checkpoint, dtype="int8", device="cpu"), reference)
        >>> gate.dtype, gate.observations, gate.worst.joint
        ('int8', 16, 'Jaw')
    """
    needs = policy.requirements
    seen = make_observations(policy.checkpoint, needs) if observations is None else observations
    expected, actual = zip(*((reference.act(each), policy.act(each)) for each in seen), strict=True)
    dtypes = (policy.dtype, reference.dtype)
    gate = compare_actions(expected, actual, needs, dtypes=dtypes, source=source, limit=limit)
    if observations is not None:
        keep_gate(find_gate_file(policy.checkpoint, policy.dtype, find_placement(policy.device)), gate)
    return gate
