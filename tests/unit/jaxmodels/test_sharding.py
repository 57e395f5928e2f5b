"""Models over several devices, with eight devices of one processor in a child process."""

import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmodels.devices import FULLY_SHARDED, TENSOR_PARALLEL, build_shardings, get_logical_axes
from jaxmodels.errors import ConfigError
from tests.testing.compiling import process_environment
from tests.testing.transformers import random_transformer

SMALL: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxmodels.devices import FULLY_SHARDED, TENSOR_PARALLEL, shard
from tests.testing.transformers import random_transformer

rng = np.random.default_rng(0)
floats = lambda *shape: rng.standard_normal(shape).astype(np.float32)
small = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
cases = {
    "continuous": (
        {"in_channels": 32, "cross_attention_dim": 24, "activation_fn": "geglu"},
        {"hidden_states": floats(4, 32, 4, 3), "encoder_hidden_states": floats(4, 5, 24)},
    ),
    "discrete": (
        {"num_vector_embeds": 9, "sample_size": 4, "num_embeds_ada_norm": 10},
        {"hidden_states": rng.integers(0, 9, (4, 15)), "timestep": np.arange(4)},
    ),
    "patches": (
        {"in_channels": 4, "patch_size": 2, "sample_size": 8, "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 5},
        {"hidden_states": floats(4, 4, 8, 8), "timestep": np.arange(4), "class_labels": np.arange(4)},
    ),
}
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
for kind, (config, call) in cases.items():
    model = random_transformer(**small, **config)
    single = np.asarray(model(**call).sample)
    for rules in (TENSOR_PARALLEL, FULLY_SHARDED, {**TENSOR_PARALLEL, **FULLY_SHARDED}):
        shard(model, mesh, rules)
        kernel = model.transformer_blocks.attn1.to_qkv.kernel[...]
        assert kernel.addressable_shards[0].data.size < kernel.size, "the weights are whole on every device"
        spread = dict(call)
        spread["hidden_states"] = jax.device_put(call["hidden_states"], NamedSharding(mesh, PartitionSpec("data")))
        for sample in (model(**spread).sample, model.compile(**spread)(**spread)):
            assert len(sample.sharding.device_set) == 8
            print(kind, np.abs(np.asarray(sample) - single).max())
"""


def test_parallel_forward_equals_forward_on_one_device() -> None:
    options = {"env": process_environment(devices=8, quick=True), "capture_output": True, "text": True}
    result = subprocess.run([sys.executable, "-c", PROGRAM], timeout=500, check=False, **options)
    assert result.returncode == 0, result.stderr
    errors = [float(line.split()[1]) for line in result.stdout.splitlines()]
    assert len(errors) == 18
    assert max(errors) < 2e-6


def test_each_weight_names_its_axes() -> None:
    patches = {"in_channels": 4, "patch_size": 2, "sample_size": 8, "norm_type": "ada_norm_zero"}
    gated = {"cross_attention_dim": 24, "attention_type": "gated", "attention_bias": True}
    model = random_transformer(**SMALL, **patches, **gated, num_embeds_ada_norm=5)
    named = get_logical_axes(model)
    assert all(any(name is not None for name in axes) or axes == () for axes in named.values()), named
    axes = {".".join(map(str, path)): names for path, names in named.items()}
    assert axes["transformer_blocks.attn1.to_qkv.kernel"] == ("layers", "embed", None, "heads")
    assert axes["transformer_blocks.ff.down.kernel"] == ("layers", "mlp", "embed")


def test_rules_name_axes_of_the_mesh() -> None:
    model = random_transformer(**SMALL, num_vector_embeds=10, sample_size=4)
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    specs = jax.tree.leaves(build_shardings(model, mesh, TENSOR_PARALLEL))
    assert any("model" in sharding.spec for sharding in specs)
    with pytest.raises(ConfigError, match="rules name data; the mesh has axes model"):
        build_shardings(random_transformer(**SMALL, in_channels=32), mesh, FULLY_SHARDED)
