"""Folders of diffusers' 2D transformers: round trips, shards, variants and refusals."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxmodels import memory
from jaxmodels.checkpoints.files import find_floats, write_floats
from jaxmodels.errors import CheckpointError, ConfigError, WeightsMismatch
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel, diffusers_folder
from jaxmodels.transformer2d.diffusers_config import read_model_config
from jaxmodels.transformer2d.diffusers_folder import tensor_names
from jaxmodels.weights import blueprint
from tests.testing.models import edit_json

GOLDEN = Path(__file__).parents[2] / "golden" / "transformer2d"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SMALL = Transformer2DConfig(2, 8, 32, num_layers=2, cross_attention_dim=12, sample_size=4)
# Norms, contexts and biases that the recorded models lack.
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
    return OTHERS.get(name) or read_model_config(json.loads((GOLDEN / name / "config.json").read_text()))


def random_weights(config: Transformer2DConfig, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {place.ours: place.whole for place in tensor_names(config)}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def random_tensors(config: Transformer2DConfig) -> dict[str, np.ndarray]:
    """Return tensors with diffusers' names and layouts."""
    rng = np.random.default_rng(0)
    return {place.theirs: rng.standard_normal(place.shape, np.float32) for place in tensor_names(config)}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_floats(path, {name: (array.dtype, array.shape) for name, array in tensors.items()}, tensors.__getitem__)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in find_floats(path).items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes()) == (array.dtype, array.shape, array.tobytes())
        for name, array in expected.items()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    diffusers_folder.write(tmp_path / "model", SMALL, random_weights(SMALL))
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    diffusers_folder.write(tmp_path / "model", SMALL, random_weights(SMALL), max_shard_bytes=10_000)
    return tmp_path / "model"


def spoil(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = read_tensors(folder / WEIGHTS)
    change(tensors)
    write_tensors(folder / WEIGHTS, tensors)


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_round_trip_is_bit_exact(name: str, tmp_path: Path) -> None:
    config, tensors = config_of(name), random_tensors(config_of(name))
    shapes = blueprint(lambda rngs: Transformer2DModel.from_config(config, rngs=rngs)).shapes
    assert {place.ours: place.whole for place in tensor_names(config)} == {key: x.shape for key, x in shapes.items()}
    diffusers_folder.write(tmp_path / "first", config, random_weights(config))
    write_tensors(tmp_path / "first" / WEIGHTS, tensors)
    found, weights = diffusers_folder.read(tmp_path / "first")
    assert found == config
    diffusers_folder.write(tmp_path / "second", found, weights)
    assert same(read_tensors(tmp_path / "second" / WEIGHTS), tensors)
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "second" / "config.json").read_text()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtype_of_the_files_is_kept_or_converted(folder: Path, dtype) -> None:
    weights = {name: array.astype(dtype) for name, array in random_weights(SMALL).items()}
    diffusers_folder.write(folder, SMALL, weights)
    assert same(diffusers_folder.read(folder)[1], weights)
    wide = {name: array.astype(np.float32) for name, array in weights.items()}
    assert same(diffusers_folder.read(folder, dtype=np.float32)[1], wide)
    halves = {name: array.astype(np.float16) for name, array in wide.items()}
    assert same(diffusers_folder.read(folder, dtype=np.float16)[1], halves)
    # JAX uses aligned arrays without a copy.
    assert {array.ctypes.data % 64 for array in diffusers_folder.read(folder)[1].values()} == {0}


def test_layers_of_different_dtypes_become_float32(folder: Path) -> None:
    name = "transformer_blocks.1.ff.net.2.bias"
    spoil(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.float16)}))
    weights = diffusers_folder.read(folder)[1]
    assert weights["transformer_blocks.ff.down.bias"].dtype == np.float32
    spoil(folder, lambda tensors: tensors.update({key: array.astype(float) for key, array in tensors.items()}))
    assert {array.dtype for array in diffusers_folder.read(folder)[1].values()} == {np.dtype(np.float32)}


def test_fixed_positions_of_older_files_are_ignored(tmp_path: Path) -> None:
    config = config_of("patches_dit")
    diffusers_folder.write(tmp_path / "model", config, random_weights(config))
    positions = {"pos_embed.pos_embed": np.zeros((1, 64, 64), np.float32)}
    spoil(tmp_path / "model", lambda tensors: tensors.update(positions))
    assert "pos_embed.proj.kernel" in diffusers_folder.read(tmp_path / "model")[1]


def test_non_finite_weights_are_refused_by_name(folder: Path) -> None:
    spoil(folder, lambda tensors: tensors["norm.bias"].__setitem__(0, 1e5))
    with pytest.raises(CheckpointError, match=r"\(as float16\): norm\.bias"):
        diffusers_folder.read(folder, dtype=np.float16)
    assert diffusers_folder.read(folder, dtype=ml_dtypes.bfloat16)[1]["norm.bias"][0] > 9e4
    name = "transformer_blocks.1.attn1.to_q.weight"
    for value in (np.nan, np.inf):
        spoil(folder, lambda tensors, value=value: tensors[name].__setitem__((2, 3), value))
        with pytest.raises(CheckpointError, match=f"NaN or an infinity: {name}"):
            diffusers_folder.read(folder)


def test_large_model_is_split_into_shards_with_an_index(sharded: Path) -> None:
    weights = random_weights(SMALL)
    files = sorted(path.name for path in sharded.iterdir())
    count = len(files) - 2
    assert count > 2
    numbered = [f"diffusion_pytorch_model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert files == ["config.json", *numbered, INDEX]
    assert all(sum(x.nbytes for x in read_tensors(sharded / name).values()) <= 10_000 for name in numbered)
    index = json.loads((sharded / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
    assert set(index["weight_map"]) == {place.theirs for place in tensor_names(SMALL)}
    assert same(diffusers_folder.read(sharded)[1], weights)


@pytest.mark.parametrize("limit", [None, 10_000])
def test_variant_is_a_separate_file(folder: Path, limit: int | None) -> None:
    plain = diffusers_folder.read(folder)[1]
    half = random_weights(SMALL, np.float16)
    diffusers_folder.write(folder, SMALL, half, variant="fp16", max_shard_bytes=limit)
    assert same(diffusers_folder.read(folder, variant="fp16")[1], half)
    assert same(diffusers_folder.read(folder)[1], plain)
    name = "diffusion_pytorch_model.fp16.safetensors" if limit is None else f"{WEIGHTS}.index.fp16.json"
    assert (folder / name).exists()


def test_shards_with_older_names_are_read(sharded: Path) -> None:
    text = (sharded / INDEX).read_text()
    (sharded / INDEX).unlink()
    for path in sharded.glob("*.safetensors"):
        path.rename(path.with_suffix(".fp16.safetensors"))
    index = text.replace(".safetensors", ".fp16.safetensors")
    (sharded / f"{WEIGHTS}.fp16.index.json").write_text(index)
    assert same(diffusers_folder.read(sharded, variant="fp16")[1], random_weights(SMALL))


def test_missing_variant_is_refused_with_the_existing_variants(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no diffusion_pytorch_model\.bf16\.safetensors; leave variant out"):
        diffusers_folder.read(folder, variant="bf16")
    (folder / WEIGHTS).rename(folder / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(CheckpointError, match=r"variants there: fp16; pass one as variant"):
        diffusers_folder.read(folder)
    with pytest.raises(CheckpointError, match=r"variant is '../fp16'; wanted letters and digits"):
        diffusers_folder.read(folder, variant="../fp16")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", "..", ".x.safetensors", 3, None]
)
def test_index_cannot_leave_its_folder(sharded: Path, name) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"norm.bias": name}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map names .*wanted plain names"):
        diffusers_folder.read(sharded)


@pytest.mark.parametrize(("before", "after"), [(10_000, None), (None, 10_000), (10_000, 20_000)])
def test_overwriting_a_model_removes_the_old_files(tmp_path: Path, before, after) -> None:
    old, new = random_weights(SMALL, seed=1), random_weights(SMALL, seed=2)
    diffusers_folder.write(tmp_path / "model", SMALL, old, max_shard_bytes=before)
    (tmp_path / "model" / "README.md").write_text("kept")
    diffusers_folder.write(tmp_path / "model", SMALL, new, max_shard_bytes=after)
    diffusers_folder.write(tmp_path / "other", SMALL, new, max_shard_bytes=after)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {"README.md", *(path.name for path in (tmp_path / "other").iterdir())}
    assert same(diffusers_folder.read(tmp_path / "model")[1], new)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "other"}


def test_failed_write_keeps_the_old_model(folder: Path, tmp_path: Path) -> None:
    class Broken:
        """Array whose transfer from its device fails."""

        shape, dtype = random_weights(SMALL)["proj_out.bias"].shape, np.dtype(np.float32)

        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = random_weights(SMALL, seed=3) | {"proj_out.bias": Broken()}
    for target in (folder, tmp_path / "new"):
        with pytest.raises(OSError, match="No space left"):
            diffusers_folder.write(target, SMALL, weights)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_of_another_config_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match=r"misshaped: proj_in\.kernel"):
        diffusers_folder.write(
            tmp_path / "model", dataclasses.replace(SMALL, attention_head_dim=4), random_weights(SMALL)
        )
    with pytest.raises(CheckpointError, match=r"other dtypes than floats: norm\.bias \(int32\)"):
        diffusers_folder.write(tmp_path / "model", SMALL, random_weights(SMALL) | {"norm.bias": np.zeros(32, np.int32)})
    assert not (tmp_path / "model").exists()


def test_jax_arrays_are_written_with_the_usual_permissions(tmp_path: Path) -> None:
    weights, folder, plain = random_weights(SMALL, ml_dtypes.bfloat16), tmp_path / "model", tmp_path / "plain"
    diffusers_folder.write(folder, SMALL, jax.device_put(dict(weights)))
    assert same(diffusers_folder.read(folder)[1], weights)
    plain.mkdir()
    (plain / "file").write_bytes(b"")
    assert folder.stat().st_mode == plain.stat().st_mode
    assert (folder / WEIGHTS).stat().st_mode == (plain / "file").stat().st_mode


def test_pickles_are_never_opened(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(CheckpointError, match=r"only diffusion_pytorch_model\.bin.*never opened.*safe_serialization"):
        diffusers_folder.read(folder)


def test_missing_files_are_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing: no such folder"):
        diffusers_folder.read(folder / "nothing")
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"no diffusion_pytorch_model\.safetensors; wanted a folder as"):
        diffusers_folder.read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        diffusers_folder.read(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"_class_name": name}, "_class_name is .*known: Transformer2DModel, DiT") for name in ("AutoencoderKL", 3)),
        ({"_class_name": "../.."}, "_class_name is"),
        ({"_class_name": None}, "_class_name is"),
        ({"num_layers": 1 << 60}, "num_layers is"),
    ],
)
def test_invalid_configs_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=words):
        diffusers_folder.read(folder)


def test_weights_that_exceed_memory_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(array.nbytes for array in random_weights(SMALL).values())
    monkeypatch.setattr(memory, "SPARE", 0)
    monkeypatch.setattr(memory, "get_free_host_memory", lambda: size)
    assert diffusers_folder.read(folder)[1]
    for dtype, free in ((None, size - 1), (ml_dtypes.bfloat16, size // 2 - 1)):
        monkeypatch.setattr(memory, "get_free_host_memory", lambda free=free: free)
        with pytest.raises(ConfigError, match=r"the weights of model, \d+ tensors\); 0 MB are free on the machine"):
            diffusers_folder.read(folder, dtype=dtype)


def test_configs_of_the_split_classes_have_separate_defaults() -> None:
    dit = read_model_config({"_class_name": "DiTTransformer2DModel", "sample_size": 128, "cross_attention_dim": 7})
    assert (dit.inner_dim, dit.num_layers, dit.outputs, dit.norm_eps) == (1152, 28, 4, 1e-5)
    assert (dit.position_scale, dit.cross_attention_dim, dit.attention_bias) == (1, None, True)
    pixart = read_model_config(
        {"_class_name": "PixArtTransformer2DModel", "num_vector_embeds": 9, "_name_or_path": "x"}
    )
    assert (pixart.inner_dim, pixart.outputs, pixart.norm_eps, pixart.kind) == (1152, 8, 1e-6, "patches")
    assert (pixart.has_conditions, pixart.position_scale, pixart.cross_attention_dim) == (True, 2, 1152)
    for size in (64, 32):
        small = read_model_config({"_class_name": "PixArtTransformer2DModel", "sample_size": size})
        assert (small.has_conditions, small.position_scale) == (False, 1)
        assert small.to_json()["use_additional_conditions"] is None
    with pytest.raises(ConfigError, match="norm_type is 'layer_norm'; wanted 'ada_norm_single'"):
        read_model_config({"_class_name": "PixArtTransformer2DModel", "norm_type": "layer_norm"})


def test_published_models_have_their_published_tensors() -> None:
    ithq = {"attention_bias": True, "activation_fn": "geglu-approximate", "num_embeds_ada_norm": 100, "num_layers": 36}
    ithq |= {"cross_attention_dim": 512, "num_vector_embeds": 4097, "sample_size": 32}
    dit = {"_class_name": "DiTTransformer2DModel", "out_channels": 8}
    pixart = {"_class_name": "PixArtTransformer2DModel", "caption_channels": 4096}
    sizes = {}
    for name, values in {"ithq": ithq, "dit": dit, "pixart": pixart}.items():
        shapes = [place.shape for place in tensor_names(read_model_config(values))]
        sizes[name] = (len(shapes), sum(math.prod(shape) for shape in shapes))
    assert sizes["ithq"] == (1015, 1_359_274_624)
    discrete = read_model_config(ithq)
    assert (discrete.kind, discrete.inner_dim, discrete.to_json()["norm_type"]) == ("discrete", 1408, "layer_norm")
    assert read_model_config(discrete.to_json()) == discrete
    assert sizes["dit"][1] == 749_826_464
    assert sizes["pixart"][1] == 611_349_152
