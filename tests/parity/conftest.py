"""Fixtures of models for comparisons with live or recorded reference implementations."""

from tests.testing.models import *  # noqa: F403 - fixtures
