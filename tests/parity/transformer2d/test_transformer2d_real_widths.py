"""One block of each published width compared with diffusers, with random weights and few tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.parity.transformer2d.conftest import inputs_for
from tests.testing.peers import require_peers

require_peers("torch", "diffusers")
pytestmark = pytest.mark.needs_peers
pytestmark = pytest.mark.fully_compiled
TOLERANCE = 5e-5  # Largest absolute difference; sums are 10 to 100 times longer than in the small models.

SD = {"num_attention_heads": 8, "cross_attention_dim": 768}
SD2 = {"attention_head_dim": 64, "cross_attention_dim": 1024, "use_linear_projection": True}
SDXL = {"attention_head_dim": 64, "cross_attention_dim": 2048, "use_linear_projection": True}
DIT = {"num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "patch_size": 2}
DIT |= {"attention_bias": True, "activation_fn": "gelu-approximate", "norm_elementwise_affine": False}
DIT |= {"num_embeds_ada_norm": 1000}
MODELS: Mapping[str, dict[str, Any]] = {
    "sd 320": {**SD, "in_channels": 320, "attention_head_dim": 40},
    "sd 640": {**SD, "in_channels": 640, "attention_head_dim": 80},
    "sd 1280": {**SD, "in_channels": 1280, "attention_head_dim": 160},
    "sd2 320": {**SD2, "in_channels": 320, "num_attention_heads": 5},
    "sdxl 640": {**SDXL, "in_channels": 640, "num_attention_heads": 10},
    "sdxl 1280": {**SDXL, "in_channels": 1280, "num_attention_heads": 20},
    "vq ithq": {
        "num_attention_heads": 16,
        "attention_head_dim": 88,
        "cross_attention_dim": 512,
        "num_vector_embeds": 4097,
        "sample_size": 32,
        "num_embeds_ada_norm": 100,
        "attention_bias": True,
        "activation_fn": "geglu-approximate",
    },
    "dit xl": {**DIT, "norm_type": "ada_norm_zero", "sample_size": 32},
    "pixart 1024": {
        **DIT,
        "norm_type": "ada_norm_single",
        "norm_eps": 1e-6,
        "sample_size": 128,
        "cross_attention_dim": 1152,
        "caption_channels": 4096,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_block_of_a_published_width_equals_diffusers(name: str, pair_of) -> None:
    config = {"num_layers": 1, **MODELS[name]}
    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {}
    if "num_vector_embeds" in config:
        inputs["hidden_states"] = rng.integers(0, 4097, (2, 70))
    else:
        size = (16, 16) if "patch_size" in config else (8, 12)
        inputs["hidden_states"] = rng.standard_normal((2, config["in_channels"], *size)).astype(np.float32)
    if "cross_attention_dim" in config:
        width = config.get("caption_channels", config["cross_attention_dim"])
        inputs["encoder_hidden_states"] = rng.standard_normal((2, 77, width)).astype(np.float32)
        inputs["encoder_attention_mask"] = (np.arange(77) < np.array([[77], [12]])).astype(np.int64)
    if name == "pixart 1024":
        sizes = {"resolution": np.array([[1024.0, 1024.0], [512.0, 2048.0]]), "aspect_ratio": np.array([[1.0], [0.25]])}
        inputs["added_cond_kwargs"] = {key: value.astype(np.float32) for key, value in sizes.items()}
    assert pair_of(config).error(**inputs_for(config, **inputs)) <= TOLERANCE


HEADS = {"num_attention_heads": 2, "attention_head_dim": 32}
# Cases of diffusers' own tests: arguments, shape of the input from seed 0, and expected numbers of the output.
PUBLISHED: Mapping[str, tuple[dict[str, Any], tuple[int, ...], list[float]]] = {
    "spatial": (
        {"in_channels": 32, "num_attention_heads": 1, "attention_head_dim": 32},
        (1, 32, 64, 64),
        [-1.9455, -0.0066, -1.3933, -1.5878, 0.5325, -0.6486, -1.8648, 0.7515, -0.9689],
    ),
    "cross attention": (
        {**HEADS, "in_channels": 64, "cross_attention_dim": 64},
        (1, 64, 64, 64),
        [0.0143, -0.6909, -2.1547, -1.8893, 1.4097, 0.1359, -0.2521, -1.3359, 0.2598],
    ),
    "timestep": (
        {**HEADS, "in_channels": 64, "cross_attention_dim": 64, "num_embeds_ada_norm": 5},
        (1, 64, 64, 64),
        [-0.3923, -1.0923, -1.7144, -1.5570, 1.4154, 0.1738, -0.1157, -1.2998, -0.1703],
    ),
    "dropout": (
        {"in_channels": 32, "num_attention_heads": 2, "attention_head_dim": 16, "dropout": 0.3},
        (1, 32, 64, 64),
        [-1.9380, -0.0083, -1.3771, -1.5819, 0.5209, -0.6441, -1.8545, 0.7563, -0.9615],
    ),
    "discrete": (
        {"num_attention_heads": 1, "attention_head_dim": 32, "num_vector_embeds": 5, "sample_size": 16},
        (1, 32),
        [-1.7648, -1.0241, -2.0985, -1.8035, -1.6404, -1.2098],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_of_diffusers_own_tests_are_reproduced(name: str, theirs_of, pair_of) -> None:
    import torch

    config, shape, numbers = PUBLISHED[name]
    torch.manual_seed(0)
    is_discrete = name == "discrete"
    sample = torch.randint(0, 5, shape) if is_discrete else torch.randn(shape)
    theirs = theirs_of(config, randomised=False)
    inputs = {"hidden_states": sample.numpy()}
    if name == "cross attention":
        inputs["encoder_hidden_states"] = torch.randn((1, 4, 64)).numpy()
    if name == "timestep":
        inputs["timestep"] = np.asarray(1)
    pair = pair_of(config, theirs=theirs)
    found = pair.find(**inputs)
    part = found[0, -2:, -3:] if is_discrete else found[0, -1, -3:, -3:]
    assert np.abs(part.flatten() - numbers).max() < 1e-3  # The tolerance of diffusers' own test.
    assert np.abs(found - pair.want(**inputs)).max() <= 1e-5
