"""How many robots does one GPU serve over real sockets before the first late chunk?

    python -m benchmarks.fleet_gpu --policy pi05          # a chunk every 0.5 s
    python -m benchmarks.fleet_gpu --policy act           # a chunk every 0.2 s
    python -m benchmarks.fleet_gpu --quick                # a small policy on this processor, in less than two minutes
    python -m benchmarks.fleet_gpu --policy small --frame 96x96 --robots 16,64    # requests that cost little to decode

Starts ``robojax serve`` and one process for each robot. A robot sends three JPEG pictures of 480x640 and its joints
over ``WS /stream`` with ``robojax.client``, once in a period. A chunk is late if it arrives more than a period after
the moment at which the robot was to ask. The number of robots doubles until a chunk is late, and is bisected then; it
counts as too large if that happens twice. ``--robots 8,16,32`` tries these numbers once each, up to the first with a
late chunk, which takes a predictable time. Measuring begins when all batch sizes are compiled and measured, or after
``--compile-within`` seconds. The results are written after every ride, so a run that is ended early loses none.

Policies have random weights: pi0.5 with all of its 3.35 billion parameters and ACT of LeRobot's default size, both in
bfloat16. ``admitted`` is the number of sessions with this rate that the server accepts. The robots themselves promise a
lower rate, so that they find the device's limit and not the limit of the admission.
``event_loop_ms`` is the processor time of the server's event loop for each chunk, which limits the chunks per second
of one server, together with the time for which its other threads hold Python's lock.

Targets on an H200: pi0.5 40 robots, ACT 64 robots, the device busy for 80 % of the time, p99 at most 2 times p50.
Last figures, an H200: 48 robots with pi0.5 (the largest number that was tried), 16 with ACT; benchmarks/results/h200.
"""

import argparse
import asyncio
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import act_latency, vla_gpu
from benchmarks.measured import RESULTS, accelerator, percentiles, quietness, result, write
from benchmarks.processes import Child, Refused, call, child, say, settle

FRAME = (480, 640)
REPORTED = 1.0  # Seconds after which the server knows what its engine did; the engine reports every 0.5 s.
UNLIMITED_RATE = 1  # Rate of the robots' sessions. The admission counts a fiftieth of the rate at which they ask.
WIDE = (-1e6, 1e6)
LONG = {"rides", "at_most", "batch_ms"}  # Figures that are written to the file and not printed.
RATE = 50  # Actions per second; the period decides how many actions of a chunk are executed.
SMALL = {
    "vision_backbone": "small_cnn",
    "dim_model": 64,
    "n_heads": 4,
    "dim_feedforward": 128,
    "n_encoder_layers": 1,
    "use_vae": False,
    "replace_final_stride_with_dilation": False,
}


@dataclass(frozen=True)
class Fleet:
    """A policy and how its robots use it."""

    period: float
    cameras: Sequence[str]
    joints: int
    fields: Mapping[str, Any] = field(default_factory=dict)


ACT_CAMERAS = [f"camera{number}" for number in range(3)]
FLEETS = {
    "pi05": Fleet(0.5, vla_gpu.CAMERAS, 6, {"policy_type": "pi05", "language_instruction": "pick up the red cube"}),
    "act": Fleet(0.2, ACT_CAMERAS, act_latency.STATE),
    "small": Fleet(0.2, ACT_CAMERAS, act_latency.STATE),
}


def write_policy(name: str, folder: Path) -> None:
    """Write the policy's folder."""
    from jaxmodels.policies import lerobot_folder

    folder.mkdir()
    if name == "small":
        checkpoint = act_latency.build_checkpoint(3, 96, 96, **SMALL)
    else:
        checkpoint = vla_gpu.build_checkpoint(vla_gpu.CASES[name], folder, is_small=False)
    lerobot_folder.write_checkpoint(folder, checkpoint)


# A robot's process.


def make_picture(seed: int, frame: tuple[int, int] = FRAME) -> tuple[bytes, np.ndarray]:
    """Return a JPEG file and its original: soft shapes, objects with edges and a camera's noise."""
    from PIL import Image, ImageDraw

    random = np.random.default_rng(seed)
    (height, width), shrink = frame, 16
    coarse = random.integers(0, 256, (height // shrink, width // shrink, 3), np.uint8)
    scene = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    for left, top, wide, high, *colour in random.integers(
        0, (width, height, 120, 120, 256, 256, 256), (40, 7)
    ).tolist():
        ImageDraw.Draw(scene).rectangle((left, top, left + wide, top + high), tuple(colour))
    file = io.BytesIO()
    noisy = np.clip(np.asarray(scene) + random.normal(0, 4, (height, width, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(file, "JPEG", quality=90)
    return file.getvalue(), noisy


def drive(url: str, number: int, fleet: Fleet, frame: tuple[int, int]) -> None:
    """Ask for chunks in the rides that standard input orders."""
    from robojax.client import Client, RobojaxError

    images = {camera: make_picture(3 * number + place, frame)[0] for place, camera in enumerate(fleet.cameras)}
    state = np.zeros(fleet.joints, np.float32)
    with Client(url, timeout=300) as client, client.session(f"robot{number}").stream() as stream:
        stream.act(images, state)  # The server compiles for these pictures.
        say(event="ready", bytes=sum(map(len, images.values())))
        for line in sys.stdin:
            order = json.loads(line)
            seconds, late, failures = [], 0, []
            due = order["start"] + number * 0.6180339 % 1 * fleet.period
            while due < order["start"] + order["seconds"]:
                time.sleep(max(due - time.monotonic(), 0))
                asked = time.monotonic()
                try:
                    stream.act(images, state)
                    seconds.append(time.monotonic() - asked)
                except RobojaxError as error:
                    failures.append(str(error)[:200])
                passed = time.monotonic() - due
                late += passed > fleet.period
                due += fleet.period * max(int(-(-passed // fleet.period)), 1)
            say(seconds=seconds, late=late, failures=failures)


# The measurement.


@contextmanager
def busy_share() -> Iterator[list[float]]:
    """Return a list that has, after the block, shares of time in which the GPU's driver counted it as busy."""
    shares: list[float] = []
    if accelerator() is None:
        yield shares
        return
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as polling:
        try:
            yield shares
        finally:
            polling.terminate()
            shares += [float(line) / 100 for line in polling.communicate()[0].split() if line.isdecimal()]


class Scene:
    """A server with one policy and its robots."""

    def __init__(self, stack: ExitStack, name: str, folder: Path, server: Sequence[str], frame: tuple[int, int]):
        self._stack, self._name, self._fleet, self._folder, self._frame = stack, name, FLEETS[name], folder, frame
        self._server = stack.enter_context(
            child("-m", "robojax.cli", "serve", "--port", "0", "--state", "off", *server)
        )
        self.url = self._server.url()
        self._robots: list[Child] = []

    def add_robots(self, count: int) -> None:
        """Create sessions and robots until there are ``count``, and wait for their first chunks; raises Refused."""
        present = len(self._robots)
        try:
            for number in range(present, count):
                self._create_session(f"robot{number}", UNLIMITED_RATE)
                command = ["-m", "benchmarks.fleet_gpu", "--robot", self.url, str(number)]
                command += ["--policy", self._name, "--frame", write_frame(self._frame)]
                self._robots.append(self._stack.enter_context(child(*command)))
        finally:  # If a session is refused, smaller fleets are still measured.
            for robot in self._robots[present:]:
                robot.told("ready")

    def count_admitted(self, most: int) -> dict[str, Any]:
        """Return how many more sessions at the robots' rate the server accepts, and why it refuses the next one."""
        admitted, refusal = 0, ""
        try:
            while admitted < most:
                self._create_session(f"probe{admitted}", RATE)
                admitted += 1
        except Refused as error:
            refusal = str(error)
        for number in range(admitted):
            call(f"{self.url}/sessions/probe{number}", "DELETE")
        return {"admitted": admitted, "refusal": refusal}

    def _create_session(self, name: str, rate: float) -> None:
        fleet = self._fleet
        body = {
            "session_id": name,
            "policy_path": str(self._folder),
            "transport_server_url": "direct",
            "camera_names": list(fleet.cameras),
            "joint_names": [f"joint_{joint}" for joint in range(fleet.joints)],
            "rate": rate,
            "action_steps": round(RATE * fleet.period),
            **fleet.fields,
        }
        call(f"{self.url}/sessions", "POST", body, patience=1200)

    def ride(self, robots: int, seconds: float) -> dict[str, Any]:
        """Return the figures of this number of robots, which ask for these seconds."""
        self.add_robots(robots)
        time.sleep(REPORTED)
        before, used, looped = self._device(), self._processor(), self._event_loop()
        order = {"start": time.monotonic() + 0.5, "seconds": seconds}
        with busy_share() as shares, ThreadPoolExecutor(robots) as pool:
            asking = [pool.submit(robot.order, **order) for robot in self._robots[:robots]]
            time.sleep(max(order["start"] + seconds - time.monotonic(), 0))
            load = self._device()["load"]
            rides = [one.result() for one in asking]
        cores = (self._processor() - used) / (time.monotonic() - order["start"])
        looped = self._event_loop() - looped
        time.sleep(REPORTED)
        after = self._device()
        answers = [taken for ride in rides for taken in ride["seconds"]]
        batches = sum(after["batches"].values()) - sum(before["batches"].values())
        return {
            "robots": robots,
            "answers": len(answers),
            "late": sum(ride["late"] for ride in rides),
            "failures": [text for ride in rides for text in ride["failures"]][:3],
            "answer_ms": percentiles(answers, (50, 95, 99)),
            "chunks_per_s": round(len(answers) / seconds, 1),
            "mean_batch": round(len(answers) / max(batches, 1), 2),
            "device_busy": round(load, 3),
            "driver_busy": round(float(np.mean(shares)), 3) if shares else None,
            "server_cores": round(cores, 2),
            "event_loop_ms": round(1e3 * looped / max(len(answers), 1), 2),
        }

    def _device(self) -> Any:
        (device,) = call(f"{self.url}/debug/system")["engine"]["devices"]
        return device

    def _processor(self) -> float:
        """Return the seconds of a core that the server and its engine have used."""
        server = psutil.Process(self._server.process.pid)
        used = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        return sum(times.user + times.system for times in used)

    def _event_loop(self) -> float:
        """Return the seconds of a core that the server's event loop has used; it is the server's first thread."""
        threads = psutil.Process(self._server.process.pid).threads()
        return sum(one.user_time + one.system_time for one in threads if one.id == self._server.process.pid)

    def describe(self) -> dict[str, Any]:
        """Return the device and the seconds of its batches."""
        return {name: self._device()[name] for name in ("device", "batch_ms")}


def measure(options: argparse.Namespace, folder: Path, note: Callable[..., None]) -> None:
    """Measure a fleet with one policy; `note` is given figures as soon as they are there."""
    # Imported here because robots' processes start in a tenth of the time without the server's code.
    from benchmarks.robots_per_device import most_without_a_miss

    sizes = ",".join(map(str, (size for size in (1, 2, 4, 8, 16, 32) if size <= options.largest_batch)))
    server = ["--engine-batch-sizes", sizes, "--max-sessions", str(2 * options.most)]
    # Random weights command motions that no robot would follow, and the server refuses a chunk far out of range.
    ranges = {f"joint_{joint}": WIDE for joint in range(FLEETS[options.policy].joints)}
    server += ["--policy-roots", str(folder.parent), "--joint-ranges", json.dumps(ranges)]
    server += ["--device", options.device] if options.device else []
    server += ["--dtype", "bfloat16"] if accelerator() is not None else []
    rides: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        began = time.monotonic()
        scene = Scene(stack, options.policy, folder, server, options.frame)
        scene.add_robots(1)
        first = time.monotonic() - began
        time.sleep(REPORTED)
        note(first_chunk_s=round(first, 1))
        try:
            settle(scene.url, options.compile_within)
            note(batch_sizes_compiled_s=round(time.monotonic() - began, 1))
        except RuntimeError as error:  # The rides may still tell enough; batch_ms says which sizes there were.
            note(batch_sizes_compiled_s=None, why=str(error))
        note(**scene.count_admitted(options.most))

        async def misses(robots: int) -> int:
            try:
                found = scene.ride(robots, options.seconds)
            except Refused as refusal:
                print(f"{robots} robots: {refusal}", flush=True)
                return 1
            print(json.dumps(found), flush=True)
            if robots not in rides or found["late"] <= rides[robots]["late"]:
                rides[robots] = found
                note(rides=[rides[robots] for robots in sorted(rides)], **scene.describe())
            return found["late"] + len(found["failures"])

        async def most_of(numbers: Sequence[int]) -> int:
            most = 0
            for robots in numbers:
                if await misses(robots):
                    break
                most = robots
            return most

        most = asyncio.run(most_of(options.robots) if options.robots else most_without_a_miss(misses, options.most))
    note(most_robots=most, at_most=rides.get(most))


def read_numbers(text: str) -> list[int]:
    return sorted(map(int, text.split(",")))


def read_frame(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d{1,3}x[1-9]\d{1,3}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}; wanted HEIGHTxWIDTH in pixels, for example 480x640")
    height, width = map(int, text.split("x"))
    return height, width


def write_frame(frame: tuple[int, int]) -> str:
    return "x".join(map(str, frame))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=tuple(FLEETS), default="pi05")
    parser.add_argument("--device", help="as of robojax serve, e.g. cuda:0; default: JAX's choice")
    parser.add_argument("--quick", action="store_true", help="a small policy, rides of 4 s, at most 16 robots")
    parser.add_argument(
        "--frame", type=read_frame, default=FRAME, help="HEIGHTxWIDTH of the pictures; default: 480x640"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each ride")
    parser.add_argument("--robots", type=read_numbers, help="numbers of robots to try instead of a search: 8,16,32")
    parser.add_argument("--most", type=int, default=256, help="largest number of robots")
    parser.add_argument("--largest-batch", type=int, default=16)
    parser.add_argument("--compile-within", type=float, default=1200.0, help="seconds for all batch sizes")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--robot", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.robot is not None:
        drive(options.robot[0], int(options.robot[1]), FLEETS[options.policy], options.frame)
        return
    if options.quick:
        options.policy, options.seconds, options.most, options.largest_batch = "small", 4.0, 16, 4
    quiet = quietness()
    fleet = FLEETS[options.policy]
    found = result(
        "How many robots does one GPU serve over real sockets before the first late chunk?",
        shlex.join(("python", "-m", "benchmarks.fleet_gpu", *sys.argv[1:])),
        quiet,
        policy=options.policy,
        period_s=fleet.period,
        pictures=f"{len(fleet.cameras)} JPEG files of {write_frame(options.frame)}",
        seconds=options.seconds,
    )
    output = options.output or RESULTS / f"fleet_gpu_{options.policy}.json"

    def note(**figures: Any) -> None:
        found.update(figures)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps({name: figures[name] for name in figures.keys() - LONG}), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        write_policy(options.policy, folder := Path(scratch) / options.policy)
        measure(options, folder, note)
    write(output, found)


if __name__ == "__main__":
    main()
