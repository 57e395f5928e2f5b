"""One order for all hosts, and an end for whoever waits when one of them is gone; the other hosts are played."""

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxmodels.errors import ObservationError
from service.distributed.host_group import (
    Arrays,
    Command,
    HostFailed,
    HostGone,
    HostGroup,
    HostRefused,
    HostSilent,
    HostsLost,
    SharedPolicy,
)
from tests.testing.doubles import ScriptedPolicy

pytestmark = pytest.mark.timed

NEVER: Future[Any] = Future()


def done(answer: Any) -> Future[Any]:
    found: Future[Any] = Future()
    if isinstance(answer, Exception):
        found.set_exception(answer)
    else:
        found.set_result(answer)
    return found


class Played:
    """A host that keeps the commands it received, and answers well unless a test says otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commands: queue.Queue[Command] = queue.Queue()
        self.last_beat_at = time.monotonic()
        self.is_silent = False
        self.ran: Callable[[int, Command], Future[Any]] = lambda number, words: done([])
        self.built: Callable[[Command], Future[Any]] = lambda words: done(None)
        self.ended: Callable[[], Future[Any]] = lambda: done(None)
        self.stayed: Future[Any] = Future()

    def beat(self) -> None:
        if not self.is_silent:
            self.last_beat_at = time.monotonic()

    def stay(self) -> Future[Any]:
        return self.stayed

    def run(self, number: int, words: Command, arrays: Arrays) -> Future[Any]:
        self.commands.put(words | {name: array.tolist() for name, array in arrays.items()})
        return self.ran(number, words)

    def build(self, words: Command) -> Future[Any]:
        self.commands.put(words)
        return self.built(words)

    def end(self, why: str | None) -> Future[Any]:
        self.commands.put({"do": "end", "why": why})
        return self.ended()

    def die(self) -> None:
        self.stayed.set_exception(HostGone("its process ended"))


class Scene:
    """A host group with two hosts."""

    def __init__(self, count: int = 2) -> None:
        self.losses: list[str] = []
        self.hosts = [Played(f"host {number + 1}") for number in range(count)]
        self.group = HostGroup(self.hosts, self.losses.append)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.group.close()


def receive(host: Played, count: int) -> list[Any]:
    return [host.commands.get(timeout=30) for _ in range(count)]


def test_all_hosts_are_told_of_runs_in_one_order(scene: Scene) -> None:
    order: list[int] = []

    def run(number: int) -> None:
        scene.group.run({"do": "act", "number": number}, lambda: order.append(number), {"x": np.array([number])})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    orders = [[words["number"] for words in receive(host, 20)] for host in scene.hosts]
    assert orders == [order, order]


def test_whoever_waits_is_told_at_once_when_a_host_dies(scene: Scene) -> None:
    began, never = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def hang() -> None:
        began.set()
        never.wait(60)

    def run(here: Callable[[], None]) -> None:
        try:
            scene.group.run({"do": "act"}, here)
        except HostsLost as error:
            errors.append(error)

    scene.hosts[1].built = lambda words: NEVER
    asked = scene.group.request_build({"do": "load"})
    threads = [threading.Thread(target=run, args=(here,)) for here in (hang, lambda: None)]
    for thread in threads:
        thread.start()
    assert began.wait(30)
    scene.hosts[1].die()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 2
    assert all("more: host 2 is gone: its process ended. " in str(error) for error in errors)
    for late in (
        asked.wait,
        lambda: scene.group.request_build({"do": "load"}),
        lambda: scene.group.run({"do": "act"}, hang),
    ):
        with pytest.raises(HostsLost, match="host 2 is gone"):
            late()
    assert len(scene.losses) == 1
    # The others are sent away.
    while (words := scene.hosts[0].commands.get(timeout=30))["do"] != "end":
        pass
    assert words["why"].startswith("host 2 is gone")
    never.set()


def test_what_nobody_waits_for_any_more_is_not_begun_when_a_silent_host_is_back(scene: Scene) -> None:
    began, back = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        back.wait(60)

    hanging = threading.Thread(target=scene.group.run, args=({"do": "act", "number": 1}, hang))
    hanging.start()
    assert began.wait(30)
    with pytest.raises(HostSilent, match=r"^host [12] has been silent for "):
        scene.group.run({"do": "act", "number": 2}, lambda: None, quiet=0.0)
    assert scene.group.lost is None
    back.set()
    hanging.join(30)
    assert scene.group.run({"do": "act", "number": 3}, lambda: 7) == 7
    assert [words["number"] for words in receive(scene.hosts[0], 2)] == [1, 3]


def test_a_program_that_does_not_end_ends_it_though_all_hosts_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.distributed.host_group.BEAT_PERIOD", 0.02)
    scene, never = Scene(), threading.Event()
    with pytest.raises(HostsLost, match=r"a program of all hosts has not ended for 0.1 s: a host hangs in it, or"):
        scene.group.run({"do": "act"}, lambda: never.wait(60), limit=0.1)
    assert len(scene.losses) == 1
    never.set()
    scene.group.close()


def test_a_host_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.distributed.host_group.BEAT_PERIOD", 0.02)
    monkeypatch.setattr("service.distributed.host_group.SILENCE_TIMEOUT", 0.1)
    monkeypatch.setattr("service.distributed.host_group.END_TIMEOUT", 0.01)
    scene, never = Scene(), threading.Event()
    scene.hosts[1].is_silent = True
    scene.hosts[1].ended = lambda: NEVER  # nor does it hear that it is over
    with pytest.raises(HostsLost, match=r"host 2 is gone: it sent nothing for 0.1 s"):
        scene.group.run({"do": "act"}, lambda: never.wait(60))
    never.set()
    scene.group.close()
    assert len(scene.losses) == 1


def test_a_server_that_ends_calls_no_host_gone(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a host that was sent home must not look like a loss, or the others are told so."""
    scene = Scene()

    def end() -> Future[Any]:
        scene.hosts[0].die()
        return done(None)

    scene.hosts[0].ended = end
    scene.group.close()
    assert [receive(host, 1) for host in scene.hosts] == [[{"do": "end", "why": None}]] * 2
    assert scene.losses == []
    assert not caplog.records
    with pytest.raises(HostsLost, match="more: the server is ending"):
        scene.group.check()


def test_a_host_that_fails_ends_it_for_all_and_is_named(scene: Scene) -> None:
    never = threading.Event()
    scene.hosts[0].ran = lambda number, words: done(HostFailed("XlaRuntimeError"))
    with pytest.raises(HostsLost, match="host 1 failed: XlaRuntimeError"):
        scene.group.run({"do": "act"}, lambda: never.wait(60))
    never.set()


def test_an_error_of_this_host_is_put_down_to_the_one_that_caused_it(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.distributed.host_group.CAUSE_TIMEOUT", 30.0)  # a busy machine hears of it late

    def fail() -> None:
        scene.hosts[0].die()
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(HostsLost, match="host 1 is gone"):
        scene.group.run({"do": "act"}, fail)


def test_an_error_of_this_host_alone_ends_it_too(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.distributed.host_group.CAUSE_TIMEOUT", 0.01)

    def fail() -> None:
        raise RuntimeError("secret")

    with pytest.raises(HostsLost, match=r"this host failed \(RuntimeError\)"):
        scene.group.run({"do": "act"}, fail)


def refused(number: int, words: Command) -> Future[Any]:
    return done([(number, "state is missing")] if words["do"] == "act" else [])


def test_what_all_hosts_refuse_harms_nobody(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.distributed.host_group.CAUSE_TIMEOUT", 30.0)  # a busy machine refuses it late

    def refuse() -> None:
        raise ObservationError("state is missing")

    scene.hosts[0].ran = scene.hosts[1].ran = refused
    with pytest.raises(ObservationError, match="state is missing"):
        scene.group.run({"do": "act"}, refuse)
    assert scene.group.run({"do": "compile"}, lambda: 7) == 7


def test_what_only_another_host_refuses_is_no_run_any_more(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.distributed.host_group.CAUSE_TIMEOUT", 0.05)
    scene.hosts[0].ran = refused
    never = threading.Event()
    with pytest.raises(HostsLost, match="host 1 refused what this host did not: state is missing"):
        scene.group.run({"do": "act"}, lambda: never.wait(60))
    never.set()


def test_a_host_that_cannot_load_says_so_and_the_others_go_on(scene: Scene) -> None:
    scene.hosts[1].built = lambda words: done("no space left")
    with pytest.raises(HostRefused, match=r"^host 2: no space left$"):
        scene.group.request_build({"do": "load"}).wait()
    scene.hosts[1].built = lambda words: done(None)
    scene.group.request_build({"do": "load"}).wait()
    assert scene.group.run({"do": "compile"}, lambda: 7) == 7


def test_a_policy_is_let_go_everywhere_when_nobody_here_has_it_any_more(scene: Scene) -> None:
    local: Any = ScriptedPolicy(device="hosts")
    local.build = lambda batch, cameras: local.compile(batch, cameras)
    policy = SharedPolicy(scene.group, local, 5)
    same = policy.on("hosts")
    policy.compile()
    cameras = policy.requirements.cameras
    observation = {f"observation.images.{name}": np.zeros((1, *size, 3), np.uint8) for name, size in cameras.items()}
    observation["observation.state"] = np.zeros((1, 6), np.float32)
    assert same.act(observation).shape == local.act(observation).shape
    told = [(words["do"], words["policy"]) for words in receive(scene.hosts[0], 3)]
    assert told == [("build", 5), ("compile", 5), ("act", 5)]
    del policy
    gc.collect()
    assert scene.hosts[0].commands.empty()
    del same
    gc.collect()
    assert {"do": "drop", "policy": 5}.items() <= receive(scene.hosts[0], 1)[0].items()
