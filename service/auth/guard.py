"""Admits or refuses every request; slows guessing."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanic import HTTPResponse, Request

from service.auth.caller import ANYBODY, STRANGER, Caller, Role
from service.auth.config import AccessSettings, is_loopback, keys_path, secret_path
from service.auth.keys import OWN_KEY_FOR, OWN_KEY_HEADER, OWN_PREFIX, PREFIX, Key, KeyFile, OwnKey
from service.auth.tokens import BadToken, SecretFile, Tickets, TokenOver, Tokens
from service.errors import Forbidden, ServiceError, TooManyRequests, Unauthorized
from service.http.limits import Rates
from service.http.origins import Origins
from service.reloading_file import FileUnusable
from service.setting_types import SettingsError

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
        if sent.startswith(PREFIX):
            return self._by_key(sent, is_stop)
        if is_room and sent.startswith(OWN_PREFIX):
            caller = self.own.caller(sent, request.headers.get(OWN_KEY_FOR))
            if caller is not None:
                return Admission(caller, lambda: True)
        if "x-api-key" in request.headers:
            raise Unauthorized(f"this key is not known here; {HOW}")
        return self._by_token(sent, is_stop)

    def is_own(self, request: "Request[Any, Any]") -> bool:
        """Whether this process itself sent it."""
        return self.own.caller(request.headers.get(OWN_KEY_HEADER, ""), None) is not None

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


# Method ("*": any), what a route's path begins with, and the least role; None: it has a proof of its own or needs none.
Rule = tuple[str, str, Role | None]
READING = ("GET", "HEAD")
# Of one address, attempts that fail: a second and at once. Only these are counted: were an address shut out altogether,
# one stranger behind the same proxy could keep the operator from stopping a robot; and 256 random bits are not guessed,
# however many tries there are.
REFUSALS = (1 / 6, 10)


class Guard:
    """One for all routes of an app: the API, the rooms, the page and its socket.

    A route says in its ``ctx_role`` which role it wants, or None; the routes of others follow ``rules``, the first
    that fits. What says nothing is for admins.

    Args:
        is_local: whether only this machine reaches the server, by its address. Then, and without keys, the Host header
            has to name this machine: the name of a foreign page may have been pointed at it (DNS rebinding).
    """

    def __init__(
        self,
        admissions: Admissions | None = None,
        *,
        origins: Origins | None = None,
        is_local: bool = False,
        rules: Sequence[Rule] = (),
    ):
        self.admissions = admissions or Admissions()
        self._origins = origins or Origins()
        self._is_local = is_local
        self._rules = tuple(rules)
        self._refusals = Rates(*REFUSALS)

    @property
    def is_guarded(self) -> bool:
        """Whether a key is wanted."""
        return self.admissions.is_wanted

    def watch(self, app: Any) -> None:
        """From now on this app lets nobody in whom ``refusal`` does not."""

        @app.on_request
        async def let_in(request: "Request[Any, Any]") -> HTTPResponse | None:
            return self.refusal(request)

    def refusal(self, request: "Request[Any, Any]") -> HTTPResponse | None:
        """The answer to a request that is not let in; else its caller is known from now on."""
        _admit(request, Admission(STRANGER, lambda: False))
        route = request.route
        if route is None:
            return None  # there is nothing to be let into
        try:
            if not self.is_guarded:
                self._check_host(request, route)
                is_own = self.admissions.is_own(request)
                _admit(request, Admission(ANYBODY, lambda: is_own or not self.is_guarded))
            elif request.method != "OPTIONS":  # which browsers send without any key, and which tells nothing
                self._let_in(request, route, self._role(request, route))
        except ServiceError as error:
            return _told(error)
        return None

    def _let_in(self, request: "Request[Any, Any]", route: Any, role: Role | None) -> None:
        try:
            is_room, is_stop = (getattr(route.ctx, name, False) for name in ("is_room", "is_stop"))
            admission = self.admissions.of(request, is_room=is_room, is_stop=is_stop)
        except Unauthorized as error:
            if role is None:
                return
            self._refused(request, error)
            raise
        _admit(request, admission)
        if role is not None and admission.caller.role < role:
            raise Forbidden(
                f"this wants the role {role}, and key {admission.caller.name!r} is {_article(admission.caller.role)}; "
                f"`robojax token new --role {role}` on the server's machine makes one"
            )

    def _role(self, request: "Request[Any, Any]", route: Any) -> Role | None:
        if hasattr(route.ctx, "role"):
            return route.ctx.role
        method = "GET" if request.method in READING else request.method
        path = "/" + route.path.strip("/")
        for of, begin, role in self._rules:
            if of in ("*", method) and path.startswith(begin):
                return role
        return Role.ADMIN

    def _refused(self, request: "Request[Any, Any]", error: Unauthorized) -> None:
        wait = self._refusals.take(request.ip)
        if wait > 0 and isinstance(error, Over):
            return  # whoever wants to stop a robot has to learn why it does not
        if wait > 0:
            raise TooManyRequests("too many attempts from this address were refused", wait)
        log.warning("%s %s from %s is refused: %s", request.method, request.path[:200], request.ip, error)

    def _check_host(self, request: "Request[Any, Any]", route: Any) -> None:
        host = request.headers.get("host")
        if self._is_local and hasattr(route.ctx, "role") and not self._origins.allows_host(host):
            raise HostRefused(
                "this server is only for its own machine, and is asked for by a name that may be anybody's; use "
                "http://127.0.0.1 or localhost, or add the page's origin to the setting origins"
            )


class HostRefused(Forbidden):
    """A page whose name was pointed at this machine."""

    code = "host_refused"


def _admit(request: "Request[Any, Any]", admission: Admission) -> None:
    request.ctx.admission = admission
    request.ctx.caller = admission.caller
    request.ctx.is_still_in = admission.is_still_in


def _told(error: ServiceError) -> HTTPResponse:
    text = json.dumps({"detail": str(error), "code": error.code}, separators=(",", ":"))
    return HTTPResponse(text, status=error.status, headers=dict(error.headers), content_type="application/json")


def _article(role: Role) -> str:
    return f"an {role}" if role >= Role.OPERATOR else f"a {role}"


def guard_of(
    access: AccessSettings, *, host: str, origins: Sequence[str], state: str | None, rules: Sequence[Rule] = ()
) -> Guard:
    """The guard of a server that listens on `host` and keeps its keys in the folder `state`.

    Raises:
        SettingsError: a file of keys or secrets cannot be used, or is named and not there.
    """
    for name in ("keys_file", "jwt_secret_file"):
        named = getattr(access, name)
        if named is not None and not Path(named).expanduser().is_file():
            made = "robojax token new --keys-file" if name == "keys_file" else "robojax token jwt --jwt-secret-file"
            raise SettingsError(f"{name}: there is no file {named!r}; `{made} {named}` makes it")
    keys, secret = keys_path(access, state), secret_path(access, state)
    admissions = Admissions(
        None if keys is None else KeyFile(keys),
        None if secret is None else SecretFile(secret, access.jwt_hours * 3600),
        # A file that was named is meant: with no key in it, nobody gets in.
        is_wanted=access.keys_file is not None or access.jwt_secret_file is not None,
    )
    try:
        admissions.check()
    except FileUnusable as error:
        raise SettingsError(str(error)) from error
    return Guard(admissions, origins=Origins(origins), is_local=is_loopback(host), rules=rules)
