"""Policies, policy loader and device worker whose device is an engine of a cluster."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels import PolicyFolder, Requirements, find_policy
from service.distributed.engine_actor import EngineFacts, Refusal
from service.distributed.replication import Copy, Engines, PolicyReplication, check_answer
from service.errors import PolicyFailed
from service.inference.batching import FrameSizesKey, LatencyModel, read_layout
from service.inference.device_worker import DeviceGone, InputRefused, Overdue, WorkerClosed
from service.inference.loaded_policy import (
    FrameSizes,
    InferenceResult,
    InferenceStuck,
    Replica,
)
from service.inference.policy_sources import copy_roots
from service.inference.sandbox import begin_building
from service.threads import mark_retrieved, settle, settle_threadsafe


class RemotePolicy:
    """A policy in an engine of a cluster; all but its properties and `is_compiled` wait for the engine.

    Attributes:
        commit: what its files are called; not the artifact's hash, which is of their contents.
    """

    def __init__(self, replication: PolicyReplication, copy: Copy, commit: str | None):
        self.commit = commit
        self._replication = replication
        self._copy = copy
        self._compiled = {_key(sizes) for sizes in copy.loaded.compiled}
        self._timings: Mapping[str, float] = {}

    @property
    def requirements(self) -> Requirements:
        """What the policy needs, as the engine read it."""
        return self._copy.loaded.requirements

    @property
    def device(self) -> str:
        """Name of the engine."""
        return self._copy.engine

    @property
    def handle(self) -> str:
        """Name of the policy in the engine."""
        return self._copy.loaded.handle

    @property
    def timings(self) -> Mapping[str, float]:
        """Timings of the last `act`, in seconds."""
        return self._timings

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run one inference for no robot; see `Policy.act`. Robots' requests go through `RemoteWorker`."""
        chunk, seconds = self._call("try_out", dict(observation))
        self._timings = {"to_device": 0.0, "compute": seconds, "to_host": 0.0}
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
            CopyRefused, CheckpointError: as of `PolicyReplication.copy`.
        """
        return RemotePolicy(self._replication, self._replication.copy(device), self.commit)

    def _call(self, method: str, *arguments: Any) -> Any:
        return check_answer(self._replication.engines.ask(self.device, method, self.handle, *arguments).result())


class RemoteLoader:
    """Loads policies into engines: a `LoadPolicy`.

    Args:
        largest, roots: as of `jaxmodels.load_policy`.
        inspect: given the folder before anything of it is sent; raises CheckpointError when it should not be.
    """

    def __init__(
        self,
        engines: Engines,
        largest: int | None = None,
        *,
        roots: Sequence[Path] | None = None,
        inspect: Callable[[PolicyFolder], None] = lambda folder: None,
    ):
        self._engines = engines
        self._largest = largest
        self._roots = roots
        self._inspect = inspect

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

        All engines that are idle load it side by side, the others later, one after the other: robots are answered by
        those that are not loading. An update, which is ``like`` what runs, is loaded one after the other as well.
        """
        report = on_progress or (lambda stage: None)
        folder, commit = find_policy(path, revision, on_progress=report, largest=self._largest)
        report("reading")
        roots = self._roots if commit is None and like is None else copy_roots(folder)
        with PolicyFolder(folder, roots=roots, largest=self._largest) as opened:
            self._inspect(opened)
        begin_building()
        replication = PolicyReplication(self._engines, folder, is_update=like is not None)
        engine, idle = self._engines.pick_engines()
        replication.begin(engine, like.handle if isinstance(like, RemotePolicy) else None)
        for other in idle if like is None else ():
            replication.begin(other)
        return RemotePolicy(replication, replication.wait_for_first(report), commit)


def _key(sizes: FrameSizes) -> frozenset[tuple[str, tuple[int, int]]]:
    return frozenset((camera, (height, width)) for camera, (height, width) in sizes.items())


# Seconds after which the request goes to another engine: three times what an answer usually takes, at least the
# first figure, and the second when none was measured. A call over the network takes a millisecond, and now and
# then tens of them.
MIN_OVERDUE = 0.25
DEFAULT_OVERDUE = 1.0

# Asks the engine: method and arguments; whatever comes of it goes to the last argument, in any thread.
Send = Callable[[str, tuple[Any, ...], Callable[[Any], None]], None]


class RemoteWorker:
    """A `DeviceWorker` whose device is an engine of a cluster.

    Sending takes this process a while for large frames, so it is done by a thread of its own and never by the event
    loop, which has ticks to keep.

    Attributes:
        facts: load and latencies that the engine reported last.
    """

    def __init__(self, name: str, send: Send, stuck_after: float = 5.0):
        self.name = name
        self.facts = EngineFacts()
        self.last_used_at = 0.0
        self.abandoned = 0
        self._send = send
        self._stuck_after = stuck_after
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"engine {name}")
        self._pending: dict[asyncio.Future[Any], float] = {}  # with when it was asked, oldest first
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
        loop, now = asyncio.get_running_loop(), time.monotonic()
        outcome: asyncio.Future[Any] = loop.create_future()
        self._pending[outcome] = self.last_used_at = now
        # Not when whoever waits gives up: an engine that owes answers has more to do than one that does not, and the
        # next question goes there.
        outcome.add_done_callback(self._pending.pop)
        due_in = None if due is None else due - now
        arguments = (policy.handle, dict(observation), due_in)
        self._sender.submit(self._post, arguments, partial(settle_threadsafe, loop, outcome), outcome)
        answer = asyncio.create_task(self._answer(outcome, replica, read_layout(observation).frames, now))
        answer.add_done_callback(mark_retrieved)
        if may_move:
            usual = self._usual_latency
            done, _ = await asyncio.wait([answer], timeout=usual)
            if not done:
                # Not held against the engine: it comes last while it owes answers, and whether it still lives the
                # pool finds out. Where one machine is too busy all of its engines stand still, and are well a moment
                # later.
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

    def _post(self, arguments: tuple[Any, ...], done: Callable[[Any], None], outcome: asyncio.Future[Any]) -> None:
        if not outcome.done():  # sending may have hung, and whoever waited has that error
            self._send("act", arguments, done)

    def fail(self, why: str) -> None:
        """Fail all pending requests: the engine is gone, whatever Ray will say later."""
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
    if isinstance(answer, Refusal):
        if answer.kind == "input":
            raise InputRefused(answer.text)
        if answer.kind in ("unknown", "engine"):
            raise DeviceGone(answer.text)
        if answer.kind == "stuck":
            raise InferenceStuck(answer.text)
        raise PolicyFailed(answer.text)
    inside = answer.queue + answer.to_device + answer.compute + answer.to_host
    return InferenceResult(
        chunk=np.array(answer.chunk),  # a copy: what came lies in the object store, and cannot be written to
        # The way there and back is waiting, too.
        queue=answer.queue + max(total - inside, 0.0),
        to_device=answer.to_device,
        compute=answer.compute,
        to_host=answer.to_host,
        total=total,
        batch=answer.batch,
    )
