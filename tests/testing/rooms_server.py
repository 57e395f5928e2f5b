from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.auth.guard import AccessGuard
from service.http.server import listen, serve_app
from service.transport.server.app import RoomsSettings, create_transport_app


@asynccontextmanager
async def serve_transport(
    settings: RoomsSettings | None = None, port: int = 0, guard: AccessGuard | None = None
) -> AsyncIterator[str]:
    """Serve a transport server on the running event loop and yield its URL. Port 0 lets the system choose a port."""
    async with serve_app(create_transport_app(settings, guard), listen("127.0.0.1", port)) as url:
        yield url
