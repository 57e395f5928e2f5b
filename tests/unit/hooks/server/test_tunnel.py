import re
import sys
from pathlib import Path

import pytest

from hooks.payload import sample
from hooks.server import serving
from hooks.server.serving import TunnelFailed, choose_tunnel, open_tunnel
from tests.unit.hooks.server.conftest import ask

# Prints what cloudflared prints, including links that are not the tunnel's address, and records when it ends.
STAND_IN = """#!{python}
import pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
def end(*_):
    here.joinpath("ended").write_text("ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
here.joinpath("arguments").write_text(" ".join(sys.argv[1:]))
print("failed to request https://api.trycloudflare.com/tunnel, trying again", file=sys.stderr)
print("INF |  https://blue-arm-2.trycloudflare.com  |", file=sys.stderr, flush=True)
time.sleep({lives})
"""
ADDRESS = "https://blue-arm-2.trycloudflare.com"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a program of this name in the only folder of PATH."""

    def install(name: str = "cloudflared", text: str = STAND_IN, lives: float = 60) -> Path:
        program = tmp_path / name
        program.write_text(text.replace("{python}", sys.executable).replace("{lives}", str(lives)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return program

    return install


def test_a_shared_server_has_the_tunnels_address_and_a_new_secret(install, make, capsys, tmp_path):
    install()
    server = make(share=True)
    server.add_webhook("x")(lambda: 1)
    with server:
        assert server.url == ADDRESS
        output = capsys.readouterr().out
        assert f"  - POST {ADDRESS}/webhooks/x\n" in output
        assert (tmp_path / "arguments").read_text() == f"tunnel --no-autoupdate --url {server.local_url}"
        secret = re.search(r"generated for this run.*\n\s+(\S+)\n", output)
        assert secret is not None
        url = f"{server.local_url}/webhooks/x"
        assert ask(url, sample()).status_code == 401
        assert ask(url, sample(), x_webhook_secret=secret[1]).json() == 1
        server.launch(prevent_thread_lock=True)
        assert secret[1] not in capsys.readouterr().out, "the secret is printed once"
    assert (tmp_path / "ended").read_text() == "ended"
    assert server.url is None


def test_share_without_a_tunnel_program_names_what_to_install(make, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TunnelFailed, match="neither cloudflared nor ngrok is installed; install one, or set"):
        make(share=True).launch(prevent_thread_lock=True)


@pytest.mark.parametrize(
    ("text", "within", "message"),
    [
        ("#!/bin/sh\necho no such account; exit 3\n", 60, r"ended with 3; its output:\n +no such account"),
        ("#!/bin/sh\nexec /bin/sleep 60\n", 0.5, "printed no address within 0.5 s; its output: nothing"),
    ],
)
async def test_a_program_without_an_address_is_an_error_with_its_output(install, text, within, message):
    program = install("tunnel", text=text)
    with pytest.raises(TunnelFailed, match=message):
        async with open_tunnel([str(program)], "http://127.0.0.1:1", timeout=within):
            pass


def test_the_configured_or_the_first_installed_program_is_used(install, tmp_path):
    ngrok = install("ngrok")
    environment = {"PATH": str(tmp_path)}
    assert choose_tunnel(environment)[:2] == ("ngrok", "http")
    install("cloudflared")
    assert choose_tunnel(environment) == serving.KNOWN_TUNNELS[0]
    assert choose_tunnel({**environment, serving.TUNNEL_COMMAND: f"{ngrok} tcp {{port}}"}) == (
        str(ngrok),
        "tcp",
        "{port}",
    )
    for command, message in (("nothing-like-this", "not installed"), ("'", "cannot be read")):
        with pytest.raises(TunnelFailed, match=message):
            choose_tunnel({**environment, serving.TUNNEL_COMMAND: command})


@pytest.mark.parametrize(
    ("program", "line", "address"),
    [
        ("cloudflared", "INF https://api.trycloudflare.com/tunnel failed", None),
        ("cloudflared", "|  https://blue-arm-2.trycloudflare.com  |", ADDRESS),
        ("ngrok", 'msg="started tunnel" addr=http://localhost:1 url=https://a1.ngrok.app', "https://a1.ngrok.app"),
        ("ssh", "** your connection id is x, docs: https://localhost.run/docs/ **", None),
        ("ssh", "a1.lhr.life tunneled with tls termination, https://a1.lhr.life", "https://a1.lhr.life"),
        ("ssh", "https://rnx-1.a.free.pinggy.link", "https://rnx-1.a.free.pinggy.link"),
    ],
)
def test_the_address_of_a_tunnel_is_found_in_its_output(program, line, address):
    found = re.search(serving.TUNNEL_PATTERNS[program], line)
    assert (found and found[0]) == address
