"""A host that says nothing is waited for a while, one that shows that it lives for as long as it takes."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from service.distributed import host_group
from service.distributed.host_group import QUIET_TIMEOUT, HostSilent, wait_for_outcome

pytestmark = pytest.mark.timed


def channels(**last_beat_at: Callable[[], float]) -> Any:
    """As of hosts that were heard when these functions say."""

    class Heard(SimpleNamespace):
        last_beat_at = property(lambda self: self.when())

    return {name: Heard(when=when) for name, when in last_beat_at.items()}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.distributed.host_group.POLL_PERIOD", 0.05)


def test_the_host_that_says_nothing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = began = 100.0

    class Unanswered(Future[int]):
        """While it is waited for, nothing but this time goes by."""

        def result(self, timeout: float | None = None) -> int:
            nonlocal now
            now += timeout or 0.0
            raise TimeoutError

    monkeypatch.setattr(host_group, "time", SimpleNamespace(monotonic=lambda: now))
    hosts = channels(one=lambda: now, two=lambda: began - 3.9, three=lambda: began - 1)
    with pytest.raises(HostSilent, match=r"^two has been silent for 4 s, .*After 10 s it is given up; if it is back"):
        wait_for_outcome(Unanswered(), hosts, QUIET_TIMEOUT)
    assert now - began < 0.2


def test_what_takes_long_is_waited_for_while_all_hosts_show_that_they_live() -> None:
    outcome: Future[int] = Future()
    timer = threading.Timer(0.3, outcome.set_result, [7])
    timer.start()
    assert wait_for_outcome(outcome, channels(one=time.monotonic), 0.2) == 7


def test_whoever_is_in_no_hurry_waits_for_a_silent_host_too() -> None:
    outcome: Future[int] = Future()
    timer = threading.Timer(0.3, outcome.set_result, [7])
    timer.start()
    assert wait_for_outcome(outcome, channels(one=lambda: 0.0)) == 7


def test_nobody_is_called_silent_right_after_this_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others said meanwhile has yet to be read."""
    began, stood_still = time.monotonic(), list[bool]()

    class Paused(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if stood_still:
                return 7
            stood_still.append(True)
            monkeypatch.setattr(time, "monotonic", lambda: began + 30)
            raise TimeoutError

    assert wait_for_outcome(Paused(), channels(one=lambda: began), QUIET_TIMEOUT) == 7
