"""Fixtures: sessions with short watchdog limits."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from service.app import session_settings
from service.sessions.request import NewSession
from service.settings import Settings
from tests.testing.rig import SessionRig

# Watchdog limits in seconds, ten times shorter than the defaults, so that tests are fast.
QUICK = {"frame_age_limit": 0.1, "degraded_after": 0.5, "stop_after": 1.0, "frozen_after": 0.2}
# The same limits with a late stop, because a pause of the test machine must not stop the robot during a test.
LENIENT = QUICK | {"stop_after": 60.0}
NEW = NewSession("s", "policy", "memory://", rate=50)


def make_rig(stuck_after: float = 5.0, **settings: Any) -> SessionRig:
    # The robots of a rig do not move when they are commanded, so frozen joints are only a warning.
    return SessionRig(NEW, session_settings(Settings.from_values(**QUICK | {"frozen": "warn"} | settings)), stuck_after)


@pytest.fixture
def rigged() -> Callable[..., SessionRig]:
    return make_rig


@pytest.fixture
async def rig() -> AsyncIterator[SessionRig]:
    async with make_rig() as made:
        yield made
