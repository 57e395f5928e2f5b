"""What benchmarks/transformer2d_latency.py measures: models of published sizes, their inputs, how much they compute."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

STEPS = 10  # Steps of a sampler's loop.

_SD = {"num_attention_heads": 8, "attention_head_dim": 40, "in_channels": 320, "cross_attention_dim": 768}
_VQ = {
    "num_attention_heads": 16,
    "attention_head_dim": 88,
    "cross_attention_dim": 512,
    "num_vector_embeds": 4097,
    "sample_size": 32,
    "norm_type": "ada_norm",
    "num_embeds_ada_norm": 100,
    "attention_bias": True,
    "activation_fn": "geglu-approximate",
}
_DIT = {
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "sample_size": 32,
    "norm_type": "ada_norm_zero",
    "num_embeds_ada_norm": 1000,
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
}
DIT_S = {**_DIT, "num_attention_heads": 6, "attention_head_dim": 64}
_POLICY = {"num_attention_heads": 8, "attention_head_dim": 64, "num_layers": 6, "cross_attention_dim": 512}
_CHUNK = {**_POLICY, "in_channels": 512}
_FLOW = {
    **_POLICY,
    "in_channels": 6,
    "out_channels": 6,
    "sample_size": 16,
    "patch_size": 1,
    "caption_channels": 512,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "use_additional_conditions": False,
    "interpolation_scale": 1,
}


@dataclass(frozen=True)
class Case:
    """One model and one call of it.

    Attributes:
        config: constructor arguments of both sides' `Transformer2DModel`.
        shape: of hidden_states.
        text: tokens of encoder_hidden_states; 0 for none.
        steps: 0 for one forward pass, else steps of Euler's method along the model's output.
    """

    config: Mapping[str, Any]
    shape: tuple[int, ...]
    text: int = 0
    steps: int = 0

    def inputs(self) -> dict[str, np.ndarray]:
        """Arguments of the call; for a loop, of its first step."""
        rng = np.random.default_rng(0)
        batch = self.shape[0]
        arrays: dict[str, np.ndarray] = {}
        if len(self.shape) == 2:
            arrays["hidden_states"] = rng.integers(0, self.config["num_vector_embeds"], self.shape)
        else:
            arrays["hidden_states"] = rng.standard_normal(self.shape).astype(np.float32)
        if self.text:
            size = (batch, self.text, self.config.get("caption_channels") or self.config["cross_attention_dim"])
            arrays["encoder_hidden_states"] = rng.standard_normal(size).astype(np.float32)
        match self.config.get("norm_type"):
            case "ada_norm":
                arrays["timestep"] = np.asarray(42)
            case "ada_norm_zero":
                arrays |= {"timestep": np.full(batch, 417), "class_labels": rng.integers(0, 1000, batch)}
            case "ada_norm_single":
                arrays["timestep"] = np.full(batch, 417.0, np.float32)
        return arrays


CPU: Mapping[str, Case] = {
    "SD 1.5 block 320, 64x64, batch 2": Case(_SD, (2, 320, 64, 64), text=77),
    "DiT-S/2, 32x32x4, batch 2": Case({**DIT_S, "num_layers": 12}, (2, 4, 32, 32)),
    "VQ-Diffusion ITHQ, 4 layers, batch 1": Case({**_VQ, "num_layers": 4}, (1, 1024), text=77),
    "continuous chunk, 10 steps": Case(_CHUNK, (1, 512, 16, 1), text=300, steps=STEPS),
    "flow over a chunk, 10 steps": Case(_FLOW, (1, 6, 16, 1), text=300, steps=STEPS),
}
_DIT_XL = {**_DIT, "num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28}
_VQ_ITHQ = {**_VQ, "num_layers": 36}
GPU: Mapping[str, Case] = {
    f"{name}, batch {batch}": Case(config, (batch, *shape), text=text)
    for name, config, shape, text in (
        ("DiT-XL/2, 32x32x4", _DIT_XL, (4, 32, 32), 0),
        ("SD 1.5 block 320, 64x64", _SD, (320, 64, 64), 77),
        ("VQ-Diffusion ITHQ", _VQ_ITHQ, (1024,), 77),
    )
    for batch in (1, 16)
}
CASES: Mapping[str, Mapping[str, Case]] = {"cpu": CPU, "gpu": GPU}
