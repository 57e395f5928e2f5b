"""A server whose policies run in engines of a real Ray, which is started and ended here."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from benchmarks.postgres import PostgresServer
from tests.testing.pauses import Pauses
from tests.testing.peers import require_peers

require_peers("ray")
pytestmark = pytest.mark.needs_peers
ROOT = Path(__file__).parents[3]
POLICY = ROOT / "robojax" / "sim" / "policy"


class Server:
    """`robojax serve` in a process of its own."""

    def __init__(self, *flags: str):
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "robojax.cli", "serve", "--port", "0", "--state", "off", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def begin(self) -> "Server":
        """Wait until it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = next((word for word in line.split() if word.startswith("http://")), "")
        assert self.url, self.process.communicate()[1]
        return self

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as found:
                return found.status, json.load(found)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def engines(self) -> dict[str, int]:
        """Names and processes of those it uses."""
        return {one["engine"]: one["process"] for one in self.call("GET", "/cluster")[1]["engines"]["engines"]}

    def until(self, engines: int, without: int = 0) -> dict[str, int]:
        """Wait until it has so many, none of them this process."""
        deadline = time.monotonic() + 100
        while len(found := self.engines()) != engines or without in found.values():
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found


@pytest.fixture(scope="module")
def server(database_of_module: PostgresServer) -> Iterator[Server]:
    """One for all tests here: a Ray takes ten seconds to start."""
    flags = ("--engine", "ray-local", "--engines", "2", "--engine-resources", "CPU=0.5")
    made = Server(*flags, "--database", database_of_module.url)
    try:
        yield made.begin()
    finally:
        made.process.kill()
        made.process.communicate()


def observation() -> dict[str, Any]:
    """What the demo's policy looks at."""
    held = io.BytesIO()
    Image.new("RGB", (96, 96), "gray").save(held, "JPEG")
    picture = base64.b64encode(held.getvalue()).decode()
    return {"images": {"front": picture}, "state": [0, -90, 90, 0, 0, 10]}


def make(server: Server, name: str, **more: Any) -> tuple[int, Any]:
    """A session without rooms.

    It takes what time there is: where others keep the cores busy an inference takes 200 ms, and a second session that
    wants five a second is refused (409, overloaded).
    """
    asked = {"session_id": name, "policy_path": str(POLICY), "transport_server_url": "direct", "degrade": True}
    return server.call("POST", "/sessions", asked | more)


def test_a_policy_in_engines_answers_and_a_killed_engine_is_made_good(server: Server, pauses: Pauses) -> None:
    engines = server.until(2)
    assert make(server, "arm")[0] == 200
    assert make(server, "arm")[0] == 409
    status, first = server.call("POST", "/sessions/arm/act", observation())
    assert status == 200, first
    assert len(first["actions"]) > 1
    doomed = next(iter(engines.values()))
    os.kill(doomed, signal.SIGKILL)
    began = time.monotonic()
    for _ in range(20):  # whichever was asked last, both are asked
        status, again = server.call("POST", "/sessions/arm/act", observation() | {"reset": True})
        assert status == 200, again
    assert pauses.running(began) < 10
    assert [len(row) for row in again["actions"]] == [len(row) for row in first["actions"]]
    assert doomed not in server.until(2, without=doomed).values()
    assert server.call("GET", "/health")[1]["status"] == "healthy"


def test_server_lives_on_without_ray_and_starts_it_again(server: Server) -> None:
    before = server.until(2)
    assert make(server, "arm")[0] in (200, 409)
    process = psutil.Process(server.process.pid)
    assert not any("/ray/" in area.path for area in process.memory_maps()), "the server has not imported ray"
    helpers = process.children(recursive=True)
    os.kill(next(one.pid for one in helpers if "DashboardAgent" in " ".join(one.cmdline())), signal.SIGKILL)
    deadline = time.monotonic() + 100
    while set(before.values()) & set(server.engines().values()):
        assert time.monotonic() < deadline
        assert server.call("GET", "/health")[0] == 200
        time.sleep(0.2)
    status, answer = server.call("POST", "/sessions/arm/act", observation() | {"reset": True})
    assert status == 200, answer
    assert not set(before.values()) & set(server.until(2).values())
    assert server.call("GET", "/cluster")[1]["engines"]["trouble"] is None


def test_what_is_wrong_with_a_policy_is_said_as_without_a_cluster(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, told = make(server, "broken", policy_path=str(tmp_path))
    assert status == 422
    assert "Ray" not in json.dumps(told)
    assert make(server, "arm")[0] in (200, 409)  # whether or not this process has run the test before
    status, told = server.call("POST", "/sessions/arm/act", observation() | {"state": [0.0]})
    assert status == 422, told
    assert server.call("GET", "/sessions/arm")[1]["status"] == "ready"


def test_the_database_lists_and_forgets_what_this_front_has(server: Server, postgres_server: PostgresServer) -> None:
    status, told = make(server, "short")
    assert status == 200, told
    cluster = server.call("GET", "/cluster")[1]
    assert cluster["front"]["others"] == []
    assert cluster["engines"]["trouble"] is None
    assert ["short"] in postgres_server.sql("SELECT id FROM robojax_sessions")
    assert server.call("POST", "/sessions/short/adopt")[0] == 409
    assert server.call("DELETE", "/sessions/short")[0] == 200
    status, told = make(server, "short")
    assert status == 200, told
    assert server.call("DELETE", "/sessions/short")[0] == 200
    assert ["short"] not in postgres_server.sql("SELECT id FROM robojax_sessions")


def test_a_cluster_that_is_not_there_is_an_error_with_what_to_do() -> None:
    server = Server("--engine", "ray://127.0.0.1:9")
    _, told = server.process.communicate(timeout=110)
    assert server.process.returncode == 2
    assert "ray://127.0.0.1:9" in told
    assert "Traceback" not in told


def test_it_ends_in_order_and_its_ray_with_it(server: Server) -> None:
    engines = server.engines()
    server.process.send_signal(signal.SIGTERM)
    _, told = server.process.communicate(timeout=100)
    assert server.process.returncode == 0, told
    assert "Traceback" not in told
    assert "SIGTERM received" not in told
    deadline = time.monotonic() + 100
    while any(map(psutil.pid_exists, engines.values())):
        assert time.monotonic() < deadline
        time.sleep(0.1)
