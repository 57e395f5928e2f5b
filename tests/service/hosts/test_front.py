"""How a front gathers its followers."""

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from service.hosts import front as fronts
from service.hosts.channel import Channel, greet_front
from service.hosts.errors import ChannelClosed, HostsLost
from service.hosts.follower import Follower, find_front, versions
from service.hosts.front import Front, HostOptions

SECRET = b"a secret of some length"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Clock:
    """Stands where the module ``time`` stands in the front."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def front_at(port: int, count: int, patience: float) -> Front:
    return Front(HostOptions(count, "127.0.0.1", port, "127.0.0.1:1", SECRET, patience), lambda folder: None)


def begun(front: Front, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Thread, list[Any]]:
    """Begin in a thread, without JAX; and what came of it."""
    monkeypatch.setattr(fronts.jaxmodels, "join_hosts", lambda *_, **__: ("hosts", 8))
    monkeypatch.setattr(fronts, "BEAT", 0.02)
    monkeypatch.setattr(fronts, "MANNERS", 30.0)
    outcome: list[Any] = []

    def begin() -> None:
        try:
            outcome.append(front.begin())
        except HostsLost as error:
            outcome.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    return thread, outcome


def say_hello(port: int, said: dict[str, str]) -> tuple[Channel, socket.socket]:
    while True:
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            break
    channel = greet_front(connection, SECRET)
    channel.send({"versions": said})
    return channel, connection


def until(channel: Channel, what: str) -> dict[str, Any]:
    while (words := channel.receive()[0])["do"] != what:
        pass
    return words


def test_strangers_and_other_versions_are_sent_away_and_who_left_is_replaced(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front = front_at(port, 3, 60)
    thread, outcome = begun(front, monkeypatch)
    other, other_connection = say_hello(port, versions() | {"jax": "0.0.1"})
    assert "it has other versions" in until(other, "end")["why"]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".ljust(100))
    gone, gone_connection = say_hello(port, versions())
    assert until(gone, "welcome")["number"] == 1
    gone.end({"is": "nothing"})
    while "is gone again" not in caplog.text:
        time.sleep(0.01)
    kept = [say_hello(port, versions()), say_hello(port, versions())]
    assert [until(channel, "welcome")["number"] for channel, _ in kept] == [1, 2]
    assert [until(channel, "join")["count"] for channel, _ in kept] == [3, 3]
    thread.join(60)
    assert outcome == ["hosts"]
    front.close()
    assert [until(channel, "end")["why"] for channel, _ in kept] == [None, None]
    for connection in (other_connection, gone_connection, *(connection for _, connection in kept)):
        connection.close()


def test_hosts_that_do_not_come_are_counted(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(fronts, "time", clock)
    thread, outcome = begun(front_at(port, 3, 0.5), monkeypatch)
    channel, connection = say_hello(port, versions())
    until(channel, "welcome")
    clock.now += 1.0
    assert until(channel, "end")["why"] == "other hosts did not come"
    thread.join(60)
    assert "1 of 2 other hosts came within 0.5 s" in str(outcome[0])
    connection.close()


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(HostsLost, match=f"127.0.0.1:{port} cannot be listened on"),
    ):
        front_at(port, 2, 1).begin()


def test_a_follower_waits_for_its_front_and_hears_why_it_ends(
    port: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChannelClosed, match=f"no front at 127.0.0.1:{port} for 0 s"):
        find_front("127.0.0.1", port, SECRET, 0.0)
    said: list[str] = []
    ended: list[str | None] = []

    def follow() -> None:
        ended.append(Follower(find_front("127.0.0.1", port, SECRET, 60.0), tmp_path, said.append).follow())

    thread = threading.Thread(target=follow)
    thread.start()
    front = front_at(port, 2, 60)
    beginning, outcome = begun(front, monkeypatch)
    beginning.join(60)
    assert outcome == ["hosts"]
    while len(said) < 2:  # it joins in a thread of its own
        time.sleep(0.001)
    crew: Any = front._crew
    crew.lose("host 1 is gone")
    thread.join(60)
    assert ended == ["host 1 is gone; start this again, and the server"]
    assert said == ["Host 1 of 2.", "Joined: 8 devices on 2 hosts. Ctrl-C ends it, and the front's policies."]
