"""Folders that diffusers wrote are read by us, and those we write by diffusers: the same weights, the same numbers."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmodels.errors import CheckpointError, ConfigError, WeightsMismatch
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
from tests.parity.transformer2d.conftest import SINGLE, live_tolerance
from tests.testing.peers import skip_reason

torch = pytest.importorskip("torch", reason=skip_reason("torch"))

pytestmark = pytest.mark.needs_peers
TOLERANCE = live_tolerance()  # largest absolute difference on outputs of order 1
WEIGHTS = "diffusion_pytorch_model.safetensors"

KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "continuous": ("continuous", {"cross_attention_dim": 20}),
    "continuous linear": ("continuous", {"cross_attention_dim": 20, "use_linear_projection": True}),
    "continuous gated": ("continuous", {"cross_attention_dim": 20, "attention_type": "gated", "attention_bias": True}),
    "continuous only cross": ("continuous", {"cross_attention_dim": 20, "only_cross_attention": True}),
    "discrete": ("discrete", {"cross_attention_dim": 20, "num_embeds_ada_norm": 9, "attention_bias": True}),
    "zero": ("patches", {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 9, "norm_elementwise_affine": False}),
    "single": SINGLE,
}


@pytest.mark.filterwarnings("ignore:The configuration file of this model:FutureWarning")  # says diffusers of ada_norm
@pytest.mark.parametrize("name", KINDS)
def test_what_we_save_is_loaded_by_diffusers_and_comes_back_the_same(
    name: str, small, inputs_for, pair_of, theirs_of, tmp_path
) -> None:
    from diffusers.models.transformers.transformer_2d import Transformer2DModel as Theirs

    kind, fields = KINDS[name]
    config = small(kind, **fields)
    pair = pair_of(config)
    pair.ours.save_pretrained(tmp_path / "ours")
    original, written = load_file(pair.folder / WEIGHTS), load_file(tmp_path / "ours" / WEIGHTS)
    assert written.keys() == original.keys()
    for key in original:
        np.testing.assert_array_equal(written[key], original[key], strict=True)
    wanted, found = (json.loads((folder / "config.json").read_text()) for folder in (pair.folder, tmp_path / "ours"))
    assert {key: found.get(key) for key in wanted if key[0] != "_"} == {
        key: value for key, value in wanted.items() if key[0] != "_"
    }
    # Both of diffusers' ways in: the class itself, and from_pretrained, which may choose another class.
    again = theirs_of(config, seed=1)
    again.load_state_dict({key: torch.from_numpy(value) for key, value in written.items()})
    inputs = inputs_for(config)
    if name == "single":
        shapes = {"resolution": (2, 2), "aspect_ratio": (2, 1)}
        inputs["added_cond_kwargs"] = {key: np.full(shape, 0.5, np.float32) for key, shape in shapes.items()}
    np.testing.assert_array_equal(type(pair)(again, tmp_path).want(**inputs), pair.want(**inputs))
    assert pair.error(**inputs) <= TOLERANCE
    loaded = Theirs.from_pretrained(tmp_path / "ours")
    for key, value in loaded.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), original[key], strict=True)
    loaded.save_pretrained(tmp_path / "theirs")
    for key, value in load_file(tmp_path / "theirs" / WEIGHTS).items():
        np.testing.assert_array_equal(value, original[key], strict=True)


@pytest.mark.parametrize("name", ["zero", "single"])
def test_folders_of_the_classes_it_was_split_into_are_read(name: str, small, inputs_for, theirs_of, tmp_path) -> None:
    theirs_of({"in_channels": 32})  # skips where diffusers is missing
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
    from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

    config = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "in_channels": 3, "out_channels": 5}
    config |= {"norm_type": f"ada_norm_{name}", "num_embeds_ada_norm": 9, "sample_size": 128, "patch_size": 16}
    torch.manual_seed(0)
    if name == "zero":
        model = DiTTransformer2DModel(**config).eval()
    else:
        config |= {"cross_attention_dim": 24, "caption_channels": 18}
        model = PixArtTransformer2DModel(**config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((2, 3, 128, 128)).astype(np.float32)
    inputs = inputs_for(config, hidden_states=images)
    if name == "single":
        shapes = {"resolution": (2, 2), "aspect_ratio": (2, 1)}
        inputs["added_cond_kwargs"] = {key: rng.random(shape).astype(np.float32) for key, shape in shapes.items()}
    with torch.no_grad():
        tensors = {
            key: {part: torch.from_numpy(array) for part, array in value.items()}
            if isinstance(value, dict)
            else torch.from_numpy(value)
            for key, value in inputs.items()
        }
        wanted = model(**tensors, return_dict=False)[0].numpy()
    ours = Transformer2DModel.from_pretrained(tmp_path)
    assert np.abs(np.asarray(ours(**inputs).sample) - wanted).max() <= TOLERANCE * max(1.0, np.abs(wanted).max() / 5)


@pytest.mark.parametrize("size", ["20KB", "60KB"])
def test_sharded_weights_are_read(size: str, small, inputs_for, pair_of, tmp_path) -> None:
    config = small("continuous", cross_attention_dim=20)
    pair = pair_of(config)
    pair.theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    inputs = inputs_for(config)
    found = Transformer2DModel.from_pretrained(tmp_path)(**inputs).sample
    np.testing.assert_array_equal(np.asarray(found), pair.find(**inputs))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_weights_of_a_variant_are_read_and_computed_in_float32(
    is_sharded: bool, small, inputs_for, theirs_of, tmp_path
) -> None:
    config = small("continuous", cross_attention_dim=20)
    theirs = theirs_of(config).half()
    theirs.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB" if is_sharded else "10GB")
    assert any(".fp16" in path.name for path in tmp_path.iterdir())
    ours = Transformer2DModel.from_pretrained(tmp_path, variant="fp16", dtype=np.float32)
    inputs = inputs_for(config)
    theirs.float()
    with torch.no_grad():
        tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
        wanted = theirs(**tensors, return_dict=False)[0].numpy()
    found = np.asarray(ours(**inputs).sample)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= TOLERANCE


def test_a_missing_variant_is_named(small, pair_of) -> None:
    pair = pair_of(small("continuous"))
    with pytest.raises(CheckpointError, match=r"fp16"):
        Transformer2DModel.from_pretrained(pair.folder, variant="fp16")


def test_a_model_in_a_subfolder_is_read(small, inputs_for, pair_of, tmp_path) -> None:
    config = small("continuous", cross_attention_dim=20)
    pair = pair_of(config)
    pair.theirs.save_pretrained(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text('{"_class_name": "AnyPipeline"}')
    inputs = inputs_for(config)
    for given in (tmp_path, str(tmp_path)):
        found = Transformer2DModel.from_pretrained(given, subfolder="transformer")(**inputs).sample
        np.testing.assert_array_equal(np.asarray(found), pair.find(**inputs))
    with pytest.raises(CheckpointError, match="transformer"):
        Transformer2DModel.from_pretrained(tmp_path)


UNETS: Mapping[str, dict[str, Any]] = {
    "stable diffusion 1": {"attention_head_dim": 4, "cross_attention_dim": 20},
    "stable diffusion 2": {"attention_head_dim": (2, 4), "cross_attention_dim": 20, "use_linear_projection": True},
    "stable diffusion xl": {
        "attention_head_dim": (2, 4),
        "cross_attention_dim": 20,
        "use_linear_projection": True,
        "transformer_layers_per_block": (1, 3),
    },
    "gligen": {"attention_head_dim": 4, "cross_attention_dim": 20, "attention_type": "gated"},
}


@pytest.mark.parametrize("name", UNETS)
def test_transformers_inside_a_unet_are_read_by_their_prefix(name: str, theirs_of, tmp_path) -> None:
    theirs_of({"in_channels": 32})  # skips where diffusers is missing
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        sample_size=8,
        **UNETS[name],
    ).eval()
    with torch.no_grad():
        for key, parameter in unet.named_parameters():
            if ".attentions." in key:
                parameter += 0.1 * torch.randn(parameter.shape)
    unet.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    text = rng.standard_normal((2, 7, 20)).astype(np.float32)
    places = {
        "down_blocks.0.attentions.0": unet.down_blocks[0].attentions[0],
        "down_blocks.1.attentions.0": unet.down_blocks[1].attentions[0],
        "mid_block.attentions.0": unet.mid_block.attentions[0],
        "up_blocks.0.attentions.1": unet.up_blocks[0].attentions[1],
    }
    for prefix, theirs in places.items():
        ours = Transformer2DModel.from_pretrained(tmp_path, prefix=prefix)
        image = rng.standard_normal((2, ours.config.in_channels, 3, 5)).astype(np.float32)
        with torch.no_grad():
            wanted = theirs(torch.from_numpy(image), torch.from_numpy(text), return_dict=False)[0].numpy()
        assert np.abs(np.asarray(ours(image, text).sample) - wanted).max() <= TOLERANCE
    with pytest.raises((CheckpointError, ConfigError), match=r"down_blocks\.7"):
        Transformer2DModel.from_pretrained(tmp_path, prefix="down_blocks.7.attentions.0")


ITHQ = {
    "_class_name": "Transformer2DModel",
    "_diffusers_version": "0.4.2",
    "activation_fn": "geglu-approximate",
    "attention_bias": True,
    "attention_head_dim": 88,
    "cross_attention_dim": 512,
    "dropout": 0.0,
    "in_channels": None,
    "norm_num_groups": 32,
    "num_attention_heads": 16,
    "num_embeds_ada_norm": 100,
    "num_layers": 36,
    "num_vector_embeds": 4097,
    "sample_size": 32,
}
PIXART = {
    "_class_name": "Transformer2DModel",
    "_diffusers_version": "0.22.0.dev0",
    "_name_or_path": "somewhere",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_head_dim": 72,
    "attention_type": "default",
    "caption_channels": 4096,
    "cross_attention_dim": 1152,
    "in_channels": 4,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-06,
    "norm_type": "ada_norm_single",
    "num_attention_heads": 16,
    "num_embeds_ada_norm": 1000,
    "num_layers": 28,
    "out_channels": 8,
    "patch_size": 2,
    "sample_size": 128,
}


def test_the_config_of_vq_diffusion_means_ada_norm_without_saying_so() -> None:
    config = Transformer2DConfig.from_json(ITHQ)
    assert config.kind == "discrete"
    assert config.inner_dim == 1408
    written = config.to_json()
    assert written["norm_type"] == "layer_norm"  # as in diffusers, whose config keeps what was given
    assert Transformer2DConfig.from_json(written) == config
    assert {key: value for key, value in ITHQ.items() if key[0] != "_"}.items() <= written.items()


def test_a_file_without_norm_type_is_read_as_ada_norm(small, inputs_for, pair_of) -> None:
    config = small("discrete", cross_attention_dim=20, num_embeds_ada_norm=9)
    pair = pair_of(config)
    path = pair.folder / "config.json"
    values = json.loads(path.read_text())
    for key in ("norm_type", "norm_eps", "out_channels", "use_linear_projection", "attention_type", "caption_channels"):
        del values[key]
    path.write_text(json.dumps(values | {"_name_or_path": "elsewhere", "no_such_argument": 3}))
    assert pair.error(**inputs_for(config)) <= TOLERANCE


@pytest.mark.parametrize(("size", "has_conditions"), [(128, True), (64, False), (32, False)])
def test_pixart_configs_imply_their_conditions(size: int, has_conditions: bool) -> None:
    config = Transformer2DConfig.from_json(PIXART | {"sample_size": size})
    assert config.kind == "patches"
    assert config.has_conditions is has_conditions
    assert config.to_json()["use_additional_conditions"] is None
    assert config.position_scale == max(size // 64, 1)


def test_older_files_may_hold_the_positions(small, inputs_for, pair_of) -> None:
    config = small("patches", norm_type="ada_norm_single")
    pair = pair_of(config)
    weights = load_file(pair.folder / WEIGHTS)
    weights["pos_embed.pos_embed"] = pair.theirs.pos_embed.pos_embed.numpy()
    save_file(weights, pair.folder / WEIGHTS)
    assert pair.error(**inputs_for(config)) <= TOLERANCE


def test_every_misfit_is_in_one_message(small, pair_of) -> None:
    pair = pair_of(small("continuous", cross_attention_dim=20))
    weights = load_file(pair.folder / WEIGHTS)
    del weights["proj_in.bias"]
    del weights["transformer_blocks.1.attn2.to_v.weight"]
    weights["transformer_blocks.0.norm9.weight"] = np.zeros(24, np.float32)
    weights["transformer_blocks.0.ff.net.2.weight"] = np.zeros((24, 95), np.float32)
    save_file(weights, pair.folder / WEIGHTS)
    with pytest.raises(WeightsMismatch) as refusal:
        Transformer2DModel.from_pretrained(pair.folder)
    names = ("proj_in.bias", "blocks.1.attn2.to_v.weight", "blocks.0.norm9.weight", "blocks.0.ff.net.2.weight")
    for name in names:
        assert name in str(refusal.value)


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_weights_are_kept_to_the_bit(name: str, small, pair_of, tmp_path) -> None:
    import jax.numpy as jnp

    kind, fields = KINDS[name]
    pair = pair_of(small(kind, **fields))
    ours = Transformer2DModel.from_pretrained(pair.folder, dtype=jnp.bfloat16)
    ours.save_pretrained(tmp_path)
    wanted = {key: value.bfloat16() for key, value in pair.theirs.state_dict().items()}
    from safetensors.torch import load_file as load_torch

    written = load_torch(tmp_path / WEIGHTS)
    assert written.keys() == wanted.keys()
    for key, value in written.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, wanted[key])
