"""The 2D transformer compared with outputs of diffusers 0.42.1 (tests/golden/transformer2d/README.md)."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
from tests.parity.transformer2d.conftest import differ
from tests.testing.compiling import compiling_quickly

pytestmark = pytest.mark.fully_compiled
GOLDEN = Path(__file__).parents[2] / "golden" / "transformer2d"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
assert len(NAMES) == 11
OPTIMIZED = ("continuous_masks", "discrete", "patches_pixart")  # Compiled like users do.
TOLERANCE = 1e-5  # Largest absolute difference on outputs of order 1; a tanh gelu or a wrong eps exceeds it.
MASKS = ("attention_mask", "encoder_attention_mask")


def recorded(name: str) -> tuple[dict[str, Any], np.ndarray]:
    with np.load(GOLDEN / name / "io.npz") as file:
        arrays = dict(file)
    wanted = arrays.pop("out.sample")
    inputs: dict[str, Any] = {}
    for key, array in arrays.items():
        name = key.removeprefix("in.")
        if name.startswith("added."):
            inputs.setdefault("added_cond_kwargs", {})[name.removeprefix("added.")] = array
        else:
            inputs[name] = array
    return inputs, wanted


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_diffusers(name: str, golden_folder) -> None:
    inputs, wanted = recorded(name)
    model = Transformer2DModel.from_pretrained(golden_folder(name))
    with nullcontext() if name in OPTIMIZED else compiling_quickly():
        assert differ(model(**inputs).sample, wanted) <= TOLERANCE
    steady = {key: inputs.pop(key) for key in list(inputs) if key not in ("hidden_states", *MASKS)}
    with compiling_quickly():
        conditioning = model.prepare(**steady)
        assert differ(model(**inputs, conditioning=conditioning).sample, wanted) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_config_of_diffusers_survives_a_round_trip(name: str) -> None:
    written = json.loads((GOLDEN / name / "config.json").read_text())
    arguments = {key: value for key, value in written.items() if not key.startswith("_")}
    assert Transformer2DConfig.from_json(written).to_json() == arguments
