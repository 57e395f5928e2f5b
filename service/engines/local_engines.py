"""Engines on this machine: a process per device, which is started again when it ends."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from service.engines.connection import Connection
from service.engines.engine_set import EngineMember, EngineSet
from service.engines.host_process import HostProcess
from service.engines.launch import ENGINE_MODULE, ENGINE_NICENESS, Launched, make_environment
from service.engines.messages import Begun, EngineOptions, LocalFolder
from service.engines.remote_loader import RemoteLoader
from service.engines.remote_policy import RemotePolicy
from service.errors import NoDevice
from service.inference.config import PolicySettings, set_cache_folders
from service.inference.engine import Engine
from service.inference.policy_sources import allowed_roots
from service.inference.progress import LoadDurations
from service.inference.sandbox import CheckpointSandbox
from service.threads import WorkerThread

# Seconds in which a process names the devices.
NAME_TIMEOUT = 120.0
# Share of a GPU's memory that JAX takes for itself, for all engines on it together.
GPU_MEMORY = 0.9
_GPU = re.compile(r"(gpu|cuda):(\d+)")


@dataclass(frozen=True)
class EnginePlan:
    """What one process runs: its name, the devices as JAX names them there, and variables of its environment.

    A plan without a name and devices runs on the device that JAX prefers, whose name it takes.
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
        elif (sharing := sum(counts[other] for other in counts if other.startswith("cpu"))) > 1:
            # Number of XLA's threads. If each of two engines has a thread for each core, throughput is a fifth lower.
            variables = {"NPROC": os.environ.get("NPROC", str(max((os.cpu_count() or 1) // sharing, 1)))}
            plan = replace(plan, variables=variables)
        plans.append(plan)
    return plans


class EngineProcess(HostProcess):
    """Runs the process of one plan, and starts it again when it ends."""

    module, niceness = ENGINE_MODULE, ENGINE_NICENESS

    def __init__(self, plan: EnginePlan, options: EngineOptions, engines: EngineSet, starter: WorkerThread):
        super().__init__(f"engine {plan.name or 'of the default device'}", engines, starter, plan.variables)
        self._plan = plan
        self._options = replace(options, devices=plan.devices, together=plan.together)

    def begin_arguments(self) -> tuple[Any, ...]:
        """Return the name of the engine and its options."""
        return self._plan.name, self._options

    def on_begun(self, connection: Connection, answer: Begun) -> None:
        """Use the engine."""
        stuck_after = self._options.stuck_after
        name = self._plan.name or answer.devices[0]
        member = EngineMember(name, answer, connection.call, stuck_after, on_stuck=self.kill, on_silent=self.kill)
        self.members[member.name] = member
        self.engines.add(member)


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
        timeout=NAME_TIMEOUT,
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

    def __init__(self, policies: PolicySettings, join_timeout: float, launched: Launched | None = None):
        """Prepare; nothing is started yet.

        Args:
            join_timeout: seconds that a robot waits for an engine before its session fails.
            launched: process of the first engine, if it was started before; see `launch_engine`.
        """
        self._policies, self._join_timeout, self._launched = policies, join_timeout, launched
        self.engines = EngineSet()
        self._loader = RemoteLoader(
            self.engines,
            LocalFolder.of,
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
            action_error=policies.action_error_percent / 100,
            batch_sizes=policies.engine_batch_sizes,
            stuck_after=policies.stuck_after,
            load_timeout=policies.load_timeout,
        )
        together, devices = policies.placement == "shard", policies.devices
        starter = WorkerThread("engines")
        if devices:
            devices = await starter.submit(partial(_name_devices, devices))
        elif policies.device:
            devices = (policies.device,)
        processes = [
            EngineProcess(plan, options, self.engines, starter) for plan in plan_engines(devices, together=together)
        ]
        processes[0].launched, self._launched = self._launched, None
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
