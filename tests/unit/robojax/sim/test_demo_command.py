"""``robojax demo`` from a user's view: the real server and the real arm as processes."""

import asyncio
import re
import shlex
import socket
import subprocess
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from robojax.cli import sim
from robojax.cli.sim import LATE_ACTIONS, choose_port
from robojax.client import Client
from robojax.sim.demo import serve_demo
from service.http.server import CannotListen
from service.processes import ChildDied
from tests.testing.compiling import process_environment
from tests.testing.http_answers import answering
from tests.testing.pauses import Pauses
from tests.testing.waiting import wait_until
from tests.unit.robojax.sim.conftest import ROBOJAX

pytestmark = pytest.mark.usefixtures("can_draw")


app = typer.Typer()
app.command()(sim.demo)


@pytest.mark.parametrize(
    ("arguments", "lifted", "required"),
    [
        (("--episodes", "1", "--require", "2"), 1, 2),
        (("--episodes", "1", "--require", "1"), 1, None),
        ((), 15, 16),
        ((), 16, None),
    ],
)
def test_too_few_lifted_cubes_are_a_failure(
    arguments: tuple[str, ...], lifted: int, required: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watched(*_: object) -> int:
        return lifted

    monkeypatch.setattr("robojax.cli.sim._run_demo", watched)
    ended = CliRunner().invoke(app, ["--headless", *arguments])
    assert ended.exit_code == (0 if required is None else 1)
    assert ended.stderr == ("" if required is None else f"fewer than the {required} required cubes\n")


def test_stopped_demo_waits_for_a_person_and_repeats_the_episode(pauses: Pauses) -> None:
    command = [*ROBOJAX, "demo", "--headless", "--port", "0", "--episodes", "1", "--require", "0"]
    environment = process_environment(quick=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        printed: list[str] = []

        def read_until(pattern: str) -> re.Match[str]:
            for line in running.stdout:  # type: ignore[union-attr]
                printed.append(line)
                if found := re.search(pattern, line):
                    return found
            raise AssertionError(f"the demo ended before it printed {pattern!r}")

        try:
            url = read_until(r"server: (http://127.0.0.1:\d+)")[1]
            with Client(url) as client:
                # Stop all robots first, then only this session.
                for stop, repair in (("stop --all", "reset demo-arm"), ("stop demo-arm", "start demo-arm")):
                    _wait_until_moving(client)
                    subprocess.run([*ROBOJAX, *stop.split(), "--server", url], check=True, timeout=60)
                    advice = read_until(r"STOPPED: .* does not count.* or: robojax (\S+ demo-arm --server \S+)$")[1]
                    assert advice == f"{repair} --server {url}"
                    assert client.session("demo-arm").status().status == "stopped"
                    subprocess.run([*ROBOJAX, *shlex.split(advice)], check=True, timeout=60)
                    read_until("continued: episode 1 starts again")
            began = time.monotonic()
            read_until(r"cube +1 \(seed 5000\): (lifted|missed)")
            text = "".join(printed) + running.stdout.read()
            assert running.wait(60) == 0
        finally:
            running.terminate()
    assert "of 1 cubes lifted" in text
    assert f"curl -X POST {url}/sessions " in text
    commands = re.search(r"commands: (\d+) sent, (\d+) late actions dropped", text)
    assert commands is not None
    assert (LATE_ACTIONS in text) == (commands[2] != "0")
    assert int(commands[1]) >= 100, "an episode has 110 ticks"
    shown = re.search(r"camera fps: front ([\d.]+)", text)
    assert shown is not None
    # 20 to 30 per second over the newest 32 pictures; the machine may have paused in between.
    assert 32 / (32 / 20 + pauses.lost(began)) <= float(shown[1]) < 30


def _wait_until_moving(client: Client) -> None:
    def commands() -> int:
        return client.session("demo-arm").status().stats["commands_sent"]

    wait_until(lambda: ("demo-arm", "running") in {(one.session_id, one.status) for one in client.sessions()})
    before = commands()
    wait_until(lambda: commands() >= before + 20)


async def test_occupied_port_is_named_and_its_server_never_called() -> None:
    with answering(200, b'{"status": "healthy"}') as (port, requests):
        for flags, environment in ((("--port", str(port)), {}), ((), {"ROBOJAX_PORT": str(port)})):
            arguments = ["--headless", "--episodes", "1", *flags]
            ended = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
            assert ended.exit_code == 2
            assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
            assert "robojax demo --port 0 takes a free port" in ended.stderr
        with pytest.raises(ChildDied, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serve_demo(port=port):
                pass
    assert requests == []


def test_demo_takes_port_8001_or_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROBOJAX_PORT", raising=False)
    monkeypatch.setattr("service.http.server.listen", lambda host, port: socket.socket())
    assert choose_port(None) == 8001

    def refuse(host: str, port: int) -> None:
        raise CannotListen(f"{host}:{port}")

    monkeypatch.setattr("service.http.server.listen", refuse)
    assert choose_port(None) == 0


def test_demo_refuses_an_unloadable_policy(tmp_path: Path) -> None:
    arguments = ["--headless", "--port", "0", "--episodes", "1", "--policy", str(tmp_path)]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 4
    assert "the server refused the policy with 422: policy_path: " in ended.stderr
    assert '{"detail"' not in ended.stderr
    assert "robojax check" in ended.stderr
    assert "wanted a folder as LeRobot's save_pretrained writes it" in ended.stderr
    assert "Traceback" not in ended.stderr
