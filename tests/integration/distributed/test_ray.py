"""A server whose policies run in engines of a real Ray, which the tests start and end."""

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
    """`robojax serve` in another process."""

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
        """Wait until the server is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = next((word for word in line.split() if word.startswith("http://")), "")
        assert self.url, self.process.communicate()[1]
        return self

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and JSON of a call."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as found:
                return found.status, json.load(found)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def engines(self) -> dict[str, int]:
        """Return the names and processes of the engines in use."""
        return {one["engine"]: one["process"] for one in self.call("GET", "/cluster")[1]["engines"]["engines"]}

    def until(self, engines: int, without: int = 0) -> dict[str, int]:
        """Wait until the server has this many engines, excluding the process ``without``."""
        deadline = time.monotonic() + 100
        while len(found := self.engines()) != engines or without in found.values():
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found


@pytest.fixture(scope="module")
def server(database_of_module: PostgresServer) -> Iterator[Server]:
    """Yield one server for all tests, because Ray takes ten seconds to start."""
    flags = ("--engine", "ray-local", "--engines", "2", "--engine-resources", "CPU=0.5")
    made = Server(*flags, "--database", database_of_module.url)
    try:
        yield made.begin()
    finally:
        made.process.kill()
        made.process.communicate()


def observation() -> dict[str, Any]:
    """Return an observation for the policy of the demo."""
    held = io.BytesIO()
    Image.new("RGB", (96, 96), "gray").save(held, "JPEG")
    picture = base64.b64encode(held.getvalue()).decode()
    return {"images": {"front": picture}, "state": [0, -90, 90, 0, 0, 10]}


def make(server: Server, name: str, **more: Any) -> tuple[int, Any]:
    """Create a session without rooms.

    It accepts any rate. On a busy machine an inference takes 200 ms, and a second session at five inferences per second
    would be refused (409, overloaded).
    """
    asked = {"session_id": name, "policy_path": str(POLICY), "transport_server_url": "direct", "degrade": True}
    return server.call("POST", "/sessions", asked | more)


def test_engines_answer_and_a_killed_engine_is_replaced(server: Server, pauses: Pauses) -> None:
    engines = server.until(2)
    assert make(server, "arm")[0] == 200
    assert make(server, "arm")[0] == 409
    status, first = server.call("POST", "/sessions/arm/act", observation())
    assert status == 200, first
    assert len(first["actions"]) > 1
    doomed = next(iter(engines.values()))
    os.kill(doomed, signal.SIGKILL)
    began = time.monotonic()
    for _ in range(20):  # Enough requests to reach both engines.
        status, again = server.call("POST", "/sessions/arm/act", observation() | {"reset": True})
        assert status == 200, again
    assert pauses.running(began) < 10
    assert [len(row) for row in again["actions"]] == [len(row) for row in first["actions"]]
    assert doomed not in server.until(2, without=doomed).values()
    assert server.call("GET", "/health")[1]["status"] == "healthy"


def test_server_survives_the_loss_of_ray_and_restarts_it(server: Server) -> None:
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


def test_policy_errors_are_the_same_as_without_a_cluster(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, reply = make(server, "broken", policy_path=str(tmp_path))
    assert status == 422
    assert "Ray" not in json.dumps(reply)
    assert make(server, "arm")[0] in (200, 409)  # 409 if an earlier test created it.
    status, reply = server.call("POST", "/sessions/arm/act", observation() | {"state": [0.0]})
    assert status == 422, reply
    assert server.call("GET", "/sessions/arm")[1]["status"] == "ready"


def test_database_lists_and_removes_sessions_of_this_server(server: Server, postgres_server: PostgresServer) -> None:
    status, reply = make(server, "short")
    assert status == 200, reply
    cluster = server.call("GET", "/cluster")[1]
    assert cluster["front"]["others"] == []
    assert cluster["engines"]["trouble"] is None
    assert ["short"] in postgres_server.sql("SELECT id FROM robojax_sessions")
    assert server.call("POST", "/sessions/short/adopt")[0] == 409
    assert server.call("DELETE", "/sessions/short")[0] == 200
    status, reply = make(server, "short")
    assert status == 200, reply
    assert server.call("DELETE", "/sessions/short")[0] == 200
    assert ["short"] not in postgres_server.sql("SELECT id FROM robojax_sessions")


def test_missing_cluster_is_an_error_with_advice() -> None:
    server = Server("--engine", "ray://127.0.0.1:9")
    _, reply = server.process.communicate(timeout=110)
    assert server.process.returncode == 2
    assert "ray://127.0.0.1:9" in reply
    assert "Traceback" not in reply


def test_server_ends_in_order_with_its_ray(server: Server) -> None:
    engines = server.engines()
    server.process.send_signal(signal.SIGTERM)
    _, reply = server.process.communicate(timeout=100)
    assert server.process.returncode == 0, reply
    assert "Traceback" not in reply
    assert "SIGTERM received" not in reply
    deadline = time.monotonic() + 100
    while any(map(psutil.pid_exists, engines.values())):
        assert time.monotonic() < deadline
        time.sleep(0.1)
