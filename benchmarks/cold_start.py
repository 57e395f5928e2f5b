"""How long does it take from the start of the process to the first action, compared with LeRobot's policy server?

    python -m benchmarks.cold_start                                            # ours alone
    python -m benchmarks.cold_start --lerobot-python VENV/bin/python           # Python with lerobot 0.4.4 and grpcio

Seconds since the start of the process, medians of alternating starts (``--rounds``). The shipped policy (0.6 M
parameters, one camera of 96x96) sends its first command over rooms. LeRobot's ACT (52 M, two cameras of 224x224, random
weights) answers one request. ``first`` compiles the policy, ``again`` uses the cache of compiled programs, and
``bundle`` is ``robojax export``'s folder with an empty cache.
Last figure, AMD EPYC, 2 cores: 2.9 s, 1.9 s again, 2.0 s as a bundle; ACT 3.9, 2.1 and 2.0 s.
"""

import argparse
import asyncio
import base64
import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.act_latency import write_policy
from benchmarks.glass_to_action import CAMERA, Robot, in_rooms
from benchmarks.measured import RESULTS, ROOT, SHIPPED, quietness, result, write
from benchmarks.processes import Child, Refused, call, child

LEROBOT = ROOT / "benchmarks" / "lerobot_server.py"
PEER_SIZE = {"cameras": 2, "height": 224, "width": 224}
CAMERAS = [f"camera{number}" for number in range(PEER_SIZE["cameras"])]
JOINTS = [f"joint_{number}" for number in range(14)]
Times = dict[str, float]


@contextmanager
def server(cache: Path) -> Iterator[tuple[Child, str, Times]]:
    """``robojax serve``, its address, and when it could be reached."""
    settings = {"ROBOJAX_COMPILE_CACHE": str(cache)}
    with child("-m", "robojax.cli", "serve", "--port", "0", "--state", "off", env=settings) as made:
        url = made.url()
        times = {"listening_s": time.monotonic() - made.began}
        call(f"{url}/health")
        times["health_s"] = time.monotonic() - made.began
        times["health_before_jax"] = float(not is_ready(url))
        while not is_ready(url):
            time.sleep(0.02)
        times["ready_to_load_s"] = time.monotonic() - made.began
        yield made, url, times


def is_ready(url: str) -> bool:
    """Whether JAX is imported."""
    try:
        return bool(call(f"{url}/ready")["ready"])
    except Refused:
        return False


def shipped(cache: Path, policy: Path = SHIPPED) -> Times:
    """The shipped policy, its robot in rooms."""
    with server(cache) as (made, url, times):
        body = {"session_id": "arm", "policy_path": str(policy), "transport_server_url": url, "camera_names": [CAMERA]}
        session = call(f"{url}/sessions", "POST", body)
        times["policy_ready_s"] = time.monotonic() - made.began

        async def first_command() -> float:
            heard = asyncio.get_running_loop().create_future()

            class Waiting(Robot):
                def obey(self, values: Mapping[str, float], received_at: float) -> None:
                    if not heard.done():
                        heard.set_result(received_at)

            robot = Waiting(size=(96, 96))
            async with in_rooms(url, session, robot) as eye:
                living = asyncio.create_task(robot.live(eye))
                await asyncio.to_thread(call, f"{url}/sessions/arm/start", "POST")
                async with asyncio.timeout(120):
                    at = await heard
                living.cancel()
            return at

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            times["first_action_s"] = runner.run(first_command()) - made.began
    return times


def observation() -> dict[str, Any]:
    """The observation for the big ACT, for ``POST /act``."""
    from PIL import Image

    random = np.random.default_rng(0)
    images = {}
    for camera in CAMERAS:
        file = io.BytesIO()
        noise = random.integers(0, 256, (PEER_SIZE["height"], PEER_SIZE["width"], 3), np.uint8)
        Image.fromarray(noise).save(file, "JPEG")
        images[camera] = base64.b64encode(file.getvalue()).decode()
    return {"images": images, "state": [0.0] * len(JOINTS)}


def big(folder: Path, cache: Path) -> Times:
    """LeRobot's ACT in our server, asked once without rooms."""
    asked = observation()
    with server(cache) as (made, url, times):
        body = {
            "session_id": "arm",
            "policy_path": str(folder),
            "transport_server_url": "direct",
            "camera_names": CAMERAS,
            "joint_names": JOINTS,
        }
        call(f"{url}/sessions", "POST", body)
        times["policy_ready_s"] = time.monotonic() - made.began
        call(f"{url}/sessions/arm/act", "POST", asked)
        times["first_action_s"] = time.monotonic() - made.began
    return times


def peer(python: str, folder: Path) -> Times:
    """The same ACT in LeRobot's policy server; the client has imported everything before."""
    port = free_port()
    with child(str(LEROBOT), "ask", "--port", str(port), python=python) as asking:
        asking.order(do="prepare")
        with child(str(LEROBOT), "serve", "--port", str(port), python=python) as made:
            wait_for(port)
            asking.order(do="ready", within=60)
            listening = time.monotonic() - made.began
            times: Times = {"listening_s": listening, "ready_to_load_s": listening}
            asking.order(do="load", folder=str(folder), actions=100, **PEER_SIZE)
            times["policy_ready_s"] = time.monotonic() - made.began
            asking.order(do="measure", count=1)
            times["first_action_s"] = time.monotonic() - made.began
    return times


def write_act(folder: Path, lerobot: str | None) -> None:
    """Write an ACT of LeRobot's default size, with LeRobot if there is a Python that has it."""
    if lerobot is None:
        write_policy(folder, *PEER_SIZE.values())
        return
    with child(str(LEROBOT), "ask", "--port", "1", python=lerobot) as writing:
        writing.order(do="write", folder=str(folder), **PEER_SIZE)


def export(policy: Path, folder: Path) -> Path:
    """Write a bundle of a policy for this CPU."""
    options = ["--for", "cpu", "--batch", "1,2,4,8,16", "--output", str(folder)]  # The server's batch sizes.
    command = [sys.executable, "-m", "robojax.cli", "export", str(policy), *options]
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def wait_for(port: int, within: float = 60.0) -> None:
    """Until something listens there."""
    until = time.monotonic() + within
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def help_time() -> float:
    """Return the seconds that ``robojax --help`` takes."""
    began = time.monotonic()
    command, env = [sys.executable, "-m", "robojax.cli", "--help"], os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=env)
    return time.monotonic() - began


def medians(rounds: Sequence[Times]) -> dict[str, float]:
    """Of each figure; times are since the start of the process."""
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


def measure(rounds: int, lerobot: str | None, scratch: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Rows in turns, and why others are left out."""
    left_out: dict[str, str] = {}
    write_act(folder := scratch / "act", lerobot)
    bundles = export(SHIPPED, scratch / "shipped-bundle"), export(folder, scratch / "act-bundle")

    def empty() -> Path:
        return scratch / f"cache-{time.monotonic_ns()}"

    ways: dict[str, Callable[[], Times]] = {
        "robojax, shipped policy, first": lambda: shipped(empty()),
        "robojax, shipped policy, again": lambda: shipped(scratch / "cache"),
        "robojax, shipped policy, bundle": lambda: shipped(empty(), bundles[0]),
    }
    if lerobot is None:
        left_out["LeRobot's policy server"] = "no --lerobot-python"
    else:
        ways["LeRobot's policy server, ACT of 52 M"] = lambda: peer(lerobot, folder)
    ways["robojax, ACT of 52 M, first"] = lambda: big(folder, empty())
    ways["robojax, ACT of 52 M, again"] = lambda: big(folder, scratch / "cache")
    ways["robojax, ACT of 52 M, bundle"] = lambda: big(bundles[1], empty())
    taken: dict[str, list[Times]] = {name: [] for name in ways}
    for name in [one for one in ways if one.endswith("again")]:
        try:
            ways[name]()  # Fill the compile caches.
        except Refused as error:
            left_out[name] = left_out[name.replace("again", "first")] = str(error)
    for number in range(rounds):
        for name, way in ways.items():
            if name not in left_out:
                taken[name].append(way())
                print(
                    f"{number + 1}: {name}: {taken[name][-1]['first_action_s']:.2f} s to the first action", flush=True
                )
    return {name: medians(times) for name, times in taken.items() if times}, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each")
    parser.add_argument("--lerobot-python", help="a Python with lerobot 0.4.4 and grpcio")
    parser.add_argument("--output", type=Path, default=RESULTS / "cold_start.json")
    options = parser.parse_args()
    quiet = quietness()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        helps = [help_time() for _ in range(max(options.rounds, 3))]
        rows, left_out = measure(options.rounds, options.lerobot_python, scratch)
    found = result(
        "seconds from the start of the process to --help, listening, a policy that is ready, the first action",
        "python -m benchmarks.cold_start --lerobot-python VENV/bin/python",
        quiet,
        rounds=options.rounds,
        help_s=round(statistics.median(helps), 3),
        since_process_start=rows,
        left_out=left_out,
    )
    write(options.output, found)


if __name__ == "__main__":
    main()
