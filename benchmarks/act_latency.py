"""How long does ACT of LeRobot's default size take from NumPy frames to NumPy actions, beside LeRobot's own in torch?

    python benchmarks/act_latency.py --peer-python /path/to/venv/bin/python

The peer is any Python that can import lerobot 0.4.4 (see benchmarks/act_latency_peer.py); without it only this package
is measured. Both run in processes of their own, never at the same time, in alternating rounds, so that whatever else
the machine does meets both alike. Batch 1, float32, every processor core; a measurement starts with uint8 frames and
float32 states in NumPy arrays and ends when the un-normalised chunk is a NumPy array.

Last result, AMD EPYC (Zen 4), 2 cores: benchmarks/results/act_latency.json
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measured import RESULTS, machine, write
from benchmarks.processes import Child, child

if TYPE_CHECKING:
    from jaxmodels.policies.lerobot_folder import Checkpoint

HERE = Path(__file__).parent
CASES = {
    "1 camera 480x640": (1, 480, 640),
    "2 cameras 480x640": (2, 480, 640),
    "2 cameras 224x224": (2, 224, 224),
}
STATE = ACTION = 14


def observation(cameras: int, height: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    frames = {
        f"observation.images.camera{i}": rng.integers(0, 256, (1, height, width, 3), np.uint8) for i in range(cameras)
    }
    return {"observation.state": rng.standard_normal((1, STATE)).astype(np.float32), **frames}


def write_policy(folder: Path, cameras: int, height: int, width: int) -> None:
    """A policy of LeRobot's default size with random weights, as LeRobot's files."""
    from jaxmodels.policies import lerobot_folder

    lerobot_folder.write_checkpoint(folder, build_checkpoint(cameras, height, width))


def build_checkpoint(
    cameras: int, height: int, width: int, draw: Callable[[str, tuple[int, ...]], np.ndarray] | None = None
) -> "Checkpoint":
    """The same in memory; `draw`: an array of weights by its name and shape, instead of what a training starts with."""
    from flax import nnx

    from jaxmodels.normalization import build_normalization
    from jaxmodels.policies.act import Act, ActConfig
    from jaxmodels.policies.lerobot_folder import Checkpoint, model_blueprint
    from jaxmodels.types import Feature
    from jaxmodels.weights import flatten

    images = tuple(Feature(f"observation.images.camera{i}", "VISUAL", (3, height, width)) for i in range(cameras))
    inputs = (Feature("observation.state", "STATE", (STATE,)), *images)
    outputs = (Feature("action", "ACTION", (ACTION,)),)
    config = ActConfig(input_features=inputs, output_features=outputs, device="cpu", pretrained_backbone_weights=None)
    stats = {
        feature.name: {
            "mean": np.full((3, 1, 1) if feature.type == "VISUAL" else feature.shape, 0.4, np.float32),
            "std": np.full((3, 1, 1) if feature.type == "VISUAL" else feature.shape, 0.25, np.float32),
        }
        for feature in (*inputs, *outputs)
    }
    if draw is None:
        weights = {name: np.asarray(array) for name, array in flatten(Act(config, rngs=nnx.Rngs(0))).items()}
    else:
        weights = {name: draw(name, shape.shape) for name, shape in model_blueprint(config).shapes.items()}
    return Checkpoint(config, weights, build_normalization(inputs, outputs, config.normalization_mapping, stats))


def load(folder: str, seen: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    import jaxmodels

    policy = jaxmodels.load_policy(folder)
    return lambda: policy.act(seen)


def nothing_loaded() -> np.ndarray:
    raise SystemExit("the first order must be to load a policy")


def serve() -> None:
    """The measured side: one line of JSON in, one out. The peer speaks the same."""
    act = nothing_loaded
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "load":
            start = time.perf_counter()
            act = load(order["folder"], observation(*order["case"]))
            loaded = time.perf_counter()
            chunk = act()
            answer = {"load_s": loaded - start, "compile_s": time.perf_counter() - loaded}
            answer["chunk"] = chunk[0, :, 0].tolist()
        else:
            seconds = []
            for _ in range(order["count"]):
                start = time.perf_counter()
                act()
                seconds.append(time.perf_counter() - start)
            answer = {"seconds": seconds}
        print(json.dumps(answer), flush=True)


def measure(commands: dict[str, list[str]], case: tuple[int, int, int], rounds: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        write_policy(folder, *case)
        results: dict[str, Any] = {}
        seconds: dict[str, list[float]] = {side: [] for side in commands}
        chunks = {}
        # One after the other in each round, and both alive, so that no side ever starts cold.
        with ExitStack() as stack:
            sides: dict[str, Child] = {}
            for side, (python, *command) in commands.items():
                sides[side] = process = stack.enter_context(child(*command, python=python))
                results[side] = process.order(do="load", folder=str(folder), case=case)
                chunks[side] = np.array(results[side].pop("chunk"))
                process.order(do="measure", count=3)
            for _ in range(rounds):
                for side, process in sides.items():
                    seconds[side] += process.order(do="measure", count=count)["seconds"]
    ours = chunks["robojax"]
    for side, values in seconds.items():
        milliseconds = np.array(values) * 1e3
        results[side] |= {
            "p50_ms": round(float(np.percentile(milliseconds, 50)), 2),
            "p99_ms": round(float(np.percentile(milliseconds, 99)), 2),
            "min_ms": round(float(milliseconds.min()), 2),
            "count": len(values),
            "largest_difference": float(np.abs(chunks[side] - ours).max() / np.abs(ours).max()),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", "--lerobot-python", type=Path, help="a Python that can import lerobot 0.4.4")
    parser.add_argument("--compiled-peer", action="store_true", help="also measure the peer under torch.compile")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--count", type=int, default=8, help="inferences per round and side")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be given again")
    parser.add_argument("--output", "--out", type=Path, default=RESULTS / "act_latency.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    commands = {"robojax": [sys.executable, __file__, "--serve"]}
    if options.peer_python:
        peer = [str(options.peer_python), str(HERE / "act_latency_peer.py")]
        commands["lerobot eager"] = peer
        if options.compiled_peer:
            commands["lerobot torch.compile"] = [*peer, "--compile"]
    import jax

    result: dict[str, Any] = {"machine": machine() | {"device": str(jax.devices()[0])}, "cases": {}}
    for name in options.case or CASES:
        sides = measure(commands, CASES[name], options.rounds, options.count)
        result["cases"][name] = sides
        for side, figures in sides.items():
            ratio = figures["p50_ms"] / sides["robojax"]["p50_ms"]
            print(
                f"{name:18} {side:22} p50 {figures['p50_ms']:8.1f} ms  p99 {figures['p99_ms']:8.1f} ms  "
                f"{ratio:5.2f} x ours  difference {figures['largest_difference']:.1e}"
            )
    write(options.output, result)


if __name__ == "__main__":
    main()
