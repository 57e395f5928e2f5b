"""How often an address was refused, so that guessing is slow to log and cheap to answer."""

from collections import OrderedDict
from dataclasses import dataclass

BURST = 10
PER_SECOND = 1 / 6
ADDRESSES = 4096


@dataclass
class _Tries:
    left: float
    at: float


class Attempts:
    """Failed attempts by address: ``BURST`` at once, then ten a minute. Times are monotonic.

    Only what fails is counted. Were an address shut out altogether, one stranger behind the same proxy could keep the
    operator from stopping a robot; and 256 random bits are not guessed, however many tries there are.
    """

    def __init__(self) -> None:
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    def wait(self, address: str, now: float) -> float:
        """Count one more; seconds until the next would be looked at, 0.0 when this one was within the limit."""
        tries = self._tries.pop(address, None) or _Tries(BURST, now)
        tries.left = min(BURST, tries.left + (now - tries.at) * PER_SECOND)
        tries.at = now
        self._tries[address] = tries
        if len(self._tries) > ADDRESSES:
            self._tries.popitem(last=False)
        if tries.left < 1:
            return (1 - tries.left) / PER_SECOND
        tries.left -= 1
        return 0.0
