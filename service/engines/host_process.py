"""Child processes of a server: each is started, connected to the server, and started again when it ends."""

import asyncio
import logging
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from service.engines.connection import Connection, ConnectionLost, EngineFault
from service.engines.engine_set import EngineMember, EngineSet
from service.engines.launch import Launched, launch
from service.engines.messages import Refusal, make_codec
from service.engines.shared_memory import SharedMemory
from service.threads import WorkerThread

logger = logging.getLogger(__name__)

# Seconds before a process is started again. They double, up to the second figure, after each process that lived for a
# shorter time than the third.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STABLE_AFTER = 60.0


class HostRefused(Exception):
    """A process cannot do its work; the text says why."""


class SupervisedProcess(ABC):
    """Runs a child process, and starts it again when it ends.

    Attributes:
        trouble: why the process does not work, or an empty text.
        is_tried: set once the process has begun or refused for the first time.
        launched: process that was started before; `run` starts one if it is None.
    """

    module: str  # main module of the process
    begin_timeout: float | None = 120.0  # seconds in which the process begins; None for no limit
    end_timeout = 1.0  # seconds in which the process ends after its connection was closed; then it is killed
    longest_pause = LONGEST_PAUSE
    niceness = 0

    def __init__(self, name: str, starter: WorkerThread, variables: Mapping[str, str]):
        """Prepare; nothing is started yet.

        Args:
            name: of the process, for messages.
            starter: thread that starts the process; the process ends with this thread.
            variables: added to the environment of the process.
        """
        self.name = name
        self.trouble = ""
        self.is_tried = asyncio.Event()
        self.launched: Launched | None = None
        self._starter, self._variables = starter, variables
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lost = asyncio.Event()

    @abstractmethod
    def begin_arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the call ``begin``, the first that the process gets."""

    @abstractmethod
    def on_begun(self, connection: Connection, answer: Any) -> None:
        """Take the answer of ``begin``."""

    @abstractmethod
    def on_ended(self, why: str) -> None:
        """Send no more calls, because the process ended or is killed; it may be called more than once."""

    def on_event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Take an event of the process."""
        if name == "log":
            logger_name, level, text = arguments
            logging.getLogger(logger_name).log(level, "%s", text)

    async def run(self) -> None:
        """Keep the process running; never returns."""
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                await self._start()
                self.trouble = ""
                self.is_tried.set()
                await self._lost.wait()
            except HostRefused as error:
                if str(error) != self.trouble:
                    logger.error("%s cannot be used: %s", self.name, error)
                self.trouble = str(error)
                self.is_tried.set()
            except Exception:  # The process is tried again, because the server needs it.
                logger.exception("%s cannot be used", self.name)
                self.trouble = f"{self.name} cannot be used; the server's log says more"
                self.is_tried.set()
            finally:
                await self.stop()
            is_stable = time.monotonic() - began > STABLE_AFTER
            pause = FIRST_PAUSE if is_stable else min(2 * pause, self.longest_pause)
            await asyncio.sleep(pause)

    async def _start(self) -> None:
        launched, self.launched = self.launched, None
        if launched is None:
            try:
                starting = partial(launch, self.module, self.niceness, self._variables)
                launched = await self._starter.submit(starting)
            except OSError as error:
                raise HostRefused(f"its process cannot be started ({error.strerror})") from error
        self._process = launched.process
        await self.connect(launched.socket, launched.calls, launched.answers)

    async def connect(self, ours: socket.socket, calls: SharedMemory, answers: SharedMemory) -> None:
        """Connect to the process at the other end of a socket, and have it begin.

        Raises:
            HostRefused: the process cannot do its work.
        """
        self._lost.clear()
        codec = make_codec(calls, answers, copies=True)
        self._connection = connection = Connection(codec, on_event=self.on_event, on_lost=self._on_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        try:
            answer = await asyncio.wait_for(connection.call("begin", *self.begin_arguments()), self.begin_timeout)
        except TimeoutError:
            raise HostRefused(f"its process did not begin in {self.begin_timeout:g} s") from None
        except (ConnectionLost, EngineFault) as error:
            raise HostRefused(f"its process could not begin ({error})") from error
        if isinstance(answer, Refusal):
            raise HostRefused(answer.text)
        self.on_begun(connection, answer)

    def _on_lost(self) -> None:
        self.on_ended("its process ended")
        self._lost.set()

    def kill_process(self, why: str) -> None:
        """Kill the process, because it does not answer."""
        logger.error("%s is killed: %s", self.name, why)
        self.on_ended(why)
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if (process := self._process) is not None:
            self._process = None
            code = await asyncio.to_thread(_wait_or_kill, process, self.end_timeout)
            if code:
                logger.warning("%s: its process ended with code %d", self.name, code)
        self.on_ended("its process ended")


class HostProcess(SupervisedProcess):
    """Process that hosts engines.

    Attributes:
        engines: of the server.
        members: engines of the process, by the names that it has for them.
    """

    def __init__(self, name: str, engines: EngineSet, starter: WorkerThread, variables: Mapping[str, str]):
        """Prepare; see `SupervisedProcess`."""
        super().__init__(name, starter, variables)
        self.engines = engines
        self.members: dict[str, EngineMember] = {}

    def on_ended(self, why: str) -> None:
        """Send no more requests to the engines: pending requests go to other engines, or wait for one."""
        for member in self.members.values():
            self.engines.retire(member, why)

    def kill(self, member: EngineMember, why: str) -> None:
        """Kill the process, because an engine of it does not answer."""
        self.kill_process(why)

    async def stop(self) -> None:
        """End the process, and forget its engines."""
        await super().stop()
        while self.members:
            _, member = self.members.popitem()
            await self.engines.forget(member)


def _wait_or_kill(process: subprocess.Popen[bytes], timeout: float) -> int:
    """Wait for a process whose connection is closed, and kill it when it does not end; returns its exit code."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout)
    process.kill()
    return process.wait()
