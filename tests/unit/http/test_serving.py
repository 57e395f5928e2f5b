import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import aiohttp
import pytest
from sanic import Sanic

from service.app import create_app
from service.http.server import CannotListen, listen, serve_app, url_of
from service.loop_watchdog import LoopWatchdog
from service.sessions.request import DIRECT
from service.settings import Settings
from service.streaming.direct_transport import DirectTransport, TransportByUrl
from service.transport.link import LinkRequest
from tests.testing.doubles import MemoryTransport, ScriptedLoader
from tests.testing.pauses import Pauses
from tests.testing.rig import body, started

pytestmark = pytest.mark.timed


def test_port_0_is_a_free_port_and_the_url_names_it():
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        assert url_of(first) != url_of(second)
        assert url_of(first) == f"http://127.0.0.1:{first.getsockname()[1]}"
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_an_ipv6_address_is_in_brackets():
    try:
        listener = listen("::1", 0)
    except CannotListen:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_a_taken_port_and_an_invalid_host_are_errors():
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(CannotListen, match=r"cannot listen on 127\.0\.0\.1"):
            listen("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(CannotListen, match=r"host '256\.1\.1\.1' is no address"):
        listen("256.1.1.1", 0)


async def test_a_burst_of_connections_is_accepted_while_the_loop_is_busy():
    async with started() as server:
        with contextlib.ExitStack() as held:
            # The blocked event loop accepts nothing here. A refused connection would be retried after one second.
            for _ in range(300):
                held.enter_context(socket.create_connection(server.address, timeout=0.5))


async def test_a_server_ends_in_time_with_open_connections(pauses: Pauses):
    load = ScriptedLoader(gate=threading.Event())
    async with aiohttp.ClientSession() as http:
        async with started(load=load) as server:
            create = asyncio.create_task(http.post(f"{server.url}/sessions", json=body()))
            await server.call("POST", "/video/workspaces/w/rooms", json={"room_id": "r"})
            room = await http.ws_connect(f"{server.url}/video/workspaces/w/rooms/r/ws")
            await room.send_json({"participant_id": "me", "role": "consumer"})
            assert (await room.receive_json())["type"] == "joined"
            idle = socket.create_connection(server.address)
            await server.until_loading()
            began = time.monotonic()
        assert pauses.running(began) < 4.5
        assert (await room.receive(30)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        answer = await create
        assert answer.status in (404, 409, 503)
        assert "shutting down" in str(await answer.json()) or "deleted while" in str(await answer.json())
    idle.close()
    load.gate.set()  # type: ignore[union-attr]
    assert server.app.name not in Sanic._app_registry


async def test_a_server_that_cannot_start_removes_its_app():
    app = create_app(Settings(), transport=MemoryTransport(), load=ScriptedLoader())

    @app.before_server_start
    async def broken(app):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        async with serve_app(app, listen("127.0.0.1", 0)):
            pass
    assert app.name not in Sanic._app_registry


class WatchdogRig:
    """Watchdog whose beats and checks the test calls."""

    def __init__(self) -> None:
        self.now = self.computed = 0.0
        self.dog = LoopWatchdog(clock=lambda: self.now, computed=lambda: self.computed)

    def advance(self, seconds: float, *, beats: bool = True, checks: bool = True, computes: float = 0.0) -> None:
        """Beat every 50 ms and check every 100 ms. ``computes`` is the share of the time that the process computes."""
        for step in range(round(seconds / 0.05)):
            self.now += 0.05
            self.computed += 0.05 * computes
            if checks and step % 2:
                self.dog.check()
            if beats:
                self.dog.beat()

    @property
    def counts(self) -> tuple[int, int]:
        return self.dog.blocked.count, self.dog.paused.count


@pytest.mark.parametrize("thread_is_first", [False, True])
@pytest.mark.parametrize(
    ("runs", "computes", "counts"),
    [
        (True, 0.0, (1, 0)),  # The loop waits in Python, so the thread can check.
        (False, 1.0, (1, 0)),  # The loop computes in C with the GIL, so the thread cannot check.
        (False, 0.2, (1, 0)),  # The loop computes in C on a busy machine.
        (False, 0.0, (0, 1)),  # The process is paused.
    ],
)
def test_a_blocked_loop_differs_from_a_paused_process(runs, computes, counts, thread_is_first, caplog) -> None:
    rig = WatchdogRig()
    rig.advance(1.0)
    assert rig.counts == (0, 0)
    rig.advance(3.0, beats=False, checks=runs, computes=computes)
    if thread_is_first:
        rig.dog.check()
    rig.dog.beat()
    rig.advance(1.0)
    assert rig.counts == counts
    assert rig.dog.blocked.seconds + rig.dog.paused.seconds == pytest.approx(3.0, abs=0.06)
    if runs:
        assert [record.getMessage()[:47] for record in caplog.records] == [
            "the event loop has been blocked for 0.30 s, in ",
            "the event loop was blocked for 3.00 s; this pro",
        ]
        assert "check (service/loop_watchdog.py:" in caplog.text


def test_a_loop_that_is_blocked_after_a_pause_counts_as_both() -> None:
    rig = WatchdogRig()
    rig.advance(1.0)
    rig.now += 30
    rig.dog.check()
    rig.advance(1.0, beats=False)
    rig.dog.beat()
    assert (rig.dog.blocked.seconds, rig.dog.paused.seconds) == (pytest.approx(1.0), pytest.approx(30.0))
    assert rig.counts == (1, 1)


# Modules with a long import time that no request needs before the start.
LAZY_MODULES = "jax aiohttp aiortc av cryptography hooks.registry.registry huggingface_hub jaxtyping jwt psutil PIL"


def test_a_server_listens_before_it_imports_large_modules() -> None:
    code = (
        "import sys, robojax.cli.serve, service.http.server; from service.app import create_app; create_app(); "
        f"print(*set('{LAZY_MODULES}'.split()) & set(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout.split() == []


async def test_every_session_waits_for_the_import_of_rooms() -> None:
    is_imported = threading.Event()
    transport = TransportByUrl(DirectTransport(), lambda: is_imported.wait() and MemoryTransport())
    inbox = SimpleNamespace(on_event=lambda event: None)

    async def connect() -> None:
        async with transport.connect(LinkRequest(DIRECT, "arm", (), None, inbox)):
            pass

    first, cancelled = asyncio.create_task(connect()), asyncio.create_task(connect())
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.sleep(0.01)
    assert (first.done(), cancelled.cancelled()) == (False, True)
    is_imported.set()
    await first
