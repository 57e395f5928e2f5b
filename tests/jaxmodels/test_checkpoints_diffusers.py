"""diffusers' folders of a 2D transformer: there and back, in shards and variants, and what is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxmodels.checkpoints import diffusers
from jaxmodels.checkpoints.diffusers_names import places
from jaxmodels.checkpoints.safetensors_file import find_floats, write_floats
from jaxmodels.errors import CheckpointError, WeightsMismatch
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
from jaxmodels.weights import blueprint

GOLDEN = Path(__file__).parent.parent / "golden" / "transformer2d"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SMALL = Transformer2DConfig(2, 8, 32, num_layers=2, cross_attention_dim=12, sample_size=4)
# Beside the recorded ones: every kind of norm, context and bias that a block may have.
OTHERS = {
    "gated": dataclasses.replace(SMALL, attention_type="gated"),
    "only cross": dataclasses.replace(SMALL, only_cross_attention=True, attention_bias=True),
    "double self": dataclasses.replace(SMALL, double_self_attention=True, cross_attention_dim=None),
    "ada_norm_zero with cross": dataclasses.replace(SMALL, norm_type="ada_norm_zero", num_embeds_ada_norm=5),
    "ada_norm_single": dataclasses.replace(SMALL, norm_type="ada_norm_single", norm_elementwise_affine=False),
    "conditions": Transformer2DConfig(
        2, 6, 4, 8, 2, patch_size=2, sample_size=8, norm_type="ada_norm_single", use_additional_conditions=True
    ),
}


def config_of(name: str) -> Transformer2DConfig:
    return OTHERS[name] if name in OTHERS else diffusers.read_config(GOLDEN / name)


def random_weights(config: Transformer2DConfig, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {place.ours: place.whole for place in places(config)}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def random_tensors(config: Transformer2DConfig, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """By diffusers' names, in its layouts."""
    rng = np.random.default_rng(seed)
    return {place.theirs: rng.standard_normal(place.shape, np.float32).astype(dtype) for place in places(config)}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_floats(path, {name: (array.dtype, array.shape) for name, array in tensors.items()}, tensors.__getitem__)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in find_floats(path).items()}


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == array.dtype
        and found[name].shape == array.shape
        and found[name].tobytes() == array.tobytes()
        for name, array in wanted.items()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A written model that a test may spoil."""
    diffusers.write(tmp_path / "model", SMALL, random_weights(SMALL))
    return tmp_path / "model"


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def spoil(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = read_tensors(folder / WEIGHTS)
    change(tensors)
    write_tensors(folder / WEIGHTS, tensors)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_of_diffusers_state_dict(name: str) -> None:
    keys = json.loads((GOLDEN / name / "keys.json").read_text())["keys"]
    assert {place.theirs: list(place.shape) for place in places(config_of(name))} == keys


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_our_arrays_are_those_of_the_model(name: str) -> None:
    config = config_of(name)
    wanted = blueprint(lambda: Transformer2DModel.from_config(config)).shapes
    assert {place.ours: place.whole for place in places(config)} == {key: x.shape for key, x in wanted.items()}


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_what_is_written_is_bit_for_bit_what_was_read(name: str, tmp_path: Path) -> None:
    config, tensors = config_of(name), random_tensors(config_of(name))
    diffusers.write(tmp_path / "first", config, random_weights(config))
    write_tensors(tmp_path / "first" / WEIGHTS, tensors)
    found, weights = diffusers.read(tmp_path / "first")
    assert found == config
    diffusers.write(tmp_path / "second", found, weights)
    assert same(read_tensors(tmp_path / "second" / WEIGHTS), tensors)
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "second" / "config.json").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_written_as_diffusers_writes_it(name: str, tmp_path: Path) -> None:
    diffusers.write(tmp_path / "model", config_of(name), random_weights(config_of(name)))
    assert (tmp_path / "model" / "config.json").read_text() == (GOLDEN / name / "config.json").read_text()


def test_a_tensor_lies_where_the_model_looks_for_it(tmp_path: Path) -> None:
    config = OTHERS["gated"]
    tensors = random_tensors(config)
    diffusers.write(tmp_path / "model", config, random_weights(config))
    write_tensors(tmp_path / "model" / WEIGHTS, tensors)
    weights = diffusers.read(tmp_path / "model")[1]
    block, theirs = "transformer_blocks", "transformer_blocks.1"
    for part, letter in enumerate("qkv"):
        wanted = tensors[f"{theirs}.attn1.to_{letter}.weight"].T
        np.testing.assert_array_equal(weights[f"{block}.attn1.to_qkv.kernel"][1, :, part], wanted)
    np.testing.assert_array_equal(
        weights[f"{block}.attn2.to_kv.kernel"][1, :, 1], tensors[f"{theirs}.attn2.to_v.weight"].T
    )
    np.testing.assert_array_equal(weights[f"{block}.attn2.to_out.bias"][1], tensors[f"{theirs}.attn2.to_out.0.bias"])
    np.testing.assert_array_equal(weights["proj_in.kernel"], tensors["proj_in.weight"][:, :, 0, 0].T)
    np.testing.assert_array_equal(weights[f"{block}.fuser.alpha_attn"][1], tensors[f"{theirs}.fuser.alpha_attn"])
    patches = random_tensors(config_of("patches_dit"))
    diffusers.write(tmp_path / "dit", config_of("patches_dit"), random_weights(config_of("patches_dit")))
    write_tensors(tmp_path / "dit" / WEIGHTS, patches)
    kernel = diffusers.read(tmp_path / "dit")[1]["pos_embed.proj.kernel"]
    np.testing.assert_array_equal(kernel[1, 0, 2, 3], patches["pos_embed.proj.weight"][3, 2, 1, 0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_dtype_of_the_files_is_kept_or_changed_on_the_way(folder: Path, dtype) -> None:
    weights = {name: array.astype(dtype) for name, array in random_weights(SMALL).items()}
    diffusers.write(folder, SMALL, weights)
    assert same(diffusers.read(folder)[1], weights)
    wide = {name: array.astype(np.float32) for name, array in weights.items()}
    assert same(diffusers.read(folder, dtype=np.float32)[1], wide)
    halves = {name: array.astype(np.float16) for name, array in wide.items()}
    assert same(diffusers.read(folder, dtype=np.float16)[1], halves)


def test_layers_of_different_dtypes_become_float32(folder: Path) -> None:
    name = "transformer_blocks.1.ff.net.2.bias"
    spoil(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.float16)}))
    weights = diffusers.read(folder)[1]
    assert weights["transformer_blocks.ff.down.bias"].dtype == np.float32
    spoil(folder, lambda tensors: tensors.update({key: array.astype(float) for key, array in tensors.items()}))
    assert {array.dtype for array in diffusers.read(folder)[1].values()} == {np.dtype(np.float32)}


def test_arrays_begin_where_jax_takes_them_without_a_copy(folder: Path) -> None:
    assert {array.ctypes.data % 64 for array in diffusers.read(folder)[1].values()} == {0}


def test_every_misfit_is_in_one_error(folder: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["proj_in.bias"], tensors["transformer_blocks.1.attn2.to_k.weight"]
        tensors["extra"] = np.zeros(3, np.float32)
        tensors["norm.weight"] = np.zeros(31, np.float32)

    spoil(folder, change)
    with pytest.raises(WeightsMismatch) as caught:
        diffusers.read(folder)
    text = str(caught.value)
    assert "2 missing, 1 unused, 1 misshaped" in text
    assert "missing: proj_in.bias [16]" in text
    assert "missing: transformer_blocks.1.attn2.to_k.weight [16, 12]" in text
    assert "unused: extra [3]" in text
    assert "misshaped: norm.weight: found [31], wanted [32]" in text


def test_fixed_positions_that_older_files_keep_are_left_alone(tmp_path: Path) -> None:
    config = config_of("patches_dit")
    diffusers.write(tmp_path / "model", config, random_weights(config))
    spoil(
        tmp_path / "model", lambda tensors: tensors.update({"pos_embed.pos_embed": np.zeros((1, 64, 64), np.float32)})
    )
    assert "pos_embed.proj.kernel" in diffusers.read(tmp_path / "model")[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    spoil(folder, lambda tensors: tensors["transformer_blocks.1.attn1.to_q.weight"].__setitem__((2, 3), value))
    with pytest.raises(CheckpointError, match=r"NaN or an infinity: transformer_blocks\.1\.attn1\.to_q\.weight"):
        diffusers.read(folder)


def test_weights_too_large_for_the_dtype_that_was_asked_for_are_named(folder: Path) -> None:
    spoil(folder, lambda tensors: tensors["norm.bias"].__setitem__(0, 1e5))
    with pytest.raises(CheckpointError, match=r"\(as float16\): norm\.bias"):
        diffusers.read(folder, dtype=np.float16)
    assert diffusers.read(folder, dtype=ml_dtypes.bfloat16)[1]["norm.bias"][0] > 9e4
