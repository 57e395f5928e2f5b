"""Policies in the engines of a cluster: their copies, their loader, the worker that sends requests, and retries."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmodels import PolicyFolder, Requirements, find_policy
from jaxmodels.errors import CheckpointError, JaxModelsError, ObservationError
from service.distributed.artifacts import PolicyArtifact, pack
from service.distributed.engine_actor import EngineFacts, Loaded, Refusal
from service.errors import PolicyFailed
from service.inference.batching import FrameSizesKey, LatencyModel, read_layout
from service.inference.device_worker import DeviceGone, InputRefused, Overdue, WorkerClosed
from service.inference.loaded_policy import FrameSizes, InferenceResult, InferenceStuck, Replica
from service.inference.policy_cache import summarize_error
from service.inference.policy_sources import copy_roots
from service.inference.sandbox import begin_building
from service.threads import mark_retrieved, settle, settle_threadsafe

if TYPE_CHECKING:
    from service.distributed.cluster import Cluster  # imports Ray, which policies and workers do not need

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
        commit: commit of the files, if known.
        folder: the policy's files; read at once, and again when the cluster was lost and joined again.
        is_update: whether it replaces a running policy, which continues unless all engines can load the new one. A
            first policy runs on the engines that can load it.

    Raises:
        CheckpointError: the files cannot be read, or cannot be sent.
    """

    def __init__(self, cluster: "Cluster", folder: Path, commit: str | None, *, is_update: bool):
        self.cluster = cluster
        self.commit = commit
        self._folder = folder
        self._is_update = is_update
        self._copies: dict[str, Future[Loaded]] = {}  # not RemotePolicy, whose reference to this would make a cycle
        # Referenced as long as another copy may be needed.
        self._artifact, self._packed_connection = pack(folder, cluster.put), cluster.connection

    def _current_artifact(self) -> PolicyArtifact:
        """Return the artifact in the store of the present connection, packed again if needed."""
        connection = self.cluster.connection
        if connection != self._packed_connection:
            artifact = pack(self._folder, self.cluster.put)
            if artifact.sha != self._artifact.sha:
                raise CheckpointError(
                    f"{self._folder.name}: the files there are others than those that run; restart the session"
                )
            self._artifact, self._packed_connection = artifact, connection
        return self._artifact

    def begin(self, engine: str, like: str | None = None) -> None:
        """Start to load the policy in an engine; `copy` returns the copy.

        Args:
            like: handle of a policy that this one probably resembles.
        """
        artifact = self._current_artifact()
        copying: Future[Loaded] = Future()
        self._copies[engine] = copying

        def make(reply: "Future[Any]") -> None:
            try:
                loaded = check_answer(reply.result())
                self.cluster.keep_copy(engine, loaded)
            except BaseException as error:  # raised again in the thread that takes the copy
                copying.set_exception(error)
            else:
                copying.set_result(loaded)

        self.cluster.ask(engine, "load", artifact, like).add_done_callback(make)

    def wait_for_first(self, report: Callable[[str], None]) -> "RemotePolicy":
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
            self.cluster.record_failure(engine, self._artifact.sha, why)
            if self._is_update and isinstance(error, JaxModelsError | PolicyFailed):
                raise CheckpointError(f"{engine}: {why}") from error
            raise DeviceGone(f"{engine}: {why}") from error

    def _report_stage(self, report: Callable[[str], None]) -> None:
        requests = [
            self.cluster.ask(engine, "stage", self._artifact.sha)
            for engine, copying in tuple(self._copies.items())
            if not copying.done()
        ]
        stages = [one.result() for one in wait(requests, POLL_PERIOD).done if one.exception() is None]
        if any(stages):
            report("reading" if "reading" in stages else "compiling")


class RemotePolicy:
    """A policy in an engine, which keeps it as long as this object is referenced.

    All methods but `is_compiled` wait for the engine.

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
        self._compiled = {_key(sizes) for sizes in loaded.compiled}

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run one inference that no robot waits for; see `Policy.act`. `RemoteWorker` sends the requests of robots."""
        chunk, seconds = self._call("try_out", dict(observation))
        self.timings = {"to_device": 0.0, "compute": seconds, "to_host": 0.0}
        return chunk

    def prepare_task(self, text: str, prompt_cut: str | None = None) -> int:
        """Encode an instruction ahead of ``act``; returns how many of its tokens are cut off."""
        return self._call("prepare_task", text, prompt_cut)

    def compile(self, batch: int = 1, cameras: FrameSizes | None = None) -> None:
        """Compile for frames of these sizes; the engine chooses the batch sizes."""
        sizes = dict(self.requirements.cameras if cameras is None else cameras)
        if not self.is_compiled(batch, sizes):
            self._call("compile", sizes)
            self._compiled.add(_key(sizes))

    def is_compiled(self, batch: int = 1, cameras: FrameSizes | None = None) -> bool:
        """Return whether it is compiled, without asking the engine."""
        return _key(self.requirements.cameras if cameras is None else cameras) in self._compiled

    def profile(self, batch: int = 1, cameras: FrameSizes | None = None) -> float:
        """Return the seconds that an inference takes in the engine."""
        return self._call("profile", None if cameras is None else dict(cameras))

    def on(self, device: str) -> "RemotePolicy":
        """Return the same policy in another engine, which may be making its copy already.

        Raises:
            DeviceGone, CheckpointError: as `PolicyReplication.copy`.
        """
        return self._replication.copy(device)

    def _call(self, method: str, *arguments: Any) -> Any:
        return check_answer(self._replication.cluster.ask(self.device, method, self.handle, *arguments).result())


@dataclass(frozen=True)
class RemoteLoader:
    """Loads policies into engines: a `LoadPolicy`.

    Attributes:
        largest, roots: as in `jaxmodels.load_policy`.
        inspect: checks the folder before its files are sent; raises CheckpointError to refuse it.
    """

    cluster: "Cluster"
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
        """Fetch the policy's files, send them, and have engines load them; see `LoadPolicy`.

        All idle engines load it in parallel. The others load it later, one after the other, so that robots are answered
        by engines that are not loading. An update, which is ``like`` a running policy, goes to one engine after
        the other.
        """
        report = on_progress or (lambda stage: None)
        folder, commit = find_policy(path, revision, on_progress=report, largest=self.largest)
        report("reading")
        roots = self.roots if commit is None and like is None else copy_roots(folder)
        with PolicyFolder(folder, roots=roots, largest=self.largest) as opened:
            self.inspect(opened)
        begin_building()
        replication = PolicyReplication(self.cluster, folder, commit, is_update=like is not None)
        engine, idle = self.cluster.pick_engines()
        replication.begin(engine, like.handle if isinstance(like, RemotePolicy) else None)
        for other in idle if like is None else ():
            replication.begin(other)
        return replication.wait_for_first(report)


def _key(sizes: FrameSizes) -> frozenset[tuple[str, tuple[int, int]]]:
    return frozenset((camera, (height, width)) for camera, (height, width) in sizes.items())


# A request goes to another engine after three times the usual latency, at least the first figure (seconds). Before any
# measurement it is the second figure. A call over the network takes a millisecond, and sometimes tens of milliseconds.
MIN_OVERDUE = 0.25
DEFAULT_OVERDUE = 1.0


class RemoteWorker:
    """A `DeviceWorker` whose device is an engine of a cluster.

    Sending large frames takes time, so a thread does it, and not the event loop, which has ticks to keep.

    Args:
        ask: calls a method of the engine with arguments and returns the future of its answer; called in a thread.

    Attributes:
        facts: load and latencies that the engine reported last.
    """

    def __init__(self, name: str, ask: Callable[..., "Future[Any]"], stuck_after: float = 5.0):
        self.name = name
        self.facts = EngineFacts()
        self.last_used_at = 0.0
        self.abandoned = 0
        self._ask = ask
        self._stuck_after = stuck_after
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"engine {name}")
        self._pending: dict[asyncio.Future[Any], float] = {}  # values: when it was sent, oldest first
        self._latency = LatencyModel()
        self._gone_reason: str | None = None
        self._is_closed = False

    @property
    def pending(self) -> int:
        """Requests of this server that have no answer yet."""
        return len(self._pending)

    @property
    def is_late(self) -> bool:
        """Whether an answer to this server takes longer than usual."""
        oldest = next(iter(self._pending.values()), None)
        return oldest is not None and time.monotonic() - oldest > self._usual_latency

    @property
    def waiting(self) -> int:
        """Requests of all servers that the engine has not begun."""
        return self.facts.waiting

    @property
    def batches(self) -> Mapping[int, int]:
        """Number of batches that the engine ran for all servers, by batch size."""
        return self.facts.batches

    def load(self, now: float) -> float:
        """Share of the last seconds that the engine was busy, as it reported last."""
        return self.facts.load

    async def submit(
        self,
        replica: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        is_alone: bool = False,
        may_move: bool = False,
    ) -> InferenceResult:
        """Run a policy on one observation; see `DeviceWorker.submit`. The engine decides what runs alone."""
        if self._is_closed:
            raise WorkerClosed("the server is ending")
        if self._gone_reason is not None:
            raise DeviceGone(self._gone_reason)
        policy = replica.policy
        assert isinstance(policy, RemotePolicy)
        now = time.monotonic()
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[outcome] = self.last_used_at = now
        # A request stays pending when its caller gives up, so that the next one goes to an engine with less to do.
        outcome.add_done_callback(self._pending.pop)
        due_in = None if due is None else due - now
        self._sender.submit(self._send, outcome, policy.handle, dict(observation), due_in)
        answer = asyncio.create_task(self._answer(outcome, replica, read_layout(observation).frames, now))
        answer.add_done_callback(mark_retrieved)
        if may_move:
            usual = self._usual_latency
            done, _ = await asyncio.wait([answer], timeout=usual)
            if not done:
                # This does not count as a failure of the engine: it is asked last while it owes answers, and the pool
                # finds out whether it lives. On a busy machine all engines are late, and recover a moment later.
                late = Overdue(f"{self.name} has not answered for {usual:.2f} s")
                late.is_counted, late.answer = True, answer
                raise late
        return await answer

    @property
    def _usual_latency(self) -> float:
        usual = self._latency.measured(1).median
        usual = max(3 * usual, MIN_OVERDUE) if self._latency.is_measured else DEFAULT_OVERDUE
        return min(usual, self._stuck_after)

    async def _answer(
        self, outcome: asyncio.Future[Any], replica: Replica, frames: FrameSizesKey, sent_at: float
    ) -> InferenceResult:
        done, _ = await asyncio.wait([outcome], timeout=self._stuck_after)
        if not done:
            raise InferenceStuck.after(self._stuck_after)
        total = time.monotonic() - sent_at
        inference = _to_result(outcome.result(), total)
        self._latency.record(1, total)
        replica.latencies[frames].record(inference.batch, inference.compute)
        return inference

    def _send(self, outcome: asyncio.Future[Any], *arguments: Any) -> None:
        if outcome.done():  # it failed while an earlier request was being sent
            return
        loop = outcome.get_loop()
        self._ask("act", *arguments).add_done_callback(
            lambda reply: settle_threadsafe(loop, outcome, reply.exception() or reply.result())
        )

    def fail(self, why: str) -> None:
        """Fail all pending requests: the engine is gone. Later answers are ignored."""
        self._gone_reason = why
        for outcome in tuple(self._pending):
            settle(outcome, DeviceGone(why))

    async def close(self, within: float) -> bool:
        """Fail all pending requests."""
        self._is_closed = True
        for outcome in tuple(self._pending):
            settle(outcome, WorkerClosed("the server is ending"))
        self._sender.shutdown(wait=False, cancel_futures=True)
        return True


def _to_result(answer: Any, total: float) -> InferenceResult:
    """Convert an engine's answer that took `total` seconds to arrive."""
    try:
        answer = check_answer(answer)
    except ObservationError as error:
        raise InputRefused(str(error)) from error
    inside = answer.queue + answer.to_device + answer.compute + answer.to_host
    waited = answer.queue + max(total - inside, 0.0)  # the transport counts as waiting
    # The chunk is copied, because arrays of the object store are read-only.
    return answer._replace(chunk=np.array(answer.chunk), queue=waited, total=total)


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
