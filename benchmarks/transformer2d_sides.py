"""The measured sides of benchmarks/transformer2d_latency.py, each a process: ours, and diffusers' eager or compiled.

    python benchmarks/transformer2d_sides.py robojax|eager|compile

One line of JSON in, one out: write a model's folder with random weights (diffusers), load it, measure some calls. A
measurement begins with arrays where the model computes and ends when its result is there; on a CPU that is from NumPy
to NumPy, and on a GPU integers (timesteps, classes, ids) come from the host on our side, as they are checked there.
"""

import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformer2d_cases import CASES, Case

WEIGHTS = "diffusion_pytorch_model.safetensors"
Call = Callable[[], Any]


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
        """A folder with random weights; also those that start as zeros, which would hide what they multiply."""
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


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # diffusers: a layer_norm config that means ada_norm
    name, device, dtype, mode = sys.argv[1:5]
    if name == "robojax":
        serve(Ours(device, dtype))
    else:
        serve(Theirs(device, dtype, mode if name == "compile" else None))


if __name__ == "__main__":
    main()
