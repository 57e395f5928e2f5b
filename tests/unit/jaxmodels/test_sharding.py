"""Models over several devices, with eight devices of one processor in a child process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmodels.devices import FULLY_SHARDED, TENSOR_PARALLEL, build_shardings, get_logical_axes
from jaxmodels.errors import ConfigError
from jaxmodels.policies import policy_types
from tests.testing.compiling import process_environment
from tests.testing.transformers import random_transformer

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
MODELS = """
import jax, numpy as np
from flax import nnx
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
both = {**TENSOR_PARALLEL, **FULLY_SHARDED}
# Four parts have one head each. With eight, a head has two parts.
meshes = {(2, 4): (TENSOR_PARALLEL, FULLY_SHARDED, both), (1, 8): (TENSOR_PARALLEL,)}
for kind, (config, call) in cases.items():
    model = random_transformer(**small, **config)
    single = np.asarray(model(**call).sample)
    scale = np.abs(single).max()
    nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[5]))
    copied = model.compile(**call)(**call)
    assert {device.id for device in copied.sharding.device_set} == {5}
    print(kind, np.abs(np.asarray(copied) - single).max() / scale)
    for (data, parts), rules in ((shape, each) for shape, every in meshes.items() for each in every):
        mesh = Mesh(np.array(jax.devices()[: data * parts]).reshape(data, parts), ("data", "model"))
        shard(model, mesh, rules)
        kernel = model.transformer_blocks.attn1.to_qkv.kernel[...]
        assert kernel.addressable_shards[0].data.size < kernel.size, "the weights are whole on every device"
        spread = dict(call)
        spread["hidden_states"] = jax.device_put(call["hidden_states"], NamedSharding(mesh, PartitionSpec("data")))
        for sample in (model(**spread).sample, model.compile(**spread)(**spread)):
            assert len(sample.sharding.device_set) == data * parts
            print(kind, np.abs(np.asarray(sample) - single).max() / scale)
"""
POLICIES = """
import sys
import jaxmodels
from jaxmodels import devices
from robojax.cli.check import make_observation

devices.SPLIT_FROM = 1 << 6  # The weights of a small policy are split, too.
for folder in sys.argv[1:]:
    policy = jaxmodels.load_policy(folder, device="cpu:0")
    rng = np.random.default_rng(0)
    observation = {
        name: rng.uniform(-1, 1, value.shape).astype(np.float32) if value.dtype == np.float32 else value
        for name, value in make_observation(policy.requirements).items()
    }
    chunk = policy.act(observation)
    size = sum(weight.nbytes for weight in policy._weights.arrays)
    kind = policy.requirements.policy_type
    for names in (["cpu:7"], *([f"cpu:{i}" for i in range(count)] for count in (2, 8))):  # Four split no other axis.
        other = policy.on("+".join(names))
        held = [0] * 8
        for shard in (shard for weight in other._weights.arrays for shard in weight.addressable_shards):
            held[shard.device.id] += shard.data.nbytes
        assert {f"cpu:{i}" for i, some in enumerate(held) if some} == set(names), folder
        assert max(held) < size * (1 / len(names) + 0.1), f"the weights of {folder} are whole on every device"
        print(kind, np.abs(other.act(observation) - chunk).max() / np.abs(chunk).max())
"""


@pytest.fixture(scope="module")
def errors(small_folder: Callable[[str], Path]) -> dict[str, list[float]]:
    """Run both programs in a process that sees eight devices; return the errors that they print for each model."""
    options = {"env": process_environment(devices=8, quick=True), "capture_output": True, "text": True}
    command = [sys.executable, "-c", MODELS + POLICIES, *(str(small_folder(kind)) for kind in policy_types())]
    result = subprocess.run(command, timeout=500, check=False, cwd=ROOT, **options)
    assert result.returncode == 0, result.stderr
    found: dict[str, list[float]] = {}
    for kind, error in map(str.split, result.stdout.splitlines()):
        found.setdefault(kind, []).append(float(error))
    return found


def test_parallel_forward_equals_forward_on_one_device(errors: dict[str, list[float]]) -> None:
    for kind in ("continuous", "discrete", "patches"):
        assert len(errors[kind]) == 1 + 2 * 4
        assert max(errors[kind]) < 2e-6, kind


def test_copied_or_split_policies_act_as_on_one_device(errors: dict[str, list[float]]) -> None:
    for kind in policy_types():
        copied, *split = errors[kind]
        assert (copied, len(split), max(split) < 1e-5) == (0, 2, True), (kind, copied, split)


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
