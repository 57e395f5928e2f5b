"""2D transformers with random weights from NumPy, because JAX would compile a program for each shape."""

from typing import Any

import jax
import numpy as np

from jaxmodels.transformer2d import Transformer2DModel
from jaxmodels.weights import blueprint


def random_transformer(seed: int = 0, **config: Any) -> Transformer2DModel:
    """Build a model of this config with random float32 weights."""
    plan = blueprint(lambda rngs: Transformer2DModel(**config, rngs=rngs))
    draw = np.random.default_rng(seed)
    weights = {
        name: (draw.standard_normal(leaf.shape) * leaf.shape[-1] ** -0.5).astype(np.float32)
        for name, leaf in plan.shapes.items()
    }
    return plan.assemble(jax.device_put(weights))
