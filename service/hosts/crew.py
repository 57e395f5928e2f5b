"""The followers of a front, and the one order in which it and they run programs."""

import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from jaxmodels.errors import JaxModelsError
from service.hosts.errors import HostGone, HostRefused, HostsLost
from service.hosts.patience import BEAT, SILENCE, wait_for

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
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
    """Another host; none of these waits for it. What they give raises `HostGone` where it is gone."""

    @property
    def name(self) -> str:
        """As errors call it."""
        ...

    @property
    def heard_at(self) -> float:
        """When it last gave a sign of life, monotonic."""
        ...

    def beat(self) -> None:
        """Ask for one, unless it still owes one."""
        ...

    def stay(self) -> "Future[None]":
        """Does not end as long as that host does not."""
        ...

    def run(self, number: int, words: Words, arrays: Arrays) -> "Future[list[tuple[int, str]]]":
        """Do this at the turn of its number; which runs were refused, and why."""
        ...

    def build(self, words: Words) -> "Future[str | None]":
        """Load or compile; why it cannot be done."""
        ...

    def end(self, why: str | None) -> "Future[None]":
        """It is over."""
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
    """Something that all followers were asked at once."""

    def __init__(self, names: Sequence[str]):
        self.answers: dict[str, Future[str | None]] = {name: Future() for name in names}

    def wait(self) -> None:
        """Wait for all of them.

        Raises:
            HostRefused: one of them cannot.
            HostsLost: one of them is gone.
        """
        refused = [f"{name}: {why}" for name, answer in self.answers.items() if (why := answer.result()) is not None]
        if refused:
            raise HostRefused("; ".join(refused))


class Crew:
    """Used from any thread; none waits for a follower that is gone.

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
        """Have all followers load or compile something, each when it gets to it.

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
        """Run something in all processes at its turn, and wait for the end of it here.

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
        """
        Raises:
            HostsLost: one of them is gone, and nothing can be computed any more.
        """
        if self.lost is not None:
            raise HostsLost(_words_for(self.lost))

    def tell(self, words: Words) -> None:
        """Have the followers do something at its turn; never waits, nothing is heard of it."""
        self._runs.put(_Run(words, {}, lambda: None, Future()))

    def lose(self, why: str) -> None:
        """Nothing can be computed any more; whoever waits is told, and the other followers are sent away."""
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
        """Send the followers home; they end."""
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
        """A follower did not begin a run; this process has not either, or waits for it in vain."""
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
