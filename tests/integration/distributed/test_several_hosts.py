"""Two processes as one computer, with four devices each, or one, made out of one processor."""

import asyncio
import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from service.distributed.host_group import QUIET_TIMEOUT
from tests.integration.distributed.robot import slow_robot
from tests.testing.compiling import FLAGS
from tests.testing.pauses import Pauses
from tests.testing.peers import require_peers

require_peers("ray")
# Processes that import JAX and compile: a busy machine takes minutes.
pytestmark = [pytest.mark.needs_peers, pytest.mark.timeout(300)]

POLICY = Path(__file__).parents[3] / "robojax" / "sim" / "policy"
# What a front does, without a server; it starts its follower itself.
SCRIPT = """
import gc, os, subprocess, sys, threading, time
from pathlib import Path

import numpy as np
import psutil

import jaxmodels
from jaxmodels.policies import lerobot_folder as lerobot
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.errors import ConfigError, JaxModelsError, ObservationError
from jaxmodels.types import ACTION, ENVIRONMENT_STATE, Feature
from jaxmodels.normalization import build_normalization
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act
from jaxmodels.weights import blueprint_of
from service.distributed.host_group import HostsLost
from service.distributed.host_coordinator import HostCoordinator as Front
from service.distributed.host_coordinator import HostOptions

port, coordinator, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
secret = Path(os.environ["ROBOJAX_HOSTS_SECRET_FILE"]).read_bytes().strip()
follower = subprocess.Popen([sys.executable, "-m", "robojax.cli", "follow", f"127.0.0.1:{port}"])
lost = []
try:
    front = Front(HostOptions(2, "127.0.0.1", port, f"127.0.0.1:{coordinator}", secret, 60.0), lambda folder: None)
    front.on_lost = lost.append
    assert front.begin() == "hosts"

    seen, given = (Feature(ENVIRONMENT_STATE, "ENV", (4,)),), (Feature(ACTION, "ACTION", (6,)),)
    small = dict(dim_model=256, n_heads=2, dim_feedforward=512, n_encoder_layers=1, n_decoder_layers=1, use_vae=False)
    config = ActConfig(input_features=seen, output_features=given, chunk_size=8, n_action_steps=8, **small)
    shapes = blueprint_of(Act, config).shapes
    stats = {ENVIRONMENT_STATE: dict(mean=np.zeros(4), std=np.ones(4)), ACTION: dict(mean=np.zeros(6), std=np.ones(6))}
    normalization = build_normalization(seen, given, config.normalization_mapping, stats)
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        weights = {name: 0.1 * rng.standard_normal(leaf.shape).astype(np.float32) for name, leaf in shapes.items()}
        lerobot.write_checkpoint(folder / str(seed), Checkpoint(config, weights, normalization))
    observation = {ENVIRONMENT_STATE: np.ones((1, 4), np.float32)}

    def check(policy, seed):
        alone = jaxmodels.load_policy(folder / str(seed), device="cpu:0").act(observation)
        difference = np.abs(policy.act(observation) - alone).max() / np.abs(alone).max()
        assert difference < 1e-5, difference
        return difference

    policy = front.load(str(folder / "0"))
    assert not policy.is_compiled()
    policy.compile()
    assert policy.is_compiled() and policy.device == "hosts" and policy.profile() > 0
    print("difference", check(policy, 0))
    held = sum(part.data.nbytes for weight in policy.local._weights for part in weight.addressable_shards)
    print("held", held / sum(weight.nbytes for weight in policy.local._weights))

    # Other weights, in the same programs, while the first ones act.
    end, chunks = threading.Event(), []
    def act():
        while not end.is_set():
            chunks.append(policy.act(observation))
    acting = threading.Thread(target=act)
    acting.start()
    # Its folder is not there on the other host.
    ask = front._group.request_build
    front._group.request_build = lambda words: ask(words | ({"folder": "/nowhere"} if words["do"] == "load" else {}))
    other = front.load(str(folder / "1"), like=policy)
    front._group.request_build = ask
    assert any((jaxmodels.user_cache() / "robojax" / "hosts").glob("*/model.safetensors"))
    assert other.local._programs is policy.local._programs and other.is_compiled()
    print("difference", check(other, 1))
    policy.compile(2)
    end.set()
    acting.join()
    assert len(chunks) > 1 and all(np.array_equal(chunk, chunks[0]) for chunk in chunks)

    # What cannot be done harms nobody.
    (folder / "broken").mkdir()
    for refused, wrong in (
        (JaxModelsError, lambda: front.load(str(folder / "broken"))),
        (ObservationError, lambda: policy.act({})),
        (ObservationError, lambda: policy.compile(1, {"front": (4, 4)})),
        (ConfigError, lambda: policy.on("cpu:0")),
    ):
        try:
            wrong()
        except refused:
            continue
        raise SystemExit("it was taken")
    del policy
    gc.collect()
    check(other, 1)

    # A host that hangs, and is gone then.
    for process in (*psutil.Process(follower.pid).children(recursive=True), psutil.Process(follower.pid)):
        process.suspend()
    raised = []
    def wait():
        try:
            other.act(observation)
        except HostsLost as error:
            raised.append((time.monotonic(), str(error)))
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    assert not raised
    killed = time.monotonic()
    follower.kill()
    waiting.join(60)
    ((at, why),) = raised
    assert at - killed < 5 and "host 1 (127.0.0.1) is gone" in why, why
    assert lost == [why]
    print("well")
finally:
    follower.kill()
    sys.stdout.flush()
os._exit(0)  # after an error, too: what is printed says which
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    secret = tmp_path / "secret"
    secret.write_text("of all hosts, in this test\n")
    secret.chmod(0o600)
    more = {"ROBOJAX_HOSTS_SECRET_FILE": str(secret), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return (
        os.environ
        | more
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(["--xla_force_host_platform_device_count=4", *FLAGS]),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "ROBOJAX_COMPILE_CACHE": "off",
        }
    )


def test_a_policy_over_two_hosts_does_what_it_does_on_one(environment: dict[str, str], tmp_path: Path) -> None:
    port, coordinator = free_ports(2)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(port), str(coordinator), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["well"] in lines, done.stdout + done.stderr[-3000:]
    (held,) = (float(line[1]) for line in lines if line[0] == "held")
    assert 0.5 <= held < 0.55


class Hosts:
    """``robojax serve`` and ``robojax follow``, on this machine both."""

    def __init__(self, environment: dict[str, str], folder: Path):
        # One device each: robots have to be answered in time.
        environment = environment | {"XLA_FLAGS": " ".join(FLAGS)}
        self.port, address, coordinator = free_ports(3)
        serve = ["serve", "--port", str(self.port), "--state", "off", "--devices", "all", "--placement", "shard"]
        serve += ["--hosts-count", "2", "--hosts-address", f"127.0.0.1:{address}"]
        serve += ["--hosts-coordinator", f"127.0.0.1:{coordinator}", "--engine-batch-sizes", "1"]
        self.log = folder / "log"
        self.front = self._start(environment, serve)
        self.follower = self._start(environment, ["follow", f"127.0.0.1:{address}"])

    def _start(self, environment: dict[str, str], arguments: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "robojax.cli", *arguments], env=environment, stdout=log, stderr=log
            )

    def signal_follower(self, number: signal.Signals) -> None:
        """To all of its processes, as when its machine stands still, or goes on."""
        follower = psutil.Process(self.follower.pid)
        for process in (follower, *follower.children(recursive=True)):
            process.send_signal(number)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, within: float = 120.0) -> tuple[int, Any]:
        """Status and answer, as soon as there is one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        until = time.monotonic() + within
        while True:
            try:
                with urllib.request.urlopen(request, timeout=within) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.load(error)
            except urllib.error.URLError:
                assert time.monotonic() < until, self.log.read_text()[-3000:]
                assert self.front.poll() is None, self.log.read_text()[-3000:]
                time.sleep(0.1)


@pytest.fixture
def hosts(environment: dict[str, str], tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(environment, tmp_path)
    yield found
    for process in (found.follower, found.front):
        with suppress(psutil.NoSuchProcess):
            for other in psutil.Process(process.pid).children(recursive=True):
                other.kill()
        process.kill()
        process.wait(60)


def seen() -> dict[str, Any]:
    picture = io.BytesIO()
    Image.new("RGB", (96, 96), "gray").save(picture, "PNG")
    state = [0.0, -90.0, 90.0, 0.0, 0.0, 10.0]
    return {"images": {"front": base64.b64encode(picture.getvalue()).decode()}, "state": state}


NEW = {
    "session_id": "arm",
    "policy_path": str(POLICY),
    "transport_server_url": "direct",
    "camera_names": ["front"],
}
# No target is farther than this from the one before, or from where the robot is when it begins to move.
STEP = 3.0
GONE = "host 1 (127.0.0.1) is gone"


async def ask(hosts: Hosts, path: str, body: Any = None, within: float = 120.0) -> tuple[int, Any]:
    return await asyncio.to_thread(hosts.ask, path, body, within)


async def test_a_server_of_two_hosts_holds_robots_when_one_stops_and_when_it_is_gone(
    hosts: Hosts, pauses: Pauses
) -> None:
    """In one go, because such a server takes long to start."""
    for new in ({"session_id": "arm", "max_relative_target": STEP}, {"session_id": "still"}):
        status, found = await ask(hosts, "/sessions", NEW | {"degrade": True} | new)
        assert status == 200, found
    status, answer = await ask(hosts, "/sessions/still/act", seen())
    assert status == 200, answer
    assert np.shape(answer["actions"])[1] == 6
    assert (await ask(hosts, "/health"))[1]["device"] == "hosts"
    async with slow_robot(hosts.url, "arm") as robot:
        await robot.shown(3)
        assert (await ask(hosts, "/sessions/arm/start", {}))[0] == 200
        await robot.moves(0.0)

        # It stops for longer than an inference may take.
        hosts.signal_follower(signal.SIGSTOP)
        stopped = time.monotonic()
        held, stage = await robot.stage(stopped, lambda stage: stage.hold_code)
        assert stage.hold_code in ("inference_slow", "starved")
        assert pauses.running(stopped, held) < 3
        assert (await ask(hosts, "/health", within=5))[0] == 200
        ended, stage = await robot.stage(stopped, lambda stage: stage.status == "error")
        # Of what it was heard of last, by the server's own clock: that may have been a beat before it stopped.
        silence = re.search(r"host 1 \(127\.0\.0\.1\) has been silent for (\d+) s", stage.reason or "")
        assert silence is not None, stage
        assert int(silence[1]) >= QUIET_TIMEOUT
        assert pauses.running(stopped, ended) < 9
        assert [at for at, _ in robot.motions(stopped) if at > held] == []
        assert any(is_hold for at, _, is_hold in robot.targets if at > stopped), "it was not told to hold"

        # It goes on, and nothing moves by that; when somebody says so, without a jump.
        hosts.signal_follower(signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert (await ask(hosts, "/sessions/arm"))[1]["status"] == "error"
        assert robot.motions(held) == []
        place, restarted = robot.pose, time.monotonic()
        assert (await ask(hosts, "/sessions/arm/restart", {}))[0] == 200
        await robot.moves(restarted)
        (_, first), *_ = robot.motions(restarted)
        assert max(abs(first[name] - at) for name, at in place.items()) <= STEP + 0.01

        hosts.follower.kill()
        killed = time.monotonic()
        held, _ = await robot.stage(killed, lambda stage: stage.hold_code or stage.status == "error")
        ended, stage = await robot.stage(killed, lambda stage: stage.status == "error")
        assert pauses.running(killed, ended) < 3
        assert GONE in (stage.reason or "")
        # Nor does it move when it is asked to.
        assert (await ask(hosts, "/sessions/arm/restart", {}))[0] == 200
        async with asyncio.timeout(60):
            while (answer := (await ask(hosts, "/sessions/arm"))[1])["status"] != "error":
                assert answer["status"] == "running", answer
                await asyncio.sleep(0.05)
        assert [at for at, _ in robot.motions(killed) if at > held] == []
        assert robot.targets[-1][2], "it was not told to hold"
    await ask_one_that_lost_its_host(hosts)
    hosts.front.terminate()
    assert hosts.front.wait(60) == 0


async def ask_one_that_lost_its_host(hosts: Hosts) -> None:
    """Every answer comes at once and names it; a session that could never act is not made."""
    for path, body in (("/sessions/still/act", seen()), ("/sessions", NEW | {"session_id": "late"})):
        status, answer = await ask(hosts, path, body, within=5)
        assert (status, answer["code"]) == (503, "hosts_lost")
        assert GONE in answer["detail"]
        assert "until this server and robojax follow on the other hosts are started anew" in answer["detail"]
    status, health = await ask(hosts, "/health", within=5)
    assert status == 200
    (device,) = health["engine"]["devices"]
    assert GONE in device["failed"]
    status, answer = await ask(hosts, "/ready", within=5)
    assert (status, answer["code"]) == (503, "not_ready")


def test_followers_end_with_the_server(hosts: Hosts) -> None:
    hosts.ask("/health")
    hosts.front.terminate()
    assert hosts.front.wait(60) == 0
    assert hosts.follower.wait(60) == 0, hosts.log.read_text()[-2000:]


def test_followers_end_when_the_server_is_killed(hosts: Hosts, pauses: Pauses) -> None:
    hosts.ask("/health")
    hosts.front.kill()
    killed = time.monotonic()
    assert hosts.follower.wait(60) == 4, hosts.log.read_text()[-2000:]
    assert pauses.running(killed) < 3
