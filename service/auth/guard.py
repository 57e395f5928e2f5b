"""Who is let in where: every request of an app gets its caller here, or is refused."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from sanic import HTTPResponse, Request

from service.auth.admission import Admission, Admissions, Over
from service.auth.caller import ANYBODY, STRANGER
from service.auth.roles import Role
from service.edge.limits import Rates
from service.edge.origins import Origins
from service.errors import Forbidden, ServiceError, TooManyRequests, Unauthorized

log = logging.getLogger(__name__)

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
        if self._is_local and hasattr(route.ctx, "role") and not self._origins.knows_host(host):
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
