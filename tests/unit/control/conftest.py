"""Sessions whose watchdogs are quick."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from service.control.watchdog import WatchdogTimeouts
from service.sessions.request import NewSession, SessionSettings
from tests.testing.rig import SessionRig

# The facts' times, ten times as quick, so that a test does not wait for them.
QUICK = WatchdogTimeouts(degraded_after=0.5, stop_after=1.0, frozen_after=0.2, bad_input_window=0.5)
# The same without the stop, which a pause of the machine would bring about before anybody saw what comes before it.
LENIENT = replace(QUICK, stop_after=60.0)
NEW = NewSession("s", "policy", "memory://", rate=50)


def make_rig(stuck_after: float = 5.0, **settings: Any) -> SessionRig:
    return SessionRig(NEW, SessionSettings(**{"patience": QUICK, "frame_age_limit": 0.1, **settings}), stuck_after)


@pytest.fixture
def rigged() -> Callable[..., SessionRig]:
    return make_rig


@pytest.fixture
async def rig() -> AsyncIterator[SessionRig]:
    async with make_rig() as made:
        yield made
