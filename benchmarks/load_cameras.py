"""L2, L3 and L6 of ``benchmarks/load.py``: sessions with cameras and policies that compute."""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.load_scene import Row, Scene, is_wanted, lateness, row

PERIOD = 0.005


class Witness:
    """Thread that measures how long a core did not run it between two reads.

    Args:
        core: core on which it sleeps; a virtual machine may pause a single core.
    """

    def __init__(self, core: int):
        self._core = core
        self._longest = 0.0

    def taken(self) -> float:
        """The longest since the last look, in seconds; then resets it."""
        longest, self._longest = self._longest, 0.0
        return longest

    def watch(self, ended: threading.Event) -> None:
        """Sleep until the event, in the thread that this is called in."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self._core})
        due = time.monotonic()
        while not ended.wait(max(due + PERIOD - time.monotonic(), 0)):
            due += PERIOD
            late = time.monotonic() - due
            self._longest = max(self._longest, late)
            if late > PERIOD:
                due += late


@contextmanager
def witnesses() -> Iterator[list[Witness]]:
    """One for each core, until the block ends; their process must have nothing else to do."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    watching, ended = [Witness(core) for core in cores], threading.Event()
    with ExitStack() as stack:
        for one in watching:
            thread = threading.Thread(target=one.watch, args=(ended,), daemon=True)
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        yield watching


def l2_l6(options: argparse.Namespace) -> list[Row]:
    """8 sessions at 25 Hz with the small ACT and a camera each; a soak."""
    rows = []
    with ExitStack() as stack:
        scene = Scene(stack, "real")
        for number in range(8):
            scene.create("s", number, ["front"])
        scene.robots("s", 8, ["front"])
        seconds = max(options.seconds / 3, 5)
        bare = []
        if is_wanted(options, "L2"):
            bare.append(scene.bare(8, 25, seconds / 2, ["front"]))
        scene.start_all()
        time.sleep(3)
        before = scene.measure(seconds)
        if is_wanted(options, "L2"):
            scene.stop_all()
            bare.append(scene.bare(8, 25, seconds / 2, ["front"]))
            scene.start_all()
            counts = before["counts"]
            figure: Row = {"lateness_ms": lateness([before])} | {
                "starvations": counts["starvations"],
                "missed_ticks_percent": round(100 * counts["missed_ticks"] / max(before["ticks"], 1), 4),
                "holds": counts["holds"],
                "inference_ms": before["inference_ms"],
                "cpu_of_a_core": before["cpu_of_a_core"],
            }
            rows.append(
                row(
                    "L2",
                    "8 x 25 Hz, ACT and a camera each: no starvation; missed ticks 0.1 %; inference p99 25 ms",
                    figure,
                    counts["starvations"] == 0
                    and figure["missed_ticks_percent"] <= 0.1
                    and before["inference_ms"]["p99"] <= 25,
                    lateness(bare),
                )
            )
        if is_wanted(options, "L6"):
            rows.append(_l6(scene, options.soak * 60))
    return rows


# A frame or a command this much late, and a robot may be held: what is older than 0.3 s is not acted upon.
STOOD_STILL = 0.15


def _l6(scene: Scene, seconds: float) -> Row:
    """Minutes one after the other; a hold is explained by a core of the machine that stood still in its minute."""
    length = min(60, seconds / 4)
    sizes: list[tuple[float, float]] = []
    held: list[dict[str, Any]] = []
    worst = 0.0
    medians: list[float] = []
    began = time.monotonic()
    with witnesses() as sleepers:
        while (elapsed := time.monotonic() - began) < seconds:
            found = scene.measure(length)
            medians.append(found["lateness_ms"]["p50"])
            stood, counts = max(one.taken() for one in sleepers), found["counts"]
            worst = max(worst, stood)
            sizes.append((time.monotonic() - began, found["rss_mb"]))
            if counts["holds"]:
                reasons = {
                    name.removeprefix("holds_"): n for name, n in counts.items() if name.startswith("holds_") and n
                }
                held.append(
                    {"minute": round(elapsed / 60, 1), "holds": counts["holds"], "reasons": reasons}
                    | {"machine_stood_still_ms": round(1000 * stood)}
                )
                print(f"    held: {json.dumps(held[-1])}", flush=True)
    times, values = [at for at, _ in sizes], [size for _, size in sizes]
    slope = statistics.linear_regression(times, values).slope * 3600 / values[0] * 100 if len(sizes) > 1 else 0.0
    unexplained = sum(one["holds"] for one in held if one["machine_stood_still_ms"] < 1000 * STOOD_STILL)
    figure = {
        "minutes": round(seconds / 60, 1),
        "rss_percent_an_hour": round(slope, 2),
        "rss_mb": [values[0], values[-1]],
        "p50_first_last_ms": [medians[0], medians[-1]],
        "holds": sum(one["holds"] for one in held),
        "unexplained_holds": unexplained,
        "held": held,
        "machine_stood_still_at_most_ms": round(1000 * worst),
    }
    return row(
        "L6",
        "soak of L2: RSS grows 1 % an hour at most, no drift of the ticks, no unexplained hold",
        figure,
        slope <= 1 and unexplained == 0 and figure["p50_first_last_ms"][1] <= figure["p50_first_last_ms"][0] + 1,
    )


def l3(options: argparse.Namespace) -> list[Row]:
    """Four cameras of 640x480 at 30 pictures a second."""
    cameras = ["one", "two", "three", "four"]
    seconds = max(options.seconds / 3, 5)
    with ExitStack() as stack:
        scene = Scene(stack, cameras=cameras, rate=50)
        plain = scene.bare(1, 50, seconds / 2, cameras, fps=30, width=640, height=480)
        scene.create("s", 0, cameras)
        scene.robots("s", 1, cameras, fps=30, width=640, height=480)
        scene.start_all()
        time.sleep(4)
        found = scene.measure(seconds)
    fps = {c: round(found["counts"][f"frames_{c}"] / found["seconds"], 1) for c in cameras}
    figure = {
        "lateness_ms": found["lateness_ms"],
        "fps": fps,
        "frame_age_ms": found["frame_age_ms"],
        "frame_way_ms": found["frame_way_ms"],
        "cpu_of_a_core": found["cpu_of_a_core"],
    }
    is_met = min(fps.values()) >= 28 and found["frame_age_ms"]["p99"] <= 120 and found["lateness_ms"]["p99"] <= 10
    return [
        row(
            "L3",
            "4 cameras 640x480 at 30: 28 a second received, age p99 120 ms (from being taken), control p99 10 ms",
            figure,
            is_met,
            plain["lateness_ms"],
        )
    ]
