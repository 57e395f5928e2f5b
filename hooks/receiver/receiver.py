"""Receiver of webhooks: checks each request, stores it as an event, and responds to its sender."""

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from sanic import Blueprint, HTTPResponse, Request, Sanic
from sanic.constants import HTTP_METHODS
from sanic.exceptions import SanicException

from hooks.errors import HooksError, InvalidWebhook, StoreError
from hooks.receiver import inbox
from hooks.receiver.endpoint import (
    RETRY_AFTER,
    SECRET_HEADERS,
    Endpoint,
    Mode,
    ReceiverSettings,
    build_answer,
    build_error,
    check_sender,
    read_handler,
    to_response,
)
from hooks.receiver.inbox import Answer, Event, IncomingEvent
from hooks.receiver.parsing import Facts, InvalidPayload, check_payload, is_quick_to_parse, parse_json, read_facts
from hooks.receiver.worker import EventWorker

log = logging.getLogger(__name__)

MAX_DISCARDED = 1 << 26  # bytes that are read and discarded so that a refused sender reads the response
DISCARD_TIMEOUT = 2.0
STORE_TIMEOUT = 8.0  # seconds for the database, after which a sender gets 503
ID_HEADERS = ("webhook-id", "x-github-delivery")
LONGEST_ID = 256


class DeliveryRefused(Exception):
    """The request is refused and not stored as an event."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


async def read_body(request: Request, max_bytes: int, timeout: float) -> bytes:
    """Read the whole body; raise ``DeliveryRefused`` if it is too large, too slow (``timeout`` seconds) or broken."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for piece in _iterate_body(request):
                body += piece
                if len(body) > max_bytes:
                    raise DeliveryRefused(_build_size_error(max_bytes))
    except TimeoutError:
        close_after_answer(request)
        raise DeliveryRefused(build_error(408, f"The body took more than {timeout:g} s.")) from None
    except SanicException:
        raise DeliveryRefused(build_error(400, "The body cannot be read.")) from None
    return bytes(body)


async def discard_body(request: Request) -> None:
    """Read and discard the rest of a body, because many senders read the response only after they sent the body."""
    stream = cast(Any, request.stream)
    if getattr(stream, "expecting_continue", False):
        close_after_answer(request)  # This sender sends its body only after "100 Continue".
        return
    count = 0
    with suppress(TimeoutError, SanicException):
        async with asyncio.timeout(DISCARD_TIMEOUT):
            async for piece in _iterate_body(request):
                count += len(piece)
                if count > MAX_DISCARDED:
                    break
            else:
                return
    close_after_answer(request)


def close_after_answer(request: Request) -> None:
    """Close the connection after the answer, without reading the rest of the body."""
    stream = cast(Any, request.stream)
    if stream is not None:
        stream.expecting_continue = False
        stream.request_body = None
        stream.keep_alive = False


async def _iterate_body(request: Request) -> AsyncIterator[bytes]:
    if request.stream is None:
        yield request.body
        return
    # The declared type of Sanic's stream has no iterator.
    async for piece in cast(Any, request.stream):
        yield piece


def _build_size_error(max_bytes: int) -> Answer:
    return build_error(413, f"The body has more than {max_bytes} bytes.")


async def read_verified_body(request: Request, settings: ReceiverSettings) -> bytes:
    """Check the declared size and the secret, then read the body; raise ``DeliveryRefused`` if a check fails."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > settings.max_body:
        raise DeliveryRefused(_build_size_error(settings.max_body))
    refusal = check_sender(request.headers, settings.secrets)
    if refusal is not None:
        raise DeliveryRefused(refusal)
    return await read_body(request, settings.max_body, settings.read_within)


def build_incoming_event(endpoint: Endpoint, request: Request, content: bytes) -> IncomingEvent:
    """Build the event to store; raise ``DeliveryRefused`` if the body or the id of the delivery is invalid."""
    takes_payload = endpoint.handler.takes("payload")
    facts = Facts()
    try:
        if content or takes_payload:
            data = parse_json(content)
            facts = read_facts(data)
            if takes_payload:
                check_payload(endpoint.handler.model, data)
    except InvalidPayload as error:
        # A handler without a payload accepts any body.
        if takes_payload:
            more: dict[str, Any] = {"fields": list(error.fields)} if error.fields else {}
            raise DeliveryRefused(build_error(422, f"{str(error).capitalize()}.", **more)) from None
    delivery_id = next((request.headers[name] for name in ID_HEADERS if request.headers.get(name)), None)
    if delivery_id is not None and (len(delivery_id) > LONGEST_ID or not delivery_id.isprintable()):
        raise DeliveryRefused(build_error(422, "The id of the delivery is too long or not printable."))
    headers = {name.lower(): text for name, text in request.headers.items() if name.lower() not in SECRET_HEADERS}
    return IncomingEvent(
        id=secrets.token_hex(12),
        path=endpoint.path,
        body=content,
        headers=json.dumps(headers),
        # Two empty bodies are two events, because an empty body identifies nothing.
        identity=f"body:{hashlib.sha256(content).hexdigest()}" if content and delivery_id is None else "",
        delivery_id=delivery_id,
        **vars(facts),
    )


class Receiver:
    """Receiver of webhooks: its endpoints and their events. It runs while a server with its blueprint runs.

    Args:
        settings: secrets, limits and the file of events; without secrets the receiver is open to everyone.
        prefix: prefix of all paths.
        is_guarded: whether the app checks senders itself; then the receiver logs no warning about a missing secret.

    Example:
        >>> receiver = Receiver()
        >>> receiver.add(lambda payload: payload.repo.name, "push")
        '/webhooks/push'
        >>> blueprint = receiver.blueprint()  # app.blueprint(blueprint) adds it to a Sanic app
    """

    def __init__(
        self, settings: ReceiverSettings | None = None, *, prefix: str = "/webhooks", is_guarded: bool = False
    ):
        self._is_guarded = is_guarded
        self.settings = settings or ReceiverSettings()
        self.prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""
        self._endpoints: dict[str, Endpoint] = {}
        self._worker: EventWorker | None = None
        self._is_built = False

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """Endpoints by absolute path."""
        return MappingProxyType(self._endpoints)

    def add(self, handler: Callable[..., Any], path: str | None = None, *, mode: Mode = "reply") -> str:
        """Add a handler with its route.

        Args:
            path: path after the prefix; the handler's name when None.
            mode: ``reply`` responds with the handler's value if it returns in time, ``queue`` with 202 at once.

        Returns:
            The absolute path.

        Raises:
            ValueError: the path is taken, or an argument is invalid (``InvalidWebhook``).
        """
        if self._is_built:
            raise HooksError(f"handler {handler!r}: add it before the server is created, which fixes its routes")
        read = read_handler(handler)
        whole = self._resolve_path(read.name if path is None else path)
        if mode not in ("reply", "queue"):
            raise InvalidWebhook(f"mode is {mode!r}; wanted 'reply' or 'queue'")
        self._endpoints[whole] = Endpoint(whole, read, mode)
        return whole

    def _resolve_path(self, path: str) -> str:
        name = path.strip("/")
        if not re.fullmatch(r"[^\s<>?#%\x00-\x1f]+", name):
            raise InvalidWebhook(f"webhook path {path!r}: wanted a path without spaces, <, >, ?, # and %; give a path")
        whole = f"{self.prefix}/{name}"
        if whole in self._endpoints:
            raise InvalidWebhook(f"Webhook {whole} already exists.")
        return whole

    def blueprint(self) -> Blueprint:
        """Build the blueprint; when its server starts, the inbox opens and pending events resume."""
        self._is_built = True
        blueprint = Blueprint(f"webhooks{re.sub(r'[^0-9A-Za-z]', '_', self.prefix)}")
        for number, endpoint in enumerate(self._endpoints.values()):
            blueprint.add_route(
                partial(self._handle_request, endpoint=endpoint),
                endpoint.path,
                # All methods, so that any app responds to a wrong method with JSON.
                methods=list(HTTP_METHODS),
                name=f"{re.sub(r'[^0-9A-Za-z]', '_', endpoint.path).strip('_')}_{number}",
                stream=True,
                unquote=True,
                error_format="json",
            )

        # Sanic's blueprints register listeners by the names of functions.
        @blueprint.before_server_start
        async def start_webhooks(app: Sanic) -> None:
            if not self.settings.secrets and not self._is_guarded:
                paths = ", ".join(self._endpoints)
                log.warning("no webhook secret is set: any client that reaches this server may deliver to %s", paths)
            self._worker = await EventWorker.open(self.settings, self._endpoints, app)

        @blueprint.before_server_stop
        async def stop_webhooks(app: Sanic) -> None:
            self._is_built = False
            if self._worker is not None:
                await self._worker.close()
                self._worker = None

        return blueprint

    async def _handle_request(self, request: Request, endpoint: Endpoint) -> HTTPResponse:
        """Respond to a request to an endpoint, always with JSON."""
        try:
            if request.method != "POST":
                answer = build_answer({"error": "Method Not Allowed"}, 405, {"allow": "POST"})
            elif self._worker is None or self._worker.is_ending:
                answer = build_error(503, "The receiver is not running.", retry_after=RETRY_AFTER)
            else:
                return to_response(await self._receive(self._worker, endpoint, request))
        except DeliveryRefused as refused:
            answer = refused.answer
        except Exception:
            log.exception("a delivery to %s failed", endpoint.path)
            answer = build_error(500, "Internal Server Error")
        await discard_body(request)
        return to_response(answer)

    async def _receive(self, worker: EventWorker, endpoint: Endpoint, request: Request) -> Answer:
        # The app that mounts the blueprint may have a shorter timeout for responses.
        longest = max(0.1, 0.8 * request.app.config.RESPONSE_TIMEOUT)
        answer_by = time.monotonic() + min(self.settings.answer_within, longest)
        content = await read_verified_body(request, self.settings)
        request.body = content
        # A thread parses large bodies, such as listings of hundreds of files.
        build_event = partial(build_incoming_event, endpoint, request, content)
        incoming = build_event() if is_quick_to_parse(content) else await asyncio.to_thread(build_event)
        try:
            return await worker.deliver(
                endpoint, incoming, request, store_within=min(STORE_TIMEOUT, longest), answer_by=answer_by
            )
        except StoreError as error:
            log.error("a delivery to %s is not acknowledged: %s", endpoint.path, error)
            raise DeliveryRefused(
                build_error(503, "The event could not be written.", retry_after=RETRY_AFTER)
            ) from None

    async def events(
        self, *, status: str | None = None, path: str | None = None, limit: int = 50, before: int | None = None
    ) -> list[Event]:
        """List events with a ``number`` below ``before``, newest first, without headers and bodies."""
        return await self._running.inbox.database.run(
            inbox.list_events, status=status, path=path, limit=limit, before=before
        )

    async def event(self, event_id: str) -> Event:
        """Return an event with its headers, body and answer; raise ``UnknownEvent`` for an unknown id."""
        return await self._running.inbox.database.run(inbox.get_event, event_id)

    async def replay(self, event_id: str) -> Event:
        """Run an event in any state again; raise ``UnknownEvent`` for an unknown id."""
        return await self._running.replay(event_id)

    @property
    def _running(self) -> EventWorker:
        if self._worker is None:
            raise HooksError("the receiver is not running; start the server, or open its file with Inbox")
        return self._worker
