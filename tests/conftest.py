"""Fixtures and settings of all tests. Property tests draw the same examples in every run and have no deadline."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from tests.testing.pauses import Pauses

# JAX and NNX create many objects: with the default threshold, looking for cycles takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)
# Check array shapes at every call. The hook must be installed before the package is imported.
install_import_hook("jaxmodels", "beartype.beartype")
pytest_plugins = ["tests.testing.compiling", "tests.testing.peers"]
TESTS = Path(__file__).parent
# Folders whose tests depend on real time, and folders with long tests, which start first.
TIMED = ("integration/rollout", "integration/rooms", "hostile", "faults")
LONG = (
    "parity",
    "unit/jaxmodels",
    "unit/robojax/sim",
    "integration/distributed",
    "test_guides.py",
    "test_notebooks.py",
)

settings.register_profile(
    "robojax", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("robojax")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that depend on real time. Start long tests and large files first, so that no process waits."""
    for item in items:
        measures = "pauses" in getattr(item, "fixturenames", ())
        if measures or any(item.path.is_relative_to(TESTS / folder) for folder in TIMED):
            item.add_marker("timed")
    size = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: (not any(item.path.is_relative_to(TESTS / path) for path in LONG), -size[item.path]))


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK  # `make test ARGS=tests/unit/hooks` has no timed tests.


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
