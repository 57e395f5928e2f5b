"""2D transformers inside UNet files, by prefix; and parity with diffusers' reading and writing of folders."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmodels.checkpoints.files import write_floats
from jaxmodels.errors import CheckpointError, ConfigError, WeightsMismatch
from jaxmodels.transformer2d import Transformer2DConfig, diffusers_folder
from jaxmodels.transformer2d.diffusers_config import block_arguments, read_block_config, read_model_config
from jaxmodels.transformer2d.diffusers_folder import tensor_names
from tests.testing.peers import require_peers

GOLDEN = Path(__file__).parents[2] / "golden" / "transformer2d"
UNET = {"_class_name": "UNet2DConditionModel"}
STABLE_DIFFUSION_1 = {**UNET, "cross_attention_dim": 768}
STABLE_DIFFUSION_2 = {**UNET, "attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024}
STABLE_DIFFUSION_2 |= {"use_linear_projection": True, "upcast_attention": True}
STABLE_DIFFUSION_XL = {
    **UNET,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
}
# A UNet of a few thousand parameters, and variants of it.
SMALL: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    **{"block_out_channels": (32, 64), "layers_per_block": 2, "cross_attention_dim": 12},
    **{"attention_head_dim": 4, "norm_num_groups": 8, "sample_size": 8},
}
VARIED: dict[str, dict[str, Any]] = {
    "like stable diffusion 1": {},
    "like stable diffusion 2": {
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "upcast_attention": True,
        "layers_per_block": (1, 2),
    },
    "like xl": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 3),
        "use_linear_projection": True,
    },
    "lists": {"cross_attention_dim": (12, 20), "transformer_layers_per_block": (2, 1)},
    "nested depths": {
        "transformer_layers_per_block": ((1, 2), (2, 1)),
        "reverse_transformer_layers_per_block": ((1, 2, 1), (2, 1, 1)),
    },
    "only cross attention": {"only_cross_attention": (True, False)},
    "cross attention everywhere": {"only_cross_attention": True},
    "gligen": {"attention_type": "gated"},
    "dual": {"dual_cross_attention": True},
    "without a middle": {"mid_block_type": None},
}


@pytest.fixture(scope="module")
def peer():
    require_peers("torch", "diffusers")
    import diffusers

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return diffusers


def test_blocks_of_published_unets_have_their_published_sizes() -> None:
    for values, prefix, expected in (
        (STABLE_DIFFUSION_1, "down_blocks.0.attentions.1", (8, 40, 1, 768)),
        (STABLE_DIFFUSION_1, "up_blocks.1.attentions.2", (8, 160, 1, 768)),
        (STABLE_DIFFUSION_1, "mid_block.attentions.0", (8, 160, 1, 768)),
        (STABLE_DIFFUSION_2, "down_blocks.2.attentions.0", (20, 64, 1, 1024)),
        (STABLE_DIFFUSION_XL, "down_blocks.1.attentions.0", (10, 64, 2, 2048)),
        (STABLE_DIFFUSION_XL, "mid_block.attentions.0", (20, 64, 10, 2048)),
        (STABLE_DIFFUSION_XL, "up_blocks.0.attentions.2", (20, 64, 10, 2048)),
    ):
        config = read_block_config(values, prefix)
        sizes = (config.num_attention_heads, config.attention_head_dim, config.num_layers, config.cross_attention_dim)
        assert sizes == expected
    assert list(block_arguments(STABLE_DIFFUSION_1))[:3] == [
        "down_blocks.0.attentions.0",
        "down_blocks.0.attentions.1",
        "down_blocks.1.attentions.0",
    ]
    assert len(block_arguments(STABLE_DIFFUSION_1)) == 6 + 1 + 9
    for values, prefix, count in (
        (STABLE_DIFFUSION_1, "down_blocks.0.attentions.0", 2_546_240),
        (STABLE_DIFFUSION_XL, "mid_block.attentions.0", 350_840_320),
    ):
        shapes = [place.shape for place in tensor_names(read_block_config(values, prefix))]
        assert sum(map(math.prod, shapes)) == count


@pytest.fixture
def unet(tmp_path: Path) -> Path:
    """Return a folder with two transformers of a UNet and other tensors, including an impossible shape."""
    values = {**UNET, **SMALL}
    tensors: dict[str, np.ndarray] = {"conv_in.weight": np.full((2, 2), np.nan, np.float32)}
    rng = np.random.default_rng(0)
    for prefix in ("down_blocks.0.attentions.1", "mid_block.attentions.0"):
        for place in tensor_names(read_block_config(values, prefix)):
            tensors[f"{prefix}.{place.theirs}"] = rng.standard_normal(place.shape, np.float32)
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps(values))
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_floats(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", shapes, tensors.__getitem__)
    return tmp_path / "unet"


def test_unknown_prefix_is_refused_with_the_existing_prefixes(unet: Path) -> None:
    for prefix in ("down_blocks.0.attentions.2", "down_blocks.0", "", "mid_block.attentions.0."):
        with pytest.raises(ConfigError, match=r"no 2D transformer there; this UNet2D.*down_blocks\.0\.attentions\.0, "):
            diffusers_folder.read(unet, prefix=prefix)
    with pytest.raises(ConfigError, match=r"give prefix, one of: down_blocks\.0\.attentions\.0"):
        diffusers_folder.read(unet)
    with pytest.raises(CheckpointError, match=r"under 'up_.*: down_blocks\.0\.attentions\.1, mid_block\.att"):
        diffusers_folder.read(unet, prefix="up_blocks.0.attentions.0")


def test_config_may_be_passed_directly(unet: Path) -> None:
    config, _ = diffusers_folder.read(unet, prefix="mid_block.attentions.0")
    values = json.loads((unet / "config.json").read_text())
    (unet / "config.json").write_text(json.dumps({**values, "_class_name": "UNet3DConditionModel"}))
    with pytest.raises(ConfigError, match=r"'UNet3DConditionModel'.*known: UNet2D.*; give config"):
        diffusers_folder.read(unet, prefix="mid_block.attentions.0")
    assert diffusers_folder.read(unet, prefix="mid_block.attentions.0", config=config)[0] == config
    other = Transformer2DConfig(4, 8, 64)
    with pytest.raises(WeightsMismatch, match=r"unet under mid_block\.attentions\.0: weights do not fit"):
        diffusers_folder.read(unet, prefix="mid_block.attentions.0", config=other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_out_channels": [32, "64"]}, "block_out_channels is"),
        ({"block_out_channels": []}, "block_out_channels is"),
        ({"block_out_channels": [320] * 100_000}, "block_out_channels is .*for each of 1 to 16 blocks"),
        ({"attention_head_dim": [4]}, "attention_head_dim is .*for each of 2 blocks"),
        ({"attention_head_dim": 0}, "attention_head_dim is 0"),
        ({"cross_attention_dim": None}, "cross_attention_dim is None"),
        ({"layers_per_block": 1 << 40}, "layers_per_block has .*at most 64"),
        ({"transformer_layers_per_block": "2"}, "transformer_layers_per_block is '2'"),
        ({"transformer_layers_per_block": [[1], [1, 1]]}, "transformer_layers_per_block has"),
        ({"only_cross_attention": 1}, "only_cross_attention is 1; wanted true or false"),
        ({"down_block_types": ["DownBlock2D"]}, "down_block_types is"),
    ],
)
def test_invalid_unet_config_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_block_config({**UNET, **SMALL, **changes}, "down_blocks.0.attentions.0")


@pytest.mark.parametrize("name", VARIED)
def test_each_transformer_of_a_unet_is_found(name: str, peer, tmp_path: Path) -> None:
    model = peer.UNet2DConditionModel(**{**SMALL, **VARIED[name]})
    model.save_pretrained(tmp_path / "unet")
    values = json.loads((tmp_path / "unet" / "config.json").read_text())
    wanted = {key: part for key, part in model.named_modules() if type(part).__name__ == "Transformer2DModel"}
    assert list(block_arguments(values)) == sorted(wanted, key=list(block_arguments(values)).index)
    for prefix, part in wanted.items():
        config, weights = diffusers_folder.read(tmp_path / "unet", prefix=prefix)
        diffusers_folder.write(tmp_path / "part", config, weights)
        back = peer.Transformer2DModel.from_pretrained(tmp_path / "part", low_cpu_mem_usage=False)
        mine, theirs = ({k: v for k, v in one.config.items() if not k.startswith("_")} for one in (back, part))
        assert mine == theirs, prefix
        state, other = back.state_dict(), part.state_dict()
        assert state.keys() == other.keys()
        assert all(bool((state[key] == other[key]).all()) for key in other)


@pytest.mark.filterwarnings("ignore:.*outdated:FutureWarning")
@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
@pytest.mark.parametrize("limit", [None, 50_000])
def test_folders_survive_a_round_trip_through_diffusers(name: str, limit, peer, tmp_path: Path) -> None:
    config = read_model_config(json.loads((GOLDEN / name / "config.json").read_text()))
    rng = np.random.default_rng(0)
    weights = {place.ours: rng.standard_normal(place.whole, np.float32) for place in tensor_names(config)}
    diffusers_folder.write(tmp_path / "ours", config, weights, max_shard_bytes=limit)
    model = peer.Transformer2DModel.from_pretrained(tmp_path / "ours", low_cpu_mem_usage=False)
    state = model.state_dict()
    assert {place.theirs for place in tensor_names(config)} == set(state)
    for place in tensor_names(config):
        np.testing.assert_array_equal(state[place.theirs].numpy(), place.take(weights[place.ours]))
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit or "10GB", variant="fp16")
    found, back = diffusers_folder.read(tmp_path / "theirs", variant="fp16")
    assert (found.kind, found.inner_dim, found.num_layers) == (config.kind, config.inner_dim, config.num_layers)
    assert all(back[key].tobytes() == array.tobytes() for key, array in weights.items())
