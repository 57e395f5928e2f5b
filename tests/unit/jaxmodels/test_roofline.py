"""Least times of policies: work that is counted by shapes alone, and the peaks of accelerators."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmodels
from jaxmodels.memory import _list_inner, measure_program
from jaxmodels.policies import get_policy_type, policy_types
from jaxmodels.program import Programs
from jaxmodels.roofline import ACCELERATORS, ChunkWork, PartWork, count_work
from tests.unit.jaxmodels.test_sizes import inputs_of, programs_of

CAMERAS = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 480, 640]} for name in ("a", "b", "c")}
FEATURES = {
    "input_features": {"observation.state": {"type": "STATE", "shape": [6]}, **CAMERAS},
    "output_features": {"action": {"type": "ACTION", "shape": [6]}},
}
H100, H200, _, V5E, _ = ACCELERATORS


@pytest.fixture(scope="module")
def pi05() -> tuple[Any, Programs, ChunkWork]:
    """Return config, programs and work for one robot of pi0.5 with LeRobot's sizes: 3.35 billion parameters."""
    config = get_policy_type("pi05").config({"type": "pi05", **FEATURES})
    programs = programs_of(config, "gpu", jnp.bfloat16)
    return config, programs, count_work(programs, inputs_of(config, continues=False))


def find_loops(program: Any) -> Iterator[Any]:
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in _list_inner(eqn):
            yield from find_loops(inner)


def test_work_of_pi05_equals_the_count_by_hand(pi05: Any) -> None:
    *_, work = pi05
    tera = [part.operations / 1e12 for part in work.parts]
    assert [part.name for part in work.parts] == ["frames", "vision", "prefix", "denoise"]
    assert tera == pytest.approx([0, 0.66, 3.76, 0.39], rel=0.02)
    # 17 layers of Gemma with 110 million weights, and the last layer's keys and values.
    assert work.parts[2].traffic == pytest.approx(17 * 110.1e6 * 2, rel=0.02)
    assert work.memory == pytest.approx(2 * 3.35e9, rel=0.1)


def test_step_of_pi05_reads_the_expert_and_the_cache(pi05: Any) -> None:
    config, programs, _ = pi05
    traced = programs.trace(inputs_of(config, continues=False))["denoise"]
    [loop] = [eqn for eqn in find_loops(traced.jaxpr.jaxpr) if eqn.params["length"] == config.num_inference_steps]
    step = measure_program(loop.params["jaxpr"])
    assert step.traffic == pytest.approx(623e6 + 19e6, rel=0.02)
    assert step.operations == pytest.approx(39e9, rel=0.02)


def test_weights_are_read_once_for_a_batch(pi05: Any) -> None:
    config, programs, work = pi05
    many = count_work(programs, inputs_of(config, 16, continues=False))
    for single, together in zip(work.parts, many.parts, strict=True):
        # The modulations of the steps are computed once.
        assert together.operations == pytest.approx(16 * single.operations, rel=0.02)
    cache, inputs = 10 * 19e6, 3 * 3 * 480 * 640
    grown = sum(part.traffic for part in many.parts) - sum(part.traffic for part in work.parts)
    assert grown == pytest.approx(15 * (cache + inputs), rel=0.05)
    # A batch is bound by arithmetic where one robot is bound by memory.
    assert [part.bound(H200, "bfloat16")[1] for part in work.parts] == ["memory", "compute", "compute", "memory"]
    assert [part.bound(H200, "bfloat16")[1] for part in many.parts] == ["memory", *["compute"] * 3]


def test_least_time_is_the_larger_of_products_and_reads() -> None:
    parts = PartWork("a", int(989e9), 1), PartWork("b", 1, int(4.8e9))
    work = ChunkWork(1, "bfloat16", parts, 0)
    assert [part.bound(H200, "bfloat16") for part in parts] == [
        (pytest.approx(1e-3), "compute"),
        (pytest.approx(1e-3), "memory"),
    ]
    assert work.bound(H200) == pytest.approx(2e-3)
    assert work.bound(H100) == pytest.approx(1e-3 + 4.8e-3 / 3.35)
    assert work.bound_in_8_bits(H200) == pytest.approx(1e-3, rel=1e-3)
    assert work.bound_in_8_bits(V5E) == pytest.approx(989 / 393e3 + 2.4 / 819, rel=1e-3)


def test_each_device_kind_belongs_to_one_accelerator() -> None:
    kinds = [kind for accelerator in ACCELERATORS for kind in accelerator.kinds]
    assert len(set(kinds)) == len(kinds)
    assert jax.devices("cpu")[0].device_kind not in kinds


@pytest.mark.parametrize("kind", policy_types())
def test_parts_of_every_type_have_work(kind: str, small_folder: Any) -> None:
    policy = jaxmodels.load_policy(small_folder(kind), device="cpu")
    asked = "bfloat16" if kind == "act" else None  # The other types are counted in their own dtype.
    work = policy.count_work(2, asked)
    assert [part.name for part in work.parts] == ["frames", *(stage.name for stage in get_policy_type(kind).stages)]
    assert all(part.operations > 0 for part in work.parts[1:])
    assert all(part.traffic > 0 for part in work.parts)
    assert (work.batch, work.dtype) == (2, asked or get_policy_type(kind).accelerator_dtype)
