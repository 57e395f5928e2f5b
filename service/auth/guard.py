"""Who is let in where: every request of an app gets its caller here, or is refused."""

from typing import Any

from sanic import HTTPResponse, Request

from service.auth.caller import ANYBODY


class Guard:
    """One for all routes of an app: the API, the rooms, the page and its socket."""

    @property
    def is_guarded(self) -> bool:
        """Whether a key is wanted."""
        return False

    def refusal(self, request: "Request[Any, Any]") -> HTTPResponse | None:
        """The answer to a request that is not let in; else its caller is known from now on."""
        request.ctx.caller = ANYBODY
        return None

    def watch(self, app: Any) -> None:
        """From now on this app lets nobody in whom ``refusal`` does not."""

        @app.on_request
        async def let_in(request: "Request[Any, Any]") -> HTTPResponse | None:
            return self.refusal(request)
