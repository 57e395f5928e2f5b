"""Which web pages may call: CORS headers, preflights, and the same rule for WebSockets, which browsers do not check."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from sanic import HTTPResponse, Request


class Origins:
    """A list of exact origins, or ``*``. A request without an Origin header comes from no web page and passes."""

    def __init__(self, allowed: Sequence[str]):
        self.allowed = frozenset(allowed)

    def allows(self, origin: str | None) -> bool:
        """Whether this Origin header passes."""
        return origin is None or "*" in self.allowed or origin in self.allowed

    def refusal(self, request: Request) -> HTTPResponse | None:
        """403 for a page that may not call, before anything happens on its behalf."""
        if self.allows(request.headers.get("origin")):
            return None
        return HTTPResponse('{"detail":"Origin not allowed"}', status=403, content_type="application/json")

    def allow(self, request: Request, response: HTTPResponse | None) -> None:
        """Add the headers that let the page read the answer."""
        origin = request.headers.get("origin")
        if origin is None or response is None or not self.allows(origin):
            return
        if "*" in self.allowed:
            response.headers["access-control-allow-origin"] = "*"
        else:
            response.headers["access-control-allow-origin"] = origin
            response.headers["access-control-allow-credentials"] = "true"
            response.headers["vary"] = "Origin"

    def preflight(self, methods: Sequence[str]) -> Callable[..., Coroutine[Any, Any, HTTPResponse]]:
        """What answers OPTIONS for a path with these methods."""

        async def options(request: Request, **parts: str) -> HTTPResponse:
            headers = {"access-control-allow-methods": ", ".join(sorted(methods)), "access-control-max-age": "600"}
            wanted = request.headers.get("access-control-request-headers")
            if wanted:
                headers["access-control-allow-headers"] = wanted
            return HTTPResponse("OK", status=200, headers=headers, content_type="text/plain")

        return options
