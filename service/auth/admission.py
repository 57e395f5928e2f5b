"""Whom a request's key, token or ticket lets in."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sanic import Request

from service.auth import keys as api_keys
from service.auth import own_key
from service.auth.caller import Caller
from service.auth.keys import Key, KeyFile
from service.auth.own_key import OwnKey
from service.auth.tickets import Tickets
from service.auth.tokens import BadToken, SecretFile, TokenOver, Tokens
from service.auth.watched import FileUnusable
from service.errors import Unauthorized

log = logging.getLogger(__name__)

HOW = "send X-API-Key: rjk_... or Authorization: Bearer ...; `robojax token new` makes a key on the server's machine"


class Over(Unauthorized):
    """A key or token that did let somebody in, and has expired: no guess, so it is always told."""


@dataclass(frozen=True)
class Admission:
    """Who is let in, and whether they still would be: a socket outlives a key that is revoked."""

    caller: Caller
    is_still_in: Callable[[], bool]


class Admissions:
    """All ways in: keys of a file, tokens signed with a secret, tickets, and the key of this process itself.

    Args:
        keys, secret: their files, which need not be there yet.
        is_wanted: whether a key is wanted even before there is one.
        clock: seconds since 1970, for what expires.
        ticks: monotonic seconds, for tickets.
    """

    def __init__(
        self,
        keys: KeyFile | None = None,
        secret: SecretFile | None = None,
        *,
        is_wanted: bool = False,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ):
        self.own = OwnKey()
        self._keys = keys
        self._secret = secret
        self._tickets = Tickets()
        self._is_wanted = is_wanted
        self._clock = clock
        self._ticks = ticks
        self._trouble = ""

    @property
    def is_wanted(self) -> bool:
        """Whether a key is wanted: one is configured, or was since the start; revoking the last one opens nothing."""
        self._is_wanted = self._is_wanted or bool(self._now_keys()) or self._now_tokens() is not None
        return self._is_wanted

    def check(self) -> bool:
        """Read what is configured; returns whether anybody has a way in.

        Raises:
            FileUnusable: one of the files cannot be used.
        """
        keys = () if self._keys is None else self._keys.known()
        has_tokens = self._secret is not None and self._secret.tokens() is not None
        return has_tokens or any(not key.is_over(self._clock()) for key in keys)

    def of(self, request: "Request[Any, Any]", *, is_room: bool = False, is_stop: bool = False) -> Admission:
        """Who sent this.

        Args:
            is_room: whether this process's own key counts.
            is_stop: whether a file that cannot be used counts as it last could: its keys stop robots all the same.

        Raises:
            Unauthorized: nobody that is known; the text says what is wrong, without anything that was sent.
        """
        sent = _sent(request)
        if sent is None:
            ticket = _ticket(request)
            if ticket is None:
                raise Unauthorized(f"a key is wanted here: {HOW}")
            return self._by_ticket(ticket)
        if sent.startswith(api_keys.PREFIX):
            return self._by_key(sent, is_stop)
        if is_room and sent.startswith(own_key.PREFIX):
            caller = self.own.caller(sent, request.headers.get(own_key.FOR))
            if caller is not None:
                return Admission(caller, lambda: True)
        if "x-api-key" in request.headers:
            raise Unauthorized(f"this key is not known here; {HOW}")
        return self._by_token(sent, is_stop)

    def is_own(self, request: "Request[Any, Any]") -> bool:
        """Whether this process itself sent it."""
        return self.own.caller(request.headers.get(own_key.HEADER, ""), None) is not None

    def ticket(self, admission: Admission) -> str:
        """A new ticket for somebody who is in."""
        return self._tickets.give(admission.caller, admission.is_still_in, self._ticks())

    def _by_key(self, sent: str, is_stop: bool) -> Admission:
        key = None
        if self._keys is not None:
            try:
                key = self._keys.find(sent)
            except FileUnusable as error:
                self._tell(error)
                key = self._keys.find(sent, self._keys.last_known()) if is_stop else None
        if key is None:
            raise Unauthorized(f"this key is not known here (any more); {HOW}")
        if key.is_over(self._clock()):
            raise Over("this key has expired; `robojax token new` makes another on the server's machine")
        return Admission(key.caller, lambda: self._has(key))

    def _has(self, key: Key) -> bool:
        return key in self._now_keys() and not key.is_over(self._clock())

    def _by_token(self, sent: str, is_stop: bool) -> Admission:
        try:
            tokens = self._now_tokens()
            if tokens is None and is_stop and self._secret is not None:
                tokens = self._secret.last_tokens()
            if tokens is None:
                raise BadToken("this server takes no tokens; use a key")
            bearer = tokens.read(sent, self._clock())
        except BadToken as error:
            kind = Over if isinstance(error, TokenOver) else Unauthorized
            raise kind(f"the token does not count: {error}") from None
        return Admission(bearer.caller, lambda: self._now_tokens() == tokens and self._clock() < bearer.expires_at)

    def _by_ticket(self, sent: str) -> Admission:
        ticket = self._tickets.take(sent, self._ticks())
        if ticket is None:
            raise Unauthorized("the ticket was used, is older than 30 s, or was never given; POST /tickets gives one")
        return Admission(ticket.caller, ticket.is_still_in)

    def _now_keys(self) -> tuple[Key, ...]:
        try:
            return () if self._keys is None else self._keys.known()
        except FileUnusable as error:
            self._tell(error)
            return ()

    def _now_tokens(self) -> Tokens | None:
        try:
            return None if self._secret is None else self._secret.tokens()
        except FileUnusable as error:
            self._tell(error)
            return None

    def _tell(self, error: FileUnusable) -> None:
        # What cannot be read lets nobody in, and lets nobody past either.
        self._is_wanted = True
        if str(error) != self._trouble:
            self._trouble = str(error)
            log.error("%s; until then nobody gets in by it", error)


def _sent(request: "Request[Any, Any]") -> str | None:
    """The key or token of a request.

    Raises:
        Unauthorized: there are several, or the header is of another kind.
    """
    given = request.headers.getall("x-api-key", [])
    logins = [value.partition(" ") for value in request.headers.getall("authorization", [])]
    # `Api-Key` is what openpi's client says.
    bearers = [rest.strip() for kind, _, rest in logins if kind.lower() in ("bearer", "api-key")]
    if len(given) + len(bearers) > 1:
        raise Unauthorized("more than one key was sent; send one, in one header")
    if given or bearers:
        return (given or bearers)[0]
    return None


def _ticket(request: "Request[Any, Any]") -> str | None:
    # A ticket is in the address, where other pages can put one: it may look, and open sockets, but change nothing.
    if request.method not in ("GET", "HEAD") or "ticket=" not in request.query_string:
        return None
    given = request.args.getlist("ticket") or []
    return given[0] if len(given) == 1 else None
