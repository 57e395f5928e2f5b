"""Policies in engines of other processes."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import CheckpointError, ObservationError
from service.engines.messages import Loaded, Refusal
from service.errors import PolicyFailed
from service.inference.batching import FrameSizesKey
from service.inference.device_worker import DeviceGone
from service.inference.loaded_policy import FrameSizes, InferenceStuck, add_plan

_REFUSALS: Mapping[str, type[Exception]] = {
    "input": ObservationError,
    "policy": CheckpointError,
    "unknown": DeviceGone,
    "engine": DeviceGone,
    "stuck": InferenceStuck,
    "failed": PolicyFailed,
}


def check_answer(answer: Any) -> Any:
    """Return an engine's answer, or raise its refusal as an error.

    Raises:
        ObservationError: the policy refused its input.
        CheckpointError: the policy cannot be loaded.
        DeviceGone: the engine does not have the policy any more, or cannot be used.
        InferenceStuck: the policy did not return in time.
        PolicyFailed: the policy raised.
    """
    if isinstance(answer, Refusal):
        raise _REFUSALS[answer.kind](answer.text)
    return answer


class RemotePolicy:
    """A policy in an engine, which keeps it while this object is referenced.

    All methods but `is_compiled` wait for the engine, and `prepare_task` waits for a limited time.

    Attributes:
        commit: commit of the files, if known.
        requirements: what the policy needs, as the engine read it.
        device: name of the engine.
        handle: name of the policy in the engine.
        timings: seconds of the last `act` by stage.
    """

    def __init__(
        self,
        loaded: Loaded,
        engine: str,
        commit: str | None,
        *,
        ask: Callable[..., "Future[Any]"],
        ask_briefly: Callable[..., Any],
        copy: Callable[[str], "RemotePolicy"],
    ):
        """Wrap a policy that an engine has loaded.

        Args:
            ask, ask_briefly: see `EngineSet`.
            copy: returns the same policy in another engine.
        """
        self.commit = commit
        self.requirements: Requirements = loaded.requirements
        self.device = engine
        self.handle = loaded.handle
        self.timings: Mapping[str, float] = {}
        self._ask, self._ask_briefly, self._copy = ask, ask_briefly, copy
        self._loaded = loaded  # keeps the policy in the engine
        self._seconds = dict(loaded.seconds)

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run one inference that no robot waits for; see `Policy.act`. `RemoteWorker` sends the requests of robots."""
        chunk, seconds = self._call("try_out", dict(observation))
        self.timings = {"to_device": 0.0, "compute": seconds, "to_host": 0.0}
        return chunk

    def prepare_task(self, text: str, prompt_cut: str | None = None) -> int:
        """Encode an instruction ahead of ``act``; return how many of its tokens are cut off.

        Raises:
            ObservationError: the policy cannot read the instruction, or the engine does not encode it in time.
        """
        try:
            return check_answer(self._ask_briefly(self.device, "prepare_task", self.handle, text, prompt_cut))
        except TimeoutError as error:
            raise ObservationError(f"{error} while it encoded the instruction; use another instruction") from error

    def compile(self, batch: int = 1, cameras: FrameSizes | None = None, *, with_plan: bool = False) -> None:
        """Compile for frames of these sizes; the engine chooses the batch sizes."""
        frames = self._frames(cameras, with_plan)
        if frames not in self._seconds:
            self._seconds[frames] = self._call("compile", dict(frames))

    def is_compiled(self, batch: int = 1, cameras: FrameSizes | None = None, *, with_plan: bool = False) -> bool:
        """Return whether it is compiled, without asking the engine."""
        return self._frames(cameras, with_plan) in self._seconds

    def profile(self, batch: int = 1, cameras: FrameSizes | None = None, *, with_plan: bool = False) -> float:
        """Return the seconds of one inference that the engine measured when it compiled for these sizes."""
        return self._seconds[self._frames(cameras, with_plan)]

    def _frames(self, cameras: FrameSizes | None, with_plan: bool) -> FrameSizesKey:
        sizes = self.requirements.cameras if cameras is None else cameras
        return frozenset((add_plan(sizes, self.requirements) if with_plan else sizes).items())

    def on(self, device: str) -> "RemotePolicy":
        """Return the same policy in another engine, which may be making its copy already.

        Raises:
            DeviceGone, CheckpointError: as `PolicyReplication.copy`.
        """
        return self._copy(device)

    def _call(self, method: str, *arguments: Any) -> Any:
        return check_answer(self._ask(self.device, method, self.handle, *arguments).result())
