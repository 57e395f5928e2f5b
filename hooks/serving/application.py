"""The Sanic app of a webhooks server, which ASGI clients may call too while it serves."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sanic import HTTPResponse, Request, Sanic
from sanic.config import Config
from sanic.exceptions import SanicException
from sanic.response import json

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUEST_DEADLINE = 20  # seconds of a request's head; the receiver has a stricter limit for a body


class WebhooksApp(Sanic[Any, Any]):
    """A Sanic app. While a server runs it, an ASGI call from another loop is carried out on the server's.

    Test clients of Starlette and httpx call from a loop of their own, where nothing of the receiver lives. An ASGI
    server may run it by itself too: it then sends ``lifespan`` first, and all happens on its loop.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it runs on; Sanic knows it only when it made the loop itself."""
        return getattr(self.ctx, "loop", None) or super().loop

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        serving: asyncio.AbstractEventLoop | None = getattr(self.ctx, "loop", None)
        here = asyncio.get_running_loop()
        if scope["type"] == "lifespan" and serving is not None:
            # It has begun before, and goes on when this caller ends.
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
            return
        if serving is None or serving is here:
            if scope["type"] == "http" and not self.state.is_started:
                raise RuntimeError(
                    "this app does not run: call server.launch(prevent_thread_lock=True) before, or give the client "
                    "the app as a context (lifespan events)"
                )
            await super().__call__(_with_raw_path(scope), receive, send)
            return

        async def receive_there() -> Message:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_await(receive), here))

        async def send_there(message: Message) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_await(send, message), here))

        answered = super().__call__(_with_raw_path(scope), receive_there, send_there)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered, serving))


async def _await(call: Callable[..., Awaitable[Any]], *arguments: Message) -> Any:
    return await call(*arguments)


def _with_raw_path(scope: Message) -> Message:
    """The optional ``raw_path`` of ASGI, which Sanic wants."""
    if scope.get("raw_path") is None and "path" in scope:
        return {**scope, "raw_path": scope["path"].encode()}
    return scope


def new_app(max_body: int) -> WebhooksApp:
    """An app without routes, whose errors are JSON without anything of ours in them."""
    # Without a prefix nothing is read from the environment.
    config = Config(env_prefix="")
    config.update(
        REQUEST_MAX_SIZE=max_body,
        REQUEST_TIMEOUT=REQUEST_DEADLINE,
        KEEP_ALIVE_TIMEOUT=15,
        GRACEFUL_SHUTDOWN_TIMEOUT=3,
        FALLBACK_ERROR_FORMAT="json",
        AUTO_EXTEND=False,
        MOTD=False,
        TOUCHUP=False,  # it rewrites Sanic's classes from their source: a second app of one process would not start
    )
    app = WebhooksApp(f"webhooks-{secrets.token_hex(4)}", config=config, configure_logging=False)
    # Sanic keeps every app in a registry; servers are made and thrown away.
    Sanic.unregister_app(app)
    app.error_handler.add(Exception, _tell)
    return app


def _tell(request: Request | None, error: Exception) -> HTTPResponse:
    if isinstance(error, SanicException):
        status = error.status_code or 500
        text = str(error) if status < 500 else "The server cannot answer this now."
        return json({"error": text}, status=status, headers=error.headers)
    logger.error("%s %s failed", *(("?", "?") if request is None else (request.method, request.path)), exc_info=error)
    return json({"error": "Internal Server Error"}, status=500)
