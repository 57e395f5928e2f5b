"""``webhook_endpoint``: one decorator, and the script is a server."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from hooks.serving.server import WebhooksServer

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def the_server() -> WebhooksServer:
    """The one server of every ``webhook_endpoint`` of this process."""
    return WebhooksServer()


@overload
def webhook_endpoint(path: Function, /) -> Function: ...


@overload
def webhook_endpoint(path: str | None = None, **options: Any) -> Callable[[Function], Function]: ...


def webhook_endpoint(path: Any = None, **options: Any) -> Any:
    """Register a function; the server starts when the script has ended.

    ``function.run()`` (or ``.launch()``) starts it now, as a notebook has to. It does not start by itself when the
    script crashed, in a REPL or notebook, under pytest, in child processes, and with ``ROBOJAX_WEBHOOKS_AT_EXIT=0``.

    Args:
        path: under ``/webhooks``; the function's name when None.
        options: filters and how it is run, as of ``WebhooksServer.add_webhook``.

    Returns:
        The function as it is, with ``launch``, ``run`` and ``close`` attached.
    """
    if callable(path):
        return webhook_endpoint(None, **options)(path)

    def register(function: Any) -> Any:
        server = the_server()
        server.add_webhook(path, **options)(function)
        server.start_at_exit()
        # A bound method takes no attributes.
        with contextlib.suppress(AttributeError, TypeError):
            function.launch, function.run, function.close = server.launch, server.run, server.close
        return function

    return register
