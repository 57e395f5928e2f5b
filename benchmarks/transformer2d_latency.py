"""How long does a forward pass of the 2D transformer take, compared with diffusers' own in torch, eager and compiled?

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.transformer2d_latency --compiled-peer
    python -m benchmarks.transformer2d_latency --device gpu --compiled-peer   # H200, dense bfloat16

Each side is a process of its own (benchmarks/transformer2d_sides.py) over the same files, and they take turns in short
rounds, so that other load on the machine affects all sides equally. float32 on two threads of a CPU, bfloat16 on a GPU.
The ratio of two sides is the median over the rounds of the ratio of their medians in a round. Ten-step cases are
Euler's method: torch in a Python loop, ours as one program over what `prepare` makes once (which is measured, too).

Requires torch and diffusers: pip install -e '.[parity]' (for a GPU, a torch built for it).

Last result: benchmarks/results/transformer2d_latency.json
"""

import argparse
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured import RESULTS, machine, write
from benchmarks.processes import child
from benchmarks.transformer2d_cases import CASES, Case

DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
OURS, EAGER, COMPILED = "robojax", "diffusers eager", "diffusers torch.compile"
TUNED = "diffusers max-autotune"
MODES = {"eager": None, "compile": "default", "max-autotune": "max-autotune"}  # Of torch.compile; None: without.
LONGEST = 100  # calls of a side in one round
# Spinning OpenMP threads would slow down the side that has its turn; XLA would take most of a GPU's memory at once.
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

WEIGHTS = "diffusion_pytorch_model.safetensors"
Call = Callable[[], Any]


# The measured sides, each in a process of its own.


class Ours:
    """A model from its files, compiled ahead of time; a loop is one program over what was prepared once."""

    def __init__(self, device: str, dtype: str):
        self.device, self.dtype = device, dtype

    def load(self, case: Case, folder: str) -> tuple[Call, Callable[[Any], np.ndarray]]:
        import jax
        import jax.numpy as jnp

        from jaxmodels.transformer2d import Transformer2DModel

        model = Transformer2DModel.from_pretrained(folder, dtype=self.dtype, device=self.device)
        inputs: dict[str, Any] = case.inputs()
        if self.device != "cpu":
            inputs = {
                name: jnp.asarray(array, self.dtype) if array.dtype == np.float32 and array.ndim > 1 else array
                for name, array in inputs.items()
            }
            jax.block_until_ready(inputs)
        run = self._loop(model, case, inputs) if case.steps else self._forward(model, inputs)
        finish = np.asarray if self.device == "cpu" else jax.block_until_ready
        return (lambda: finish(run())), lambda output: np.asarray(output, np.float32)

    @staticmethod
    def _forward(model: Any, inputs: dict[str, Any]) -> Call:
        forward = model.compile(**inputs)
        return lambda: forward(**inputs)

    @staticmethod
    def _loop(model: Any, case: Case, inputs: dict[str, Any]) -> Call:
        import jax
        from flax import nnx
        from jax.tree_util import Partial

        from jaxmodels.samplers import FlowSchedule, flow_euler
        from jaxmodels.transformer2d import Conditioning

        graph, state = nnx.split(model)
        schedule = FlowSchedule(spacing="uniform")
        key = jax.random.key(0)

        def predict(state: Any, context: Any, x: Any, _: Any, modulations: Any = None) -> Any:
            modulations = model.prepare_modulations() if modulations is None else modulations
            return nnx.merge(graph, state)(x, conditioning=Conditioning(context, modulations)).sample

        def run() -> Any:
            context = model.prepare_context(inputs["encoder_hidden_states"])
            times = schedule.euler_rows(case.steps).timestep
            each_step = jax.vmap(model.prepare_modulations)(times) if "timestep" in inputs else None
            return flow_euler(
                Partial(predict, state, context),
                case.shape,
                key,
                schedule,
                steps=case.steps,
                extras=each_step,
                start=inputs["hidden_states"],
            )

        return run


class Theirs:
    """diffusers' model, eager or under torch.compile, in inference mode."""

    def __init__(self, device: str, dtype: str, mode: str | None):
        import torch  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(2 if device == "cpu" else torch.get_num_threads())
        self.torch, self.mode = torch, mode
        self.device = "cpu" if device == "cpu" else "cuda"
        self.dtype = getattr(torch, dtype)

    def build(self, case: Case) -> Any:
        from diffusers.models.transformers.transformer_2d import (  # pyright: ignore[reportMissingImports]
            Transformer2DModel,
        )

        with self.torch.device(self.device):
            return Transformer2DModel(**case.config).eval()

    def write(self, case: Case, folder: str) -> None:
        """Write a folder with random weights, including weights that start as zeros, so that all layers count."""
        torch = self.torch
        torch.manual_seed(0)
        model = self.build(case)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif "emb" in name or name.endswith("scale_shift_table"):
                    parameter.normal_(std=0.1)
        model.save_pretrained(folder, max_shard_size="100GB")

    def load(self, case: Case, folder: str) -> tuple[Call, Callable[[Any], np.ndarray]]:
        from safetensors.torch import load_file

        torch = self.torch
        model = self.build(case)
        model.load_state_dict(load_file(Path(folder) / WEIGHTS, device=self.device))
        model = model if self.dtype == torch.float32 else model.to(self.dtype)
        inputs = {name: torch.from_numpy(array).to(self.device) for name, array in case.inputs().items()}
        inputs = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() and tensor.ndim > 1 else tensor
            for name, tensor in inputs.items()
        }
        forward = model if self.mode is None else torch.compile(model, mode=self.mode)

        def run() -> Any:
            with torch.inference_mode():
                output = self._loop(forward, case, inputs) if case.steps else forward(**inputs, return_dict=False)[0]
            if self.device == "cpu":
                return output.float().numpy()
            torch.cuda.synchronize()
            return output

        return run, lambda output: output if self.device == "cpu" else output.float().cpu().numpy()

    def _loop(self, forward: Any, case: Case, inputs: dict[str, Any]) -> Any:
        others = {name: value for name, value in inputs.items() if name not in ("hidden_states", "timestep")}
        x = inputs["hidden_states"]
        sigmas = np.append(np.linspace(1.0, 1 / case.steps, case.steps), 0.0).astype(np.float32)
        for sigma, after in itertools.pairwise(sigmas):
            if "timestep" in inputs:
                others["timestep"] = self.torch.full((len(x),), float(sigma * 1000), device=self.device)
            x = x + float(after - sigma) * forward(x, **others, return_dict=False)[0]
        return x


def nothing_loaded() -> Any:
    raise SystemExit("the first order must be to load a model")


def serve(side: Any) -> None:
    call: Call = nothing_loaded
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        case = CASES[order["device"]][order["case"]] if "case" in order else None
        if order["do"] == "write":
            assert case is not None
            side.write(case, order["folder"])
        elif order["do"] == "load":
            assert case is not None
            start = time.perf_counter()
            call, read = side.load(case, order["folder"])
            loaded = time.perf_counter()
            output = call()
            answer = {"load_s": loaded - start, "first_call_s": time.perf_counter() - loaded}
            np.save(order["output"], read(output))
        else:
            seconds = []
            for _ in range(order["count"]):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            answer = {"seconds": seconds}
        print(json.dumps(answer), flush=True)


def run_side(name: str, device: str, dtype: str) -> None:
    """Answer the orders of this benchmark: ``robojax``, or diffusers' ``eager``, ``compile`` or ``max-autotune``."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # diffusers: a layer_norm config that means ada_norm
    serve(Ours(device, dtype) if name == "robojax" else Theirs(device, dtype, MODES[name]))


# The comparison.


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as the device suits")
    parser.add_argument("--compiled-peer", action="store_true", help="torch.compile, too: about a minute per case")
    parser.add_argument(
        "--tuned-peer", action="store_true", help="torch.compile with max-autotune, too: minutes per case"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="per round and side, at least one call")
    parser.add_argument("--case", action="append", help="only cases whose name contains this text; repeatable")
    parser.add_argument("--exact", action="store_true", help="only cases that have this very name")
    parser.add_argument("--output", type=Path, default=RESULTS / "transformer2d_latency.json")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(*options.side)
        return
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("diffusers") is None:
        raise SystemExit("this compares with diffusers in torch; install both: pip install -e '.[parity]'")
    device, dtype = options.device, options.dtype or DTYPES[options.device]
    asked = options.case or [""]
    names = [
        name for name in CASES[device] if name in asked or (not options.exact and any(part in name for part in asked))
    ]
    if not names:
        raise SystemExit(f"no such case; there are: {'; '.join(CASES[device])}")
    sides = {OURS: "robojax", EAGER: "eager"}
    sides |= {COMPILED: "compile"} if options.compiled_peer else {}
    sides |= {TUNED: "max-autotune"} if options.tuned_peer else {}
    command = [sys.executable, "-m", "benchmarks.transformer2d_latency", "--side"]
    commands = {side: [*command, name, device, dtype] for side, name in sides.items()}
    # Figures of other devices and of cases that are not run this time stay in the file.
    result = json.loads(options.output.read_text()) if options.output.exists() else {}
    section = result.setdefault(f"{device} {dtype}", {"cases": {}})
    section["machine"] = machine("torch", "diffusers")
    for name in names:
        figures = measure(commands, device, name, options.rounds, options.seconds)
        section["cases"][name] = figures
        for side, values in figures.items():
            print(
                f"{name:36} {side:24} p50 {values['p50_ms']:9.2f} ms  min {values['min_ms']:9.2f} ms  "
                f"ours is {values['ours_over_it']:5.2f} of it  "
                f"difference {values['largest_difference']:.1e} of {values['largest_output']:.1f}",
                flush=True,
            )
        write(options.output, result)


if __name__ == "__main__":
    main()
