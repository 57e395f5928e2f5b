"""Models, compiled quickly and checked strictly."""

from tests.testing.models import *  # noqa: F403 - fixtures and hooks
