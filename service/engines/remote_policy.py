"""Policies in engines of other processes: their copies, and the loader that has engines make them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmodels import PolicyFolder, Requirements, find_policy
from jaxmodels.errors import CheckpointError, JaxModelsError, ObservationError
from service.engines.messages import Loaded, LocalFolder, Refusal
from service.errors import PolicyFailed
from service.inference.device_worker import DeviceGone
from service.inference.loaded_policy import FrameSizes, InferenceStuck
from service.inference.policy_cache import summarize_error
from service.inference.policy_sources import copy_roots
from service.inference.sandbox import raise_if_cancelled

if TYPE_CHECKING:
    from service.engines.engine_set import EngineSet  # it imports this module

# Seconds between two polls of how far engines have loaded a policy.
POLL_PERIOD = 0.5
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


class PolicyReplication:
    """One policy's files, and the copies of it that engines make.

    Args:
        files: what engines load the policy from.
        is_update: whether it replaces a running policy, which continues unless all engines can load the new one. A
            first policy runs on the engines that can load it.
    """

    def __init__(self, engines: "EngineSet", files: LocalFolder, *, is_update: bool):
        self.engines = engines
        self.commit = files.commit
        self._files = files
        self._is_update = is_update
        self._copies: dict[str, Future[Loaded]] = {}  # not RemotePolicy, whose reference to this would make a cycle

    def begin(self, engine: str, like: str | None = None) -> None:
        """Start to load the policy in an engine; `copy` returns the copy.

        Args:
            like: handle of a policy that this one probably resembles.
        """
        self._copies[engine] = self.engines.load(engine, self._files, like)

    def wait_for_first(self, report: Callable[[str], None]) -> "RemotePolicy":
        """Wait for all copies that were started, and return the first; ``report`` gets the slowest engine's stage.

        Raises:
            JaxModelsError, PolicyFailed: no engine can load it.
        """
        while wait(self._copies.values(), POLL_PERIOD).not_done:
            raise_if_cancelled()
            loading = [engine for engine, copying in tuple(self._copies.items()) if not copying.done()]
            if stages := self.engines.read_stages(loading, self._files.sha):
                report("reading" if "reading" in stages else "compiling")
        errors = {}
        for engine, copying in tuple(self._copies.items()):
            if (error := copying.exception()) is None:
                return self.copy(engine)
            errors[engine] = error
        self._copies.clear()
        gone = [f"{engine}: {error}" for engine, error in errors.items() if isinstance(error, DeviceGone)]
        if len(gone) == len(errors):
            raise CheckpointError(f"no engine could load it ({'; '.join(gone)}); try again")
        raise next(error for error in errors.values() if not isinstance(error, DeviceGone))

    def copy(self, engine: str) -> "RemotePolicy":
        """Return the copy in this engine; starts to make it if needed.

        Raises:
            DeviceGone: the engine cannot load the policy, or is gone; requests go to other engines.
            CheckpointError: the engine cannot load an update.
        """
        try:
            if engine not in self._copies:
                self.begin(engine)
            return RemotePolicy(self, engine, self._copies.pop(engine).result())
        except Exception as error:
            is_safe = isinstance(error, JaxModelsError | PolicyFailed | DeviceGone)
            why = str(error) if is_safe else summarize_error(error)
            self.engines.record_failure(engine, self._files.sha, why)
            if self._is_update and isinstance(error, JaxModelsError | PolicyFailed):
                raise CheckpointError(f"{engine}: {why}") from error
            raise DeviceGone(f"{engine}: {why}") from error


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

    def __init__(self, replication: PolicyReplication, engine: str, loaded: Loaded):
        self.commit = replication.commit
        self.requirements: Requirements = loaded.requirements
        self.device = engine
        self.handle = loaded.handle
        self.timings: Mapping[str, float] = {}
        self._replication = replication
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
        ask = self._replication.engines.ask_briefly
        try:
            return check_answer(ask(self.device, "prepare_task", self.handle, text, prompt_cut))
        except TimeoutError as error:
            raise ObservationError(f"{error} while it encoded the instruction; use another instruction") from error

    def compile(self, batch: int = 1, cameras: FrameSizes | None = None) -> None:
        """Compile for frames of these sizes; the engine chooses the batch sizes."""
        sizes = dict(self.requirements.cameras if cameras is None else cameras)
        if not self.is_compiled(batch, sizes):
            self._seconds[frozenset(sizes.items())] = self._call("compile", sizes)

    def is_compiled(self, batch: int = 1, cameras: FrameSizes | None = None) -> bool:
        """Return whether it is compiled, without asking the engine."""
        return frozenset((self.requirements.cameras if cameras is None else cameras).items()) in self._seconds

    def profile(self, batch: int = 1, cameras: FrameSizes | None = None) -> float:
        """Return the seconds of one inference that the engine measured when it compiled for these sizes."""
        return self._seconds[frozenset((self.requirements.cameras if cameras is None else cameras).items())]

    def on(self, device: str) -> "RemotePolicy":
        """Return the same policy in another engine, which may be making its copy already.

        Raises:
            DeviceGone, CheckpointError: as `PolicyReplication.copy`.
        """
        return self._replication.copy(device)

    def _call(self, method: str, *arguments: Any) -> Any:
        return check_answer(self._replication.engines.ask(self.device, method, self.handle, *arguments).result())


@dataclass(frozen=True)
class RemoteLoader:
    """Loads policies into engines: a `LoadPolicy`.

    Attributes:
        largest, roots: as in `jaxmodels.load_policy`.
        inspect: checks the folder before engines read it; raises CheckpointError to refuse it.
        share: makes the files of a verified folder available to engines: (open folder, commit).
    """

    engines: "EngineSet"
    share: Callable[[PolicyFolder, str | None], LocalFolder]
    largest: int | None = None
    roots: Sequence[Path] | None = None
    inspect: Callable[[PolicyFolder], None] = lambda folder: None

    def __call__(
        self,
        path: str,
        revision: str | None = None,
        /,
        *,
        like: Any = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> RemotePolicy:
        """Fetch the policy's files, verify them, and have engines load them; see `LoadPolicy`.

        All idle engines load it in parallel. The others load it later, one after the other, so that robots are answered
        by engines that are not loading. An update, which is ``like`` a running policy, goes to one engine after
        the other.
        """
        report = on_progress or (lambda stage: None)
        folder, commit = find_policy(path, revision, on_progress=report, largest=self.largest)
        report("reading")
        if commit is not None:  # A snapshot in the Hub's cache consists of links to files in a neighbouring folder.
            roots: Sequence[Path] | None = folder.parents[1:2]
        else:
            roots = self.roots if like is None else copy_roots(folder)
        with PolicyFolder(folder, roots=roots, largest=self.largest) as opened:
            self.inspect(opened)
            files = self.share(opened, commit)
        raise_if_cancelled()
        replication = PolicyReplication(self.engines, files, is_update=like is not None)
        engine, idle = self.engines.pick()
        replication.begin(engine, like.handle if isinstance(like, RemotePolicy) else None)
        for other in idle if like is None else ():
            replication.begin(other)
        return replication.wait_for_first(report)
