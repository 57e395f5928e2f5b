"""Tickets: for a browser, which cannot send a key with a WebSocket or a link. Each lets one request in, and soon."""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from service.auth.caller import Caller

PREFIX = "rjt_"
LIFETIME = 30.0
MOST = 4096
MOST_OF_ONE = 64


@dataclass(frozen=True)
class Ticket:
    """Whom it lets in, until when (monotonic), and whether what it was got with is still good."""

    caller: Caller
    until: float
    is_still_in: Callable[[], bool]


class Tickets:
    """All that were given out and not used. They are in an address, which proxies write down, so they count once."""

    def __init__(self) -> None:
        self._given: dict[bytes, Ticket] = {}  # oldest first

    def give(self, caller: Caller, is_still_in: Callable[[], bool], now: float) -> str:
        """A new ticket for this caller; of too many, its oldest goes."""
        self._given = {key: ticket for key, ticket in self._given.items() if ticket.until > now}
        own = [key for key, ticket in self._given.items() if ticket.caller == caller]
        if len(own) >= MOST_OF_ONE or len(self._given) >= MOST:
            del self._given[own[0] if own else next(iter(self._given))]
        text = PREFIX + secrets.token_urlsafe(32)
        self._given[_digest(text)] = Ticket(caller, now + LIFETIME, is_still_in)
        return text

    def take(self, text: str, now: float) -> Ticket | None:
        """Whom it lets in; from now on nobody any more."""
        ticket = self._given.pop(_digest(text), None)
        return ticket if ticket is not None and now < ticket.until and ticket.is_still_in() else None


def _digest(text: str) -> bytes:
    # Looked up by its hash: how long the look-up takes tells nothing of tickets that are there.
    return hashlib.sha256(text.encode(errors="replace")).digest()
