"""POST /tickets: what a browser needs to open a WebSocket, or to follow a link, where a key is wanted."""

from sanic import HTTPResponse

from service.auth.roles import Role
from service.auth.tickets import LIFETIME
from service.routes.answers import answer
from service.routes.context import Request
from service.routes.route import Route


async def make_ticket(request: Request) -> HTTPResponse:
    """A ticket lets one GET or WebSocket in, as `?ticket=...`, within 30 s and as the caller who got it.

    It stands in an address, which is written down in places; so it is used up at once, and changes nothing itself.
    """
    ticket = request.app.ctx.guard.admissions.ticket(request.ctx.admission)
    return answer({"ticket": ticket, "expires_in": int(LIFETIME)})


_TICKET = {
    "type": "object",
    "properties": {"ticket": {"type": "string"}, "expires_in": {"type": "integer", "description": "seconds"}},
    "required": ["ticket", "expires_in"],
}
ROUTES = (Route("POST", "/tickets", make_ticket, "Access", _TICKET, role=Role.VIEWER),)
