import asyncio
import contextlib
import socket
import time
from pathlib import Path

import httpx2
import pytest
from sanic import Blueprint, Request
from sanic.response import text

from hooks.errors import HooksError, InvalidWebhook, StoreError
from hooks.payload import WebhookPayload, sample
from hooks.receiver.endpoint import ReceiverSettings
from hooks.server import serving as application
from hooks.server.server import WebhooksServer, get_default_server, webhook_endpoint
from hooks.server.serving import CannotListen, choose_address, open_listener, serve_app
from tests.unit.hooks.server.conftest import ask

SECRET = {"x_webhook_secret": "my_webhook_secret"}


@pytest.mark.parametrize("path", [None, "implicit", "/explicit/", "robots//left"])
def test_registration_returns_the_function_and_sets_the_path(make, path):
    server = make()

    def implicit():
        pass

    decorate = server.add_webhook if path is None else server.add_webhook(path)
    assert decorate(implicit) is implicit
    assert dict(server.registered_webhooks) == {f"/webhooks/{(path or 'implicit').strip('/')}": implicit}


def test_paths_of_the_servers_pages_are_refused_as_webhooks(make):
    with pytest.raises(InvalidWebhook, match="choose another path"):
        make().add_webhook("_events/mine")(lambda: None)


class Robot:
    def on_push(self, payload):
        return {"robot": payload.repo.name}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (classmethod(Robot.on_push), "found classmethod"),
        (Robot, "found type <class '.*Robot'>"),
        (7, "wanted a function, or a path"),
    ],
)
def test_a_value_that_is_not_a_function_is_refused(make, value, message):
    with pytest.raises(TypeError, match=message):
        make().add_webhook(value)
    with pytest.raises(TypeError):
        webhook_endpoint("x")(value)


def test_webhook_endpoint_returns_the_function_with_run_and_launch():
    get_default_server.cache_clear()

    @webhook_endpoint
    async def bare():
        return 1

    @webhook_endpoint("/other/", mode="queue")
    def named():
        pass

    try:
        assert asyncio.run(bare()) == 1
        assert set(get_default_server().registered_webhooks) == {"/webhooks/bare", "/webhooks/other"}
        assert bare.run == get_default_server().run
        assert named.launch == get_default_server().launch
    finally:
        get_default_server.cache_clear()


def test_the_secret_protects_handlers_but_not_the_landing_page(make):
    server = make("<h1>Hello World!</h1>", "my_webhook_secret")

    @server.add_webhook
    async def scope(payload: WebhookPayload, request: Request):
        return {"scope": payload.event.scope, "method": request.method}

    with server:
        url = f"{server.url}/webhooks/scope"
        response = ask(url, sample("discussion"), **SECRET)
        assert (response.status_code, response.json()) == (200, {"scope": "discussion", "method": "POST"})
        assert ask(url, {}).status_code == 401
        assert ask(url, {}, x_webhook_secret="wrong").status_code == 403
        assert ask(f"{server.url}/").text == "<h1>Hello World!</h1>"


def test_the_start_prints_addresses_routes_and_the_missing_secret(make, capsys):
    server = make(port=None)
    server.add_webhook("test_webhook")(lambda: None)
    server.launch(prevent_thread_lock=True)
    server.launch(prevent_thread_lock=True)  # The second launch only prints.
    output = capsys.readouterr().out
    addresses = (
        "Webhooks are correctly setup and ready to use:\n",
        f"  - POST {server.local_url}/webhooks/test_webhook\n",
    )
    assert [output.count(part) for part in (*addresses, "open to everyone", "set `WEBHOOK_SECRET`")] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "start", ["GET /healthz HTTP/1.1\r\nX: ", "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"]
)
def test_a_request_that_arrives_byte_by_byte_is_ended(make, monkeypatch, start):
    monkeypatch.setattr(application, "REQUEST_TIMEOUT", 0.3)
    with make() as server:
        server.app.config.RESPONSE_TIMEOUT = 0.3
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as line:
            line.sendall(start.encode())
            until, output = time.monotonic() + 30, b""
            line.settimeout(0.05)
            while not output and time.monotonic() < until:
                with contextlib.suppress(TimeoutError):
                    output = line.recv(100)
                with contextlib.suppress(OSError):
                    line.sendall(b"a")
            line.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert b"" in iter(lambda: line.recv(4096), None), "the connection stays open"
    assert output.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 503 "))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"HELLO\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nConnection: close\r\n" + b"X-Some: 1\r\n" * 100 + b"\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n" + b"X-Some: 1\r\n" * 10_000 + b"\r\n", 413),
        (b"POST /webhooks/x HTTP/1.1\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n", 413),
    ],
    ids=["no method", "invalid URL", "TLS", "100 headers", "10,000 headers", "a large body"],
)
def test_a_malformed_or_large_request_is_answered_and_closed(make, caplog, sent, status):
    server = make()
    server.add_webhook("x")(lambda payload: None)
    with server, socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as line:
        line.sendall(sent)
        output = b"".join(iter(lambda: line.recv(4096), b""))
    assert output.startswith(b"HTTP/1.1 %d " % status)
    assert "uncaught" not in caplog.text


async def test_a_burst_of_connections_is_accepted_while_the_loop_is_busy(make):
    app = make().app
    listener = open_listener("127.0.0.1", (0,))
    address = listener.getsockname()
    async with serve_app(app, listener):
        with contextlib.ExitStack() as held:
            # The blocked event loop accepts nothing here. A refused connection would be retried after one second.
            for _ in range(300):
                held.enter_context(socket.create_connection(address, timeout=0.5))


def test_ports_are_chosen_as_gradio_chooses_them():
    assert choose_address(None, None, {}) == ("127.0.0.1", tuple(range(7860, 7960)))
    assert choose_address(None, None, {"SPACE_ID": "a/b"}) == ("0.0.0.0", (7860,))
    assert choose_address(None, None, {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SERVER_PORT": "1"}) == ("0.0.0.0", (1,))
    assert choose_address("::1", 5, {"GRADIO_SERVER_PORT": "1"}) == ("::1", (5,))
    with pytest.raises(CannotListen, match="GRADIO_SERVER_PORT is 'x'"):
        choose_address(None, None, {"GRADIO_SERVER_PORT": "x"})
    with pytest.raises(CannotListen, match="port 65536: wanted a number from 0 to 65535"):
        choose_address(None, 65536, {})


def test_a_default_port_may_be_replaced_but_a_named_port_may_not(make):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with open_listener("127.0.0.1", (port, 0)) as other:
            assert other.getsockname()[1] != port
        with pytest.raises(CannotListen, match=f"port {port}: Address already in use; end the program that listens"):
            make(port=port).launch(prevent_thread_lock=True)


async def test_launch_returns_in_a_running_loop_and_two_servers_serve(make):
    one, two = make(), make()
    one.add_webhook("x")(lambda: 1)
    two.add_webhook("x")(lambda: 2)
    one.run()
    two.launch()
    answers = [await asyncio.to_thread(ask, f"{server.url}/webhooks/x", {}) for server in (one, two)]
    assert [answer.json() for answer in answers] == [1, 2]


def test_a_closed_server_can_be_launched_again_with_more_webhooks(make):
    server = make()
    server.add_webhook("x")(lambda: 1)
    with server:
        first = server.local_url
        with pytest.raises(HooksError, match="close"):
            server.add_webhook("y")(lambda: 2)
    assert (server.url, server.is_running) == (None, False)
    with pytest.raises(httpx2.ConnectError):
        ask(f"{first}/healthz")
    server.add_webhook("y")(lambda: 2)
    with server:
        assert ask(f"{server.url}/webhooks/y", {}).json() == 2


def test_a_failed_start_raises_and_can_be_repeated(make, tmp_path):
    settings = ReceiverSettings(database=tmp_path / "events.sqlite")
    first, second = make(settings=settings), make(settings=settings)
    with first, pytest.raises(StoreError, match="another receiver"):
        second.launch(prevent_thread_lock=True)
    assert not second.is_running
    with second:
        assert ask(f"{second.url}/healthz").status_code == 200


def test_arguments_take_precedence_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("WEBHOOK_SECRET", "from-the-environment")
    monkeypatch.setenv("ROBOJAX_WEBHOOKS_DATABASE", str(tmp_path / "a.sqlite"))
    assert WebhooksServer().settings.database == tmp_path / "a.sqlite"
    for secret in (None, "", []):
        assert WebhooksServer(webhook_secret=secret).settings.secrets == ("from-the-environment",)
    assert WebhooksServer(webhook_secret=("old", "new")).settings.secrets == ("old", "new")
    assert WebhooksServer(database="b").settings.database == Path("b")
    monkeypatch.setenv("WEBHOOK_SECRET", "")
    assert WebhooksServer().settings.secrets == ()


def test_a_blueprint_replaces_the_landing_page(make):
    blueprint = Blueprint("own")
    blueprint.add_route(lambda request: text("own"), "/", name="page")
    with make(blueprint) as server:
        assert ask(f"{server.url}/").text == "own"
