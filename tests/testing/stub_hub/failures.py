"""Failures that the stub was told to show: what it answers instead, and how often."""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

HOWS = ("short", "cut", "corrupt", "hang", "stall", "drop", "drip", "endless", "body")


@dataclass
class Failure:
    """One scripted failure.

    Attributes:
        pattern: a regular expression that is looked for in ``"GET /path?query"``.
        how: an HTTP status, or one of ``short`` (a body that ends early and says that this is all of it), ``cut``
            (the connection ends in the middle), ``corrupt`` (as many bytes, but others), ``hang`` (no answer at all),
            ``stall`` (half of the body, then nothing), ``drop`` (the connection is closed at once), ``drip`` (a byte
            of the body every 20 ms), ``endless`` (a body without an end), ``body`` (the one given here, or the right
            one with other headers).
        times: how many requests it meets; None for all.
        code: ``X-Error-Code``, for a status.
        retry_after: seconds that a 429 asks the client to wait.
        body, more: of a ``body``, and headers of it (or of a status).
        released: set it and what hangs goes on as a dropped connection.
        met: requests that it has met so far.
        held: answers that it has held back so far, of those that hang or stall.
    """

    pattern: str
    how: int | str
    times: int | None = 1
    code: str = ""
    retry_after: int = 0
    body: bytes | None = None
    more: Mapping[str, str] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    met: int = 0
    held: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.how, int) and self.how not in HOWS:
            raise ValueError(f"how {self.how!r}: wanted an HTTP status or one of {', '.join(HOWS)}")

    def hold(self) -> None:
        """Wait until it is released."""
        self.held += 1
        self.released.wait()

    def is_for(self, line: str) -> bool:
        return (self.times is None or self.met < self.times) and re.search(self.pattern, line) is not None

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer with its status."""
        named = {**({"X-Error-Code": self.code} if self.code else {}), **self.more}
        if self.how != 429:
            return named
        return {
            **named,
            "RateLimit": f'"api";r=0;t={self.retry_after}',
            "RateLimit-Policy": '"fixed window";"api";q=500;w=300',
            "Retry-After": str(self.retry_after),
        }


def corrupted(body: bytes) -> bytes:
    """As many bytes, of which those in the middle are others: a header at the beginning stays readable."""
    middle = len(body) // 2
    return body[:middle] + bytes(byte ^ 0x55 for byte in body[middle : middle + 8]) + body[middle + 8 :]
