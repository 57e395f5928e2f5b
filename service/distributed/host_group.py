"""Host group: one policy sharded over several hosts, which run its programs in the same order."""

import logging
import math
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import ConfigError, JaxModelsError, ObservationError
from service.errors import DeviceAway
from service.http.array_formats import DTYPES
from service.inference.batching import IMAGES
from service.inference.loaded_policy import FrameSizes

if TYPE_CHECKING:
    import jaxmodels  # a server of one host listens before it imports JAX


class HostsLost(DeviceAway, JaxModelsError):
    """A host of the group is gone or failed; nothing can be computed until all are started again."""

    code = "hosts_lost"


class HostSilent(DeviceAway, JaxModelsError):
    """A host of the group has sent nothing for a while; it may come back."""

    code = "host_silent"


class HostRefused(JaxModelsError):
    """Another host cannot do what this one can; the text says which, and why."""


class HostGone(Exception):
    """The process or the machine of another host ended; the text says what Ray knows."""


class HostFailed(Exception):
    """A program raised on another host what no policy raises; the text says what, and its log says more."""


Result = TypeVar("Result")
# Seconds between signs of life, and without any after which the other side is gone.
BEAT_PERIOD = 1.0
SILENCE_TIMEOUT = 10.0
# Seconds without a sign of life after which urgent calls do not wait for a host. Below the `stuck_after` of the
# settings (5 s), so that a robot's session names that host in its error, and above what a busy machine may be late.
QUIET_TIMEOUT = 4.0
# Seconds between two checks of the hosts.
POLL_PERIOD = BEAT_PERIOD / 4


class HasHeartbeat(Protocol):
    """Interface of a host with the monotonic time of its last sign of life."""

    @property
    def last_beat_at(self) -> float: ...


def wait_for_outcome(outcome: "Future[Result]", hosts: Mapping[str, HasHeartbeat], quiet: float = math.inf) -> Result:
    """Wait for the outcome of a command that all hosts run.

    Args:
        hosts: the others, by their names.
        quiet: seconds for which one may be silent; after them, and the first check, it is not waited for any more.

    Raises:
        HostSilent: one is silent, and may be gone.
        Exception: whatever the outcome is.
    """
    while True:
        began = time.monotonic()
        with suppress(TimeoutError):
            return outcome.result(POLL_PERIOD)
        now = time.monotonic()
        last_beat_at = {name: host.last_beat_at for name, host in hosts.items()}
        name = min(last_beat_at, key=lambda name: last_beat_at[name])
        silence = now - last_beat_at[name]
        # When this whole process stood still, it has yet to receive what was sent meanwhile.
        if silence > quiet and now - began < 2 * POLL_PERIOD:
            raise HostSilent(
                f"{name} has been silent for {silence:.0f} s, and nothing is computed without it: check that "
                f"machine and its network. After {SILENCE_TIMEOUT:g} s it is given up; if it is back before, restart "
                "the sessions that ended in an error"
            )


logger = logging.getLogger(__name__)

Command: TypeAlias = dict[str, Any]
Arrays: TypeAlias = Mapping[str, np.ndarray]
# Seconds after an error of this process in which a follower's death may become known, which is what caused it then.
CAUSE_TIMEOUT = 1.0
# Seconds after which a program that has not ended never will, though all hosts show that they live: one hangs in it, or
# only the network that programs use is cut.
HANG_TIMEOUT = 60.0
# Seconds that hosts get to end in order.
END_TIMEOUT = 1.0
# Runs whose outcome is known, for followers that answer late.
REMEMBERED_RUNS = 64


class Host(Protocol):
    """Interface of another host; no method waits for it. Futures raise `HostGone` when it is gone."""

    @property
    def name(self) -> str:
        """The host's name in errors."""
        ...

    @property
    def last_beat_at(self) -> float:
        """Monotonic time of its last sign of life."""
        ...

    def beat(self) -> None:
        """Ask for a sign of life, unless one is still owed."""
        ...

    def stay(self) -> "Future[None]":
        """Return a future that ends when the host does."""
        ...

    def run(self, number: int, command: Command, arrays: Arrays) -> "Future[list[tuple[int, str]]]":
        """Run a command when its number is next; returns the commands that were refused, and why."""
        ...

    def build(self, command: Command) -> "Future[str | None]":
        """Load or compile; returns why it cannot be done, or None."""
        ...

    def end(self, why: str | None) -> "Future[None]":
        """End the host, for this reason."""
        ...


@dataclass
class _Run:
    command: Command
    arrays: Arrays
    run_here: Callable[[], Any]
    outcome: "Future[Any]"
    limit: float = HANG_TIMEOUT
    is_abandoned: bool = False


class BuildRequest:
    """Answers of all worker hosts to one build request."""

    def __init__(self, names: Sequence[str]):
        self.answers: dict[str, Future[str | None]] = {name: Future() for name in names}

    def wait(self) -> None:
        """Wait for all answers.

        Raises:
            HostRefused: one of them cannot.
            HostsLost: one of them is gone.
        """
        refused = [f"{name}: {why}" for name, answer in self.answers.items() if (why := answer.result()) is not None]
        if refused:
            raise HostRefused("; ".join(refused))


class HostGroup:
    """The worker hosts of a group, and the order in which all hosts run programs. Used from any thread.

    Programs over the devices of several processes are begun everywhere in the same order, or they wait for each other
    for ever. So all of them go through one thread here (`run`) and one thread there. What asks nothing of the devices
    of others, loading and compiling, goes beside that (`request_build`), so that robots are served meanwhile.

    Calls that cannot be answered any more after one host is lost fail at once, though a program may be left behind that
    never ends.

    Args:
        on_lost: called once, in some thread, with why no programs can be run any more.
    """

    def __init__(self, hosts: Sequence[Host], on_lost: Callable[[str], None]):
        self.lost: str | None = None
        self._hosts = tuple(hosts)
        self._on_lost = on_lost
        self._is_lost = threading.Event()
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._waiting: set[Future[Any]] = set()
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._outcomes: OrderedDict[int, Future[Any]] = OrderedDict()
        self._running: tuple[float, float] | None = None  # since when, monotonic, and for how long at most
        self._is_closed = False
        for host in self._hosts:
            host.stay().add_done_callback(partial(self._on_host_end, host))
        for name, work in (("hosts-run", self._run_programs), ("hosts-beat", self._send_beats)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def request_build(self, command: Command) -> BuildRequest:
        """Ask all worker hosts to load or compile something, each as soon as it can.

        Raises:
            HostsLost: one of them is gone.
        """
        request = BuildRequest([host.name for host in self._hosts])
        with self._lock:
            self.check()
            self._waiting.update(request.answers.values())
        for host in self._hosts:
            host.build(command).add_done_callback(partial(self._on_build_answer, host, request.answers[host.name]))
        return request

    def run(
        self,
        command: Command,
        here: Callable[[], Result],
        arrays: Arrays | None = None,
        *,
        quiet: float = math.inf,
        limit: float = HANG_TIMEOUT,
    ) -> Result:
        """Run a command on all hosts in the common order, and wait for its result here.

        Args:
            command: what it is, for the followers.
            here: the same in this process.
            quiet: seconds for which a follower may be silent; after them it is not waited for any more.
            limit: seconds that it may take, once it is its turn.

        Raises:
            HostSilent: a follower is silent, and may be gone; what has not begun by then never does.
            HostsLost: a follower is gone or failed, before or meanwhile, or the program did not end.
            JaxModelsError: what `here` raised; the followers raise it likewise, before anything is computed.
        """
        outcome: Future[Result] = Future()
        run = _Run(command, arrays or {}, here, outcome, limit)
        with self._lock:
            self.check()
            self._waiting.add(outcome)
        self._runs.put(run)
        try:
            return wait_for_outcome(outcome, {host.name: host for host in self._hosts}, quiet)
        finally:
            run.is_abandoned = True
            with self._lock:
                self._waiting.discard(outcome)

    def check(self) -> None:
        """Raise when a host is gone."""
        if self.lost is not None:
            raise HostsLost(_describe_loss(self.lost))

    def queue_command(self, command: Command) -> None:
        """Queue a command for the worker hosts without waiting for it."""
        self._runs.put(_Run(command, {}, lambda: None, Future()))

    def mark_lost(self, why: str) -> None:
        """Mark the group as lost: pending calls fail, and the other worker hosts are ended."""
        is_closed = self._is_closed  # then connections end because they are closed here, and followers know that
        why = "the server is ending" if is_closed else why
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
            waiting = tuple(self._waiting)
        self._is_lost.set()
        if not is_closed:
            logger.error("the hosts are not together any more: %s", why)
            self._on_lost(_describe_loss(why))
        for outcome in waiting:
            with suppress(InvalidStateError):
                outcome.set_exception(HostsLost(_describe_loss(why)))
        if not is_closed:
            self._end_hosts(f"{why}; start this again, and the server")

    def close(self) -> None:
        """End all worker hosts."""
        self._is_closed = True
        self._runs.put(None)
        if self.lost is None:
            wait(self._end_hosts(None), END_TIMEOUT)
        self.mark_lost("the server is ending")

    def _end_hosts(self, why: str | None) -> Sequence["Future[None]"]:
        return [host.end(why) for host in self._hosts]

    def _run_programs(self) -> None:
        while (run := self._runs.get()) is not None:
            if self.lost is None and not run.is_abandoned:
                self._run_everywhere(run)
            self._running = None
            del run  # with it a policy, and its weights, would wait here for the next one

    def _run_everywhere(self, run: _Run) -> None:
        finish: Callable[[], None]
        number = next(self._numbers)
        self._outcomes[number] = run.outcome
        if len(self._outcomes) > REMEMBERED_RUNS:
            self._outcomes.popitem(last=False)
        try:
            for host in self._hosts:
                host.run(number, run.command, run.arrays).add_done_callback(partial(self._on_run_answer, host))
        except Exception as error:  # Ray itself; whoever waits must not wait for ever
            logger.error("other hosts cannot be asked", exc_info=error)
            self.mark_lost(f"this host failed ({type(error).__name__}); the log says more")
            return
        self._running = time.monotonic(), run.limit
        try:
            finish = partial(run.outcome.set_result, run.run_here())
        except JaxModelsError as error:
            finish = partial(run.outcome.set_exception, error)
        except Exception as error:
            # What JAX says when another process is gone names none.
            if not self._is_lost.wait(CAUSE_TIMEOUT):
                logger.error("a program of all hosts failed here", exc_info=error)
                self.mark_lost(f"this host failed ({type(error).__name__}); the log says more")
            return
        with suppress(InvalidStateError):  # whoever waited has the error that a follower is gone
            finish()

    def _on_host_end(self, host: Host, stayed: "Future[None]") -> None:
        error = stayed.exception()
        self.mark_lost(f"{host.name} is gone: {error or 'it was ended there'}")

    def _on_build_answer(self, host: Host, answer: "Future[str | None]", built: "Future[str | None]") -> None:
        with self._lock:
            self._waiting.discard(answer)
        if (error := built.exception()) is None:
            with suppress(InvalidStateError):  # whoever waited has the error that a host is gone
                answer.set_result(built.result())
            return
        self.mark_lost(_describe_failure(host, error))
        with suppress(InvalidStateError):
            answer.set_exception(HostsLost(_describe_loss(self.lost or "")))

    def _on_run_answer(self, host: Host, run: "Future[list[tuple[int, str]]]") -> None:
        if (error := run.exception()) is not None:
            self.mark_lost(_describe_failure(host, error))
            return
        for number, why in run.result():  # rare; this process may be slower, and other answers are read meanwhile
            threading.Thread(target=self._compare, args=(host, number, why), daemon=True).start()

    def _compare(self, host: Host, number: int, why: str) -> None:
        """Compare a worker host's refusal with the outcome here; when they differ, the group is lost."""
        outcome = self._outcomes.get(number)
        try:
            here = None if outcome is None else outcome.exception(CAUSE_TIMEOUT)
        except TimeoutError:
            here = None
        if not isinstance(here, JaxModelsError):
            self.mark_lost(f"{host.name} refused what this host did not: {why}")

    def _send_beats(self) -> None:
        checked_at = time.monotonic()
        while not self._is_lost.wait(BEAT_PERIOD):
            now = time.monotonic()
            # When this whole process stood still, it has yet to receive what was sent meanwhile.
            stood_still, checked_at = now - checked_at > 2 * BEAT_PERIOD, now
            for host in self._hosts:
                host.beat()
                if now - host.last_beat_at > SILENCE_TIMEOUT and not stood_still:
                    self.mark_lost(f"{host.name} is gone: it sent nothing for {SILENCE_TIMEOUT:g} s")
            running = self._running
            if running is not None and time.monotonic() - running[0] > running[1]:
                hangs = "a host hangs in it, or the network between them is cut"
                self.mark_lost(f"a program of all hosts has not ended for {running[1]:g} s: {hangs}")


def _describe_failure(host: Host, error: BaseException) -> str:
    return f"{host.name} {'is gone' if isinstance(error, HostGone) else 'failed'}: {error}"


def _describe_loss(why: str) -> str:
    return (
        f"the hosts are not together any more: {why}. Nothing can be computed until this server and robojax follow on "
        "the other hosts are started anew"
    )


class _HostReference:
    """Number under which worker hosts know a policy; they drop it when nothing here refers to it any more."""

    def __init__(self, group: HostGroup, number: int):
        self.number = number
        weakref.finalize(self, group.queue_command, {"do": "drop", "policy": number})


class SharedPolicy:
    """A `service.inference.loaded_policy.Policy` over several hosts; each host runs the same programs as this one.

    Args:
        local: this process' part of it.
        number: by which the followers know theirs.

    Attributes:
        commit: what its files are called, when that is known.
        local: as above.
    """

    def __init__(self, group: HostGroup, local: "jaxmodels.Policy", number: int):
        self.commit: str | None = local.commit
        self.local = local
        self._group = group
        self._reference = _HostReference(group, number)
        self._timings: Mapping[str, float] = {}

    @property
    def number(self) -> int:
        """Number under which the worker hosts know the policy."""
        return self._reference.number

    @property
    def requirements(self) -> Requirements:
        """What the policy needs."""
        return self.local.requirements

    @property
    def device(self) -> str:
        """Name of the device that stands for all devices of all hosts."""
        return self.local.device

    @property
    def timings(self) -> Mapping[str, float]:
        """As `jaxmodels.Policy.timings`, of this host; waiting for the common order is not included."""
        return MappingProxyType(dict(self._timings))

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the action chunk (b, t, a), float32, for feature names to arrays with a batch axis.

        Raises:
            ObservationError: a feature is missing or is not as it should be.
            HostSilent: another host is silent, and may be gone.
            HostsLost: another host is gone or failed.
        """
        texts, arrays = _split_observation(observation)
        batch, sizes = _batch_and_sizes(arrays)
        if set(sizes) == set(self.requirements.cameras) and not self.is_compiled(batch, sizes):
            self._build(batch, sizes)  # robots that ask for something else are answered meanwhile

        def here() -> tuple[np.ndarray, Mapping[str, float]]:
            return self.local.act(observation), dict(self.local.timings)

        actions, self._timings = self._group.run(
            self._make_command("act") | {"texts": texts}, here, arrays, quiet=QUIET_TIMEOUT
        )
        return actions

    def prepare_task(self, text: str, prompt_cut: str | None = None) -> int:
        """Encode an instruction ahead of ``act``, as `jaxmodels.Policy.prepare_task`.

        Raises:
            ObservationError: the policy cannot read it.
            HostsLost: another host is gone or failed.
        """
        command = self._make_command("prepare") | {"text": text, "prompt_cut": prompt_cut}
        return self._group.run(command, lambda: self.local.prepare_task(text, prompt_cut))

    def compile(self, batch: int = 1, cameras: FrameSizes | None = None) -> None:
        """Compile on all hosts at once, while other requests are answered; then run once.

        Raises:
            ObservationError: a camera the policy does not have, or one left out.
            HostRefused: another host cannot.
            HostsLost: another host is gone or failed.
        """
        self._build(batch, cameras)
        command = self._make_command("compile") | _build_arguments(batch, cameras)
        self._group.run(command, lambda: self.local.compile(batch, cameras))

    def profile(self, batch: int = 1, cameras: FrameSizes | None = None) -> float:
        """Return the seconds that `act` takes now for such a batch, measured with zeros; raises as `compile`."""
        if not self.is_compiled(batch, cameras):
            self._build(batch, cameras)
        command = self._make_command("profile") | _build_arguments(batch, cameras)
        return self._group.run(command, lambda: self.local.profile(batch, cameras))

    def is_compiled(self, batch: int = 1, cameras: FrameSizes | None = None) -> bool:
        """Return whether this host has the program; others may take a moment longer, and are waited for."""
        return self.local.is_compiled(batch, cameras)

    def on(self, device: str) -> "SharedPolicy":
        """Return a copy that shares the weights.

        Raises:
            ConfigError: it is to be somewhere else than on all hosts.
        """
        if device != self.device:
            raise ConfigError(f"device is {device!r}; a policy of several hosts is on all of them ({self.device!r})")
        return copy(self)

    def _build(self, batch: int, cameras: FrameSizes | None) -> None:
        request = self._group.request_build(self._make_command("build") | _build_arguments(batch, cameras))
        self.local.build(batch, cameras)
        request.wait()

    def _make_command(self, what: str) -> Command:
        return {"do": what, "policy": self.number}


def _build_arguments(batch: int, cameras: FrameSizes | None) -> Command:
    return {"batch": batch, "cameras": None if cameras is None else {name: list(cameras[name]) for name in cameras}}


def _split_observation(observation: Mapping[str, Any]) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
    """Split an observation into its texts and its arrays of numbers, which travel differently."""
    texts: dict[str, list[str]] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in observation.items():
        if isinstance(value, np.ndarray) and value.dtype.name in DTYPES:
            arrays[name] = value
            continue
        if isinstance(value, str):
            raise ObservationError(f"{name} is one text without a batch axis; wanted one for each member")
        members = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(members, Sequence) or not all(isinstance(text, str) for text in members):
            raise ObservationError(f"{name} is {type(value).__name__}; wanted an array of numbers, or texts")
        texts[name] = list(members)
    return texts, arrays


def _batch_and_sizes(arrays: Arrays) -> tuple[int, FrameSizes]:
    frames = {name.removeprefix(IMAGES): array.shape for name, array in arrays.items() if name.startswith(IMAGES)}
    batch = max((array.shape[0] for array in arrays.values() if array.ndim), default=1)
    return batch, {name: (shape[-3], shape[-2]) for name, shape in frames.items() if len(shape) in (4, 5)}
