"""How long do pi0, pi0.5, SmolVLA, Diffusion Policy and ACT take on a GPU, from NumPy frames to NumPy actions?

    python -m benchmarks.vla_gpu --lerobot-python VENV/bin/python --compiled-peer

Targets, on an H200 in bfloat16 with three cameras of 480x640 and 10 steps: pi0.5 43 ms (p50) for one robot and 33
chunks a second for four together, SmolVLA 20 ms, ACT 2.5 ms. Policies have the sizes that people run (pi0.5 with all of
its 3.35 billion parameters) and random weights in memory. A measurement starts with uint8 frames and float32 states in
NumPy arrays and ends when the un-normalised chunk is a NumPy array. Also measured: seconds to load and to compile, the
parts of a chunk, each as a program of its own, and memory.

Each case runs in a process of its own with a time limit, and its figures are written at once, so a case that fails does
not affect the others. The peer is a Python 3.12 with lerobot 0.6.1, its extras smolvla, pi and diffusion, and a torch
for this GPU; it runs after ours, because both need the GPU's memory.

Last figures, an H200 with 16 cores of a Xeon: pi0.5 21.1 ms, and 100.8 chunks a second for 16 robots together
(benchmarks/results/h200); SmolVLA 13.4 ms, ACT 2.4 ms; LeRobot eager 238 ms, 233 ms and 17.0 ms (results/vla_gpu.json).
``benchmarks/openpi_jax_peer.py`` measures openpi's own JAX model.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import act_latency, vla_latency
from benchmarks.measured import RESULTS, accelerator, result, write
from benchmarks.processes import Child, child

QUESTION = "How long do policies take on a GPU, from NumPy frames to NumPy actions?"
HERE = Path(__file__).parent
CAMERAS = ("camera1", "camera2", "camera3")
PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Case:
    """A policy, the dtype it computes in, and what to measure."""

    policy: str
    dtype: str = "bfloat16"
    target_ms: float | None = None
    target_chunks_per_s: float | None = None


CASES = {
    "act": Case("act", target_ms=2.5),
    "act float32": Case("act", "float32"),
    "smolvla": Case("smolvla", target_ms=20.0),
    "pi05": Case("pi05", target_ms=43.0, target_chunks_per_s=33.0),
    "pi05 int8": Case("pi05", "int8"),
    "pi05 fp8": Case("pi05", "fp8"),
    "pi0": Case("pi0"),
    "diffusion": Case("diffusion"),
}
TOGETHER = 4
BLOCK = 1 << 25


class RandomBlocks:
    """Random weights of billions of numbers in seconds: arrays of one spread are views of one block."""

    def __init__(self, dtype: Any):
        self._numbers = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
        self._dtype = dtype
        self._blocks: dict[int, np.ndarray] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) < 2:
            return np.full(shape, 1.0 if name.endswith(("scale", "variance")) else 0.0, self._dtype)
        fan = shape[1] if name.endswith("weight") else int(np.prod(shape[:-1]))  # weights are (out, in)
        if fan not in self._blocks:
            self._blocks[fan] = (self._numbers * np.float32(fan**-0.5)).astype(self._dtype)
        return (
            np.resize(self._blocks[fan], shape)
            if np.prod(shape) > BLOCK
            else self._blocks[fan][: int(np.prod(shape))].reshape(shape)
        )


def build_checkpoint(
    case: Case, folder: Path, *, is_small: bool, draw: Any = None, architecture: Mapping[str, Any] | None = None
) -> Any:
    """A policy of random weights in memory; the folder gets its tokenizer's files.

    Args:
        draw: an array of weights by its name and shape, instead of random ones.
        architecture: sizes of pi0 and pi0.5; by default those in LeRobot's code, or smaller ones if `is_small`.
    """
    import ml_dtypes

    if case.policy == "act":
        return act_latency.build_checkpoint(len(CAMERAS), *vla_latency.FRAME, draw or RandomBlocks(np.float32))
    parts, sizes = (4, vla_latency.ARCHITECTURE) if is_small else (1, {})
    if case.policy in ("pi0", "pi05"):
        draw = draw or RandomBlocks(ml_dtypes.bfloat16)
    return vla_latency.build_checkpoint(
        folder, case.policy, parts=parts, cameras=CAMERAS, architecture=architecture or sizes, draw=draw
    )


def observe(case: Case, batch: int) -> dict[str, Any]:
    """What this many robots with three cameras send."""
    if case.policy == "act":
        one: dict[str, Any] = act_latency.observation(len(CAMERAS), *vla_latency.FRAME)
    else:
        one = vla_latency.observation(case.policy, CAMERAS)
    return {key: value * batch if key == "task" else np.repeat(value, batch, axis=0) for key, value in one.items()}


def summarize(seconds: Sequence[float], batch: int) -> dict[str, float]:
    """Milliseconds of a batch, and chunks a second."""
    milliseconds = np.array(seconds) * 1e3
    found = {f"p{percent}_ms": round(float(np.percentile(milliseconds, percent)), 3) for percent in PERCENTS}
    found["min_ms"] = round(float(milliseconds.min()), 3)
    return found | {"chunks_per_s": round(batch * 1e3 / found["p50_ms"], 1)}


def name_batch(batch: int) -> str:
    return f"{batch} together" if batch > 1 else "alone"


class Measured:
    """The measured side: orders to answers, as `vla_latency.serve` has them."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._policy: Any = None
        self._case = CASES["act"]

    def load(self, case: str, device: str | None, is_small: bool) -> dict[str, Any]:
        self._case = CASES[case]
        from jaxmodels.policy import Policy

        checkpoint = build_checkpoint(self._case, self._folder, is_small=is_small)
        made = time.perf_counter()
        self._policy = Policy(checkpoint, dtype=self._case.dtype, device=device)
        return {
            "load_s": round(time.perf_counter() - made, 2),
            "dtype": self._policy.dtype,
            "parameters": sum(self._policy.count_parameters().values()),
            "operations": self._policy.demand.operations,
        }

    def compile(self, batch: int) -> dict[str, Any]:
        start = time.perf_counter()
        self._policy.compile(batch)
        return {"compile_s": round(time.perf_counter() - start, 2)}

    def measure(self, batch: int, count: int) -> dict[str, Any]:
        seen = observe(self._case, batch)
        warm = [self._policy.act(seen) for _ in range(5)]
        seconds, parts = [], []
        for _ in range(count):
            start = time.perf_counter()
            self._policy.act(seen)
            seconds.append(time.perf_counter() - start)
            parts.append(dict(self._policy.timings))
        found = summarize(seconds, batch)
        within = {name: round(float(np.median([one[name] for one in parts])) * 1e3, 3) for name in parts[0]}
        return found | {
            "within_ms": within | {"reading": round(found["p50_ms"] - sum(within.values()), 3)},
            "count": count,
            "is_finite": bool(np.isfinite(warm).all()),
        }

    def stages(self, runs: int) -> dict[str, Any]:
        start = time.perf_counter()
        stages = self._policy.profile_stages(runs)
        found: dict[str, Any] = {f"{stage.name}_ms": round(stage.seconds * 1e3, 3) for stage in stages}
        return found | {"compile_and_run_s": round(time.perf_counter() - start, 2)}

    def memory(self) -> dict[str, Any]:
        import jax

        stats: Mapping[str, int] = jax.local_devices()[0].memory_stats() or {}
        return {
            f"{name}_gb": round(stats[name] / 1e9, 2) for name in ("peak_bytes_in_use", "bytes_in_use") if name in stats
        }


def serve() -> None:
    with tempfile.TemporaryDirectory() as name:
        measured = Measured(Path(name))
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(getattr(measured, order.pop("do"))(**order)), flush=True)


@contextmanager
def limit(process: Child, seconds: float) -> Iterator[None]:
    """Ends a process that takes longer than this; the caller that waits for its answer learns that it ended."""
    timer = threading.Timer(seconds, process.process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_case(name: str, options: argparse.Namespace, note: Callable[..., None]) -> None:
    """Everything about one case, in a process of its own; `note` is given figures as soon as they are there."""
    case, count = CASES[name], options.count
    with child("-m", "benchmarks.vla_gpu", "--serve") as process, limit(process, options.limit):
        where = {"device": options.device, "is_small": options.small}
        note("loaded", **process.order(do="load", case=name, **where))
        for batch in options.batches:
            found = process.order(do="compile", batch=batch) | process.order(do="measure", batch=batch, count=count)
            if batch == 1 and case.target_ms is not None:
                found |= {"target_ms": case.target_ms, "is_met": found["p50_ms"] <= case.target_ms}
            if batch == TOGETHER and case.target_chunks_per_s is not None:
                target = case.target_chunks_per_s
                found |= {"target_chunks_per_s": target, "is_met": found["chunks_per_s"] >= target}
            note(name_batch(batch), **found)
        note("memory", **process.order(do="memory"))
        note("parts", **process.order(do="stages", runs=count))


def run_peer(name: str, options: argparse.Namespace, note: Callable[..., None], *, is_compiled: bool) -> None:
    """LeRobot's own policy of the same config in torch, with the weights that it begins a training with.

    Args:
        is_compiled: under torch.compile, which compiles again for each number of robots.
    """
    from jaxmodels.checkpoints.files import write_json
    from jaxmodels.policies.lerobot_processors import write_processors

    case, count, device = CASES[name], options.count, "cpu" if options.device == "cpu" else "cuda"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        checkpoint = build_checkpoint(case, folder, is_small=options.small, draw=lambda name, shape: np.empty(0))
        write_json(folder / "config.json", checkpoint.config.to_json(), indent=1)
        write_processors(folder, checkpoint.normalization, device)
        for file, values in checkpoint.config.dump_architecture().items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            write_json(folder / file, dict(values), indent=1)
        python, flags = str(options.lerobot_python), ["--compile"] if is_compiled else []
        peer = "lerobot torch.compile" if is_compiled else "lerobot"
        with (
            child(str(HERE / "vla_latency_peer.py"), *flags, python=python) as process,
            limit(process, options.limit),
        ):
            order = {"case": case.policy, "device": device, "dtype": case.dtype, "cameras": CAMERAS}
            found = process.order(do="load", folder=place, has_weights=False, is_small=options.small, **order)
            for batch in options.batches:
                start = time.perf_counter()
                process.order(do="measure", batch=batch, count=3)
                first = {"first_three_s": round(time.perf_counter() - start, 1)}
                seconds = process.order(do="measure", batch=batch, count=count)["seconds"]
                figures = {"load_s": round(found["load_s"], 2)} | first | summarize(seconds, batch)
                note(f"{peer} {name_batch(batch)}", **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="only this one; may be given again")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, TOGETHER], help="numbers of robots")
    parser.add_argument("--count", type=int, default=100, help="chunks of each measurement")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a case may take")
    parser.add_argument("--lerobot-python", type=Path, help="a Python that can import lerobot 0.6.1 and has this GPU")
    parser.add_argument("--compiled-peer", action="store_true", help="also measure the peer under torch.compile")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--small", action="store_true", help="a quarter of the width, two layers of pi0 and pi0.5")
    parser.add_argument("--output", type=Path, default=RESULTS / "vla_gpu.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.device != "cpu" and accelerator() is None:
        print("no GPU here (nvidia-smi finds none), nothing measured; --device cpu --small shows that everything works")
        return
    command = " ".join(["python", "-m", "benchmarks.vla_gpu", *sys.argv[1:]])
    found = result(QUESTION, command, {}, "jaxlib", frame=vla_latency.FRAME, cameras=len(CAMERAS), cases={})

    def note_under(name: str) -> Callable[..., None]:
        figures = found["cases"].setdefault(name, {})

        def note(part: str, **values: Any) -> None:
            figures[part] = values
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name:12} {part:12} " + "  ".join(f"{key} {value}" for key, value in values.items()), flush=True)

        return note

    for name in options.case or CASES:
        note = note_under(name)
        try:
            run_case(name, options, note)
            if options.lerobot_python and CASES[name].dtype == "bfloat16":
                for is_compiled in (False, True)[: 1 + options.compiled_peer]:
                    run_peer(name, options, note, is_compiled=is_compiled)
        except RuntimeError as error:
            note("failed", why=str(error)[-2000:])
    write(options.output, found)


if __name__ == "__main__":
    main()
