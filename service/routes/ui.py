"""The page at /ui, its files, and its socket."""

from sanic import Blueprint, HTTPResponse
from sanic.exceptions import NotFound
from sanic.response import redirect
from sanic.server.websockets.impl import WebsocketImplProtocol

from service.auth.caller import caller_of
from service.auth.roles import Role
from service.edge.origins import Origins
from service.routes.context import Request
from service.routes.route import Route
from service.ui.files import POLICY, File, read_files

PAGE = "page.html"
FILES = read_files()


async def get_page(request: Request) -> HTTPResponse:
    """The page that shows what happens and stops it."""
    if request.path.endswith("/"):
        # Its files are named from here, and so would be looked for one place too deep.
        return redirect("../ui")
    return _answer(FILES[PAGE])


async def get_page_file(request: Request, name: str) -> HTTPResponse:
    """One of the page's files."""
    if name not in FILES or name == PAGE:
        raise NotFound()
    return _answer(FILES[name])


def _answer(file: File) -> HTTPResponse:
    headers = {
        "content-security-policy": POLICY,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    return HTTPResponse(file.content, content_type=file.type, headers=headers)


def live_blueprint(prefix: str, origins: Origins) -> Blueprint:
    """``{prefix}/ui/live``; the guard has looked at the caller's ticket or key before."""
    blueprint = Blueprint(f"live{prefix.replace('/', '-')}")

    async def live(request: Request, websocket: WebsocketImplProtocol) -> None:
        await request.app.ctx.live.attend(websocket, caller_of(request), request.ctx.is_still_in)

    blueprint.add_websocket_route(live, f"{prefix}/ui/live", name="live", error_format="json", ctx_role=Role.VIEWER)

    # A function, because Sanic's blueprints silently ignore a bound method as middleware.
    @blueprint.on_request
    async def refuse(request: Request) -> HTTPResponse | None:
        return origins.refusal(request)

    return blueprint


# The page asks for a key itself, so it is there for everybody; its socket is not.
ROUTES = (
    Route("GET", "/ui", get_page, "Documents", {"type": "string"}, content_type="text/html", role=None),
    Route(
        "GET",
        "/ui/{name}",
        get_page_file,
        "Documents",
        {"type": "string"},
        content_type="text/plain",
        errors=(404,),
        role=None,
    ),
)
