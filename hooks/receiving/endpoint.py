"""One route: its handler, which deliveries it wants, who may send them, and how they are run."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hooks.errors import RetryableError
from hooks.receiving.filters import Filter
from hooks.receiving.handlers import Handler
from hooks.receiving.secrets import Proofs
from hooks.receiving.settings import ReceiverSettings

Mode = Literal["reply", "queue"]
Retry = Literal["any", "retryable", "never"]


@dataclass(frozen=True)
class Endpoint:
    """A path's handler.

    Attributes:
        path: absolute.
        mode: ``reply`` gives the handler's value to the sender when it is there in time, ``queue`` says 202 at once.
        retry: which errors in the background are tried again.
        concurrency: runs of this handler at one time; None for as many as the receiver has.
        timeout: seconds of a run until it has failed; a sync one goes on in its thread and is not tried again.
        answer_within: seconds until a sender is told 202.
        is_coalesced: of what waits for one repo, only the latest is run.
    """

    path: str
    handler: Handler
    filter: Filter
    proofs: Proofs
    mode: Mode
    retry: Retry
    concurrency: int | None
    timeout: float | None
    answer_within: float
    is_coalesced: bool

    def delay(self, error: BaseException, failures: int, settings: ReceiverSettings) -> float | None:
        """Seconds until another attempt after so many that failed; None for none."""
        if self.retry == "never" or (self.retry == "retryable" and not isinstance(error, RetryableError)):
            return None
        if isinstance(error, RetryableError) and error.after is not None:
            return error.after
        return backoff(failures, settings)


def backoff(failures: int, settings: ReceiverSettings, chance: Callable[[], float] = random.random) -> float:
    """Doubles with every failure; up to half of it is left to chance, so that not all come back at one time."""
    longest = min(settings.longest_backoff, settings.backoff * 2.0 ** min(failures - 1, 60))
    return longest * (1 - chance() / 2)
