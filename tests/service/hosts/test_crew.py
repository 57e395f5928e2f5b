"""One order for all hosts, and an end for whoever waits when one of them is gone; followers are played by threads."""

import gc
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from jaxmodels.errors import ObservationError
from service.engine.scripted_policy import ScriptedPolicy
from service.hosts.channel import Channel, Words, greet_follower, greet_front
from service.hosts.crew import Crew, Link
from service.hosts.errors import ChannelClosed, HostRefused, HostSilent, HostsLost
from service.hosts.shared_policy import SharedPolicy

SECRET = b"a secret of some length"


class Played:
    """A follower that remembers what it was told, and answers what `reply` says."""

    def __init__(self, connection: socket.socket, reply: Callable[[Words], Words | None]):
        self.heard: queue.Queue[Words] = queue.Queue()
        self.connection = connection
        self.reply = reply
        self.channel: Channel | None = None
        threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        self.channel = greet_front(self.connection, SECRET)
        with suppress(ChannelClosed):
            while True:
                words, arrays = self.channel.receive()
                self.heard.put(words | {name: array.tolist() for name, array in arrays.items()})
                if (answer := self.reply(words)) is not None:
                    self.channel.send(answer)


class Scene:
    """A crew with followers, each of which answers everything well."""

    def __init__(self, count: int = 2) -> None:
        self.told: list[str] = []
        self.replies: list[Callable[[Words], Words | None]] = [answer_well] * count
        links, self.followers = [], []
        for number in range(count):
            server = socket.create_server(("127.0.0.1", 0))
            other = socket.create_connection(server.getsockname())
            mine, _ = server.accept()
            server.close()
            self.followers.append(Played(other, lambda words, number=number: self.replies[number](words)))
            links.append(Link(f"host {number + 1}", greet_follower(mine, SECRET)))
        self.crew = Crew(links, lambda sha, name, at, length: f"{sha} {name} {at} {length}".encode(), self.told.append)

    def close(self) -> None:
        self.crew.close()
        for follower in self.followers:
            follower.connection.close()


def answer_well(words: Words) -> Words | None:
    return {"is": "answer", "asked": words["asked"], "why": None} if "asked" in words else None


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def heard(follower: Played, count: int) -> list[Any]:
    return [follower.heard.get(timeout=30) for _ in range(count)]


def test_all_hosts_are_told_of_runs_in_one_order(scene: Scene) -> None:
    done: list[int] = []

    def run(number: int) -> None:
        scene.crew.run({"do": "act", "number": number}, lambda: done.append(number), {"x": np.array([number])})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    orders = [[words["number"] for words in heard(follower, 20)] for follower in scene.followers]
    assert orders == [done, done]


def test_whoever_waits_is_told_at_once_when_a_host_dies(scene: Scene) -> None:
    began, never = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def hang() -> None:
        began.set()
        never.wait(60)

    def run(here: Callable[[], None]) -> None:
        try:
            scene.crew.run({"do": "act"}, here)
        except HostsLost as error:
            errors.append(error)

    scene.replies[1] = lambda words: None
    asked = scene.crew.ask({"do": "load"})
    threads = [threading.Thread(target=run, args=(here,)) for here in (hang, lambda: None)]
    for thread in threads:
        thread.start()
    assert began.wait(30)
    scene.followers[1].connection.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(30)
    assert len(errors) == 2
    assert all("more: host 2 is gone: it closed the connection. " in str(error) for error in errors)
    for late in (asked.wait, lambda: scene.crew.ask({"do": "load"}), lambda: scene.crew.run({"do": "act"}, hang)):
        with pytest.raises(HostsLost, match="host 2 is gone"):
            late()
    assert len(scene.told) == 1
    # The others are sent away.
    while (words := scene.followers[0].heard.get(timeout=30))["do"] != "end":
        pass
    assert words["why"].startswith("host 2 is gone")
    never.set()


def test_what_nobody_waits_for_any_more_is_not_begun_when_a_silent_host_is_back(scene: Scene) -> None:
    began, back = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        back.wait(60)

    hanging = threading.Thread(target=scene.crew.run, args=({"do": "act", "number": 1}, hang))
    hanging.start()
    assert began.wait(30)
    with pytest.raises(HostSilent, match=r"^host [12] has said nothing for "):
        scene.crew.run({"do": "act", "number": 2}, lambda: None, quiet=0.0)
    assert scene.crew.lost is None
    back.set()
    hanging.join(30)
    assert scene.crew.run({"do": "act", "number": 3}, lambda: 7) == 7
    assert [words["number"] for words in heard(scene.followers[0], 2)] == [1, 3]


def test_a_program_that_does_not_end_ends_it_though_all_hosts_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.hosts.crew.BEAT", 0.02)
    scene, never = Scene(), threading.Event()
    with pytest.raises(HostsLost, match=r"a program of all hosts has not ended for 0.1 s: a host hangs in it, or"):
        scene.crew.run({"do": "act"}, lambda: never.wait(60), limit=0.1)
    assert len(scene.told) == 1
    never.set()
    scene.close()


def test_all_hosts_are_sent_home_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes nothing any more keeps neither the others waiting nor the server's end."""
    scene, all_of_them = Scene(3), threading.Barrier(3)
    end = Channel.end

    def end_together(channel: Channel, words: Words) -> None:
        all_of_them.wait(30)
        end(channel, words)

    monkeypatch.setattr(Channel, "end", end_together)
    scene.crew.close()
    assert not all_of_them.broken
    monkeypatch.undo()
    scene.close()


def test_a_server_that_ends_calls_no_host_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own closing of a connection must not look like a follower's end, or the others are told so."""
    scene, is_heard, whys = Scene(2), threading.Event(), []
    end, lose, first = Channel.end, Crew.lose, scene.crew._links[0].channel

    def end_slowly(channel: Channel, words: Words) -> None:
        whys.append(words["why"])
        if channel is not first:
            assert is_heard.wait(30)  # the first one is closed by then, and heard to be
        end(channel, words)

    def lose_audibly(crew: Crew, why: str) -> None:
        lose(crew, why)
        is_heard.set()

    monkeypatch.setattr(Channel, "end", end_slowly)
    monkeypatch.setattr(Crew, "lose", lose_audibly)
    scene.close()
    assert whys == [None, None]
    assert scene.told == []
    assert not caplog.records
    with pytest.raises(HostsLost, match="more: the server is ending"):
        scene.crew.check()


def test_a_host_that_fails_ends_it_for_all_and_is_named(scene: Scene) -> None:
    never = threading.Event()
    scene.replies[0] = lambda words: {"is": "failed", "why": "XlaRuntimeError"} if words["do"] == "act" else None
    with pytest.raises(HostsLost, match="host 1 failed: XlaRuntimeError"):
        scene.crew.run({"do": "act"}, lambda: never.wait(60))
    never.set()


def test_an_error_of_this_host_is_put_down_to_the_one_that_caused_it(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.hosts.crew.CAUSE", 30.0)  # a busy machine hears of it late

    def fail() -> None:
        scene.followers[0].connection.shutdown(socket.SHUT_RDWR)
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(HostsLost, match="host 1 is gone"):
        scene.crew.run({"do": "act"}, fail)


def test_an_error_of_this_host_alone_ends_it_too(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.hosts.crew.CAUSE", 0.01)

    def fail() -> None:
        raise RuntimeError("secret")

    with pytest.raises(HostsLost, match=r"this host failed \(RuntimeError\)"):
        scene.crew.run({"do": "act"}, fail)


def refused(words: Words) -> Words | None:
    return {"is": "refused", "run": words["run"], "why": "state is missing"} if words["do"] == "act" else None


def test_what_all_hosts_refuse_harms_nobody(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.hosts.crew.CAUSE", 30.0)  # a busy machine refuses it late

    def refuse() -> None:
        raise ObservationError("state is missing")

    scene.replies[:] = [refused, refused]
    with pytest.raises(ObservationError, match="state is missing"):
        scene.crew.run({"do": "act"}, refuse)
    assert scene.crew.run({"do": "compile"}, lambda: 7) == 7


def test_what_only_another_host_refuses_is_no_run_any_more(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr("service.hosts.crew.CAUSE", 0.05)
    scene.replies[0] = refused
    never = threading.Event()
    with pytest.raises(HostsLost, match="host 1 refused what this host did not: state is missing"):
        scene.crew.run({"do": "act"}, lambda: never.wait(60))
    never.set()


def test_a_host_that_cannot_load_says_so_and_the_others_go_on(scene: Scene) -> None:
    scene.replies[1] = lambda words: {"is": "answer", "asked": words["asked"], "why": "no space left"}
    with pytest.raises(HostRefused, match=r"^host 2: no space left$"):
        scene.crew.ask({"do": "load"}).wait()
    scene.replies[1] = answer_well
    scene.crew.ask({"do": "load"}).wait()
    assert scene.crew.run({"do": "compile"}, lambda: 7) == 7


def test_a_host_gets_pieces_of_files(scene: Scene) -> None:
    channel = scene.followers[0].channel
    while channel is None:
        time.sleep(0.001)
        channel = scene.followers[0].channel
    channel.send({"is": "want", "sha": "s", "name": "config.json", "at": 3, "length": 4})
    assert heard(scene.followers[0], 1) == [{"do": "piece", "piece": b"s config.json 3 4"}]


def test_a_policy_is_let_go_everywhere_when_nobody_here_has_it_any_more(scene: Scene) -> None:
    local: Any = ScriptedPolicy(device="hosts")
    local.build = lambda batch, cameras: local.compile(batch, cameras)
    policy = SharedPolicy(scene.crew, local, 5)
    same = policy.on("hosts")
    policy.compile()
    cameras = policy.requirements.cameras
    observation = {f"observation.images.{name}": np.zeros((1, *size, 3), np.uint8) for name, size in cameras.items()}
    observation["observation.state"] = np.zeros((1, 6), np.float32)
    assert same.act(observation).shape == local.act(observation).shape
    told = [(words["do"], words["policy"]) for words in heard(scene.followers[0], 3)]
    assert told == [("build", 5), ("compile", 5), ("act", 5)]
    del policy
    gc.collect()
    assert scene.followers[0].heard.empty()
    del same
    gc.collect()
    assert {"do": "drop", "policy": 5}.items() <= heard(scene.followers[0], 1)[0].items()
