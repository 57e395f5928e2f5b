"""Replication of policies: loads one into several engines side by side, and retries where that failed."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxmodels.errors import CheckpointError, JaxModelsError, ObservationError
from service.distributed.artifacts import PolicyArtifact, pack
from service.distributed.engine_actor import Loaded, Refusal
from service.errors import PolicyFailed
from service.inference.device_worker import DeviceGone
from service.inference.policy_cache import summarize_error

# Seconds between two polls of how far engines are.
POLL_PERIOD = 0.5


@dataclass(frozen=True, eq=False)
class Copy:
    """A policy in an engine, which keeps it as long as this object is referred to."""

    engine: str
    loaded: Loaded


class CopyRefused(DeviceGone):
    """An engine cannot have a policy that others have; requests go to those."""


class Engines(Protocol):
    """Interface of a cluster's engines, for threads that may wait for them."""

    @property
    def connection(self) -> int:
        """Number of the present connection; objects in the store of an earlier one are gone."""
        ...

    def pick_engines(self) -> tuple[str, Sequence[str]]:
        """Return the engine to load a policy to first, and all others that are idle.

        Raises:
            CheckpointError: there is none.
        """
        ...

    def ask(self, engine: str, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of an engine; raises DeviceGone as soon as it is gone."""
        ...

    def keep_copy(self, copy: Copy) -> None:
        """Keep a policy in an engine for as long as its copy is referred to."""
        ...

    def record_failure(self, engine: str, handle: str, why: str) -> None:
        """Record that an engine could not load a policy that others have; it is tried again."""
        ...

    def put(self, piece: bytes) -> Any:
        """Put bytes into the object store, for any number of engines."""
        ...


class PolicyReplication:
    """One policy's files, and the copies of it that engines make.

    Args:
        folder: where they are here; read at once, and again when the cluster was lost and joined anew.
        is_update: of what runs, which goes on where not all engines can have it. A first one runs on those that can.

    Attributes:
        engines: that may have it.

    Raises:
        CheckpointError: the files cannot be read, or be sent.
    """

    def __init__(self, engines: Engines, folder: Path, *, is_update: bool = False):
        self.engines = engines
        self._folder = folder
        self._is_update = is_update
        self._copies: dict[str, Future[Copy]] = {}
        # Kept as long as a copy may have to be made.
        self._artifact, self._packed_connection = pack(folder, engines.put), engines.connection

    def _current_artifact(self) -> PolicyArtifact:
        """Return the artifact in the store of the present connection, packed again if needed."""
        connection = self.engines.connection
        if connection != self._packed_connection:
            artifact = pack(self._folder, self.engines.put)
            if artifact.sha != self._artifact.sha:
                raise CheckpointError(
                    f"{self._folder.name}: the files there are others than those that run; restart the session"
                )
            self._artifact, self._packed_connection = artifact, connection
        return self._artifact

    def begin(self, engine: str, like: str | None = None) -> "Future[Copy]":
        """Start to load the policy in an engine; `copy` returns the copy.

        Args:
            like: handle of a policy that it probably resembles.
        """
        artifact = self._current_artifact()
        copying: Future[Copy] = Future()
        self._copies[engine] = copying

        def make(reply: "Future[Any]") -> None:
            try:
                copy = Copy(engine, check_answer(reply.result()))
                self.engines.keep_copy(copy)
            except BaseException as error:  # whatever it is belongs to whoever takes the copy
                copying.set_exception(error)
            else:
                copying.set_result(copy)

        self.engines.ask(engine, "load", artifact, like).add_done_callback(make)
        return copying

    def wait_for_first(self, report: Callable[[str], None]) -> Copy:
        """Wait for all copies that were started, and return the first; ``report`` gets the slowest engine's stage.

        Raises:
            JaxModelsError, PolicyFailed: no engine can load it.
        """
        while wait(self._copies.values(), POLL_PERIOD).not_done:
            self._report_stage(report)
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

    def copy(self, engine: str) -> Copy:
        """Return the copy in this engine; one that was not started is made now.

        Raises:
            CopyRefused: it cannot have one, or is not there any more.
            CheckpointError: it cannot have one of an update.
        """
        try:
            return (self._copies.pop(engine, None) or self._begin_copy(engine)).result()
        except Exception as error:
            why = describe_error(error)
            self.engines.record_failure(engine, self._artifact.sha, why)
            if self._is_update and isinstance(error, JaxModelsError | PolicyFailed):
                raise CheckpointError(f"{engine}: {why}") from error
            raise CopyRefused(f"{engine}: {why}") from error

    def _begin_copy(self, engine: str) -> "Future[Copy]":
        self.begin(engine)
        return self._copies.pop(engine)

    def _report_stage(self, report: Callable[[str], None]) -> None:
        requests = [
            self.engines.ask(engine, "stage", self._artifact.sha)
            for engine, copying in tuple(self._copies.items())
            if not copying.done()
        ]
        stages = [one.result() for one in wait(requests, POLL_PERIOD).done if one.exception() is None]
        if any(stages):
            report("reading" if "reading" in stages else "compiling")


def describe_error(error: BaseException) -> str:
    """Describe an error of an engine, for clients."""
    return str(error) if isinstance(error, JaxModelsError | PolicyFailed | DeviceGone) else summarize_error(error)


def check_answer(answer: Any) -> Any:
    """Return an engine's answer, or raise its refusal as an error.

    Raises:
        ObservationError: the policy refused its input.
        CheckpointError: it cannot be loaded.
        DeviceGone: the engine does not have it any more, or cannot be used.
        PolicyFailed: it raised.
    """
    if not isinstance(answer, Refusal):
        return answer
    if answer.kind == "input":
        raise ObservationError(answer.text)
    if answer.kind == "policy":
        raise CheckpointError(answer.text)
    if answer.kind in ("unknown", "engine"):
        raise DeviceGone(answer.text)
    raise PolicyFailed(answer.text)


# Seconds until a first try again; each that fails doubles them, up to the second number.
FIRST_RETRY = 5.0
LONGEST_RETRY = 300.0


@dataclass
class _Failure:
    why: str
    tries: int
    failed_at: float
    retry_at: float


class RetryState:
    """Schedule of retries: when which engine loads which missing policy again. Pure; reads no clock."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], _Failure] = {}

    def record_failure(self, engine: str, handle: str, why: str, now: float) -> None:
        """Record that an engine could not load a policy."""
        before = self._failures.get((engine, handle))
        tries = 1 if before is None else before.tries + 1
        # After three days of tries the power alone would be more than a float can hold.
        self._failures[engine, handle] = _Failure(
            why, tries, now, now + min(FIRST_RETRY * 2.0 ** min(tries - 1, 60), LONGEST_RETRY)
        )

    def record_success(self, engine: str, handle: str) -> None:
        """Record that an engine has a policy."""
        self._failures.pop((engine, handle), None)

    def retain(self, engines: Collection[str], handles: Collection[str]) -> None:
        """Forget all engines but these, and policies that none of them has."""
        for engine, handle in tuple(self._failures):
            if engine not in engines or handle not in handles:
                del self._failures[engine, handle]

    def drop_failures(self, engine: str, before: float) -> None:
        """Forget failures of an engine from before it tried everything again."""
        for key, failure in tuple(self._failures.items()):
            if key[0] == engine and failure.failed_at < before:
                del self._failures[key]

    def due(self, now: float) -> Sequence[str]:
        """Return the engines that should try again."""
        return sorted({engine for (engine, _), failure in self._failures.items() if now >= failure.retry_at})

    def describe(self, now: float) -> str:
        """Describe all missing policies, for people; empty when there are none."""
        return "; ".join(
            f"{engine} is missing policy {handle[:12]}, which others have: {failure.why} "
            f"(tried {failure.tries} times, {_when(failure.retry_at - now)})"
            for (engine, handle), failure in sorted(self._failures.items())
        )


def _when(seconds: float) -> str:
    return f"again in {seconds:.0f} s" if seconds > 0 else "and now again"
