"""The engines that a server uses, as they come and go."""

import asyncio
import logging
import time
from asyncio import Task
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

from jaxmodels.errors import CheckpointError
from service.engines.connection import ConnectionLost, EngineFault
from service.engines.messages import Begun, EngineFacts, Loaded
from service.engines.remote_policy import RemotePolicy, check_answer
from service.engines.remote_worker import RemoteWorker
from service.inference.device_worker import DeviceGone
from service.inference.engine import Engine
from service.inference.sandbox import raise_if_cancelled
from service.threads import settle

logger = logging.getLogger(__name__)

# Seconds between two polls of an engine.
POLL_PERIOD = 0.5
# Seconds for which the process that hosts an engine may be silent: times of `stuck_after`, and the least.
SILENCE_FACTOR, SHORTEST_SILENCE = 2.0, 1.0
# Seconds for which a load waits for the first engine.
START_TIMEOUT = 60.0
# Seconds between two tries to load policies that an engine could not load.
RETRY_PERIOD = 60.0


class EngineMember:
    """One engine of another process, from joining until leaving.

    Attributes:
        name: of the engine; it may have another name after it joined again.
        stuck_after: seconds after which an engine that does not answer a short call counts as stuck.
        begun: what it reported at its start.
        worker: sends the requests of robots to the engine.
        joined_at: monotonic time at which it joined, or failed here.
        is_gone: no calls are sent to it any more.
        poll_task: polls its load.
        copy_task: copies missing policies to it.
        copies: policies in the engine that this server uses; for the event loop only.
    """

    def __init__(
        self,
        name: str,
        begun: Begun,
        call: Callable[..., asyncio.Future[Any]],
        stuck_after: float,
        *,
        on_stuck: Callable[["EngineMember", str], None],
        on_silent: Callable[["EngineMember", str], None],
        shortest_silence: float = SHORTEST_SILENCE,
    ):
        """Represent an engine that has begun; its event loop is the running one.

        Args:
            call: calls a method of the engine with arguments, on the event loop; see `Connection.call`.
            stuck_after: seconds after which an inference counts as stuck.
            on_stuck: called with this engine and a reason when an inference is stuck.
            on_silent: called with this engine and a reason when the process that hosts the engine does not answer.
            shortest_silence: seconds for which that process may be silent at least.
        """
        self.name, self.begun = name, begun
        self._call, self._loop, self.stuck_after = call, asyncio.get_running_loop(), stuck_after
        self._on_stuck, self._on_silent = on_stuck, on_silent
        self._silence = max(SILENCE_FACTOR * stuck_after, shortest_silence)
        self.worker = RemoteWorker(name, call, stuck_after, self.report_stuck)
        self.joined_at = time.monotonic()
        self.is_gone = False
        self.poll_task: Task[None] | None = None
        self.copy_task: Task[None] | None = None
        self.copies: WeakSet[Loaded] = WeakSet()
        self._pending: set[asyncio.Future[Any]] = set()
        self._gone_reason = ""

    def ask(self, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the engine, from any thread.

        Returns:
            Its answer, or `DeviceGone` as soon as the engine is gone.
        """

        async def call() -> Any:
            if self.is_gone:
                raise DeviceGone(self._gone_reason)
            reply = self._call(method, *arguments)
            self._pending.add(reply)
            reply.add_done_callback(self._pending.discard)
            try:
                return await reply
            except ConnectionLost as error:
                raise DeviceGone(f"engine {self.name}: its process ended") from error

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def report_stuck(self) -> None:
        self._on_stuck(self, f"an inference did not return in {self.stuck_after:g} s (stuck_after)")

    async def poll(self, engines: "EngineSet") -> None:
        """Poll the engine's load until it leaves, or is silent for too long."""
        while True:
            try:
                facts = await asyncio.wait_for(self._call("facts", *engines.poll_arguments()), self._silence)
                if isinstance(facts, EngineFacts):
                    engines.take_facts(self, facts)
                engines.retry_copies()
            except TimeoutError:
                self._on_silent(self, f"it did not answer for {self._silence:g} s")
                return
            except ConnectionLost:
                return
            except EngineFault as error:
                logger.error("polling %s failed: %s", self.name, error)
            await asyncio.sleep(POLL_PERIOD)

    def fail(self, why: str) -> None:
        """Mark the engine as gone and fail all pending calls, also the requests of robots."""
        self.is_gone, self._gone_reason = True, f"engine {self.name} is not there any more: {why}"
        for reply in tuple(self._pending):
            settle(reply, DeviceGone(self._gone_reason))
        self.worker.fail(why)

    def cancel(self) -> None:
        """Cancel its tasks."""
        for task in (self.poll_task, self.copy_task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()


class EngineSet:
    """Adds engines to an `Engine` and removes them, and copies the loaded policies to them.

    Attributes:
        members: engines by name, also failed engines that have not left yet.
        address: where they are: ``local``, or an address of Ray.
        read_trouble: returns why engines are missing, or an empty text.
    """

    def __init__(self, address: str = "local") -> None:
        self.address = address
        self.members: dict[str, EngineMember] = {}
        self.read_trouble: Callable[[], str] = lambda: ""
        self._missing: dict[tuple[str, str], str] = {}  # engine and handle of a policy that it could not load: why
        self._retry_at = 0.0
        self._engine: Engine  # set by `open`, like the loop
        self._loop: asyncio.AbstractEventLoop

    def open(self, engine: Engine) -> None:
        """Add the engines that join from now on to this `Engine`."""
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def add(self, member: EngineMember) -> None:
        """Add an engine; it gets requests for a policy as soon as it has a copy of the policy."""
        self.members[member.name] = member
        member.poll_task = asyncio.create_task(member.poll(self), name=f"watch {member.name}")
        self._engine.replica_manager.add_device(member.name, member.worker)
        logger.info("engine %s joins (%s, process %d)", member.name, member.begun.node, member.begun.process)

    def retire(self, member: EngineMember, why: str) -> None:
        """Remove an engine: its pending requests go to others, or wait for one."""
        if self.members.get(member.name) is member:
            del self.members[member.name]
        member.cancel()
        member.fail(why)
        self._engine.replica_manager.retire_device(member.name, why)

    async def forget(self, member: EngineMember) -> None:
        """Forget a removed engine; from then on another engine may have its name."""
        await self._engine.replica_manager.remove_device(member.name)

    def has_failed(self, name: str) -> bool:
        """Return whether an engine of this name is out of use."""
        return name in self._engine.devices.health.failed

    def take_facts(self, member: EngineMember, facts: Any) -> None:
        """Take what an engine reports of itself; its measured batch sizes count for the admission of sessions."""
        member.worker.facts = facts
        for loaded in self._engine.policy_cache.all:
            for replica in loaded.replicas:
                if replica.policy.device == member.name:
                    replica.take_latencies(facts.latencies.get(getattr(replica.policy, "handle", None), {}))
        compiler, reported = self._engine.batch_compiler, [one.worker.facts for one in self.members.values()]
        compiler.remaining_elsewhere = max((each.to_compile for each in reported), default=0)
        (compiler.idle.clear if any(each.is_compiling for each in reported) else compiler.idle.set)()

    def poll_arguments(self) -> tuple[list[str], bool, bool]:
        """Return what a poll says to an engine: policies in use, whether a robot moves, and needs larger batches."""
        return sorted(self._used_handles()), self._engine.has_running_robot(), self._engine.needs_batches()

    def _used_handles(self) -> set[str]:
        """Return the policies that sessions use, or that are being loaded for them.

        References to a copy live longer: an ended session is in memory until Python's garbage collector runs.
        """
        cache = self._engine.policy_cache
        replicas = (replica for loaded in cache.all for replica in loaded.replicas)
        used = {replica.policy.handle for replica in replicas if isinstance(replica.policy, RemotePolicy)}
        if cache.loading_count:
            used |= {copy.handle for member in self.members.values() for copy in member.copies}
        return used

    def retry_copies(self) -> None:
        """Start to copy missing policies to their engines if it is time for another try."""
        alive = {member.name: member for member in self.members.values() if not member.is_gone}
        used = self._used_handles()
        self._missing = {key: why for key, why in self._missing.items() if key[0] in alive and key[1] in used}
        if not self._missing or time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + RETRY_PERIOD
        for name in {name for name, _ in self._missing}:
            member = alive[name]
            if member.copy_task is None or member.copy_task.done():
                member.copy_task = asyncio.create_task(
                    self._engine.replica_manager.copy_missing_policies(name), name=f"complete {name}"
                )

    def get_stats(self) -> dict[str, object]:
        """Return state and load of all engines for the API; JSON-ready."""
        engines = [
            {
                "engine": member.name,
                "node": member.begun.node,
                "process": member.begun.process,
                "load": round(member.worker.facts.load, 4),
                "queue_ms": round(member.worker.facts.queue * 1e3, 2),
                "waiting": member.worker.facts.waiting,
                "policies": member.worker.facts.policies,
                "batches": {str(size): times for size, times in sorted(member.worker.facts.batches.items())},
                "batch_ms": list(member.worker.facts.batch_ms),
            }
            for member in self.members.values()
            if not member.is_gone
        ]
        missing = [
            f"{engine} is missing policy {handle[:12]}, which others have: {why} (tried again every {RETRY_PERIOD:g} s)"
            for (engine, handle), why in sorted(self._missing.items())
        ]
        trouble = "; ".join(filter(None, (self.read_trouble(), *missing)))
        return {"address": self.address, "engines": engines, "trouble": trouble or None}

    def close(self) -> None:
        """Fail all pending calls."""
        for member in self.members.values():
            member.cancel()
            member.fail("the server is ending")

    # For threads that load policies.

    def pick(self) -> tuple[str, Sequence[str]]:
        """Return the engine with the least work, to load a policy to first, and all others that are idle.

        An engine that is being started is waited for.

        Raises:
            CheckpointError: there is no engine.
        """
        until = time.monotonic() + START_TIMEOUT
        while not (alive := [one for one in tuple(self.members.values()) if not one.is_gone]):
            if (trouble := self.read_trouble()) or time.monotonic() > until:
                raise CheckpointError(trouble or f"no engine has begun for {START_TIMEOUT:g} s; try again when one has")
            raise_if_cancelled()
            time.sleep(0.02)
        first, *others = sorted(alive, key=lambda one: (one.worker.facts.policies, one.worker.facts.load, one.name))
        return first.name, [one.name for one in others if not one.worker.facts.load]

    def read_stages(self, engines: Collection[str], sha: str) -> list[str]:
        """Return the stages in which these engines load a policy, if they reported it."""
        members = [member for member in tuple(self.members.values()) if member.name in engines]
        return [stages[sha] for member in members if sha in (stages := member.worker.facts.stages)]

    def ask(self, engine: str, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the engine of this name; see `EngineMember.ask`."""
        member = self.members.get(engine)
        if member is not None:
            return member.ask(method, *arguments)
        answer: Future[Any] = Future()
        answer.set_exception(DeviceGone(f"engine {engine} is not there any more"))
        return answer

    def ask_briefly(self, engine: str, method: str, *arguments: Any) -> Any:
        """Return the answer to a call; an engine that does not give it within ``stuck_after`` seconds is stuck.

        Raises:
            TimeoutError: the engine did not answer.
            DeviceGone: the engine is gone.
        """
        answer, member = self.ask(engine, method, *arguments), self.members.get(engine)
        try:
            return answer.result(None if member is None else member.stuck_after)
        except TimeoutError as error:
            if member is None or answer.done():
                raise
            self._call_on_loop(member.report_stuck)
            raise TimeoutError(
                f"engine {engine} did not answer within {member.stuck_after:g} s (stuck_after)"
            ) from error

    def load(self, engine: str, files: Any, like: str | None) -> "Future[Loaded]":
        """Have an engine load a policy, and keep it there while the answer is referenced.

        Args:
            like: handle of a policy that this one probably resembles.
        """

        async def load() -> Loaded:
            loaded = check_answer(await asyncio.wrap_future(self.ask(engine, "load", files, like)))
            if (member := self.members.get(engine)) is not None:
                member.copies.add(loaded)
                self._missing.pop((engine, loaded.handle), None)
            return loaded

        return asyncio.run_coroutine_threadsafe(load(), self._loop)

    def record_failure(self, engine: str, handle: str, why: str) -> None:
        """Record that an engine could not load a policy that others have; it is tried again."""
        logger.warning("%s is missing policy %s: %s", engine, handle[:12], why)

        def record() -> None:
            if not self._missing:
                self._retry_at = time.monotonic() + RETRY_PERIOD
            self._missing[engine, handle] = why

        self._call_on_loop(record)

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop has ended, and with it the caller that loads the policy.
            if not self._loop.is_closed():
                raise
