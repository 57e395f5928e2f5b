"""A 2D transformer in Orbax's format, there and back, over several devices too."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.checkpoints import orbax
from jaxmodels.errors import CheckpointError, WeightsMismatch
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel, diffusers_folder
from jaxmodels.weights import flatten
from tests.testing.compiling import process_environment

CONFIG = Transformer2DConfig(4, 8, 32, num_layers=2, cross_attention_dim=12)
PROGRAM = """
import sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxmodels.transformer2d import diffusers_folder
from jaxmodels.devices import build_shardings
from jaxmodels.transformer2d import Transformer2DModel
from jaxmodels.weights import flatten

folder = Path(sys.argv[1])
config, _ = diffusers_folder.restore_orbax(folder)
model = nnx.eval_shape(lambda: Transformer2DModel.from_config(config))
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
named = dict(zip(flatten(model), jax.tree.leaves(build_shardings(model, mesh)), strict=True))
_, weights = diffusers_folder.restore_orbax(folder, shardings=named)
kernel = weights["transformer_blocks.attn1.to_qkv.kernel"]
assert all(array.sharding == named[name] for name, array in weights.items())
assert kernel.addressable_shards[0].data.shape == (2, 32, 3, 8), kernel.addressable_shards[0].data.shape
diffusers_folder.save_orbax(folder.parent / "spread", config, weights)
"""


@pytest.fixture(scope="module")
def weights() -> dict[str, jax.Array]:
    return flatten(Transformer2DModel.from_config(CONFIG))


def bits(weights) -> dict[str, tuple]:
    return {name: (str(array.dtype), np.asarray(array).tobytes()) for name, array in weights.items()}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_comes_back_with_the_same_bits(tmp_path: Path, weights, dtype) -> None:
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    diffusers_folder.save_orbax(tmp_path / "model", CONFIG, weights)
    for options in ({}, {"dtype": dtype}):
        config, back = diffusers_folder.restore_orbax(tmp_path / "model", **options)
        assert config == CONFIG
        assert bits(back) == bits(weights)


def test_a_model_is_loaded_from_orbax_where_there_is_nothing_else(tmp_path: Path, weights) -> None:
    diffusers_folder.save_orbax(tmp_path / "model", CONFIG, weights)
    model = Transformer2DModel.from_pretrained(tmp_path / "model")
    assert bits(flatten(model)) == bits(weights)
    half = diffusers_folder.read(tmp_path / "model", dtype=np.float16)[1]
    assert {array.dtype for array in half.values()} == {np.dtype(np.float16)}
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / orbax.FOLDER).rename(tmp_path / "elsewhere")
    assert bits(diffusers_folder.read(tmp_path / "model")[1]) == bits(weights)


def test_what_does_not_fit_is_refused_with_all_of_it(tmp_path: Path, weights) -> None:
    folder = tmp_path / "model"
    with pytest.raises(WeightsMismatch, match=r"unused: extra \[3\]"):
        diffusers_folder.save_orbax(folder, CONFIG, {**weights, "extra": jnp.zeros(3)})
    assert not folder.exists()
    diffusers_folder.save_orbax(folder, CONFIG, weights)
    with pytest.raises(CheckpointError, match=r"norm\.bias \(found float32, wanted bfloat16\)"):
        diffusers_folder.restore_orbax(folder, dtype=jnp.bfloat16)
    orbax.save(folder / orbax.FOLDER, {**weights, "norm.bias": jnp.zeros(31), "extra": jnp.zeros(3)})
    with pytest.raises(WeightsMismatch, match="1 unused, 1 misshaped"):
        diffusers_folder.restore_orbax(folder)
    orbax.save(folder / orbax.FOLDER, {**weights, "norm.bias": jnp.full(32, jnp.nan)})
    with pytest.raises(CheckpointError, match=r"NaN or an infinity: norm\.bias"):
        diffusers_folder.read(folder)
    orbax.save(folder / orbax.FOLDER, {**weights, "norm.bias": jnp.zeros(32, jnp.int32)})
    with pytest.raises(CheckpointError, match=r"no floats: norm\.bias \(int32\)"):
        diffusers_folder.restore_orbax(folder)
    with pytest.raises(CheckpointError, match="no Orbax checkpoint there"):
        orbax.float_dtypes(folder / "nothing")


def test_arrays_spread_over_devices_are_restored_and_saved_where_they_lie(tmp_path: Path, weights) -> None:
    diffusers_folder.save_orbax(tmp_path / "model", CONFIG, weights)
    environment = process_environment(devices=8, quick=True)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert bits(diffusers_folder.restore_orbax(tmp_path / "spread")[1]) == bits(weights)
