"""How long does a forward pass of the 2D transformer take, beside diffusers' own in torch, eager and compiled?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/transformer2d_latency.py --compiled-peer
    python benchmarks/transformer2d_latency.py --device gpu --compiled-peer --peak-tflops 989   # H200, dense bfloat16

Each side is a process of its own (benchmarks/transformer2d_sides.py) over the same files, and they take turns in short
rounds, so that whatever else the machine does meets all alike. float32 on two threads of a CPU, bfloat16 on a GPU. The
ratio of two sides is the median over the rounds of the ratio of their medians in a round. Ten-step cases are Euler's
method: torch in a Python loop, ours as one program over what `prepare` makes once (which is measured, too).

Wants torch and diffusers: pip install -e '.[parity]' (for a GPU, a torch built for it).

Last result: benchmarks/results/transformer2d_latency.json
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from transformer2d_cases import CASES, Case

from benchmarks.measured import RESULTS, machine, write
from benchmarks.processes import child

HERE = Path(__file__).parent
DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
OURS, EAGER, COMPILED = "robojax", "diffusers eager", "diffusers torch.compile"
LONGEST = 100  # calls of a side in one round
# Spinning OpenMP threads would slow down whoever's turn it is; XLA would take most of a GPU's memory at once.
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def measure(commands: Mapping[str, list[str]], device: str, name: str, rounds: int, budget: float) -> dict[str, Any]:
    """Every side's figures for one case.

    Args:
        budget: seconds that a side may take in one round.
    """
    results: dict[str, Any] = {}
    outputs: dict[str, np.ndarray] = {}
    medians: dict[str, list[float]] = {side: [] for side in commands}
    seconds: dict[str, list[float]] = {side: [] for side in commands}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = str(Path(temporary) / "model")
        sides = {
            side: stack.enter_context(child(*command, python=python, env={**SETTINGS, **os.environ}))
            for side, (python, *command) in commands.items()
        }
        sides[EAGER].order(do="write", device=device, case=name, folder=folder)
        counts = {}
        for side, process in sides.items():
            output = str(Path(temporary) / "output.npy")
            results[side] = process.order(do="load", device=device, case=name, folder=folder, output=output)
            outputs[side] = np.load(output)
            warm = process.order(do="measure", count=3)["seconds"]
            counts[side] = int(np.clip(budget / min(warm), 1, LONGEST))
        for _ in range(rounds):
            for side, process in sides.items():
                taken = process.order(do="measure", count=counts[side])["seconds"]
                medians[side].append(float(np.median(taken)))
                seconds[side] += taken
    scale = np.abs(outputs[EAGER]).max()
    for side, values in seconds.items():
        milliseconds = np.array(values) * 1e3
        ratios = np.array(medians[OURS]) / np.array(medians[side])
        results[side] |= {
            "p50_ms": round(float(np.percentile(milliseconds, 50)), 3),
            "p99_ms": round(float(np.percentile(milliseconds, 99)), 3),
            "min_ms": round(float(milliseconds.min()), 3),
            "count": len(values),
            "ours_over_it": round(float(np.median(ratios)), 3),
            "largest_difference": float(np.abs(outputs[side] - outputs[EAGER]).max()),
            "largest_output": float(scale),
        }
    return results


def describe(case: Case, figures: dict[str, Any], peak: float | None) -> str:
    """Teraflops per second of the products, and what part of the peak they are; both are added to the figures."""
    reached = case.operations() / figures["p50_ms"] / 1e9
    figures["tflops"] = round(reached, 3)
    if peak is None:
        return f"{reached:7.2f} TFLOP/s"
    figures["share_of_peak"] = round(reached / peak, 4)
    return f"{reached:7.2f} TFLOP/s {reached / peak:6.1%} of peak"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as the device suits")
    parser.add_argument("--compiled-peer", action="store_true", help="torch.compile, too: about a minute per case")
    parser.add_argument("--compile-mode", default="default", help="of torch.compile, e.g. max-autotune")
    parser.add_argument("--peak-tflops", type=float, help="of the device in this dtype; 989 for an H200 in bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="per round and side, at least one call")
    parser.add_argument("--case", action="append", help="only those whose name has this in it; may be given again")
    parser.add_argument("--output", "--out", type=Path, default=RESULTS / "transformer2d_latency.json")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("diffusers") is None:
        raise SystemExit("this compares with diffusers in torch; install both: pip install -e '.[parity]'")
    device, dtype = options.device, options.dtype or DTYPES[options.device]
    names = [name for name in CASES[device] if any(part in name for part in options.case or [""])]
    if not names:
        raise SystemExit(f"no such case; there are: {'; '.join(CASES[device])}")
    sides = {OURS: "robojax", EAGER: "eager"} | ({COMPILED: "compile"} if options.compiled_peer else {})
    script = str(HERE / "transformer2d_sides.py")
    commands = {
        side: [sys.executable, script, name, device, dtype, options.compile_mode] for side, name in sides.items()
    }
    # Figures of other devices and of cases that are not run this time stay in the file.
    result = json.loads(options.output.read_text()) if options.output.exists() else {}
    section = result.setdefault(f"{device} {dtype}", {"cases": {}})
    section["machine"] = machine("torch", "diffusers")
    for name in names:
        figures = measure(commands, device, name, options.rounds, options.seconds)
        section["cases"][name] = figures
        for side, values in figures.items():
            speed = describe(CASES[device][name], values, options.peak_tflops)
            print(
                f"{name:36} {side:24} p50 {values['p50_ms']:9.2f} ms  min {values['min_ms']:9.2f} ms  "
                f"ours is {values['ours_over_it']:5.2f} of it  {speed}  "
                f"difference {values['largest_difference']:.1e} of {values['largest_output']:.1f}",
                flush=True,
            )
        write(options.output, result)


if __name__ == "__main__":
    main()
