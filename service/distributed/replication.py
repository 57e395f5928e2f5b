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

# Seconds between looks how far engines are.
LOOK = 0.5


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

    def pick(self) -> tuple[str, Sequence[str]]:
        """Return the engine to load a policy to first, and all others that are idle.

        Raises:
            CheckpointError: there is none.
        """
        ...

    def ask(self, engine: str, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of an engine; raises DeviceGone as soon as it is gone."""
        ...

    def keep(self, copy: Copy) -> None:
        """Keep a policy in an engine as long as its copy is referred to."""
        ...

    def lacks(self, engine: str, handle: str, why: str) -> None:
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
        self._begun: dict[str, Future[Copy]] = {}
        # Kept as long as a copy may have to be made.
        self._parcel, self._packed = pack(folder, engines.put), engines.connection

    def _packed_now(self) -> PolicyArtifact:
        """Return the artifact in the store of the present connection, packed again if needed."""
        connection = self.engines.connection
        if connection != self._packed:
            parcel = pack(self._folder, self.engines.put)
            if parcel.sha != self._parcel.sha:
                raise CheckpointError(
                    f"{self._folder.name}: the files there are others than those that run; restart the session"
                )
            self._parcel, self._packed = parcel, connection
        return self._parcel

    def begin(self, engine: str, like: str | None = None) -> "Future[Copy]":
        """Start to load the policy in an engine; `copy` returns the copy.

        Args:
            like: handle of a policy that it probably resembles.
        """
        parcel = self._packed_now()
        made: Future[Copy] = Future()
        self._begun[engine] = made

        def make(asked: "Future[Any]") -> None:
            try:
                copy = Copy(engine, answered(asked.result()))
                self.engines.keep(copy)
            except BaseException as error:  # whatever it is belongs to whoever takes the copy
                made.set_exception(error)
            else:
                made.set_result(copy)

        self.engines.ask(engine, "load", parcel, like).add_done_callback(make)
        return made

    def first(self, tell: Callable[[str], None]) -> Copy:
        """Wait for all copies that were started, and return the first; ``tell`` gets the slowest engine's stage.

        Raises:
            JaxModelsError, PolicyFailed: no engine can load it.
        """
        while wait(self._begun.values(), LOOK).not_done:
            self._tell_stage(tell)
        errors = {}
        for engine, made in tuple(self._begun.items()):
            if (error := made.exception()) is None:
                return self.copy(engine)
            errors[engine] = error
        self._begun.clear()
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
            return (self._begun.pop(engine, None) or self._begin_and_forget(engine)).result()
        except Exception as error:
            why = in_words(error)
            self.engines.lacks(engine, self._parcel.sha, why)
            if self._is_update and isinstance(error, JaxModelsError | PolicyFailed):
                raise CheckpointError(f"{engine}: {why}") from error
            raise CopyRefused(f"{engine}: {why}") from error

    def _begin_and_forget(self, engine: str) -> "Future[Copy]":
        self.begin(engine)
        return self._begun.pop(engine)

    def _tell_stage(self, tell: Callable[[str], None]) -> None:
        asked = [
            self.engines.ask(engine, "stage", self._parcel.sha)
            for engine, made in tuple(self._begun.items())
            if not made.done()
        ]
        heard = [one.result() for one in wait(asked, LOOK).done if one.exception() is None]
        if any(heard):
            tell("reading" if "reading" in heard else "compiling")


def in_words(error: BaseException) -> str:
    """Describe an error of an engine, for clients."""
    return str(error) if isinstance(error, JaxModelsError | PolicyFailed | DeviceGone) else summarize_error(error)


def answered(found: Any) -> Any:
    """Return an engine's answer, or raise its refusal as an error.

    Raises:
        ObservationError: the policy refused its input.
        CheckpointError: it cannot be loaded.
        DeviceGone: the engine does not have it any more, or cannot be used.
        PolicyFailed: it raised.
    """
    if not isinstance(found, Refusal):
        return found
    if found.kind == "input":
        raise ObservationError(found.text)
    if found.kind == "policy":
        raise CheckpointError(found.text)
    if found.kind in ("unknown", "engine"):
        raise DeviceGone(found.text)
    raise PolicyFailed(found.text)


# Seconds until a first try again; each that fails doubles them, up to the second number.
FIRST_RETRY = 5.0
LONGEST_RETRY = 300.0


@dataclass
class _Lack:
    why: str
    tries: int
    failed_at: float
    again_at: float


class RetryState:
    """When which engine tries again to load which policy. Reads no clock and asks nobody."""

    def __init__(self) -> None:
        self._lacks: dict[tuple[str, str], _Lack] = {}

    def failed(self, engine: str, handle: str, why: str, now: float) -> None:
        """Record that an engine could not load a policy."""
        before = self._lacks.get((engine, handle))
        tries = 1 if before is None else before.tries + 1
        # After three days of tries the power alone would be more than a float can hold.
        self._lacks[engine, handle] = _Lack(
            why, tries, now, now + min(FIRST_RETRY * 2.0 ** min(tries - 1, 60), LONGEST_RETRY)
        )

    def has(self, engine: str, handle: str) -> None:
        """Record that an engine has a policy."""
        self._lacks.pop((engine, handle), None)

    def keep(self, engines: Collection[str], handles: Collection[str]) -> None:
        """Forget all engines but these, and policies that none of them has."""
        for engine, handle in tuple(self._lacks):
            if engine not in engines or handle not in handles:
                del self._lacks[engine, handle]

    def forget(self, engine: str, before: float) -> None:
        """Forget failures of an engine from before it tried everything again."""
        for key, lack in tuple(self._lacks.items()):
            if key[0] == engine and lack.failed_at < before:
                del self._lacks[key]

    def due(self, now: float) -> Sequence[str]:
        """Return the engines that should try again."""
        return sorted({engine for (engine, _), lack in self._lacks.items() if now >= lack.again_at})

    def words(self, now: float) -> str:
        """Describe all missing policies, for people; empty when there are none."""
        return "; ".join(
            f"{engine} goes without policy {handle[:12]}, which others have: {lack.why} "
            f"(tried {lack.tries} times, {_when(lack.again_at - now)})"
            for (engine, handle), lack in sorted(self._lacks.items())
        )


def _when(seconds: float) -> str:
    return f"again in {seconds:.0f} s" if seconds > 0 else "and now again"
