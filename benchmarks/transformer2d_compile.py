"""Does a 2D transformer of 28 layers compile about as fast as one of 2?

    python benchmarks/transformer2d_compile.py

Every measurement is a process of its own that has compiled nothing before and keeps nothing: DiT-S's width, 256 tokens,
batch 1, random weights. Once as `model.compile` makes executables, and once as a call compiles on first use. The target
is 2 times at most.

Last result: benchmarks/results/transformer2d_compile.json
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformer2d_cases import DIT_S

from benchmarks.measured import RESULTS, machine, write

SHALLOW, DEEP = 2, 28


def measure_once(layers: int, way: str) -> dict[str, float]:
    """Seconds to an executable, and of a call once it is there, in this process."""
    import jax
    import jax.numpy as jnp

    from jaxmodels.transformer2d import Transformer2DModel
    from jaxmodels.weights import blueprint

    # Weights without a program that draws them: nothing may be compiled before the clock starts.
    plan = blueprint(lambda rngs: Transformer2DModel(**DIT_S, num_layers=layers, rngs=rngs))
    rng = np.random.default_rng(0)
    weights = {
        name: jnp.asarray(0.02 * rng.standard_normal(wanted.shape), wanted.dtype)
        for name, wanted in plan.shapes.items()
    }
    model = plan.assemble(weights)
    image = rng.standard_normal((1, 4, 32, 32)).astype(np.float32)
    call = {"hidden_states": image, "timestep": np.array([417]), "class_labels": np.array([3])}
    start = time.perf_counter()
    run = model.compile(**call) if way == "ahead" else partial(model, return_dict=False)
    if way != "ahead":
        jax.block_until_ready(run(**call))
    compiled = time.perf_counter()
    jax.block_until_ready(run(**call))
    again = time.perf_counter()
    jax.block_until_ready(run(**call))
    return {"compile_s": compiled - start, "call_s": time.perf_counter() - again}


def in_a_process(layers: int, way: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--once", str(layers), way]
    settings = {**os.environ, "ROBOJAX_COMPILE_CACHE": "off"}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=settings).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", "--out", type=Path, default=RESULTS / "transformer2d_compile.json")
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure_once(int(options.once[0]), options.once[1])))
        return
    result: dict[str, Any] = {"machine": machine()}
    for way in ("ahead", "on first call"):
        seconds: dict[int, list[float]] = {SHALLOW: [], DEEP: []}
        for _ in range(options.rounds):
            for layers, values in seconds.items():
                values.append(in_a_process(layers, way)["compile_s"])
        shallow, deep = (float(np.median(seconds[layers])) for layers in (SHALLOW, DEEP))
        ratio = float(np.median(np.array(seconds[DEEP]) / np.array(seconds[SHALLOW])))
        result[way] = {f"{SHALLOW}_layers_s": shallow, f"{DEEP}_layers_s": deep, "ratio": ratio}
        print(f"{way:14} {SHALLOW} layers {shallow:.2f} s  {DEEP} layers {deep:.2f} s  ratio {ratio:.2f}", flush=True)
    write(options.output, result)


if __name__ == "__main__":
    main()
