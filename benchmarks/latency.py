"""Comparison of policies that run in processes of their own and take turns, from NumPy frames to NumPy actions.

``act_latency`` and ``vla_latency`` use it. The peer's scripts import it in the peer's Python, so this module needs only
NumPy and the standard library.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured import machine, write
from benchmarks.processes import child

OURS = "robojax"
Act = Callable[..., np.ndarray]


def serve(load: Callable[..., Act]) -> None:
    """Answer the orders of `compare`: load a policy, then measure calls; one line of JSON for each order.

    Args:
        load: Receives the values of the order and returns the call that is measured.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # LeRobot prints while it loads.
    act: Act | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if order.pop("do") == "load":
            start = time.perf_counter()
            act = load(**order)
            loaded = time.perf_counter()
            chunk = act()
            found: dict[str, Any] = {"load_s": loaded - start, "compile_s": time.perf_counter() - loaded}
            found["chunk"] = chunk[0].tolist()
        else:
            assert act is not None, "The first order loads a policy."
            count = order.pop("count")
            found = time_calls(partial(act, **order), count)
        print(json.dumps(found), file=answers, flush=True)


def time_calls(act: Callable[[], object], count: int) -> dict[str, list[float]]:
    """Return the seconds of each call: of the clock and of all processors."""
    found: dict[str, list[float]] = {"seconds": [], "processor_seconds": []}
    for _ in range(count):
        start, used = time.perf_counter(), time.process_time()
        act()
        found["seconds"].append(time.perf_counter() - start)
        found["processor_seconds"].append(time.process_time() - used)
    return found


def compare(
    commands: Mapping[str, list[str]], order: Mapping[str, Any], rounds: int, count: int
) -> dict[str, dict[str, Any]]:
    """Return the figures of every side. Sides take turns in short rounds, so other load meets all of them alike.

    Args:
        commands: Name of a side to its command; a Python comes first. One side is `OURS`.
        order: Values of the order that loads the policy.
        rounds: Turns of each side.
        count: Calls in each turn.
    """
    results: dict[str, dict[str, Any]] = {}
    turns: dict[str, list[dict[str, list[float]]]] = {side: [] for side in commands}
    chunks: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        sides = {}
        for side, (python, *command) in commands.items():
            sides[side] = process = stack.enter_context(child(*command, python=python))
            results[side] = process.order(do="load", **order)
            chunks[side] = np.array(results[side].pop("chunk"))
            process.order(do="measure", count=1)
        for _ in range(rounds):
            for side, process in sides.items():
                turns[side].append(process.order(do="measure", count=count))

    def collect(side: str, kind: str) -> np.ndarray:
        """Milliseconds (rounds, calls)."""
        return np.array([found[kind] for found in turns[side]]) * 1e3

    ours = np.median(collect(OURS, "seconds"), axis=1)
    for side, result in results.items():
        milliseconds = collect(side, "seconds")
        result |= {
            "p50_ms": round(float(np.percentile(milliseconds, 50)), 2),
            "p99_ms": round(float(np.percentile(milliseconds, 99)), 2),
            "min_ms": round(float(milliseconds.min()), 2),
            "processor_ms": round(float(np.median(collect(side, "processor_seconds"))), 2),
            "count": milliseconds.size,
            "ours_over_it": round(float(np.median(ours / np.median(milliseconds, axis=1))), 3),
            "largest_difference": float(np.abs(chunks[side] - chunks[OURS]).max() / np.abs(chunks[OURS]).max()),
        }
    return results


def run(
    name: str,
    doc: str | None,
    cases: Iterable[str],
    load: Callable[..., Act],
    write_policy: Callable[[Path, str], None],
    *,
    lerobot: str,
    output: Path,
) -> None:
    """Run a benchmark of this kind from the command line.

    Args:
        name: Name of its module; the peer's script is next to it and ends with ``_peer.py``.
        cases: Names of cases.
        load: Loads a policy in our process, see `serve`.
        write_policy: Writes the policy of a case into a folder.
        lerobot: Version of LeRobot that the peer needs.
        output: File for results.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot-python", type=Path, help=f"Python with lerobot {lerobot}")
    parser.add_argument("--compiled-peer", action="store_true", help="also measure the peer under torch.compile")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--count", type=int, default=4, help="inferences in each round of each side")
    parser.add_argument("--case", choices=list(cases), action="append", help="only this case; repeatable")
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(load)
        return
    commands = {OURS: [sys.executable, "-m", f"benchmarks.{name}", "--serve"]}
    if options.lerobot_python:
        peer = [str(options.lerobot_python), str(Path(__file__).with_name(f"{name}_peer.py"))]
        commands["lerobot eager"] = peer
        if options.compiled_peer:
            commands["lerobot torch.compile"] = [*peer, "--compile"]
    import jax

    result: dict[str, Any] = {"machine": machine() | {"device": str(jax.devices()[0])}, "cases": {}}
    for case in options.case or cases:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "policy"
            folder.mkdir()
            write_policy(folder, case)
            order = {"folder": str(folder), "case": case}
            result["cases"][case] = sides = compare(commands, order, options.rounds, options.count)
        for side, figures in sides.items():
            print(
                f"{case:18} {side:22} p50 {figures['p50_ms']:8.1f} ms  p99 {figures['p99_ms']:8.1f} ms  "
                f"processor {figures['processor_ms']:8.1f} ms  ours takes {figures['ours_over_it']:5.2f} of it  "
                f"difference {figures['largest_difference']:.1e}",
                flush=True,
            )
    write(options.output, result)
