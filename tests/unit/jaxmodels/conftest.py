"""Fixtures of models, quick compilation, and a check for silent dtype promotion."""

from tests.testing.models import *  # noqa: F403 - fixtures
