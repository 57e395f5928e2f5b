"""For how long other hosts are waited for, by whoever drives a robot, while one of them says nothing."""

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

from service.hosts.errors import HostSilent

Result = TypeVar("Result")
# Seconds between signs of life, and without any after which the other side is gone.
BEAT = 1.0
SILENCE = 10.0
# Seconds without a sign of life after which a host is not waited for by whoever is in a hurry. Below the `stuck_after`
# of the settings (5 s), so that a robot's session hears which host it is, and above what a busy machine may be late.
QUIET = 4.0
# Seconds between looks at the hosts.
LOOK = BEAT / 4


class LastHeard(Protocol):
    """Another host, which was heard of last at this time, monotonic."""

    @property
    def heard_at(self) -> float: ...


def wait_for(outcome: "Future[Result]", hosts: Mapping[str, LastHeard], quiet: float = math.inf) -> Result:
    """What all hosts were asked for, when it is there.

    Args:
        hosts: the others, by their names.
        quiet: seconds in which one may say nothing; after them, and the first look, it is not waited for any more.

    Raises:
        HostSilent: one says nothing, and may be gone.
        Exception: whatever the outcome is.
    """
    while True:
        began = time.monotonic()
        with suppress(TimeoutError):
            return outcome.result(LOOK)
        now = time.monotonic()
        heard_at = {name: host.heard_at for name, host in hosts.items()}
        name = min(heard_at, key=lambda name: heard_at[name])
        silence = now - heard_at[name]
        # When this whole process stood still, it has yet to hear what was said meanwhile.
        if silence > quiet and now - began < 2 * LOOK:
            raise HostSilent(
                f"{name} has said nothing for {silence:.0f} s, and nothing is computed without it: look after that "
                f"machine and its network. After {SILENCE:g} s it is given up; if it is back before, restart the "
                "sessions that ended in an error"
            )
