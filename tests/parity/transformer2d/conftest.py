"""Pairs of diffusers' 2D transformer in torch and our model from the same files, and golden folders with weights."""

import json
import math
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.testing.models import seeded_tensor
from tests.testing.peers import require_peers

GOLDEN = Path(__file__).parents[2] / "golden" / "transformer2d"

# Inputs of each kind, with a different size for each axis. inner_dim is 24.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "continuous": {"in_channels": 16, "norm_num_groups": 4},
    "discrete": {"num_vector_embeds": 11, "sample_size": 4},
    "patches": {"in_channels": 3, "out_channels": 5, "patch_size": 2, "sample_size": 8},
}
# The kind and the config fields of PixArt.
SINGLE: tuple[str, Mapping[str, Any]] = (
    "patches",
    {
        "norm_type": "ada_norm_single",
        "cross_attention_dim": 24,
        "caption_channels": 18,
        "use_additional_conditions": True,
    },
)


def live_tolerance() -> float:
    """Return the largest absolute difference from diffusers on this machine, for outputs of order 1.

    The last bit of PyTorch's timestep frequencies depends on the processor (0.52 units in the last place with AVX2,
    0.88 with AVX-512); at timestep 1000 that bit is 6e-5 in the angle. If PyTorch computes the frequencies of the
    goldens, which are ours, 1e-5 holds; otherwise the tolerance of parity applies.
    """
    try:
        import torch
    except ImportError:
        return 1e-5
    from jaxmodels.layers.embeddings import time_frequencies

    for shift in (0, 1):
        exponent = -math.log(10000) * torch.arange(128, dtype=torch.float32) / (128 - shift)
        if not np.array_equal(torch.exp(exponent).numpy(), time_frequencies(256, shift)):
            return 1e-4
    return 1e-5


def small(kind: str, **fields: Any) -> dict[str, Any]:
    """Return the config of a model with a few thousand parameters: two layers, two heads of 12."""
    return {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, **SMALL[kind], **fields}


def block_norm(config: Mapping[str, Any]) -> str:
    norm = config.get("norm_type", "layer_norm")
    return "ada_norm" if norm == "layer_norm" and config.get("num_embeds_ada_norm") else norm


def inputs_for(config: Mapping[str, Any], batch: int = 2, seed: int = 0, **replaced: Any) -> dict[str, Any]:
    """Return arguments that diffusers accepts for `config`; a None in `replaced` removes one."""
    rng = np.random.default_rng([seed, 71])
    inner = config["num_attention_heads"] * config["attention_head_dim"]
    inputs: dict[str, Any] = {}
    if config.get("num_vector_embeds") is not None:
        inputs["hidden_states"] = rng.integers(0, config["num_vector_embeds"], (batch, 13))
    else:
        is_square = config.get("patch_size") is not None and config["norm_type"] == "ada_norm_zero"
        size = (8, 8) if is_square else (6, 10) if config.get("patch_size") else (3, 5)
        inputs["hidden_states"] = rng.standard_normal((batch, config["in_channels"], *size)).astype(np.float32)
    width = config.get("caption_channels") or config.get("cross_attention_dim")
    if width is not None:
        inputs["encoder_hidden_states"] = rng.standard_normal((batch, 7, width)).astype(np.float32)
    match block_norm(config):
        case "ada_norm":
            inputs["timestep"] = np.asarray(rng.integers(0, config["num_embeds_ada_norm"]))
        case "ada_norm_zero":
            inputs["timestep"] = rng.integers(0, 1000, batch)
            inputs["class_labels"] = rng.integers(0, config["num_embeds_ada_norm"] + 1, batch)
        case "ada_norm_single" if config.get("patch_size") is not None:
            inputs["timestep"] = rng.integers(0, 1000, batch)
        case "ada_norm_single":  # Without patches, diffusers needs the embedded timestep.
            inputs["timestep"] = (0.3 * rng.standard_normal((batch, 6 * inner))).astype(np.float32)
    if config.get("use_additional_conditions"):
        shapes = {"resolution": (batch, 2), "aspect_ratio": (batch, 1)}
        inputs["added_cond_kwargs"] = {
            name: rng.uniform(0.3, 9.0, shape).astype(np.float32) for name, shape in shapes.items()
        }
    inputs |= replaced
    return {name: value for name, value in inputs.items() if value is not None}


def to_torch(value: Any) -> Any:
    import torch

    if isinstance(value, Mapping):
        return {name: to_torch(entry) for name, entry in value.items()}
    return torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def randomise(module: Any, seed: int) -> None:
    """Randomise each weight, including initial zeros and ones, whose effect a comparison would miss."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            x = torch.randn(parameter.shape, generator=generator)
            is_table = "emb.weight" in name or "embedding_table" in name or name.endswith("scale_shift_table")
            if is_table:
                parameter.copy_(0.5 * x)
            elif parameter.ndim > 1:
                parameter.copy_(x / np.sqrt(np.prod(parameter.shape[1:])))
            else:
                is_one = name.endswith("weight") or "alpha" in name
                parameter.copy_(0.2 * x + float(is_one))


@dataclass
class Pair:
    """diffusers' model, and ours from the files that diffusers wrote."""

    theirs: Any
    folder: Path

    @cached_property
    def ours(self) -> Any:
        from jaxmodels.transformer2d import Transformer2DModel

        return Transformer2DModel.from_pretrained(self.folder)

    def want(self, **inputs: Any) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.theirs(**to_torch(inputs), return_dict=False)[0].numpy()

    def find(self, **inputs: Any) -> np.ndarray:
        return np.asarray(self.ours(**inputs).sample)

    def error(self, **inputs: Any) -> float:
        """Return the largest absolute difference of the outputs."""
        return differ(self.find(**inputs), self.want(**inputs))


def differ(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert np.isfinite(expected).all()
    return float(np.abs(found.astype(np.float64) - expected.astype(np.float64)).max())


def build_theirs(config: Mapping[str, Any], seed: int = 0, randomised: bool = True) -> Any:
    """Build diffusers' `Transformer2DModel` itself, because its `from_pretrained` changes the class of some configs."""
    require_peers("torch", "diffusers")
    import torch
    from diffusers.models.transformers import transformer_2d

    torch.set_num_threads(1)  # One thread is fastest for small models.
    with warnings.catch_warnings():
        # diffusers warns that a layer_norm config that means ada_norm is outdated.
        warnings.simplefilter("ignore", FutureWarning)
        module = transformer_2d.Transformer2DModel(**config).eval()
    if randomised:
        randomise(module, seed)
    return module


@pytest.fixture
def theirs_of() -> Callable[..., Any]:
    return build_theirs


@pytest.fixture
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Return a function that builds a pair from constructor arguments, with random weights from `seed`."""

    def make(config: Mapping[str, Any], seed: int = 0, *, theirs: Any = None) -> Pair:
        module = build_theirs(config, seed) if theirs is None else theirs
        folder = tmp_path_factory.mktemp("model")
        module.save_pretrained(folder)
        return Pair(module, folder)

    return make


def model_of(config: Mapping[str, Any], seed: int = 0, **options: Any) -> Any:
    """Build our model with random weights that do not depend on the options, without files or compilation."""
    import jax

    from jaxmodels.transformer2d import Transformer2DModel
    from jaxmodels.weights import blueprint

    plan = blueprint(lambda rngs: Transformer2DModel(**config, **options, rngs=rngs))
    weights = {}
    for name, leaf in plan.shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        x = rng.standard_normal(leaf.shape)
        if name.endswith("kernel"):
            is_fused = name.endswith(("to_qkv.kernel", "to_kv.kernel"))  # (layer, inputs, parts, width)
            is_patch = name == "pos_embed.proj.kernel"  # (rows, columns, channels, width)
            inputs = leaf.shape[-3] if is_fused else np.prod(leaf.shape[:-1]) if is_patch else leaf.shape[-2]
            x /= np.sqrt(inputs)
        else:
            x = 0.3 * x + float(name.endswith("scale"))
        weights[name] = np.float32(x).astype(leaf.dtype)
    return plan.assemble(jax.device_put(weights))


def seeded_weights(seed: int, shapes: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    """Return weights by the rule of tests/golden/transformer2d/README.md."""
    rngs = {name: np.random.default_rng([seed, zlib.crc32(name.encode())]) for name in shapes}
    return {name: seeded_tensor(rngs[name], name, shape) for name, shape in shapes.items()}


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the folder of a golden model as diffusers does."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
        keys = json.loads((GOLDEN / name / "keys.json").read_text())
        assert not keys["fixed"]
        save_file(seeded_weights(keys["seed"], keys["keys"]), folder / "diffusion_pytorch_model.safetensors")
        return folder

    return make
