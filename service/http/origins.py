"""Rules for web pages that call the API, the rooms and their WebSockets, and security headers."""

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from sanic import Blueprint, HTTPResponse, Request, Sanic

# An origin as browsers send it: scheme://host[:port] (RFC 6454, 6.2).
_HOST = r"(?P<name>[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::\d{1,5})?"
_HOST_HEADER = re.compile(_HOST, re.IGNORECASE | re.ASCII)
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]{{0,31}}://(?P<host>{_HOST})", re.IGNORECASE | re.ASCII)


class Origins:
    """Rules for web pages that may call. Without them, any page could move a robot on localhost.

    A request without an Origin header passes, because no web page sent it. An invalid origin is refused.

    Args:
        allowed: exact origins, or ``*`` for all, in addition to pages of this machine.
    """

    def __init__(self, allowed: Sequence[str] = ()):
        self._allowed = frozenset(allowed)
        name = socket.gethostname().lower()
        self._own_names = {"localhost", name, f"{name}.local"}
        self._hosts = {urlsplit(origin).hostname for origin in self._allowed}

    def allows(self, origin: str | None, host: str | None) -> bool:
        """Return whether a request with these Origin and Host headers may pass."""
        if origin is None:
            return True
        found = _ORIGIN.fullmatch(origin)
        if found is None and origin != "null":
            return False
        if "*" in self._allowed or origin in self._allowed:
            return True
        if found is None:
            return False
        name = found["name"].lower().strip("[]")
        if is_loopback(name):
            return True
        # A page of this server. Any other name could be a foreign page's, with a DNS entry for this address.
        return found["host"] == host and (name in self._own_names or _is_address(name))

    def allows_host(self, host: str | None) -> bool:
        """Return whether a Host header names this machine or an allowed page."""
        if host is None or "*" in self._allowed:
            return True
        found = _HOST_HEADER.fullmatch(host)
        name = found["name"].lower().strip("[]") if found else None
        return name is not None and (name in self._own_names or name in self._hosts or _is_address(name))

    def install(self, target: "Sanic[Any, Any] | Blueprint") -> None:
        """Refuse requests of foreign pages to this app or blueprint."""

        @target.on_request
        async def refuse(request: Request[Any, Any]) -> HTTPResponse | None:
            return self.refuse_request(request)

    def install_cors(self, blueprint: Blueprint, methods: Mapping[str, Sequence[str]]) -> None:
        """Install these rules, and let allowed pages of other origins call.

        Args:
            methods: methods that OPTIONS names, by path.
        """
        self.install(blueprint)

        @blueprint.on_response
        async def allow(request: Request[Any, Any], response: HTTPResponse | None) -> None:
            self._add_cors_headers(request, response)

        for number, (path, allowed) in enumerate(methods.items()):
            # The default value binds the methods of this path; a closure would see the last path's methods.
            async def options(
                request: Request[Any, Any], allowed: Sequence[str] = allowed, **parts: str
            ) -> HTTPResponse:
                return _answer_preflight(request, allowed)

            blueprint.add_route(
                options, path, methods=["OPTIONS"], name=f"options{number}", error_format="json", ctx_role=None
            )

    def refuse_request(self, request: Request[Any, Any]) -> HTTPResponse | None:
        """Return a 403 response for a page that may not call, else None."""
        if self.allows(request.headers.get("origin"), request.headers.get("host")):
            return None
        text = '{"detail":"This origin may not call; add it to the setting origins","code":"origin_refused"}'
        return HTTPResponse(text, status=403, content_type="application/json")

    def _add_cors_headers(self, request: Request[Any, Any], response: HTTPResponse | None) -> None:
        """Let an allowed page of another origin read the response, without the browser's cookies and logins."""
        origin = request.headers.get("origin")
        if response is None or origin is None or not self.allows(origin, request.headers.get("host")):
            return
        response.headers["access-control-allow-origin"] = origin
        response.headers["access-control-expose-headers"] = "x-request-id"
        response.headers["vary"] = "origin"


def add_security_headers(response: HTTPResponse) -> None:
    """Add headers against sniffing, framing, caching, sharing, and loading of other content."""
    for name, value in _HEADERS:
        response.headers.setdefault(name, value)


_HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
)


def _answer_preflight(request: Request[Any, Any], methods: Sequence[str]) -> HTTPResponse:
    """Answer OPTIONS for a path with these methods."""
    allowed = ", ".join(methods)
    headers = {"allow": allowed}
    if "access-control-request-method" in request.headers:
        headers |= {
            "access-control-allow-methods": allowed,
            "access-control-allow-headers": "authorization, content-type, x-api-key",
            "access-control-max-age": "600",
        }
    return HTTPResponse(status=204, headers=headers)


def is_loopback(host: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
