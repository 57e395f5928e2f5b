"""Shadow policy, which is compared with the first policy and never moves the robot."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from service.control.joints import have_same_joints
from service.errors import PolicyError, PolicyFailed
from service.inference.batching import read_layout
from service.inference.engine import Engine
from service.inference.loaded_policy import FrameSizes, LoadedPolicy, LoadPolicy, RenamedPolicy, select_features
from service.stats import Recent

logger = logging.getLogger(__name__)

OBSERVATION, IMAGES = "observation.", "observation.images."  # Prefixes of the names of features and of images.


class ShadowRefused(PolicyError):
    """The shadow policy of a new session cannot be loaded; ``loc`` is its place in the request."""

    loc = ("body", "shadow_policy_path")


class Shadow:
    """Shadow policy of one session, whose errors only appear in its figures.

    Attributes:
        compared, skipped, errors: number of answered observations, of observations while it was busy, and of failures.
        last_error: last failure, or the reason why the shadow is not used; None without an error.
    """

    def __init__(
        self, path: str, loaded: LoadedPolicy, engine: Engine, requirements: Requirements, names: tuple[str, ...]
    ):
        """Create a shadow for the first policy's requirements and wire names of joints."""
        self.path = path
        self.compared = self.skipped = self.errors = 0
        self.last_error = _explain_mismatch(loaded.requirements, requirements, names)
        self._is_off = self.last_error is not None
        self._first_steps = requirements.observation_steps
        self._served = loaded
        self._engine = engine
        self._names = names
        self._total = np.zeros(len(names))
        self._largest = np.zeros(len(names))
        self._seconds = Recent(256)
        self._task: asyncio.Task[None] | None = None

    def compare(self, observation: Mapping[str, np.ndarray], chunk: np.ndarray) -> None:
        """Compare the first policy's answer (1, t, a) with the shadow's, unless the shadow is busy."""
        if self._is_off:
            return
        if self._task is not None and not self._task.done():
            self.skipped += 1
            return
        self._task = asyncio.create_task(self._compare(observation, chunk), name=f"shadow {self.path}")

    def get_stats(self) -> dict[str, object]:
        """Return the shadow's figures, JSON-ready; differences in the units of the joints."""
        mean = self._total / max(self.compared, 1)
        return {
            "policy_path": self.path,
            "commit": self._served.commit,
            "compared": self.compared,
            "skipped": self.skipped,
            "difference": {
                name: {"mean": round(float(mean[i]), 4), "max": round(float(self._largest[i]), 4)}
                for i, name in enumerate(self._names)
            }
            if self.compared
            else {},
            "inference_ms": self._seconds.percentiles_ms(50, 99),
            "errors": self.errors,
            "last_error": self.last_error,
        }

    async def close(self) -> None:
        """End the comparison."""
        self._is_off = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _compare(self, observation: Mapping[str, np.ndarray], chunk: np.ndarray) -> None:
        try:
            sizes = dict(read_layout(observation).frames)
            if not self._served.is_compiled(sizes):
                await self._compile(sizes)
                return  # The observation is outdated now.
            answer, seconds = await self._engine.run_trial(self._served, self._select_inputs(observation))
            self._add_comparison(answer, chunk, seconds)
        except PolicyFailed as error:
            self._note_failure(str(error))
        except Exception as error:
            logger.exception("the shadow policy %r failed", self.path)
            self._note_failure(f"{type(error).__name__}; the server's log says more")

    async def _compile(self, sizes: FrameSizes) -> None:
        try:
            await self._engine.compile(self._served, sizes)
        except PolicyFailed:
            self._is_off = True  # A retry would fail at every observation.
            raise

    def _select_inputs(self, observation: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Select the shadow's inputs from the first policy's features and newest observations."""
        requirements, steps = self._served.requirements, self._served.requirements.observation_steps
        features = dict(select_features(requirements, observation))
        if steps < self._first_steps:
            # Only observations have an axis of time.
            for name in (name for name in features if name.startswith(OBSERVATION)):
                features[name] = features[name][:, -1] if steps == 1 else features[name][:, -steps:]
        return features

    def _add_comparison(self, answer: object, chunk: np.ndarray, seconds: float) -> None:
        if not isinstance(answer, np.ndarray) or answer.ndim != 3 or answer.shape[::2] != chunk.shape[::2]:
            self._note_failure("it returned something that is not a chunk of actions")
            return
        if not np.isfinite(answer).all():
            self._note_failure("it returned values that are not finite")
            return
        steps = min(answer.shape[1], chunk.shape[1])
        difference = np.abs(answer[0, :steps].astype(np.float64) - chunk[0, :steps])
        self.compared += 1
        self._seconds.add(seconds)
        self._total += difference.mean(axis=0)
        np.maximum(self._largest, difference.max(axis=0), out=self._largest)

    def _note_failure(self, text: str) -> None:
        self.errors += 1
        self.last_error = text


@asynccontextmanager
async def load_shadow(
    path: str | None,
    revision: str | None,
    requirements: Requirements,
    names: tuple[str, ...],
    *,
    engine: Engine,
    load: LoadPolicy,
    notify: Callable[[str], None],
    rename: Mapping[str, str] | None = None,
) -> AsyncIterator[Shadow | None]:
    """Load the shadow policy of this path and revision, or yield None without a path.

    Args:
        rename: the first policy's camera names to the robot's names, which a shadow may have.

    Raises:
        ShadowRefused: the shadow cannot be loaded.
    """
    if path is None:
        yield None
        return
    loading = engine.policy_cache.open_policy(load, path, revision, lambda stage: notify(f"shadow policy: {stage}"))
    try:
        loaded = await loading.__aenter__()
    except PolicyError as error:
        raise ShadowRefused(f"shadow: {error}") from error
    own = {camera: name for camera, name in (rename or {}).items() if camera in loaded.requirements.cameras}
    if own and set(loaded.requirements.cameras) != set(requirements.cameras):
        with suppress(JaxModelsError):  # The shadow's figures then list its cameras.
            loaded = RenamedPolicy(loaded, own)
    shadow = Shadow(path, loaded, engine, requirements, names)
    del loaded
    try:
        yield shadow
    finally:
        await shadow.close()
        await loading.__aexit__(None, None, None)


def _explain_mismatch(shadow: Requirements, first: Requirements, names: tuple[str, ...]) -> str | None:
    """Return why the shadow's answers cannot be compared, or None. Chunks may have different lengths."""
    wrong = []
    if set(shadow.cameras) != set(first.cameras):
        wrong.append(f"it wants cameras {sorted(shadow.cameras)}, the session has {sorted(first.cameras)}")
    if shadow.action != first.action:
        wrong.append(f"its actions have {shadow.action} values, the session's {first.action}")
    elif shadow.joint_names is not None and not have_same_joints(shadow.joint_names, names):
        wrong.append(f"its joints are {list(shadow.joint_names)}, the session's {list(names)}")
    if shadow.controls_joints != first.controls_joints:
        wrong.append("only one policy commands targets of joints")
    width = first.action if first.controls_joints else first.state
    if shadow.state not in (None, width):
        wrong.append(f"its state has {shadow.state} values, the session's {width}")
    if shadow.environment_state is not None:
        wrong.append("it reads observation.environment_state, which no room carries")
    if shadow.observation_steps > first.observation_steps:
        wrong.append(f"it looks at {shadow.observation_steps} observations, the session's at {first.observation_steps}")
    if shadow.rate != first.rate:
        wrong.append(f"its actions are {shadow.rate} per second, the session's {first.rate}")
    return "it does not fit: " + "; ".join(wrong) if wrong else None
