"""Programs for devices that this machine does not have: StableHLO for GPUs and TPUs, and executables for a TPU."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

import jaxmodels
from jaxmodels import ACCELERATORS
from jaxmodels.policies import get_policy_type, policy_types
from jaxmodels.policies.pi0 import config as pi0_config
from jaxmodels.transformer2d.arguments import read_arguments
from robojax.cli.check import make_observation
from tests.testing.compiling import process_environment
from tests.testing.models import relative_error
from tests.testing.peers import require_peers
from tests.unit.jaxmodels.test_loaded_model import small_transformer

ROOT = Path(__file__).parents[3]
ABSENT = ("cuda", "tpu")
# Neither a question to a cloud's metadata server, nor a lock against other tests.
TPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "ROBOJAX_COMPILE_CACHE": "off"}
every_type = pytest.mark.parametrize("kind", policy_types(), scope="module")
TPU = """
import sys
from dataclasses import replace
from jax.experimental import topologies
import jaxmodels
from jaxmodels.devices import Placement

chip = topologies.get_topology_desc("v6e:1x1", "tpu", chips_per_host_bounds=(1, 1, 1)).devices[0]
policy = jaxmodels.load_policy(sys.argv[1], device="cpu")
programs = replace(policy._describe_programs("tpu", "bfloat16"), placement=Placement((chip,)))
program = programs.get_program(policy._reader.inputs(1, None))
read = sum(stage.compiled.memory_analysis().argument_size_in_bytes for stage in program.stages)
assert read > 0.5 * 2 * programs.count_weights(), read
print(chip.device_kind)
"""


@pytest.fixture(scope="module")
def policy(kind: str, small_folder: Callable[[str], Path]) -> jaxmodels.Policy:
    return jaxmodels.load_policy(small_folder(kind), device="cpu")


@pytest.fixture(scope="module")
def served(policy: jaxmodels.Policy) -> tuple[tuple[Any, ...], np.ndarray]:
    """Return arguments of a policy's program, and the chunk that is served for them."""
    passed: list[Any] = []
    run = policy._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi0_config, "SHORT_PROMPTS", ())  # The exported program reads the longest prompt.
        patch.setattr(policy, "_run", lambda program, arrays: passed.append(arrays) or run(program, arrays))
        chunk = policy.act(make_observation(policy.requirements))
    return (policy._weights.arrays, policy._weights.scales, *passed), chunk


def run_exported(program: jax.export.Exported, *arguments: Any) -> np.ndarray:
    return np.asarray(jax.jit(program.call)(*arguments))


@every_type
def test_policy_is_lowered_for_gpus_and_tpus(policy: jaxmodels.Policy, served: Any) -> None:
    arguments, chunk = served
    assert relative_error(run_exported(policy.export("cpu"), *arguments), chunk) < 1e-6
    for platform in ABSENT:
        program = policy.export(platform)
        assert program.platforms == (platform,)
        assert [output.shape for output in program.out_avals] == [chunk.shape]
        served = get_policy_type(policy.requirements.policy_type).accelerator_dtype
        assert {weight.dtype.name for weight in program.in_avals[:3]} == {served}, "of an accelerator"


@pytest.mark.needs_peers
@pytest.mark.parametrize("kind", ["act", "pi05"], scope="module")
def test_exported_policy_survives_a_round_trip(policy: jaxmodels.Policy, served: Any) -> None:
    require_peers("flatbuffers")
    arguments, chunk = served
    read = jax.export.deserialize(policy.export("cpu").serialize())
    assert relative_error(run_exported(read, *arguments), chunk) < 1e-6
    assert jax.export.deserialize(policy.export("tpu").serialize()).platforms == ("tpu",)


@pytest.mark.parametrize("name", ["continuous", "discrete", "patches"])
def test_transformer_is_lowered_for_gpus_and_tpus(name: str) -> None:
    model = small_transformer(name)
    inputs: Any = jaxmodels.LoadedModel(model).example(batch=2)
    compiled = model.compile(**inputs)
    arguments = read_arguments(model.config, model.dtype, **inputs)
    sample = run_exported(compiled.export("cpu", **inputs), compiled._weights, arguments, None)
    assert relative_error(sample, np.asarray(compiled(**inputs))) < 1e-6
    programs = {platform: compiled.export(platform, **inputs) for platform in ABSENT}
    assert all(program.platforms == (platform,) for platform, program in programs.items())
    # Only the continuous example has enough tokens for the kernel of TPUs.
    kernels = {platform: "tpu_custom_call" in program.mlir_module() for platform, program in programs.items()}
    assert kernels == {"cuda": False, "tpu": name == "continuous"}


@pytest.mark.needs_peers
@every_type
def test_policy_compiles_for_an_absent_tpu(kind: str, small_folder: Callable[[str], Path]) -> None:
    require_peers("libtpu")
    environment = process_environment() | TPU_ENVIRONMENT
    options = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    command = [sys.executable, "-c", TPU, str(small_folder(kind))]
    result = subprocess.run(command, timeout=500, check=False, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() in ACCELERATORS[-1].kinds
