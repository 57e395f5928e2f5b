"""WebhooksServer, and `webhook_endpoint` for scripts of a few functions."""

import contextlib
import functools
import inspect
import os
import secrets
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from sanic import HTTPResponse, Request, Sanic
from sanic.response import json

from hooks.errors import HooksError, InvalidWebhook
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.receiver import Receiver
from hooks.server import event_routes, pages
from hooks.server.lifecycle import AtExit, is_interactive, register_at_exit, resolve_settings
from hooks.server.serving import (
    BackgroundServer,
    build_app,
    build_url,
    choose_address,
    choose_tunnel,
    has_running_loop,
    open_listener,
    open_tunnel,
    serve_until_signal,
)

OPEN = (
    "Webhook secret is not defined. This means your webhook endpoints will be open to everyone.\n"
    "To add a secret, set `WEBHOOK_SECRET` as environment variable or pass it at initialization:\n"
    "    WebhooksServer(webhook_secret='...')\n"
    "For more details about webhook secrets, see https://huggingface.co/docs/hub/webhooks#webhook-secret"
)
CLOSED = "Webhook secret is correctly defined."
# Printed once, because the Hub needs the secret.
SECRET_MADE = (
    "The address is public and no secret was set, so a secret was generated for this run. Give it to the Hub:\n"
    "    {secret}"
)


def print_notice(text: str) -> None:
    """Print one notice to the terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def format_addresses(local: str, public: str | None, paths: Sequence[str]) -> str:
    """Format the addresses for the terminal."""
    url = public or local
    lines = ["", f"Running on local URL: {local}"]
    if public is not None:
        lines.append(f"Running on public URL: {public}")
    lines.append("Webhooks are correctly setup and ready to use:")
    lines += [f"  - POST {url}{path}" for path in paths] or ["  (none yet: decorate a function with add_webhook)"]
    lines.append("Go to https://huggingface.co/settings/webhooks to setup your webhooks.")
    return "\n".join(lines)


Function = TypeVar("Function", bound=Callable[..., Any])

RESERVED = ("_events",)


class WebhooksServer:
    """Server whose endpoints are functions, each at ``/webhooks/<name>``.

    Args:
        ui: page at ``/`` instead of the landing page: HTML or a Sanic blueprint, which may serve files.
        webhook_secret: secret that the Hub sends as ``X-Webhook-Secret``, or several during a rotation; the variable
            ``WEBHOOK_SECRET`` when None or empty. Without a secret the server is open to everyone and prints a warning.
        host: address to listen on; 127.0.0.1, or all addresses on a Space.
        port: port; None for the first free port from 7860, 0 for any free port.
        share: whether a tunnel provides a public address: ``cloudflared``, ``ngrok``, or the command in
            ``ROBOJAX_WEBHOOKS_TUNNEL``; a missing secret is generated.
        database: file that keeps events over a restart; None for ``ROBOJAX_WEBHOOKS_DATABASE``, else the script's file
            in ``~/.local/state/robojax/webhooks``. With ``"memory"`` or without a script, a restart loses the events.
        settings: all other settings of the receiver; the arguments above take precedence.

    Raises:
        TypeError: ``ui`` is neither HTML nor a blueprint.
        InvalidWebhook: a secret is invalid.

    Example:
        >>> from hooks import WebhookPayload
        >>> server = WebhooksServer(webhook_secret="a secret of the Hub", database="memory")
        >>> @server.add_webhook
        ... async def push(payload: WebhookPayload):
        ...     return {"repo": payload.repo.name}
        >>> list(server.registered_webhooks)
        ['/webhooks/push']
    """

    def __init__(
        self,
        ui: object = None,
        webhook_secret: str | Sequence[str] | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        share: bool = False,
        database: str | Path | None = None,
        settings: ReceiverSettings | None = None,
    ):
        self._ui = None if ui is None else pages.build_ui_blueprint(ui)
        self._host, self._port, self._share = host, port, share
        self.receiver = Receiver(resolve_settings(settings, webhook_secret, database))
        self._app: Sanic[Any, Any] | None = None
        self._background: BackgroundServer | None = None
        self._local: str | None = None
        self._public: str | None = None
        self._stop = threading.Event()
        self._at_exit = AtExit(self.launch)

    @property
    def settings(self) -> ReceiverSettings:
        """Settings of the receiver, with the secret and database of this server."""
        return self.receiver.settings

    @property
    def registered_webhooks(self) -> Mapping[str, Callable[..., Any]]:
        """Registered functions by absolute path."""
        return {path: endpoint.handler.function for path, endpoint in self.receiver.endpoints.items()}

    @property
    def app(self) -> Sanic[Any, Any]:
        """Sanic app with all endpoints added so far; ``close`` discards it."""
        if self._app is None:
            self._app = self._new_app()
        return self._app

    @property
    def url(self) -> str | None:
        """Public address if there is one, else the local address; None while stopped."""
        return (self._public or self._local) if self.is_running else None

    @property
    def local_url(self) -> str | None:
        """Address on this machine; None while stopped."""
        return self._local if self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._background is not None and self._background.is_running

    @overload
    def add_webhook(self, path: Function, /) -> Function: ...

    @overload
    def add_webhook(self, path: str | None = None, **options: Any) -> Callable[[Function], Function]: ...

    def add_webhook(self, path: Any = None, **options: Any) -> Any:
        """Register a function: ``@server.add_webhook`` or ``@server.add_webhook("path")``.

        Args:
            path: path under ``/webhooks``; None for the function's name. Slashes at both ends are ignored.
            options: ``mode`` of ``Receiver.add``.

        Returns:
            The function itself.

        Raises:
            ValueError: the path is taken, or a parameter of the function has no known meaning.
            TypeError: the decorated object is not a function.
        """
        if callable(path):
            return self._add(path, None, options)
        if path is not None and not isinstance(path, str):
            raise TypeError(
                f"add_webhook: found {type(path).__name__} {path!r:.60}, wanted a function, or a path as text"
            )
        return lambda function: self._add(function, path, options)

    def _add(self, function: Any, path: str | None, options: dict[str, Any]) -> Any:
        if not callable(function) or inspect.isclass(function):
            raise TypeError(
                f"a webhook is a function: found {type(function).__name__} {function!r:.60}. In a class, register the "
                "method of an object: server.add_webhook(robot.on_push)"
            )
        if self.is_running:
            raise HooksError("the server runs already: close() it, add the webhook, launch() it again")
        if self._app is not None:
            # The user may have added routes to the app, which a new app would lack.
            raise HooksError("the app exists already, and its routes are fixed: add webhooks before you read .app")
        if path is not None and path.strip("/").split("/")[0] in RESERVED:
            raise InvalidWebhook(f"webhook path {path!r} is a page of the server; choose another path")
        self.receiver.add(function, path, **options)
        return function

    def run(self) -> None:
        """Serve until Ctrl-C or SIGTERM; short for ``launch()``."""
        self.launch(prevent_thread_lock=False)

    def launch(
        self,
        prevent_thread_lock: bool = False,
        *,
        share: bool | None = None,
        host: str | None = None,
        port: int | None = None,
    ) -> None:
        """Start the server unless it runs, and print the addresses.

        Args:
            prevent_thread_lock: whether to return and serve in the background, which always happens in a notebook, in
                a REPL and in a running event loop. Else this returns after Ctrl-C, SIGTERM or ``close``.

        Raises:
            CannotListen: the port is taken.
            StoreError: the file of events cannot be used.
            TunnelFailed: the tunnel program printed no public address.
        """
        self._at_exit.cancel()
        if not self.is_running:
            self._start(
                self._share if share is None else share, host or self._host, self._port if port is None else port
            )
        assert self._local is not None
        print_notice(format_addresses(self._local, self._public, list(self.registered_webhooks)))
        if not (prevent_thread_lock or is_interactive() or has_running_loop()):
            self.block_thread()

    def _start(self, share: bool, host: str | None, port: int | None) -> None:
        command: Sequence[str] | None = None
        if share:
            command = choose_tunnel()
            if not self.settings.secrets:
                secret = secrets.token_urlsafe(32)
                self.receiver.settings = replace(self.settings, secrets=(secret,))
                print_notice(SECRET_MADE.format(secret=secret))
        where, ports = choose_address(host, port)
        listener = open_listener(where, ports)
        self._stop.clear()
        app, self._local = self.app, build_url(listener)
        space = os.environ.get("SPACE_HOST")
        self._public = f"https://{space}" if space else None
        try:
            self._background = BackgroundServer(
                app, listener, lambda: self._share_publicly(command, build_url(listener))
            )
        except BaseException:
            self._app = None
            raise
        # At the end of the main program, close while threads can still be used.
        reference = weakref.WeakMethod(self.close)
        with contextlib.suppress(RuntimeError):
            register_at_exit(lambda: (close := reference()) and close())
        print_notice(CLOSED if self.settings.secrets else OPEN)

    @asynccontextmanager
    async def _share_publicly(self, command: Sequence[str] | None, local: str) -> AsyncIterator[None]:
        if command is None:
            yield
            return
        async with open_tunnel(command, local) as public:
            self._public = public
            try:
                yield
            finally:
                self._public = None

    def block_thread(self) -> None:
        """Wait until Ctrl-C, SIGTERM or ``close`` ends the server; a second signal ends the process at once."""
        serve_until_signal(self._stop, lambda: self.is_running, self.close)

    def close(self) -> None:
        """Stop the server, after a short wait for running requests and handlers."""
        self._at_exit.cancel()
        self._stop.set()
        background, self._background = self._background, None
        if background is not None:
            background.stop()
            self._app = None

    def __enter__(self) -> "WebhooksServer":
        """Serve in the background within a ``with`` block."""
        self.launch(prevent_thread_lock=True)
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the server."""
        self.close()

    def _new_app(self) -> Sanic[Any, Any]:
        app = build_app(self.settings.max_body)
        app.blueprint(self.receiver.blueprint())
        app.blueprint(event_routes.build_blueprint(self.receiver, lambda: self.settings.secrets))
        if self._ui is None:
            links = {"Health": "/healthz"}
            app.blueprint(pages.build_blueprint(self.receiver, "/", base=lambda: self._public, links=links))
        else:
            app.blueprint(self._ui)

        @app.get("/healthz", name="healthz")
        async def healthz(request: Request) -> HTTPResponse:
            return json({"status": "ok"})

        return app


@functools.cache
def get_default_server() -> WebhooksServer:
    """Return the server of all ``webhook_endpoint`` functions in this process."""
    return WebhooksServer()


@overload
def webhook_endpoint(path: Function, /) -> Function: ...


@overload
def webhook_endpoint(path: str | None = None, **options: Any) -> Callable[[Function], Function]: ...


def webhook_endpoint(path: Any = None, **options: Any) -> Any:
    """Register a function; the server starts at the end of the script.

    ``function.run()`` (or ``.launch()``) starts the server now, for example in a notebook. The server does not start
    by itself after a crash of the script, in a REPL or notebook, under pytest, in child processes, and with
    ``ROBOJAX_WEBHOOKS_AT_EXIT=0``.

    Args:
        path: path under ``/webhooks``; None for the function's name.
        options: ``mode`` of ``Receiver.add``.

    Returns:
        The function itself, with ``launch``, ``run`` and ``close`` attached.

    Example:
        >>> from hooks import WebhookPayload
        >>> @webhook_endpoint
        ... async def on_push(payload: WebhookPayload):
        ...     print(payload.repo.name)
        >>> on_push.launch()  # doctest: +SKIP
    """
    if callable(path):
        return webhook_endpoint(None, **options)(path)

    def register(function: Any) -> Any:
        server = get_default_server()
        server.add_webhook(path, **options)(function)
        server._at_exit.arm()
        # A bound method accepts no attributes.
        with contextlib.suppress(AttributeError, TypeError):
            function.launch, function.run, function.close = server.launch, server.run, server.close
        return function

    return register
