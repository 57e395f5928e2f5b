"""Scripted failures of the stub: the substitute response and the number of requests."""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Failure:
    """One scripted failure of up to ``times`` requests (None: all) whose ``"GET /path?query"`` matches ``pattern``.

    ``how`` is an HTTP status (with ``code`` as ``X-Error-Code``, and ``retry_after`` seconds for a 429), or one of
    ``short`` (half of the body with a matching length), ``cut`` (the connection ends in the body), ``corrupt`` (other
    bytes), ``hang`` (no response), ``stall`` (silence after half of the body), ``drop`` (closed at once), ``drip`` (a
    byte every 20 ms), ``endless``, ``body`` (the given ``body``, or other headers). ``more`` are further headers;
    ``met`` counts requests, ``held`` the answers that wait for ``released``.
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

    def hold(self) -> None:
        self.held += 1
        self.released.wait()

    def is_for(self, line: str) -> bool:
        return (self.times is None or self.met < self.times) and re.search(self.pattern, line) is not None

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of the response with its status."""
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
    """Return the body with changed bytes in the middle; a header at the beginning stays readable."""
    middle = len(body) // 2
    return body[:middle] + bytes(byte ^ 0x55 for byte in body[middle : middle + 8]) + body[middle + 8 :]
