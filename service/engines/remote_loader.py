"""Loader of policies into engines of other processes, and the copies that engines make of a policy."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmodels import PolicyFolder, find_policy
from jaxmodels.errors import CheckpointError, JaxModelsError
from service.engines.engine_set import EngineSet
from service.engines.messages import Loaded, LocalFolder
from service.engines.remote_policy import RemotePolicy
from service.errors import PolicyFailed
from service.inference.device_worker import DeviceGone
from service.inference.policy_cache import summarize_error
from service.inference.policy_sources import copy_roots
from service.inference.sandbox import raise_if_cancelled

# Seconds between two polls of how far engines have loaded a policy.
POLL_PERIOD = 0.5


class PolicyReplication:
    """One policy's files, and the copies of it that engines make.

    Args:
        files: what engines load the policy from.
        is_update: whether it replaces a running policy, which continues unless all engines can load the new one. A
            first policy runs on the engines that can load it.
    """

    def __init__(self, engines: EngineSet, files: LocalFolder, *, is_update: bool):
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

    def wait_for_first(self, report: Callable[[str], None]) -> RemotePolicy:
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

    def copy(self, engine: str) -> RemotePolicy:
        """Return the copy in this engine; starts to make it if needed.

        Raises:
            DeviceGone: the engine cannot load the policy, or is gone; requests go to other engines.
            CheckpointError: the engine cannot load an update.
        """
        try:
            if engine not in self._copies:
                self.begin(engine)
            return RemotePolicy(
                self._copies.pop(engine).result(),
                engine,
                self.commit,
                ask=self.engines.ask,
                ask_briefly=self.engines.ask_briefly,
                copy=self.copy,
            )
        except Exception as error:
            is_safe = isinstance(error, JaxModelsError | PolicyFailed | DeviceGone)
            why = str(error) if is_safe else summarize_error(error)
            self.engines.record_failure(engine, self._files.sha, why)
            if self._is_update and isinstance(error, JaxModelsError | PolicyFailed):
                raise CheckpointError(f"{engine}: {why}") from error
            raise DeviceGone(f"{engine}: {why}") from error


@dataclass(frozen=True)
class RemoteLoader:
    """Loads policies into engines: a `LoadPolicy`.

    Attributes:
        largest, roots: as in `jaxmodels.load_policy`.
        inspect: checks the folder before engines read it; raises CheckpointError to refuse it.
        share: makes the files of a verified folder available to engines: (open folder, commit).
    """

    engines: EngineSet
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
