"""What the reference implementations compute, or once recorded; models are compiled as in their other tests."""

from tests.testing.models import *  # noqa: F403 - fixtures
