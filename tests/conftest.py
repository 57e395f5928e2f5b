"""Property tests draw the same examples in every run, and do not time the machine."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.pauses import Pauses

settings.register_profile(
    "robojax", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("robojax")


@pytest.fixture
def pauses() -> Iterator[Pauses]:
    """What the machine takes away from a test that has a limit of time to hold."""
    with Pauses() as running:
        yield running
