"""WebhooksServer, and `webhook_endpoint` for scripts of one function."""

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
from contextvars import ContextVar
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, overload

from sanic import HTTPResponse, Request
from sanic.response import json

from hooks.errors import HooksError, InvalidWebhook
from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.receiver import Receiver
from hooks.server import event_routes, pages
from hooks.server.lifecycle import AtExit, get_exit_hook, is_interactive, resolve_settings
from hooks.server.serving import (
    BackgroundServer,
    WebhooksApp,
    build_app,
    build_url,
    choose_address,
    has_running_loop,
    open_listener,
    serve_until_signal,
)
from hooks.server.tunnel import Program, choose_program, open_tunnel

OPEN = (
    "Webhook secret is not defined. This means your webhook endpoints will be open to everyone.\n"
    "To add a secret, set `WEBHOOK_SECRET` as environment variable or pass it at initialization:\n"
    "    WebhooksServer(webhook_secret='...')\n"
    "For more details about webhook secrets, see https://huggingface.co/docs/hub/webhooks#webhook-secret"
)
CLOSED = "Webhook secret is correctly defined."
SHARED = "A share link lives for 72 hours at most and changes with every start"
SPACE = "A Space on free hardware sleeps after 48 hours without traffic: deliveries then fail"
CHANGES = "This interface may still change: pin the version you use (robojax=={version})"


def print_notice(text: str) -> None:
    """Print one notice to the terminal."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def format_addresses(local: str, public: str | None, paths: Sequence[str]) -> str:
    """Format the addresses for the terminal, once the server answers."""
    url = public or local
    lines = ["", f"Running on local URL: {local}"]
    if public is not None:
        lines.append(f"Running on public URL: {public}")
    lines.append("Webhooks are correctly setup and ready to use:")
    lines += [f"  - POST {url}{path}" for path in paths] or ["  (none yet: decorate a function with add_webhook)"]
    lines.append("Go to https://huggingface.co/settings/webhooks to setup your webhooks.")
    return "\n".join(lines)


def describe_limits(database: Path | None, version: str) -> str:
    """Describe the limits that users would otherwise learn by losing events."""
    storage = "in memory and forgotten when this ends; database='webhooks.sqlite3' keeps them"
    lines = [
        SHARED,
        SPACE,
        CHANGES.format(version=version),
        f"Events are kept {f'in {database}' if database else storage}",
    ]
    return "Good to know:\n" + "\n".join(f"  - {line}." for line in lines)


def format_generated_secret(secret: str) -> str:
    """Format the notice of a generated secret; it is shown this one time, because the Hub has to be given it."""
    return (
        "The address is public and no secret was set, so one was made for this run. Give it to the Hub with the "
        f"webhook:\n    {secret}"
    )


def check_function(function: Any) -> None:
    """Raise for a value that cannot be called with a delivery.

    Raises:
        TypeError: it is a class, a method without its object, or nothing that is called at all.
    """
    if isinstance(function, classmethod | property) or not callable(function):
        raise TypeError(
            f"a webhook is a function: found {describe_value(function)}. In a class, register the method of an object: "
            "server.add_webhook(robot.on_push)"
        )
    if inspect.isclass(function):
        raise TypeError(f"a webhook is a function: found the class {function.__name__}")
    if inspect.isfunction(function) and "." in function.__qualname__.rpartition("<locals>.")[2]:
        first = next(iter(inspect.signature(function).parameters), None)
        if first in ("self", "cls"):
            raise TypeError(
                f"{function.__qualname__} is a method and wants an object, which nobody has yet; register that of an "
                f"object: server.add_webhook(robot.{function.__name__})"
            )


def describe_value(value: object) -> str:
    """Describe a value for an error's text."""
    return f"{type(value).__name__} {value!r:.60}"


Function = TypeVar("Function", bound=Callable[..., Any])

RESERVED = ("_events",)
# While a script is only looked at for its server, by a command that starts it as it is told to.
is_script_being_loaded: ContextVar[bool] = ContextVar("is_script_being_loaded", default=False)


class WebhooksServer:
    """A server whose endpoints are functions, each at ``/webhooks/<name>``.

    Args:
        ui: what stands at ``/`` in place of the landing page: HTML, a file or folder, or a Sanic blueprint.
        webhook_secret: what the Hub sends as ``X-Webhook-Secret``; ``WEBHOOK_SECRET`` when None or empty; several while
            one replaces another. Without any the server is open to everyone, and says so.
        host: to listen on; 127.0.0.1, or all addresses on a Space.
        port: the first free one from 7860 on when None, any free one when 0.
        share: ask ``cloudflared``, ``ngrok`` or ``tunnel`` for a public address; without a secret one is made.
        tunnel: a command that makes a public address, with ``{url}``, ``{host}`` and ``{port}`` in it.
        database: file that keeps events over a restart; ``ROBOJAX_WEBHOOKS_DATABASE`` when None, else one of the
            script's own in ``~/.local/state/robojax/webhooks``. ``"memory"``, or no script: a restart forgets them.
        settings: all else about receiving; arguments here win over it.

    Raises:
        TypeError: ``ui`` is none of these.
        InvalidWebhook: a secret cannot be one.
    """

    def __init__(
        self,
        ui: object = None,
        webhook_secret: str | Sequence[str] | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        share: bool = False,
        tunnel: str | Sequence[str] | None = None,
        database: str | Path | None = None,
        settings: ReceiverSettings | None = None,
    ):
        self._ui = None if ui is None else pages.check_ui(ui)
        self._host, self._port, self._share, self._tunnel = host, port, share, tunnel
        self._settings = resolve_settings(
            settings, webhook_secret, database, has_script=not is_script_being_loaded.get()
        )
        self._added: list[tuple[Callable[..., Any], str | None, dict[str, Any]]] = []
        self._receiver = Receiver(self._settings)
        self._app: WebhooksApp | None = None
        self._background: BackgroundServer | None = None
        self._local: str | None = None
        self._public: str | None = None
        self._stop = threading.Event()
        self._at_exit = AtExit(self.launch)

    @property
    def _has_secret(self) -> bool:
        settings = self._settings
        return bool(settings.secrets or settings.standard_secrets or settings.github_secrets)

    @property
    def settings(self) -> ReceiverSettings:
        """Settings of the receiver; they can be replaced until it runs."""
        return self._settings

    @settings.setter
    def settings(self, settings: ReceiverSettings) -> None:
        self._refuse_while_running("change its settings")
        self._settings = settings
        self._rebuild_receiver()

    def _refuse_while_running(self, what: str) -> None:
        if self.is_running:
            raise HooksError(f"the server runs already: close() it, {what}, launch() it again")

    @property
    def registered_webhooks(self) -> Mapping[str, Callable[..., Any]]:
        """Registered functions by absolute path."""
        return self._receiver.registered

    @property
    def receiver(self) -> Receiver:
        """Receiver of the deliveries."""
        return self._receiver

    @property
    def app(self) -> WebhooksApp:
        """Sanic app with the endpoints added before this is first used; another one after ``close``."""
        if self._app is None:
            self._app = self._new_app()
        return self._app

    @property
    def fastapi_app(self) -> WebhooksApp:
        """The app by huggingface_hub's name for it; an ASGI test client takes it."""
        return self.app

    @property
    def url(self) -> str | None:
        """Public address if there is one, else the local one; None while stopped."""
        return (self._public or self._local) if self.is_running else None

    @property
    def local_url(self) -> str | None:
        """Address on this machine; None while stopped."""
        return self._local if self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether the server answers."""
        return self._background is not None and self._background.is_running

    @overload
    def add_webhook(self, path: Function, /) -> Function: ...

    @overload
    def add_webhook(self, path: str | None = None, **options: Any) -> Callable[[Function], Function]: ...

    def add_webhook(self, path: Any = None, **options: Any) -> Any:
        """Register a function: ``@server.add_webhook``, ``@server.add_webhook("path")``, with filters or without.

        Args:
            path: under ``/webhooks``; the function's name when None. Slashes at both ends do not count.
            options: filters (``events``, ``repos``, ``repo_types``, ``scopes``, ``actions``, ``refs``) and how it is
                run (``mode``, ``concurrency``, ``timeout``, ``secret``, ``coalesce``, ``retry``): see ``Receiver.add``.

        Returns:
            The function as it is.

        Raises:
            ValueError: there is a webhook of this path already, or the function takes what there is not.
            TypeError: it was put on something that is no function.
        """
        if callable(path):
            return self._add(path, None, options)
        if path is not None and not isinstance(path, str):
            raise TypeError(f"add_webhook: found {describe_value(path)}, wanted a function, or a path as text")
        return lambda function: self._add(function, path, options)

    def _add(self, function: Any, path: str | None, options: dict[str, Any]) -> Any:
        check_function(function)
        self._refuse_while_running("add the webhook")
        if self._app is not None:
            # Whoever has it may have added to it; another one would be without that.
            raise HooksError("the app is made already, and its routes are fixed: add webhooks before .app is asked for")
        if path is not None and path.strip("/").split("/")[0] in RESERVED:
            raise InvalidWebhook(f"webhook path {path!r} is a page of the server's; give it another one")
        self._receiver.add(function, path, **options)
        self._added.append((function, path, options))
        return function

    def _rebuild_receiver(self) -> None:
        """Build a new receiver with the same endpoints, because the routes of one with an app are fixed."""
        self._receiver, self._app = Receiver(self._settings), None
        for function, path, options in self._added:
            self._receiver.add(function, path, **options)

    def start_at_exit(self) -> None:
        """Serve when the script has ended, unless ``launch`` was called before or the script crashed."""
        self._at_exit.arm()

    def cancel_start_at_exit(self) -> bool:
        """Cancel the start at the script's end; return whether one was scheduled."""
        return self._at_exit.cancel()

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
        server_name: str | None = None,
        server_port: int | None = None,
    ) -> None:
        """Serve now and print the addresses; a server that runs already goes on.

        Args:
            prevent_thread_lock: return when it answers, and serve in the background; always so in a notebook, in a REPL
                and where an event loop runs. Else this returns when Ctrl-C, SIGTERM or ``close`` has ended the server.
            server_name: ``host`` by its name in gradio.
            server_port: ``port`` likewise.

        Raises:
            CannotListen: the port is taken.
            StoreError: the file of events cannot be used.
            TunnelFailed: there is no public address to be had.
        """
        if is_script_being_loaded.get():
            return
        self._at_exit.cancel()
        if not self.is_running:
            ports = (port, server_port, self._port)
            self._start(
                self._share if share is None else share,
                host or server_name or self._host,
                next((one for one in ports if one is not None), None),
            )
        assert self._local is not None
        print_notice(format_addresses(self._local, self._public, list(self.registered_webhooks)))
        if not (prevent_thread_lock or is_interactive() or has_running_loop()):
            self.block_thread()

    def _start(self, share: bool, host: str | None, port: int | None) -> None:
        program: Program | None = None
        if share:
            program = choose_program(self._tunnel)
            if not self._has_secret:
                self._make_secret()
        where, ports = choose_address(host, port)
        listener = open_listener(where, ports)
        self._stop.clear()
        app, self._local = self.app, build_url(listener)
        space = os.environ.get("SPACE_HOST")
        self._public = f"https://{space}" if space else None
        try:
            self._background = BackgroundServer(
                app, listener, lambda: self._share_publicly(program, build_url(listener))
            )
        except BaseException:
            self._rebuild_receiver()
            raise
        _close_at_exit(self)
        print_notice(CLOSED if self._has_secret else OPEN)
        print_notice(describe_limits(self._settings.database, _version()))

    @asynccontextmanager
    async def _share_publicly(self, program: Program | None, local: str) -> AsyncIterator[None]:
        if program is None:
            yield
            return
        async with open_tunnel(program, local, on_end=print_notice) as public:
            self._public = public
            try:
                yield
            finally:
                self._public = None

    def _make_secret(self) -> None:
        secret = secrets.token_urlsafe(32)
        self._settings = replace(self._settings, secrets=(secret,))
        self._rebuild_receiver()
        print_notice(format_generated_secret(secret))

    def block_thread(self) -> None:
        """Wait until Ctrl-C, SIGTERM or ``close`` ends the server; a second signal ends the process at once."""
        serve_until_signal(self._stop, lambda: self.is_running, self.close)

    def close(self) -> None:
        """Stop the server: requests and handlers under way get a moment, then the port is free again."""
        self._at_exit.cancel()
        self._stop.set()
        background, self._background = self._background, None
        if background is not None:
            background.stop()
            self._rebuild_receiver()

    def __enter__(self) -> "WebhooksServer":
        """Serve in the background within a ``with``."""
        self.launch(prevent_thread_lock=True)
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop the server."""
        self.close()

    def _new_app(self) -> WebhooksApp:
        app = build_app(self._settings.max_body)
        app.blueprint(self._receiver.blueprint())
        app.blueprint(event_routes.build_blueprint(self._receiver, lambda: self._settings.secrets))
        paths = pages.PagePaths("/" if self._ui is None else "", "/docs", "/openapi.json")
        links = {"Health": "/healthz"}
        app.blueprint(pages.build_blueprint(self._receiver, paths, base=lambda: self._public, links=links))
        if self._ui is not None:
            app.blueprint(pages.build_ui_blueprint(self._ui))

        @app.get("/healthz", name="healthz")
        async def healthz(request: Request) -> HTTPResponse:
            return json({"status": "ok"})

        return app


def _close_at_exit(server: WebhooksServer) -> None:
    """Close a background server at exit while its loop, threads and database are still usable."""
    reference = weakref.ref(server)

    def close() -> None:
        if (server_or_none := reference()) is not None:
            server_or_none.close()

    # At the end of the script itself nothing can be registered any more; there `launch` waits and closes.
    with contextlib.suppress(RuntimeError):
        register = get_exit_hook(())
        if register is not None:
            register(close)


def _version() -> str:
    try:
        return version("robojax")
    except PackageNotFoundError:
        return "0"


@functools.cache
def get_default_server() -> WebhooksServer:
    """Return the one server of all ``webhook_endpoint`` functions of this process."""
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
        server = get_default_server()
        server.add_webhook(path, **options)(function)
        server.start_at_exit()
        # A bound method takes no attributes.
        with contextlib.suppress(AttributeError, TypeError):
            function.launch, function.run, function.close = server.launch, server.run, server.close
        return function

    return register
