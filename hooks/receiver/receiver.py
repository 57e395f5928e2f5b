"""Receiver of webhooks: routes of a Sanic blueprint that call handlers."""

import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sanic import Blueprint, HTTPResponse, Request, Sanic
from sanic.constants import HTTP_METHODS

from hooks.errors import HooksError, InvalidWebhook
from hooks.receiver import inbox
from hooks.receiver.endpoint import (
    AcceptedSecrets,
    Endpoint,
    Filter,
    Mode,
    Names,
    ReceiverSettings,
    Retry,
    check_secrets,
    read_handler,
)
from hooks.receiver.events import Event
from hooks.receiver.intake import Intake

log = logging.getLogger(__name__)


class Receiver:
    """Receiver of webhooks: its endpoints and their events. Nothing runs before a server with its blueprint starts.

    Args:
        settings: secrets, limits, the file of events; without secrets it is open to everyone.
        prefix: of all paths.
        is_guarded: the app that it is in decides who may deliver without a secret; no warning then.
    """

    def __init__(
        self, settings: ReceiverSettings | None = None, *, prefix: str = "/webhooks", is_guarded: bool = False
    ):
        self._is_guarded = is_guarded
        self.settings = settings or ReceiverSettings()
        self.prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""
        self._endpoints: dict[str, Endpoint] = {}
        self._intake: Intake | None = None
        self._is_built = False

    @property
    def registered(self) -> Mapping[str, Callable[..., Any]]:
        """Handlers as they were given, by absolute path."""
        return MappingProxyType({path: endpoint.handler.function for path, endpoint in self._endpoints.items()})

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """Endpoints by absolute path."""
        return MappingProxyType(self._endpoints)

    def add(
        self,
        handler: Callable[..., Any],
        path: str | None = None,
        *,
        events: Names = None,
        repos: Names = None,
        repo_types: Names = None,
        scopes: Names = None,
        actions: Names = None,
        refs: Names = None,
        mode: Mode = "reply",
        concurrency: int | None = None,
        timeout: float | None = None,
        answer_within: float | None = None,
        secret: str | tuple[str, ...] | None = None,
        coalesce: str | None = None,
        retry: Retry = "any",
    ) -> str:
        """Add a handler with its route and filter; deliveries that the filter refuses are answered as ignored.

        Args:
            path: after the prefix; the handler's name when None.
            events: ``scope`` or ``scope:action``; see ``Filter`` for this and the next five.
            mode: ``reply`` tells the sender the handler's value if it is there in time, ``queue`` says 202 at once.
            concurrency: runs of this handler at one time.
            timeout: seconds of a run until it counts as failed.
            answer_within: seconds until the sender is told 202; as the settings say when None.
            secret: of this endpoint alone (or several, in rotation), instead of all that the settings have.
            coalesce: ``latest``: of the events of one repo that wait, only the latest is run.
            retry: after an error in the background: ``any``, ``retryable`` (only ``RetryableError``) or ``never``.

        Returns:
            The absolute path.

        Raises:
            ValueError: the path is taken, or an argument cannot be used (``InvalidWebhook``).
        """
        if self._is_built:
            raise HooksError(f"handler {handler!r}: add it before the server is made; its routes are fixed then")
        read = read_handler(handler)
        whole = self._resolve_path(read.name if path is None else path)
        _check("mode", mode, ("reply", "queue"))
        _check("retry", retry, ("any", "retryable", "never"))
        _check("coalesce", coalesce, (None, "latest"))
        for name, number in (("concurrency", concurrency), ("timeout", timeout), ("answer_within", answer_within)):
            if number is not None and not number > 0:
                raise InvalidWebhook(f"{name} is {number}; wanted more than 0")
        self._endpoints[whole] = Endpoint(
            path=whole,
            handler=read,
            filter=Filter.build(
                events=events, repos=repos, repo_types=repo_types, scopes=scopes, actions=actions, refs=refs
            ),
            accepted_secrets=self._get_accepted_secrets(secret),
            mode=mode,
            retry=retry,
            concurrency=concurrency,
            timeout=timeout,
            answer_within=self.settings.answer_within if answer_within is None else answer_within,
            is_coalesced=coalesce == "latest",
        )
        return whole

    def _resolve_path(self, path: str) -> str:
        name = path.strip("/")
        if not name or not re.fullmatch(r"[^\s<>?#%\x00-\x1f]+", name):
            raise InvalidWebhook(f"webhook path {path!r}: wanted a path without spaces, <, >, ?, # and %; give it one")
        whole = f"{self.prefix}/{name}"
        if whole in self._endpoints:
            raise InvalidWebhook(f"Webhook {whole} already exists.")
        return whole

    def _get_accepted_secrets(self, secret: str | tuple[str, ...] | None) -> AcceptedSecrets:
        if secret is None:
            return AcceptedSecrets(self.settings.secrets, self.settings.standard_secrets, self.settings.github_secrets)
        own = (secret,) if isinstance(secret, str) else tuple(secret)
        check_secrets("secret", own)
        return AcceptedSecrets(own)

    def blueprint(self) -> Blueprint:
        """Build the blueprint; the inbox opens when its server starts, and pending events resume."""
        self._is_built = True
        blueprint = Blueprint(f"webhooks{re.sub(r'[^0-9A-Za-z]', '_', self.prefix)}")
        for number, endpoint in enumerate(self._endpoints.values()):
            blueprint.add_route(
                self._make_route(endpoint),
                endpoint.path,
                # All methods, so that a wrong one is answered as JSON in whatever app this is.
                methods=list(HTTP_METHODS),
                name=f"{re.sub(r'[^0-9A-Za-z]', '_', endpoint.path).strip('_')}_{number}",
                stream=True,
                unquote=True,
                error_format="json",
            )

        # Functions, because Sanic's blueprints register them by their names.
        @blueprint.before_server_start
        async def start_webhooks(app: Sanic) -> None:
            is_open = [path for path, endpoint in self._endpoints.items() if endpoint.accepted_secrets.is_open]
            for path in is_open if not self._is_guarded else ():
                log.warning("no webhook secret is set: whoever reaches %s may deliver to it", path)
            self._intake = await Intake.open(self.settings, self._endpoints, app)

        @blueprint.before_server_stop
        async def stop_webhooks(app: Sanic) -> None:
            if self._intake is not None:
                await self._intake.close()
                self._intake = None

        return blueprint

    def _make_route(self, endpoint: Endpoint) -> Callable[..., Any]:
        async def receive(request: Request) -> HTTPResponse:
            return await Intake.handle_request(self._intake, self.settings, endpoint, request)

        return receive

    async def events(
        self, *, status: str | None = None, path: str | None = None, limit: int = 50, before: int | None = None
    ) -> list[Event]:
        """List events, newest first, without headers and bodies.

        Args:
            status: one of ``Status``; ``dead`` lists the dead letters.
            before: the ``number`` of the last one of the page before.
        """
        return await self._running.inbox.database.run(
            inbox.list_events, status=status, path=path, limit=limit, before=before
        )

    async def event(self, event_id: str) -> Event:
        """Return one event with its headers, body and answer.

        Raises:
            UnknownEvent: there is none of this id.
        """
        return await self._running.inbox.database.run(inbox.get_event, event_id)

    async def replay(self, event_id: str) -> Event:
        """Set an event to run again, whatever its state.

        Raises:
            UnknownEvent: there is none of this id.
        """
        return await self._running.replay(event_id)

    async def list_recent(self, limit: int = 10) -> list[Event]:
        """List the latest events for a page; nothing in them is secret but names of repos. Empty while stopped."""
        return [] if self._intake is None else await self.events(limit=limit)

    @property
    def _running(self) -> Intake:
        if self._intake is None:
            raise HooksError("the receiver is not running; start the server, or open its file with Inbox")
        return self._intake


def _check(name: str, value: object, expected: tuple[object, ...]) -> None:
    if value not in expected:
        raise InvalidWebhook(f"{name} is {value!r}; wanted one of {', '.join(map(repr, expected))}")
