"""Models, compiled quickly, without silent promotion of dtypes."""

from tests.testing.models import *  # noqa: F403 - fixtures
