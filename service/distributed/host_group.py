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
from service.http.array_limits import DTYPES
from service.inference.loaded_policy import IMAGES, FrameSizes

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
BEAT = 1.0
SILENCE = 10.0
# Seconds without a sign of life after which a host is not waited for by whoever is in a hurry. Below the `stuck_after`
# of the settings (5 s), so that a robot's session hears which host it is, and above what a busy machine may be late.
QUIET = 4.0
# Seconds between looks at the hosts.
LOOK = BEAT / 4


class LastHeard(Protocol):
    """Interface of a host with the monotonic time of its last sign of life."""

    @property
    def heard_at(self) -> float: ...


def wait_for(outcome: "Future[Result]", hosts: Mapping[str, LastHeard], quiet: float = math.inf) -> Result:
    """Wait for the outcome of what all hosts were asked for.

    Args:
        hosts: the others, by their names.
        quiet: seconds in which one may say nothing; after them, and the first look, it is not waited for any more.

    Raises:
        HostSilent: one says nothing, and may be gone.
        Exception: whatever the outcome is.
    """
    while True:
        began = time.monotonic()
        with suppress(TimeoutError):
            return outcome.result(LOOK)
        now = time.monotonic()
        heard_at = {name: host.heard_at for name, host in hosts.items()}
        name = min(heard_at, key=lambda name: heard_at[name])
        silence = now - heard_at[name]
        # When this whole process stood still, it has yet to hear what was said meanwhile.
        if silence > quiet and now - began < 2 * LOOK:
            raise HostSilent(
                f"{name} has said nothing for {silence:.0f} s, and nothing is computed without it: look after that "
                f"machine and its network. After {SILENCE:g} s it is given up; if it is back before, restart the "
                "sessions that ended in an error"
            )


logger = logging.getLogger(__name__)

Words: TypeAlias = dict[str, Any]
Arrays: TypeAlias = Mapping[str, np.ndarray]
# Seconds after an error of this process in which a follower's death may become known, which is what caused it then.
CAUSE = 1.0
# Seconds after which a program that has not ended never will, though all hosts show that they live: one hangs in it, or
# only the network that programs use is cut.
HUNG = 60.0
# Seconds that hosts get to hear that it is over.
PARTING = 1.0
# Runs whose outcome is known, for followers that tell late.
REMEMBERED = 64


class Host(Protocol):
    """Interface of another host; no method waits for it. Futures raise `HostGone` when it is gone."""

    @property
    def name(self) -> str:
        """The host's name in errors."""
        ...

    @property
    def heard_at(self) -> float:
        """Monotonic time of its last sign of life."""
        ...

    def beat(self) -> None:
        """Ask for a sign of life, unless one is still owed."""
        ...

    def stay(self) -> "Future[None]":
        """Return a future that ends when the host does."""
        ...

    def run(self, number: int, words: Words, arrays: Arrays) -> "Future[list[tuple[int, str]]]":
        """Run a command when its number is next; returns the commands that were refused, and why."""
        ...

    def build(self, words: Words) -> "Future[str | None]":
        """Load or compile; returns why it cannot be done, or None."""
        ...

    def end(self, why: str | None) -> "Future[None]":
        """End the host, for this reason."""
        ...


@dataclass
class _Run:
    words: Words
    arrays: Arrays
    here: Callable[[], Any]
    outcome: "Future[Any]"
    limit: float = HUNG
    is_unwanted: bool = False


class Asked:
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
    of others, loading and compiling, goes beside that (`ask`), so that robots are served meanwhile.

    What cannot be answered any more after one host is lost is told so at once, though a program may be left behind that
    never ends.

    Args:
        told: called once, in some thread, with why no programs can be run any more.
    """

    def __init__(self, hosts: Sequence[Host], told: Callable[[str], None]):
        self.lost: str | None = None
        self._hosts = tuple(hosts)
        self._told = told
        self._is_lost = threading.Event()
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._waiting: set[Future[Any]] = set()
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._begun: OrderedDict[int, Future[Any]] = OrderedDict()
        self._running: tuple[float, float] | None = None  # since when, monotonic, and for how long at most
        self._is_closed = False
        for host in self._hosts:
            host.stay().add_done_callback(partial(self._hear_end, host))
        for name, work in (("hosts-run", self._work), ("hosts-beat", self._beat)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def ask(self, words: Words) -> Asked:
        """Ask all worker hosts to load or compile something, each as soon as it can.

        Raises:
            HostsLost: one of them is gone.
        """
        asked = Asked([host.name for host in self._hosts])
        with self._lock:
            self.check()
            self._waiting.update(asked.answers.values())
        for host in self._hosts:
            host.build(words).add_done_callback(partial(self._hear_answer, host, asked.answers[host.name]))
        return asked

    def run(
        self,
        words: Words,
        here: Callable[[], Result],
        arrays: Arrays | None = None,
        *,
        quiet: float = math.inf,
        limit: float = HUNG,
    ) -> Result:
        """Run a command on all hosts in the common order, and wait for its result here.

        Args:
            words: what it is, for the followers.
            here: the same in this process.
            quiet: seconds in which a follower may say nothing; after them it is not waited for any more.
            limit: seconds that it may take, once it is its turn.

        Raises:
            HostSilent: a follower says nothing, and may be gone; what has not begun by then never does.
            HostsLost: a follower is gone or failed, before or meanwhile, or the program did not end.
            JaxModelsError: what `here` raised; the followers raise it likewise, before anything is computed.
        """
        outcome: Future[Result] = Future()
        run = _Run(words, arrays or {}, here, outcome, limit)
        with self._lock:
            self.check()
            self._waiting.add(outcome)
        self._runs.put(run)
        try:
            return wait_for(outcome, {host.name: host for host in self._hosts}, quiet)
        finally:
            run.is_unwanted = True
            with self._lock:
                self._waiting.discard(outcome)

    def check(self) -> None:
        """Raise when a host is gone."""
        if self.lost is not None:
            raise HostsLost(_words_for(self.lost))

    def tell(self, words: Words) -> None:
        """Queue a command for the worker hosts without waiting for it."""
        self._runs.put(_Run(words, {}, lambda: None, Future()))

    def lose(self, why: str) -> None:
        """Mark the group as lost: pending calls fail, and the other worker hosts are ended."""
        is_closed = self._is_closed  # then connections end because they are closed here, and followers are told so
        why = "the server is ending" if is_closed else why
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
            waiting = tuple(self._waiting)
        self._is_lost.set()
        if not is_closed:
            logger.error("the hosts are not together any more: %s", why)
            self._told(_words_for(why))
        for outcome in waiting:
            with suppress(InvalidStateError):
                outcome.set_exception(HostsLost(_words_for(why)))
        if not is_closed:
            self._send_away(f"{why}; start this again, and the server")

    def close(self) -> None:
        """End all worker hosts."""
        self._is_closed = True
        self._runs.put(None)
        if self.lost is None:
            wait(self._send_away(None), PARTING)
        self.lose("the server is ending")

    def _send_away(self, why: str | None) -> Sequence["Future[None]"]:
        return [host.end(why) for host in self._hosts]

    def _work(self) -> None:
        while (run := self._runs.get()) is not None:
            if self.lost is None and not run.is_unwanted:
                self._do(run)
            self._running = None
            del run  # with it a policy, and its weights, would wait here for the next one

    def _do(self, run: _Run) -> None:
        finish: Callable[[], None]
        number = next(self._numbers)
        self._begun[number] = run.outcome
        if len(self._begun) > REMEMBERED:
            self._begun.popitem(last=False)
        try:
            for host in self._hosts:
                host.run(number, run.words, run.arrays).add_done_callback(partial(self._hear_run, host))
        except Exception as error:  # Ray itself; whoever waits must not wait for ever
            logger.error("other hosts cannot be asked", exc_info=error)
            self.lose(f"this host failed ({type(error).__name__}); the log says more")
            return
        self._running = time.monotonic(), run.limit
        try:
            finish = partial(run.outcome.set_result, run.here())
        except JaxModelsError as error:
            finish = partial(run.outcome.set_exception, error)
        except Exception as error:
            # What JAX says when another process is gone names none.
            if not self._is_lost.wait(CAUSE):
                logger.error("a program of all hosts failed here", exc_info=error)
                self.lose(f"this host failed ({type(error).__name__}); the log says more")
            return
        with suppress(InvalidStateError):  # whoever waited was told that a follower is gone
            finish()

    def _hear_end(self, host: Host, stayed: "Future[None]") -> None:
        error = stayed.exception()
        self.lose(f"{host.name} is gone: {error or 'it was ended there'}")

    def _hear_answer(self, host: Host, answer: "Future[str | None]", built: "Future[str | None]") -> None:
        with self._lock:
            self._waiting.discard(answer)
        if (error := built.exception()) is None:
            with suppress(InvalidStateError):  # whoever waited was told that a host is gone
                answer.set_result(built.result())
            return
        self.lose(_words_of(host, error))
        with suppress(InvalidStateError):
            answer.set_exception(HostsLost(_words_for(self.lost or "")))

    def _hear_run(self, host: Host, run: "Future[list[tuple[int, str]]]") -> None:
        if (error := run.exception()) is not None:
            self.lose(_words_of(host, error))
            return
        for number, why in run.result():  # rare; this process may be slower, and others have to be heard meanwhile
            threading.Thread(target=self._compare, args=(host, number, why), daemon=True).start()

    def _compare(self, host: Host, number: int, why: str) -> None:
        """Compare a worker host's refusal with the outcome here; when they differ, the group is lost."""
        outcome = self._begun.get(number)
        try:
            here = None if outcome is None else outcome.exception(CAUSE)
        except TimeoutError:
            here = None
        if not isinstance(here, JaxModelsError):
            self.lose(f"{host.name} refused what this host did not: {why}")

    def _beat(self) -> None:
        looked_at = time.monotonic()
        while not self._is_lost.wait(BEAT):
            now = time.monotonic()
            # When this whole process stood still, it has yet to hear what was said meanwhile.
            stood_still, looked_at = now - looked_at > 2 * BEAT, now
            for host in self._hosts:
                host.beat()
                if now - host.heard_at > SILENCE and not stood_still:
                    self.lose(f"{host.name} is gone: nothing was heard of it for {SILENCE:g} s")
            running = self._running
            if running is not None and time.monotonic() - running[0] > running[1]:
                hangs = "a host hangs in it, or the network between them is cut"
                self.lose(f"a program of all hosts has not ended for {running[1]:g} s: {hangs}")


def _words_of(host: Host, error: BaseException) -> str:
    return f"{host.name} {'is gone' if isinstance(error, HostGone) else 'failed'}: {error}"


def _words_for(why: str) -> str:
    return (
        f"the hosts are not together any more: {why}. Nothing can be computed until this server and robojax follow on "
        "the other hosts are started anew"
    )


class _Held:
    """Number under which worker hosts know a policy; they drop it when nothing here refers to it any more."""

    def __init__(self, crew: HostGroup, number: int):
        self.number = number
        weakref.finalize(self, crew.tell, {"do": "drop", "policy": number})


class SharedPolicy:
    """A `service.inference.loaded_policy.Policy` over several hosts; each host does what this one is asked for.

    Args:
        local: this process' part of it.
        number: by which the followers know theirs.

    Attributes:
        commit: what its files are called, when that is known.
        local: as above.
    """

    def __init__(self, crew: HostGroup, local: "jaxmodels.Policy", number: int):
        self.commit: str | None = local.commit
        self.local = local
        self._crew = crew
        self._held = _Held(crew, number)
        self._timings: Mapping[str, float] = {}

    @property
    def number(self) -> int:
        """Number under which the worker hosts know the policy."""
        return self._held.number

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
            HostSilent: another host says nothing, and may be gone.
            HostsLost: another host is gone or failed.
        """
        texts, arrays = _apart(observation)
        batch, sizes = _sizes(arrays)
        if set(sizes) == set(self.requirements.cameras) and not self.is_compiled(batch, sizes):
            self._build(batch, sizes)  # robots that ask for something else are answered meanwhile

        def here() -> tuple[np.ndarray, Mapping[str, float]]:
            return self.local.act(observation), dict(self.local.timings)

        actions, self._timings = self._crew.run(self._words("act") | {"texts": texts}, here, arrays, quiet=QUIET)
        return actions

    def prepare_task(self, text: str) -> None:
        """Encode an instruction ahead of ``act``, as `jaxmodels.Policy.prepare_task`.

        Raises:
            ObservationError: the policy cannot read it.
            HostsLost: another host is gone or failed.
        """
        self._crew.run(self._words("prepare") | {"text": text}, lambda: self.local.prepare_task(text))

    def compile(self, batch: int = 1, cameras: FrameSizes | None = None) -> None:
        """Compile on all hosts at once, while other requests are answered; then run once.

        Raises:
            ObservationError: a camera the policy does not have, or one left out.
            HostRefused: another host cannot.
            HostsLost: another host is gone or failed.
        """
        self._build(batch, cameras)
        words = self._words("compile") | _which(batch, cameras)
        self._crew.run(words, lambda: self.local.compile(batch, cameras))

    def rehearse(self, batch: int = 1, cameras: FrameSizes | None = None) -> float:
        """Return the seconds that `act` takes now for such a batch, measured with zeros; raises as `compile`."""
        if not self.is_compiled(batch, cameras):
            self._build(batch, cameras)
        words = self._words("rehearse") | _which(batch, cameras)
        return self._crew.run(words, lambda: self.local.rehearse(batch, cameras))

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
        asked = self._crew.ask(self._words("build") | _which(batch, cameras))
        self.local.build(batch, cameras)
        asked.wait()

    def _words(self, what: str) -> Words:
        return {"do": what, "policy": self.number}


def _which(batch: int, cameras: FrameSizes | None) -> Words:
    return {"batch": batch, "cameras": None if cameras is None else {name: list(cameras[name]) for name in cameras}}


def _apart(observation: Mapping[str, Any]) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
    """Split an observation into its texts and its arrays of numbers, which travel differently."""
    texts: dict[str, list[str]] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in observation.items():
        if isinstance(value, np.ndarray) and value.dtype.name in DTYPES:
            arrays[name] = value
            continue
        if isinstance(value, str):
            raise ObservationError(f"{name} is one text without a batch axis; wanted one for each member")
        said = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(said, Sequence) or not all(isinstance(text, str) for text in said):
            raise ObservationError(f"{name} is {type(value).__name__}; wanted an array of numbers, or texts")
        texts[name] = list(said)
    return texts, arrays


def _sizes(arrays: Arrays) -> tuple[int, FrameSizes]:
    frames = {name.removeprefix(IMAGES): array.shape for name, array in arrays.items() if name.startswith(IMAGES)}
    batch = max((array.shape[0] for array in arrays.values() if array.ndim), default=1)
    return batch, {name: (shape[-3], shape[-2]) for name, shape in frames.items() if len(shape) in (4, 5)}
