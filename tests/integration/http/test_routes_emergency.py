"""Emergency stops of single sessions over HTTP, with their latches."""

import asyncio
import http.client
import threading
import time
from collections.abc import Callable

import pytest

from tests.testing.pauses import Pauses
from tests.testing.rig import POSE, show


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not claim():  # noqa: ASYNC110 - each check takes one turn of the loop
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b'{"reason": "a hand"}', "a hand"), (b'{"reason": "' + b"x" * 200_000 + b'"}', "asked for over HTTP")],
    ids=["a reason", "too long"],
)
async def test_only_the_named_session_is_stopped_and_latched(server, body: bytes, reason: str) -> None:
    for name in ("a", "b"):
        await server.create(name)
        await server.call("POST", f"/sessions/{name}/start")
    status, reply = await server.call("POST", "/sessions/a/emergency_stop", data=body)
    assert (status, reply["stopped"]) == (200, ["a"])
    _, (found, other) = await server.call("GET", "/sessions")
    assert (found["status"], other["status"]) == ("stopped", "running")
    assert (found["stats"]["emergency_stop"], found["stats"]["stop_code"]) == (reason, "asked")
    assert (await server.call("POST", "/sessions/a/start"))[0] == 409
    assert (await server.call("POST", "/debug/sessions/a/reset"))[0] == 200
    assert (await server.call("GET", "/sessions/a"))[1]["status"] == "stopped", "a reset does not start the session"
    assert (await server.call("POST", "/sessions/a/start"))[0] == 200
    assert (await server.call("POST", "/sessions/nobody/emergency_stop"))[0] == 404


@pytest.mark.parametrize("path", ["/sessions/arm/emergency_stop", "/debug/emergency_stop"])
@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 99999999\r\n\r\n",
        b'Content-Length: 2000000\r\n\r\n{"reason": "' + b"x" * 400_000,
        b'Content-Length: 30\r\n\r\n{"reas',
        b'Transfer-Encoding: chunked\r\n\r\n6\r\n{"reas\r\n',
    ],
    ids=["above the limit", "far above the limit", "stalled", "stalled chunks"],
)
async def test_no_body_delays_a_stop(server, path: str, rest: bytes, pauses: Pauses) -> None:
    await server.create()
    await server.call("POST", "/sessions/arm/start")
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + rest)
    began = time.monotonic()
    assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
    assert pauses.running(began) < 1, "a request may take ten seconds"
    writer.close()
    found = (await server.call("GET", "/sessions/arm"))[1]
    assert (found["status"], found["stats"]["emergency_stop"]) == ("stopped", "asked for over HTTP")


async def test_stop_during_a_blocked_loop_precedes_any_command(server) -> None:
    await server.create("arm", rate=50)
    link = server.transport.link

    showing = asyncio.create_task(show(link))
    await server.call("POST", "/sessions/arm/start")
    await until(lambda: len(link.sent) >= 10)
    host, port = server.address

    def stop() -> None:
        connection = http.client.HTTPConnection(host, port, timeout=30)
        connection.request("POST", "/api/sessions/arm/emergency_stop")
        asked.set()
        answers.append(connection.getresponse().status)
        connection.close()

    answers: list[int] = []
    asked = threading.Event()
    stopping = threading.Timer(0.02, stop)
    sent = len(link.sent)
    stopping.start()
    time.sleep(0.2)  # noqa: ASYNC251 - the stop arrives while the event loop is blocked
    assert asked.wait(30)
    session = server.app.ctx.sessions.get("arm")
    await until(lambda: session.is_latched)
    stopped = len(link.sent)
    showing.cancel()
    await until(lambda: bool(answers))
    assert answers == [200]
    assert len([one for one in link.sent[sent:stopped] if one.values != POSE]) <= 2, "the stop acts within 20 ms"
    assert all(one.values == POSE for one in link.sent[stopped:]), "only the hold follows the stop"
