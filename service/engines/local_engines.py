"""Engines on this machine: a process per device, which is started again when it ends."""

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from service.engines.connection import Connection, ConnectionLost, EngineFault
from service.engines.engine_set import POLL_PERIOD, EngineMember, EngineSet, settle_now
from service.engines.messages import Begun, EngineOptions, LocalFolder, Refusal, make_codec
from service.engines.remote_policy import RemoteLoader, RemotePolicy
from service.engines.shared_memory import SharedMemory
from service.errors import NoDevice
from service.inference.config import PolicySettings
from service.inference.device_worker import DeviceGone
from service.inference.engine import Engine
from service.inference.policy_sources import allowed_roots, set_cache_folders
from service.inference.progress import LoadDurations
from service.inference.sandbox import CheckpointSandbox
from service.threads import Worker, call_soon

logger = logging.getLogger(__name__)

# Bytes of addresses for frames on their way to an engine, and for answers; the system gives pages only to what is used.
MEMORY_BYTES = 1 << 30
# Seconds in which a process has to begin.
BEGIN_TIMEOUT = 120.0
# Seconds for which a process may be silent, in times of `stuck_after`, before it is killed.
SILENCE_FACTOR = 2.0
# Seconds before an engine is started again: twice as long after each one that lived shorter than the last figure.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STABLE_AFTER = 60.0
# Seconds in which a process ends after its connection was closed; then it is killed.
END_TIMEOUT = 1.0
# Share of a GPU's memory that JAX takes for itself, for all engines on it together.
GPU_MEMORY = 0.9
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)KEYS?($|_)|^ROBOJAX_|^PG", re.IGNORECASE)
# Variables that engines need though their names are like those of secrets.
PASSED = frozenset({"ROBOJAX_COMPILE_CACHE"})
_GPU = re.compile(r"(gpu|cuda):(\d+)")


@dataclass(frozen=True)
class EnginePlan:
    """What one process runs: its name, the devices as JAX names them there, and variables of its environment.

    Without a name and devices it runs JAX's first choice, and has the name of that.
    """

    name: str
    devices: Sequence[str] = ()
    together: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def plan_engines(devices: Sequence[str], *, together: bool = False) -> list[EnginePlan]:
    """Divide devices into engines: one for each, but one for all chips of a TPU, which a process has for itself.

    Args:
        devices: names without ``all`` and numbers; none for JAX's choice.
        together: whether a policy is spread over all of them.
    """
    if not devices or together:
        return [EnginePlan("+".join(devices), tuple(devices), together)]
    tpus = [name for name in devices if name.startswith("tpu")]
    plans = [EnginePlan("tpu", tuple(tpus))] if tpus else []
    counts, seen = Counter(devices), Counter[str]()
    for device in devices:
        if device in tpus:
            continue
        seen[device] += 1
        name = device if seen[device] == 1 else f"{device}#{seen[device]}"
        plan = EnginePlan(name, (device,))
        if (gpu := _GPU.fullmatch(device)) is not None:
            visible = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
            number = visible[int(gpu[2])] if int(gpu[2]) < len(visible) else gpu[2]
            variables = {"CUDA_VISIBLE_DEVICES": number}
            if counts[device] > 1:
                variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{GPU_MEMORY / counts[device]:.2f}"
            plan = replace(plan, devices=(f"{gpu[1]}:0",), variables=variables)
        plans.append(plan)
    return plans


class EngineRefused(Exception):
    """An engine cannot begin; the text says why."""


class LocalMember(EngineMember):
    """An engine in a process of this machine.

    Args:
        stop: kills the process: (engine, why).
    """

    def __init__(
        self,
        name: str,
        begun: Begun,
        connection: Connection,
        stuck_after: float,
        stop: Callable[["LocalMember", str], None],
    ):
        super().__init__(name, begun, stuck_after)
        self._connection, self._loop, self._stop = connection, asyncio.get_running_loop(), stop
        self._stuck_after = stuck_after

    def _call(self, method: str, arguments: tuple[Any, ...], deliver: Callable[[Any], None]) -> None:
        def call() -> None:
            self._connection.call(method, *arguments).add_done_callback(
                lambda answer: deliver(self._translate(answer.exception()) or answer.result())
            )

        call_soon(self._loop, call)

    def act(self, outcome: asyncio.Future[Any], *arguments: Any) -> None:
        self._connection.call("act", *arguments).add_done_callback(lambda answer: settle_now(outcome, answer))

    def on_stuck(self) -> None:
        self._stop(self, f"an inference did not return in {self._stuck_after:g} s (stuck_after)")

    def _translate(self, error: BaseException | None) -> BaseException | None:
        return DeviceGone(f"engine {self.name}: its process ended") if isinstance(error, ConnectionLost) else error

    async def poll(self, engines: EngineSet) -> None:
        """Poll the engine's load until it leaves; it is killed when it is silent for too long."""
        silence = SILENCE_FACTOR * self._stuck_after
        while True:
            try:
                facts = await asyncio.wait_for(
                    self._connection.call("facts", *engines.poll_arguments(self)), max(silence, 2 * POLL_PERIOD)
                )
                engines.take_facts(self, facts)
                engines.retry_copies()
            except TimeoutError:
                self._stop(self, f"it did not answer for {silence:g} s")
                return
            except ConnectionLost:
                return
            except EngineFault as error:
                logger.error("polling %s failed: %s", self.name, error)
            await asyncio.sleep(POLL_PERIOD)


class EngineProcess:
    """Runs the process of one plan, and starts it again when it ends.

    Attributes:
        trouble: why there is no engine, or an empty text.
        is_tried: set once the engine has begun or was refused for the first time.
    """

    def __init__(self, plan: EnginePlan, options: EngineOptions, engines: EngineSet, starter: Worker):
        self._plan, self._engines, self._starter = plan, engines, starter
        self._options = replace(options, devices=plan.devices, together=plan.together)
        self._member: LocalMember | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lost = asyncio.Event()
        self.is_tried = asyncio.Event()
        self.trouble = ""

    async def run(self) -> None:
        """Keep the engine running; never returns."""
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                await self._start()
                self.trouble = ""
                self.is_tried.set()
                await self._lost.wait()
            except EngineRefused as error:
                if str(error) != self.trouble:
                    logger.error("engine %s cannot be used: %s", self._plan.name or "of JAX's choice", error)
                self.trouble = str(error)
                self.is_tried.set()
            finally:
                await self.stop()
            pause = FIRST_PAUSE if time.monotonic() - began > STABLE_AFTER else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _start(self) -> None:
        self._lost.clear()
        ours, theirs = socket.socketpair()
        calls, answers = (SharedMemory(SharedMemory.create_descriptor(MEMORY_BYTES), MEMORY_BYTES) for _ in range(2))
        descriptors = (theirs.fileno(), calls.descriptor, answers.descriptor)
        arguments = (*descriptors, MEMORY_BYTES, os.getpid())
        try:
            # A thread that lives as long as the server: the process ends with the thread that started it.
            self._process = await self._starter.submit(
                lambda: subprocess.Popen(
                    [sys.executable, "-m", "service.engines.process", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    env=make_environment(self._plan.variables),
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C is for the server, which ends its engines in order
                )
            )
        except OSError as error:
            ours.close()
            raise EngineRefused(f"its process cannot be started ({error.strerror})") from error
        finally:
            theirs.close()
        codec = make_codec(calls, answers, copies=True)
        self._connection = connection = Connection(codec, on_event=_take_event, on_lost=self._on_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        calls.close()
        answers.close()
        try:
            begun = await asyncio.wait_for(connection.call("begin", self._plan.name, self._options), BEGIN_TIMEOUT)
        except TimeoutError:
            raise EngineRefused(f"its process did not begin in {BEGIN_TIMEOUT:g} s") from None
        except (ConnectionLost, EngineFault) as error:
            raise EngineRefused(f"its process could not begin ({error})") from error
        if isinstance(begun, Refusal):
            raise EngineRefused(begun.text)
        name = self._plan.name or begun.devices[0]
        member = LocalMember(name, begun, connection, self._options.stuck_after, self._kill)
        self._member = member
        self._engines.add(member, lambda: member.poll(self._engines))

    def _on_lost(self) -> None:
        if self._member is not None:
            self._engines.retire(self._member, "its process ended")
        self._lost.set()

    def _kill(self, member: LocalMember, why: str) -> None:
        """Kill a process that does not answer; its requests go to other engines, or wait for the next one."""
        logger.error("engine %s is killed: %s", member.name, why)
        self._engines.retire(member, why)
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """End the process, and forget its engine."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if (process := self._process) is not None:
            self._process = None
            code = await asyncio.to_thread(_wait_or_kill, process)
            if code:
                logger.warning(
                    "the process of engine %s ended with code %d", self._plan.name or "of JAX's choice", code
                )
        if (member := self._member) is not None:
            self._member = None
            self._engines.retire(member, "its process ended")
            await self._engines.forget(member)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process whose connection is closed, and kill it when it does not end; returns its exit code."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(END_TIMEOUT)
    process.kill()
    return process.wait()


def _take_event(name: str, arguments: tuple[Any, ...]) -> None:
    if name == "log":
        logger_name, level, text = arguments
        logging.getLogger(logger_name).log(level, "%s", text)


def make_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine: this one's without secrets, and with these variables."""
    own = {name: value for name, value in os.environ.items() if name in PASSED or not _SECRET.search(name)}
    return own | dict(variables)


def _name_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Have another process name all devices, because JAX takes the memory of each device that it opens; blocks."""
    if not any(name == "all" or name.isdecimal() for name in devices):
        return tuple(devices)
    program = "import json, sys, jaxmodels\nprint(json.dumps(jaxmodels.name_devices(json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(list(devices))],
        capture_output=True,
        text=True,
        env=make_environment({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        timeout=BEGIN_TIMEOUT,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["JAX finds no device"])[-1]
        raise NoDevice(f"devices: {why.partition('Error: ')[2] or why}")
    return tuple(json.loads(done.stdout))


class LocalEngines:
    """Engine source with processes on this machine.

    Attributes:
        engines: usable while the source is open.
        load: loads policies into engines.
    """

    def __init__(self, policies: PolicySettings, join_timeout: float):
        """Prepare; nothing is started yet.

        Args:
            join_timeout: seconds that a robot waits for an engine before its session fails.
        """
        self._policies, self._join_timeout = policies, join_timeout
        self.engines = EngineSet()
        self._loader = RemoteLoader(
            self.engines,
            lambda folder, commit: partial(_same, LocalFolder.of(folder, commit)),
            policies.policy_bytes,
            roots=allowed_roots(policies),
            inspect=CheckpointSandbox(policies.load_memory),
        )

    def load(self, path: str, revision: str | None = None, /, **more: Any) -> RemotePolicy:
        """Load a policy; see `RemoteLoader`."""
        set_cache_folders(self._policies)
        return self._loader(path, revision, **more)

    @asynccontextmanager
    async def open(self, durations: LoadDurations) -> AsyncIterator[Engine]:
        """Start the engines; they end with the context. Named devices are waited for.

        Raises:
            NoDevice: the machine does not have a device of the settings.
        """
        policies = self._policies
        set_cache_folders(policies)
        engine = Engine(
            stuck_after=policies.stuck_after,
            durations=durations,
            max_load=policies.engine_load,
            are_remote=True,
            join_timeout=self._join_timeout,
        )
        self.engines.open(engine)
        options = EngineOptions(
            dtype=policies.dtype,
            batch_sizes=policies.engine_batch_sizes,
            stuck_after=policies.stuck_after,
            load_timeout=policies.load_timeout,
        )
        together, devices = policies.placement == "shard", policies.devices
        starter = Worker("engines")
        if devices:
            devices = await starter.submit(partial(_name_devices, devices))
        elif policies.device:
            devices = (policies.device,)
        processes = [
            EngineProcess(plan, options, self.engines, starter) for plan in plan_engines(devices, together=together)
        ]
        tasks = [asyncio.create_task(process.run(), name="engine process") for process in processes]
        self.engines.read_trouble = lambda: "; ".join(filter(None, (process.trouble for process in processes)))
        try:
            if policies.devices:
                await asyncio.gather(*(process.is_tried.wait() for process in processes))
                if trouble := self.engines.read_trouble():
                    raise NoDevice(trouble)
            yield engine
        finally:
            for task in tasks:
                task.cancel()
            self.engines.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            starter.close(0.0)


def _same(files: LocalFolder) -> LocalFolder:
    return files
