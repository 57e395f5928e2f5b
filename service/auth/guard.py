"""Access guard of all routes: admits or refuses every request, and slows down guessing."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sanic import HTTPResponse, Request

from service.auth.caller import ANYBODY, STRANGER, Admission, Role
from service.auth.config import AccessSettings, keys_path, secret_path
from service.auth.keys import OWN_KEY_FOR, OWN_KEY_HEADER, OWN_PREFIX, PREFIX, Key, KeyFile, OwnKey
from service.auth.tokens import BadToken, SecretFile, Tickets, TokenExpired, Tokens
from service.errors import Forbidden, ServiceError, TooManyRequests, Unauthorized
from service.http.bodies import json_response
from service.http.limits import Rates
from service.http.origins import Origins, is_loopback
from service.reloading_file import Content, FileUnusable
from service.setting_types import SettingsError

log = logging.getLogger(__name__)

HOW_TO_AUTHENTICATE = (
    "send X-API-Key: rjk_... or Authorization: Bearer ...; `robojax token new` makes a key on the server's machine"
)


class KeyExpired(Unauthorized):
    """The key or token has expired. This is not a guess, so the limit of refusals does not hide the reason."""


class Admissions:
    """Authenticates requests: by keys of a file, tokens signed with a secret, tickets, and this process's own key.

    Args:
        keys, secret: their files, which may be missing.
        requires_key: whether a key is required even if none exists.
    """

    def __init__(
        self,
        keys: KeyFile | None = None,
        secret: SecretFile | None = None,
        *,
        requires_key: bool = False,
    ):
        self.own = OwnKey()
        self._keys = keys
        self._secret = secret
        self._tickets = Tickets()
        self._requires_key = requires_key
        self._reported = ""

    @property
    def requires_key(self) -> bool:
        """Whether requests need a key: one is configured, or was since the start. Revoking the last opens nothing."""
        self._requires_key = self._requires_key or bool(self._current_keys()) or self._current_tokens() is not None
        return self._requires_key

    def check_files(self) -> bool:
        """Read the files of keys and secrets, and return whether they hold a key that has not expired, or a secret.

        Raises:
            FileUnusable: a file cannot be used.
        """
        keys = () if self._keys is None else self._keys.read_keys()
        has_tokens = self._secret is not None and self._secret.tokens() is not None
        self._requires_key = self._requires_key or bool(keys) or has_tokens
        return has_tokens or any(not key.is_expired(time.time()) for key in keys)

    def authenticate(self, request: "Request[Any, Any]", *, is_room: bool = False, is_stop: bool = False) -> Admission:
        """Return the caller of a request, and whether the caller is still authorized later.

        Args:
            is_room: whether the key of this process is accepted.
            is_stop: whether the request stops robots. Then the last known keys and secret are accepted while their
                file is missing or unusable, and keys and tokens are accepted at any time of the clock.

        Raises:
            Unauthorized: the request has no accepted key, token or ticket. The text contains nothing of the request.
        """
        sent = _read_credential(request)
        if sent is None:
            ticket = _read_ticket(request)
            if ticket is None:
                raise Unauthorized(f"this request needs a key: {HOW_TO_AUTHENTICATE}")
            admission = self._tickets.redeem(ticket, time.monotonic())
            if admission is None:
                unusable = "the ticket was used, is older than 30 s, or was never issued"
                raise Unauthorized(f"{unusable}; POST /tickets gives one")
            return admission
        if sent.startswith(PREFIX):
            return self._authenticate_key(sent, is_stop)
        if is_room and sent.startswith(OWN_PREFIX):
            caller = self.own.identify(sent, request.headers.get(OWN_KEY_FOR))
            if caller is not None:
                return Admission(caller, lambda: True)
        if "x-api-key" in request.headers:
            raise Unauthorized(f"this key is not known here; {HOW_TO_AUTHENTICATE}")
        return self._authenticate_token(sent, is_stop)

    def is_own(self, request: "Request[Any, Any]") -> bool:
        """Whether this process itself sent the request."""
        return self.own.identify(request.headers.get(OWN_KEY_HEADER, ""), None) is not None

    def issue_ticket(self, admission: Admission) -> str:
        """Issue a ticket to an admitted caller."""
        return self._tickets.issue(admission, time.monotonic())

    def _authenticate_key(self, sent: str, is_stop: bool) -> Admission:
        key = None
        if self._keys is not None:
            try:
                key = self._keys.find(sent)
            except FileUnusable as error:
                self._report_unusable(error)
            if key is None and is_stop:
                # The same keys as above, unless the file is missing or unusable.
                key = self._keys.find(sent, self._keys.last_keys())
        if key is None:
            raise Unauthorized(f"this key is not known here (any more); {HOW_TO_AUTHENTICATE}")
        if key.is_expired(time.time()) and not is_stop:
            raise KeyExpired("this key has expired; `robojax token new` makes another on the server's machine")
        return Admission(key.caller, lambda: self._is_current(key))

    def _is_current(self, key: Key) -> bool:
        return key in self._current_keys() and not key.is_expired(time.time())

    def _authenticate_token(self, sent: str, is_stop: bool) -> Admission:
        try:
            tokens = self._current_tokens()
            if tokens is None and is_stop and self._secret is not None:
                tokens = self._secret.last_tokens()
            if tokens is None:
                raise BadToken("this server accepts no tokens; use a key")
            bearer = tokens.verify(sent, None if is_stop else time.time())
        except BadToken as error:
            kind = KeyExpired if isinstance(error, TokenExpired) else Unauthorized
            raise kind(f"the token is not accepted: {error}") from None
        return Admission(bearer.caller, lambda: self._current_tokens() == tokens and time.time() < bearer.expires_at)

    def _current_keys(self) -> tuple[Key, ...]:
        return () if self._keys is None else self._read(self._keys.read_keys) or ()

    def _current_tokens(self) -> Tokens | None:
        return None if self._secret is None else self._read(self._secret.tokens)

    def _read(self, read: Callable[[], Content]) -> Content | None:
        """Content of a file, or None when the file cannot be used, which is logged."""
        try:
            return read()
        except FileUnusable as error:
            self._report_unusable(error)
            return None

    def _report_unusable(self, error: FileUnusable) -> None:
        # A file that cannot be used admits no request, and its absence opens nothing.
        self._requires_key = True
        if str(error) != self._reported:
            self._reported = str(error)
            log.error("%s; until then its last known content admits only requests that stop robots", error)


def _read_credential(request: "Request[Any, Any]") -> str | None:
    """Return the key or token of a request, None when it has none.

    Raises:
        Unauthorized: there are several, or the header is of another kind.
    """
    given = request.headers.getall("x-api-key", [])
    logins = [value.partition(" ") for value in request.headers.getall("authorization", [])]
    # openpi's client sends `Api-Key`.
    bearers = [rest.strip() for kind, _, rest in logins if kind.lower() in ("bearer", "api-key")]
    if len(given) + len(bearers) > 1:
        raise Unauthorized("more than one key was sent; send one, in one header")
    if given or bearers:
        return (given or bearers)[0]
    return None


def _read_ticket(request: "Request[Any, Any]") -> str | None:
    # A ticket is in the address, where other pages can put one: it may look, and open sockets, but change nothing.
    if request.method not in ("GET", "HEAD") or "ticket=" not in request.query_string:
        return None
    given = request.args.getlist("ticket") or []
    return given[0] if len(given) == 1 else None


# Method ("*": any), beginning of a route's path, and lowest role; None: another proof, or none, is required.
Rule = tuple[str, str, Role | None]
SAFE_METHODS = ("GET", "HEAD")
# Failed attempts of one address, per second and at once. Successful requests are never limited, so that other clients
# behind the same proxy cannot keep an operator from stopping a robot.
REFUSALS = (1 / 6, 10)


class AccessGuard:
    """Access guard of all routes of an app: the API, the rooms, the dashboard and its socket.

    The ``ctx_role`` of a route is the required role, or None. For routes without it, the first matching rule counts;
    all other routes require an admin.

    Args:
        is_local: whether the server listens on a loopback address. Then, and without keys, the Host header must name
            this machine, against DNS rebinding.
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
        self._logged_stops = Rates(*REFUSALS)

    @property
    def requires_key(self) -> bool:
        """Whether requests need a key."""
        return self.admissions.requires_key

    def install(self, app: Any) -> None:
        """Install the guard: from now on the app answers no request that ``authorize`` refuses."""

        @app.on_request
        async def let_in(request: "Request[Any, Any]") -> HTTPResponse | None:
            return self.authorize(request)

    def authorize(self, request: "Request[Any, Any]") -> HTTPResponse | None:
        """Return the answer that refuses a request; None if it is admitted, which sets its caller."""
        _set_admission(request, Admission(STRANGER, lambda: False))
        route = request.route
        if route is None:
            return None  # no route answers the request
        try:
            if not self.requires_key:
                self._check_host(request, route)
                is_own = self.admissions.is_own(request)
                _set_admission(request, Admission(ANYBODY, lambda: is_own or not self.requires_key))
            elif request.method != "OPTIONS":  # browsers send these without a key, and the response holds no data
                self._authorize(request, route, self._required_role(request, route))
        except ServiceError as error:
            return _error_response(error)
        return None

    def _authorize(self, request: "Request[Any, Any]", route: Any, role: Role | None) -> None:
        """Set the caller of a request.

        Raises:
            Unauthorized: the request has no accepted key, token or ticket, and the route needs one.
            TooManyRequests: too many requests of this address were refused before.
            Forbidden: the role of the caller is too low.
        """
        is_room, is_stop = (getattr(route.ctx, name, False) for name in ("is_room", "is_stop"))
        try:
            admission = self.admissions.authenticate(request, is_room=is_room, is_stop=is_stop)
        except Unauthorized as error:
            if role is None:
                return
            self._count_refusal(request, error, is_stop)
            raise
        _set_admission(request, admission)
        if role is not None and admission.caller.role < role:
            raise Forbidden(
                f"this request needs the role {role}, and key {admission.caller.name!r} is "
                f"{_with_article(admission.caller.role)}; "
                f"`robojax token new --role {role}` on the server's machine makes one"
            )

    def _required_role(self, request: "Request[Any, Any]", route: Any) -> Role | None:
        if hasattr(route.ctx, "role"):
            return route.ctx.role
        method = "GET" if request.method in SAFE_METHODS else request.method
        path = "/" + route.path.strip("/")
        for of, begin, role in self._rules:
            if of in ("*", method) and path.startswith(begin):
                return role
        return Role.ADMIN

    def _count_refusal(self, request: "Request[Any, Any]", error: Unauthorized, is_stop: bool) -> None:
        """Count and log a refused request; a refused stop is only logged, at a limited rate.

        Raises:
            TooManyRequests: too many requests of this address were refused before.
        """
        wait = (self._logged_stops if is_stop else self._refusals).take(request.ip)
        if wait > 0 and (is_stop or isinstance(error, KeyExpired)):
            return  # The caller must see why the key is refused.
        if wait > 0:
            raise TooManyRequests("too many attempts from this address were refused", wait)
        log.warning("%s %s from %s is refused: %s", request.method, request.path[:200], request.ip, error)

    def _check_host(self, request: "Request[Any, Any]", route: Any) -> None:
        host = request.headers.get("host")
        if self._is_local and hasattr(route.ctx, "role") and not self._origins.allows_host(host):
            raise HostHeaderRefused(
                "this server is only for its own machine, and the request's Host header has another name; use "
                "http://127.0.0.1 or localhost, or add the page's origin to the setting origins"
            )


class HostHeaderRefused(Forbidden):
    """The Host header names another host: a page's name may have been pointed at this machine (DNS rebinding)."""

    code = "host_refused"


def _set_admission(request: "Request[Any, Any]", admission: Admission) -> None:
    request.ctx.admission = admission
    request.ctx.caller = admission.caller
    request.ctx.is_still_authorized = admission.is_still_authorized


def _error_response(error: ServiceError) -> HTTPResponse:
    return json_response({"detail": str(error), "code": error.code}, error.status, error.headers)


def _with_article(role: Role) -> str:
    return f"an {role}" if role >= Role.OPERATOR else f"a {role}"


def create_guard(
    access: AccessSettings, *, host: str, origins: Sequence[str], state: str | None, rules: Sequence[Rule] = ()
) -> AccessGuard:
    """Create the guard of a server that listens on `host` and keeps its keys in the folder `state`.

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
        # A named file without a key admits no request.
        requires_key=access.keys_file is not None or access.jwt_secret_file is not None,
    )
    try:
        admissions.check_files()
    except FileUnusable as error:
        raise SettingsError(str(error)) from error
    return AccessGuard(admissions, origins=Origins(origins), is_local=is_loopback(host), rules=rules)
