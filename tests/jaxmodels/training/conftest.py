"""Training as it runs: optax multiplies step counts by floats, which strict promotion refuses."""

import pytest


@pytest.fixture(autouse=True)
def strict_dtypes() -> None:
    """Overrides the strictness of the models' tests."""
