"""How many images a second does the loader give for training, compared with LeRobot's on the same files?

    python -m benchmarks.data_loader --lerobot-python VENV/bin/python         # Python with lerobot 0.4.4

Two cameras of 480x640, a state, and chunks of 100 actions, in shuffled batches of 8, as ``lerobot-train`` asks for by
default. One dataset is written by this package (H.264), one by LeRobot (AV1). LeRobot's side is its
``LeRobotDataset`` behind torch's ``DataLoader``, with one worker for each core and with 4, which is its default. Ours
is measured with its cache of decoded frames and without it. Sides take turns; batches that were prepared before a
turn do not count. A ratio is ours over LeRobot's faster one, the median of the rounds' ratios.

Last figure, Intel Xeon, 2 cores: 588 (H.264) and 1,058 (AV1) images a second, LeRobot 156 and 162.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.measured import RESULTS, quietness, result, write
from benchmarks.processes import Child, child, say

PEER = Path(__file__).with_name("data_loader_peer.py")
CAMERAS, SIZE, JOINTS, FPS, CHUNK, BATCH = ("front", "wrist"), (480, 640), 6, 30, 100, 8
CACHED, DECODED = "robojax, from its cache", "robojax, decoding each time"
# More than any loader prepares ahead.
SKIPPED = 16


def picture(row: int, camera: int) -> np.ndarray:
    """Something that moves over something that does not, with the noise of a sensor."""
    height, width = SIZE
    y, x = np.mgrid[:height, :width]
    frame = np.stack((x * 255 // width, y * 255 // height, (x + y) * 127 // width), axis=2).astype(np.int16)
    left, top = (row * 7 + camera * 90) % (width - 120), (row * 3 + camera * 40) % (height - 120)
    frame[top : top + 120, left : left + 120] = (200, 40, 60)
    frame += np.random.default_rng([row, camera]).integers(-6, 7, frame.shape, np.int16)
    return np.clip(frame, 0, 255).astype(np.uint8)


def write_dataset(folder: Path, episodes: int, rows: int) -> None:
    """By our own writer."""
    from jaxmodels.data import DatasetWriter

    random = np.random.default_rng(0)
    with DatasetWriter(folder, fps=FPS, joint_names=[f"joint_{n}" for n in range(JOINTS)], cameras=CAMERAS) as writer:
        for episode in range(episodes):
            for row in range(rows):
                frames = {
                    f"observation.images.{name}": picture(episode * rows + row, number)
                    for number, name in enumerate(CAMERAS)
                }
                pose = random.normal(size=JOINTS).astype(np.float32)
                writer.add({"observation.state": pose, "action": pose + 1, **frames})
            writer.end_episode("pick up the cube")


def serve(folder: Path, cache: str) -> None:
    """Our loader; each order is a number of batches."""
    from jaxmodels.data import Loader, open_dataset
    from jaxmodels.types import Feature

    began = time.perf_counter()
    dataset = open_dataset(folder)
    policy: Any = SimpleNamespace(
        cameras=tuple(Feature(f"observation.images.{name}", "VISUAL", (3, *SIZE)) for name in CAMERAS),
        state=Feature("observation.state", "STATE", (JOINTS,)),
        environment_state=None,
        action=Feature("action", "ACTION", (JOINTS,)),
        observation_steps=1,
        action_delta_indices=range(CHUNK),
    )
    loader = Loader(dataset, policy, batch_size=BATCH, seed=0, cache=Path(cache) if cache != "none" else False)
    batches = loader.batches(0, 1 << 40)
    next(batches)
    say(event="ready", seconds=time.perf_counter() - began, frames=len(dataset) * len(CAMERAS))
    for line in sys.stdin:
        for _ in range(SKIPPED):
            next(batches)
        began = time.perf_counter()
        images = sum(len(frames) for _ in range(json.loads(line)["batches"]) for frames in next(batches).images)
        say(images=images, seconds=time.perf_counter() - began)


def measure(folder: Path, scratch: Path, python: str | None, rounds: int, batches: int) -> dict[str, Any]:
    """Images per second of every loader on one dataset, in turns."""
    with ExitStack() as stack:
        sides: dict[str, Child] = {}
        began: dict[str, Any] = {}
        commands = {CACHED: ("-m", "benchmarks.data_loader", "--serve", str(folder), "--cache", str(scratch / "cache"))}
        commands[DECODED] = ("-m", "benchmarks.data_loader", "--serve", str(folder), "--cache", "none")
        for side, command in commands.items():
            sides[side] = stack.enter_context(child(*command))
            began[side] = sides[side].told("ready")
        for workers in sorted({os.cpu_count() or 1, 4}) if python is not None else ():
            side = f"LeRobot, {workers} workers"
            command = (str(PEER), "load", str(folder), str(workers), str(CHUNK), str(BATCH), str(SKIPPED))
            sides[side] = stack.enter_context(child(*command, python=str(python), env={"HF_HUB_OFFLINE": "1"}))
            began[side] = sides[side].told("ready")
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, process in sides.items():
                found = process.order(batches=batches)
                speeds[side].append(found["images"] / found["seconds"])
    filling = began[CACHED]
    found: dict[str, Any] = {
        "images_per_s": {side: round(float(np.median(each)), 1) for side, each in speeds.items()},
        "cache_filled_s": round(filling["seconds"], 1),
        "cache_filled_images_per_s": round(filling["frames"] / filling["seconds"], 1),
    }
    peers = [side for side in speeds if side.startswith("LeRobot")]
    if peers:
        best = max(peers, key=lambda side: np.median(speeds[side]))
        found["video_backend_of_lerobot"] = began[best]["backend"]
        found["ratio"] = {
            side: round(float(np.median(np.divide(speeds[side], speeds[best]))), 2) for side in (CACHED, DECODED)
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot-python", help="a Python with lerobot 0.4.4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40, help="of each side and round")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--rows", type=int, default=60, help="of an episode")
    parser.add_argument("--output", type=Path, default=RESULTS / "data_loader.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve), options.cache)
        return
    python = options.lerobot_python
    quiet = quietness()
    cases, left_out = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        print("writing the datasets", flush=True)
        write_dataset(scratch / "ours", options.episodes, options.rows)
        datasets = {"H.264, written by robojax": scratch / "ours"}
        if python is None:
            left_out["LeRobot's loader, and AV1 as it writes it"] = "no --lerobot-python"
        else:
            with child(str(PEER), "write", str(scratch / "ours"), str(scratch / "theirs"), python=python) as writing:
                writing.told("ready")
            datasets["AV1, written by LeRobot"] = scratch / "theirs"
        for name, folder in datasets.items():
            cases[name] = measure(folder, scratch, python, options.rounds, options.batches)
            for side, speed in cases[name]["images_per_s"].items():
                print(f"{name}: {side}: {speed:.0f} images/s", flush=True)
            print(f"{name}: ratio {cases[name].get('ratio', 'without LeRobot, none')}", flush=True)
    found = result(
        "images per second that come out of a dataset for training, ours and LeRobot's on the same files",
        "python -m benchmarks.data_loader --lerobot-python VENV/bin/python",
        quiet,
        "av",
        "pyarrow",
        rounds=options.rounds,
        load=f"{len(CAMERAS)} cameras of {SIZE[0]}x{SIZE[1]}, chunks of {CHUNK}, batches of {BATCH}, "
        f"{options.episodes * options.rows} rows",
        cases=cases,
        target_ratio=1.5,
        left_out=left_out,
    )
    write(options.output, found)


if __name__ == "__main__":
    main()
