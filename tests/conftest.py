"""Fixtures and settings of all tests. Property tests draw the same examples in every run and have no deadline."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from tests.testing.pauses import Pauses

# Check array shapes at every call. The hook must be installed before the package is imported.
install_import_hook("jaxmodels", "beartype.beartype")
pytest_plugins = ["tests.testing.compiling", "tests.testing.stages", "tests.testing.peers"]

settings.register_profile(
    "robojax", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("robojax")


@pytest.fixture
def pauses() -> Iterator[Pauses]:
    """Measure pauses of the machine for tests with a time limit."""
    with Pauses() as running:
        yield running


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Iterator[Path]:
    """Write an untrained DiT of two layers to the folder ``transformer`` of a pipeline."""
    from tests.testing.transformers import random_transformer

    model = random_transformer(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=7,
        activation_fn="gelu-approximate",
    )
    pipeline = tmp_path_factory.mktemp("models") / "pipeline"
    folder = pipeline / "transformer"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOJAX_COMPILE_CACHE", "off")
        model.save_pretrained(folder)
        (pipeline / "model_index.json").write_text('{"_class_name": "DiTPipeline"}')
        yield folder
