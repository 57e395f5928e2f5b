"""How long does openpi's own JAX model of pi0.5 take on a GPU, from NumPy frames to NumPy actions?

    PYTHONPATH=OPENPI/src python benchmarks/openpi_jax_peer.py 1 2 4 8 16 32

OPENPI is a checkout of https://github.com/Physical-Intelligence/openpi with its packages. Random
bfloat16 weights, three frames of 224x224, and a prompt of 60 tokens, which openpi pads to 200. Prints a line of JSON
for each batch size.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

TOKENS, WORDS, STATE = 200, 60, 32


def create_model() -> Any:
    """Return the model with random numbers from NumPy, because openpi's own initialization compiles for minutes."""
    from openpi.models.pi0_config import Pi0Config  # pyright: ignore[reportMissingImports]

    block = np.random.default_rng(0).standard_normal(1 << 24, np.float32)

    def draw(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if len(leaf.shape) < 2:
            return jnp.zeros(leaf.shape, jnp.bfloat16)
        return jax.device_put(np.resize(block * np.float32(leaf.shape[-2] ** -0.5), leaf.shape).astype(jnp.bfloat16))

    config = Pi0Config(pi05=True, action_horizon=50)
    graph, state = nnx.split(nnx.eval_shape(lambda: config.create(jax.random.key(0))))
    return nnx.merge(graph, jax.tree.map(draw, state))


def observe(batch: int) -> Mapping[str, Any]:
    from openpi.models import model  # pyright: ignore[reportMissingImports]

    random = np.random.default_rng(0)
    return {
        "image": {name: random.integers(0, 256, (batch, 224, 224, 3), np.uint8) for name in model.IMAGE_KEYS},
        "image_mask": {name: np.ones(batch, bool) for name in model.IMAGE_KEYS},
        "state": random.standard_normal((batch, STATE), np.float32),
        "tokenized_prompt": random.integers(3, 2000, (batch, TOKENS)).astype(np.int32),
        "tokenized_prompt_mask": np.arange(TOKENS)[None].repeat(batch, 0) < WORDS,
    }


def main(batches: list[int], count: int = 60) -> None:
    from openpi.models import model  # pyright: ignore[reportMissingImports]
    from openpi.shared import nnx_utils  # pyright: ignore[reportMissingImports]

    sample = nnx_utils.module_jit(create_model().sample_actions)
    for batch in batches:
        seen = observe(batch)
        seconds = []
        for number in range(4 + (count if batch == 1 else count // 3)):
            began = time.perf_counter()
            arrays = jax.tree.map(jnp.asarray, dict(seen))
            np.asarray(sample(jax.random.key(number), model.Observation.from_dict(arrays)))
            seconds.append(time.perf_counter() - began)
        p50 = float(np.median(seconds[4:])) * 1e3
        figures = {"p50": round(p50, 2), "first_s": round(seconds[0], 1), "chunks_per_s": round(batch * 1e3 / p50, 1)}
        print(json.dumps({"batch": batch, **figures}), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 4, 16])
