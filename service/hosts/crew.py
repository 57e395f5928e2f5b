"""The followers of a front, and the one order in which it and they run programs."""

import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from jaxmodels.errors import JaxModelsError
from service.hosts.channel import BEAT, Arrays, Channel, Words
from service.hosts.errors import ChannelClosed, HostRefused, HostsLost
from service.hosts.patience import wait_for

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
# Seconds after an error of this process in which a follower's death may become known, which is what caused it then.
CAUSE = 1.0
# Seconds after which a program that has not ended never will, though all hosts show that they live: one hangs in it, or
# only the network that programs use is cut.
HUNG = 60.0
# Runs whose outcome is known, for followers that tell late.
REMEMBERED = 64


@dataclass(frozen=True)
class Link:
    """A follower, as errors call it, and the way to it."""

    name: str
    channel: Channel


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
        piece: folder's sha, name, place and length to bytes of a policy's file, for followers that do not have it.
        told: called once, in some thread, with why no programs can be run any more.
    """

    def __init__(
        self, links: Sequence[Link], piece: Callable[[str, str, int, int], bytes], told: Callable[[str], None]
    ):
        self.lost: str | None = None
        self._links = tuple(links)
        self._piece = piece
        self._told = told
        self._is_lost = threading.Event()
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._numbers = count(1)
        self._asked: dict[int, Asked] = {}
        self._waiting: set[Future[Any]] = set()
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._begun: OrderedDict[int, Future[Any]] = OrderedDict()
        self._running: tuple[float, float] | None = None  # since when, monotonic, and for how long at most
        self._is_closed = False
        for name, work in (("hosts-run", self._work), ("hosts-beat", self._beat)):
            threading.Thread(target=work, name=name, daemon=True).start()
        for link in self._links:
            threading.Thread(target=self._hear, args=(link,), name="hosts-hear", daemon=True).start()

    def ask(self, words: Words) -> Asked:
        """Have all followers do something, each when it gets to it; what is asked is done there in the order of asking.

        Raises:
            HostsLost: one of them is gone.
        """
        asked = Asked([link.name for link in self._links])
        with self._asking:  # in the same order to all
            with self._lock:
                self.check()
                number = next(self._numbers)
                self._asked[number] = asked
            if not self._say(words | {"asked": number}, {}):
                self.check()
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
            return wait_for(outcome, {link.name: link.channel for link in self._links}, quiet)
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
            waiting = [*self._waiting, *(answer for asked in self._asked.values() for answer in asked.answers.values())]
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
        for leaving in self._send_away(None):
            leaving.join()
        self.lose("the server is ending")

    def _send_away(self, why: str | None) -> Sequence[threading.Thread]:
        """All at a time: one that takes nothing any more must not keep the others waiting, or this process."""
        words = {"do": "end", "why": why}
        threads = [threading.Thread(target=link.channel.end, args=(words,), daemon=True) for link in self._links]
        for thread in threads:
            thread.start()
        return threads

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
        if not self._say(run.words | {"run": number}, run.arrays):
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

    def _say(self, words: Words, arrays: Arrays) -> bool:
        for link in self._links:
            try:
                link.channel.send(words, arrays)
            except ChannelClosed as error:
                self.lose(f"{link.name} is gone: {error}")
                return False
        return True

    def _hear(self, link: Link) -> None:
        try:
            while True:
                words, _ = link.channel.receive()
                self._answer(link, words)
        except ChannelClosed as error:
            self.lose(f"{link.name} is gone: {error}")

    def _answer(self, link: Link, words: Mapping[str, Any]) -> None:
        match words.get("is"):
            case "answer":
                asked = self._asked[words["asked"]]
                with suppress(InvalidStateError):
                    asked.answers[link.name].set_result(words["why"])
                if all(answer.done() for answer in asked.answers.values()):
                    with self._lock:
                        self._asked.pop(words["asked"], None)
            case "want":
                try:
                    piece = self._piece(words["sha"], words["name"], words["at"], words["length"])
                except (OSError, KeyError):
                    piece = b""  # its sum will be another one, and the follower says so
                link.channel.send({"do": "piece", "piece": piece})
            case "refused":
                self._compare(link, words["run"], words["why"])
            case "failed":
                self.lose(f"{link.name} failed: {words['why']}")

    def _compare(self, link: Link, number: int, why: str) -> None:
        """A follower did not begin a run; this process has not either, or waits for it in vain."""
        outcome = self._begun.get(number)
        try:
            here = None if outcome is None else outcome.exception(CAUSE)
        except TimeoutError:
            here = None
        if not isinstance(here, JaxModelsError):
            self.lose(f"{link.name} refused what this host did not: {why}")

    def _beat(self) -> None:
        while not self._is_lost.wait(BEAT):
            for link in self._links:
                with suppress(ChannelClosed):  # whoever hears it says so
                    link.channel.beat()
            running = self._running
            if running is not None and time.monotonic() - running[0] > running[1]:
                hangs = "a host hangs in it, or the network between them is cut"
                self.lose(f"a program of all hosts has not ended for {running[1]:g} s: {hangs}")


def _words_for(why: str) -> str:
    return (
        f"the hosts are not together any more: {why}. Nothing can be computed until this server and robojax follow on "
        "the other hosts are started anew"
    )
