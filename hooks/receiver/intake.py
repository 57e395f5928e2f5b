"""Intake of deliveries: requests are limited, checked and stored as events."""

import asyncio
import hashlib
import json
import logging
import secrets
import sqlite3
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Self, cast

from sanic import HTTPResponse, Request, Sanic
from sanic.exceptions import SanicException

from hooks.errors import StoreError
from hooks.queue import QueueRunner
from hooks.receiver import endpoint as answers
from hooks.receiver import inbox as ledger
from hooks.receiver.endpoint import DAY, SECRET_HEADERS, Endpoint, ReceiverSettings
from hooks.receiver.events import Answer, Event, Status
from hooks.receiver.filters import Facts, InvalidPayload, check_payload, is_quick_to_parse, parse_json, read_facts
from hooks.receiver.inbox import Acceptance, Inbox, IncomingEvent
from hooks.receiver.worker import HandlerRunner, Reply

MAX_DISCARDED = 1 << 26  # bytes that are read and thrown away so that a sender hears why it is refused
DISCARD_TIMEOUT = 2.0


class BodyTooLarge(Exception):
    """The body has more bytes than allowed."""


class BodyTimeout(Exception):
    """The body did not arrive in time."""


class BodyUnreadable(Exception):
    """The body's encoding is broken, or the sender closed the connection."""


def get_content_length(request: Request) -> int:
    """Return the length that a request declares; 0 without a usable header."""
    text = request.headers.get("content-length", "0")
    return int(text[:20]) if text.isdecimal() else 0


async def read_body(request: Request, max_bytes: int, timeout: float) -> bytes:
    """Read the whole body of a request.

    Raises:
        BodyTooLarge, BodyTimeout, BodyUnreadable: it cannot be had.
    """
    pieces: list[bytes] = []
    count = 0
    try:
        async with asyncio.timeout(timeout):
            async for piece in _iterate_body(request):
                count += len(piece)
                if count > max_bytes:
                    raise BodyTooLarge
                pieces.append(piece)
    except TimeoutError:
        raise BodyTimeout from None
    except SanicException as error:
        raise BodyUnreadable from error
    return b"".join(pieces)


async def discard_body(request: Request) -> None:
    """Read and drop the rest of a body: a sender that writes first and reads later would miss the answer."""
    stream = cast(Any, request.stream)
    if getattr(stream, "expecting_continue", False):
        # Who asks before sending is not told to go on, and will not send.
        disable_keep_alive(request)
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
    disable_keep_alive(request)


def disable_keep_alive(request: Request) -> None:
    """Close the connection after the answer, without reading the rest of the body."""
    stream = cast(Any, request.stream)
    if stream is not None:
        stream.expecting_continue = False
        stream.request_body = None
        stream.keep_alive = False


def _iterate_body(request: Request) -> AsyncIterator[bytes]:
    if request.stream is None:
        return _iterate_once(request.body)
    # Sanic calls the type of its own stream Stream, which is less than it is.
    return cast(Any, request.stream).__aiter__()


async def _iterate_once(body: bytes) -> AsyncIterator[bytes]:
    yield body


MAX_SOURCES = 10_000  # that are remembered; the one that was silent for longest is forgotten first


@dataclass
class _Bucket:
    tokens: float
    updated_at: float


class RateLimiter:
    """Rate limit per source address, as a token bucket each."""

    def __init__(self, rate: float, burst: int):
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take_token(self, source: str, now: float) -> float:
        """Take a token; return 0, or the seconds until the source may send again.

        Args:
            now: monotonic.
        """
        bucket = self._buckets.setdefault(source, _Bucket(self._burst, now))
        self._buckets.move_to_end(source)
        if len(self._buckets) > MAX_SOURCES:
            self._buckets.popitem(last=False)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.updated_at) * self._rate)
        bucket.updated_at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / self._rate
        bucket.tokens -= 1
        return 0.0


ID_HEADERS = ("webhook-id", "x-github-delivery")
LONGEST_ID = 256


class Refused(Exception):
    """The request is refused and becomes no event."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


async def read_verified_body(
    endpoint: Endpoint, request: Request, settings: ReceiverSettings, rate_limiter: RateLimiter
) -> bytes:
    """Read the body of a request after checking size, rate and secret, each as early as possible.

    Raises:
        Refused: it may not.
    """
    too_large = answers.build_error(413, f"The body has more than {settings.max_body} bytes.")
    if get_content_length(request) > settings.max_body:
        raise Refused(too_large)
    wait = rate_limiter.take_token(request.remote_addr or request.ip or "", time.monotonic())
    if wait:
        headers = {"retry-after": str(max(1, round(wait)))}
        raise Refused(answers.build_answer({"error": "Too many deliveries from this address."}, 429, headers))
    refusal = endpoint.accepted_secrets.check_headers(request.headers)
    if refusal is not None:
        raise Refused(refusal)
    try:
        content = await read_body(request, settings.max_body, settings.read_within)
    except BodyTooLarge:
        raise Refused(too_large) from None
    except BodyTimeout:
        raise Refused(answers.build_error(408, f"The body took more than {settings.read_within:g} s.")) from None
    except BodyUnreadable:
        raise Refused(answers.build_error(400, "The body cannot be read.")) from None
    # A signature of 5 MB takes 4 ms for each secret that may have made it.
    check_delivery = partial(endpoint.accepted_secrets.check_delivery, request.headers, content, now=time.time())
    refusal = check_delivery() if is_quick_to_parse(content) else await asyncio.to_thread(check_delivery)
    if refusal is not None:
        raise Refused(refusal)
    return content


def build_incoming_event(endpoint: Endpoint, request: Request, content: bytes) -> IncomingEvent:
    """Build the event to store from a request whose sender is verified.

    Raises:
        Refused: its body is not what the endpoint needs.
    """
    takes_payload = endpoint.handler.takes("payload")
    facts = Facts()
    try:
        if content or takes_payload:
            data = parse_json(content)
            facts = read_facts(data)
            if takes_payload:
                check_payload(endpoint.handler.model, data)
    except InvalidPayload as error:
        # A handler that takes no payload may be sent anything.
        if takes_payload:
            more = {"fields": list(error.fields)} if error.fields else {}
            raise Refused(answers.build_error(422, f"{str(error).capitalize()}.", **more)) from None
    delivery_id = next((request.headers[name] for name in ID_HEADERS if request.headers.get(name)), None)
    if delivery_id is not None and (len(delivery_id) > LONGEST_ID or not delivery_id.isprintable()):
        raise Refused(answers.build_error(422, "The id of the delivery is not usable."))
    headers = {name.lower(): text for name, text in request.headers.items() if name.lower() not in SECRET_HEADERS}
    return IncomingEvent(
        id=secrets.token_hex(12),
        path=endpoint.path,
        body=content,
        headers=json.dumps(headers),
        lane=facts.repo_id or "",
        # An empty body says nothing, so two of them are two events.
        identity=f"body:{hashlib.sha256(content).hexdigest()}" if content and delivery_id is None else "",
        webhook_id=facts.webhook_id or "",
        delivery_id=delivery_id,
        repo=facts.repo,
        repo_type=facts.repo_type,
        scope=facts.scope,
        action=facts.action,
        status=Status.WAITING if endpoint.filter.matches(facts) else Status.IGNORED,
    )


log = logging.getLogger(__name__)

POLL_INTERVAL = 0.5  # seconds between looks for replays by other processes
PRUNE_INTERVAL = 60.0
HUB_LIMIT = 1000  # deliveries of one webhook in a day; the Hub's
WARNING_SHARE = 0.8  # of it


class Maintenance:
    """Maintenance of a running receiver's inbox: notices replays by other processes and prunes old events."""

    def __init__(self, inbox: Inbox, runner: QueueRunner, settings: ReceiverSettings):
        self._inbox = inbox
        self._runner = runner
        self._settings = settings
        self._warned: dict[str, float] = {}

    async def run(self) -> None:
        """Run the maintenance until cancelled."""
        version: int | None = None
        pruned_at, logged_error = 0.0, ""
        while True:
            try:
                last_version, version = version, await self._inbox.database.run(ledger.get_data_version)
                if version != last_version:
                    self._runner.wake()
                if time.monotonic() - pruned_at > PRUNE_INTERVAL:
                    pruned_at = time.monotonic()
                    await self.prune(time.time())
                logged_error = ""
            except StoreError as error:
                # Once: a disk that is full stays so for long, and a log of it would fill another.
                if str(error) != logged_error:
                    log.error("the inbox cannot be looked after: %s", error)
                logged_error = str(error)
            await asyncio.sleep(POLL_INTERVAL)

    async def prune(self, now: float) -> None:
        """Prune old events, and warn of webhooks near the Hub's daily limit.

        Args:
            now: seconds since 1970.
        """
        settings = self._settings
        pruned = 1
        while pruned:
            # A few at a time: deliveries are written in between.
            pruned = await self._inbox.database.run(
                ledger.prune_events,
                now=now,
                max_age=settings.kept,
                max_dead_age=settings.kept_dead,
                max_bytes=settings.kept_bytes,
            )
        counts = await self._inbox.database.run(ledger.count_deliveries, since=now - DAY)
        for webhook_id, count in counts.items():
            if count >= WARNING_SHARE * HUB_LIMIT and now - self._warned.get(webhook_id, 0.0) >= DAY:
                self._warned[webhook_id] = now
                log.warning(
                    "webhook %s had %d deliveries within a day; the Hub stops at %d", webhook_id, count, HUB_LIMIT
                )


class Intake:
    """Running part of a receiver, from the server's start to its stop; made on the server's loop."""

    def __init__(self, inbox: Inbox, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic | None):
        self.inbox = inbox
        self.settings = settings
        self.rate_limiter = RateLimiter(settings.rate, settings.burst)
        self.runner = QueueRunner(inbox.database, ledger.QUEUE, self._run_event, self._get_limits)
        self._endpoints = endpoints
        self._handler_runner = HandlerRunner(inbox, settings, app, self.runner.write)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._background_tasks = [
            asyncio.create_task(self.runner.run(), name="webhook events"),
            asyncio.create_task(Maintenance(inbox, self.runner, settings).run(), name="webhook inbox"),
        ]
        self._is_ending = False
        # Senders that wait, by event. Their requests are not kept for longer than they: a thousand events may wait,
        # each with a large body.
        self._senders: dict[str, tuple[Reply, weakref.ref[Request]]] = {}

    @classmethod
    async def open(cls, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic) -> Self:
        """Open the inbox and resume its pending events.

        Raises:
            StoreError: it cannot be opened, or another receiver has it.
        """
        inbox = await asyncio.to_thread(Inbox, settings.database)
        try:
            inbox.lock()
            waiting = await inbox.database.run(ledger.resume_events, now=time.time(), max_crashes=settings.crashes)
        except BaseException:
            inbox.close()
            raise
        for path in sorted(set(waiting) - set(endpoints)):
            log.warning("%d events wait for %s, which has no handler here; they wait on", waiting[path], path)
        return cls(inbox, settings, endpoints, app)

    def _get_limits(self, path: str) -> Mapping[str, int]:
        """Return how many handlers may run at once: of this endpoint, and of all sync or async ones."""
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            return {path: 0}
        limits = {"async": self.settings.concurrency} if endpoint.handler.is_async else {"sync": self.settings.threads}
        return limits if endpoint.concurrency is None else limits | {path: endpoint.concurrency}

    async def _run_event(self, row: sqlite3.Row) -> bool:
        event = ledger.read_event(row)
        reply, request = self._senders.pop(event.id, (None, None))
        try:
            return await self._handler_runner.run_handler(
                self._endpoints[event.path], event, reply, request and request()
            )
        finally:
            if reply is not None:
                reply.set_answer(answers.build_accepted_answer(event.id))  # unless it was told

    async def close(self) -> None:
        """Stop accepting, let running handlers end for a while, and leave the rest to the next start."""
        self._is_ending = self.runner.is_ending = True
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, *self._tasks, return_exceptions=True)
        await self.runner.close(self.settings.stop_within)
        self._handler_runner.close()
        for event_id, (reply, _) in self._senders.items():
            reply.set_answer(answers.build_accepted_answer(event_id))
        with suppress(StoreError):  # what could not be released is resumed anyway
            await self.inbox.database.run(ledger.QUEUE.release_running)
        await asyncio.to_thread(self.inbox.close)

    @staticmethod
    async def handle_request(
        intake: "Intake | None", settings: ReceiverSettings, endpoint: Endpoint, request: Request
    ) -> HTTPResponse:
        """Answer a request to an endpoint, always with JSON."""
        try:
            if request.method != "POST":
                answer = answers.build_answer({"error": "Method Not Allowed"}, 405, {"allow": "POST"})
            elif intake is None or intake._is_ending:
                answer = answers.build_busy_answer("The receiver is not running.", settings.retry_after)
            else:
                return answers.to_response(await intake._receive(endpoint, request))
        except Refused as refused:
            answer = refused.answer
            if answer.status == HTTPStatus.REQUEST_TIMEOUT:
                disable_keep_alive(request)
                return answers.to_response(answer)
        except Exception:
            log.exception("a delivery to %s failed", endpoint.path)
            answer = answers.build_error(500, "Internal Server Error")
        await discard_body(request)
        return answers.to_response(answer)

    async def _receive(self, endpoint: Endpoint, request: Request) -> Answer:
        # The app that this is mounted in may cut an answer that takes longer.
        longest = max(0.1, 0.8 * request.app.config.RESPONSE_TIMEOUT)
        answer_by = time.monotonic() + min(endpoint.answer_within, longest)
        content = await read_verified_body(endpoint, request, self.settings, self.rate_limiter)
        request.body = content
        # In a thread where it may take long: as much is a listing of hundreds of files.
        build_event = partial(build_incoming_event, endpoint, request, content)
        incoming = build_event() if is_quick_to_parse(content) else await asyncio.to_thread(build_event)
        reply = Reply() if endpoint.mode == "reply" and incoming.status is not Status.IGNORED else None
        task = asyncio.create_task(self._accept(endpoint, incoming, reply, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Shielded: when the sender goes away or waits no longer, what is accepted is still run.
        try:
            async with asyncio.timeout(min(self.settings.store_within, longest)):
                answer, event_id = await asyncio.shield(task)
        except (TimeoutError, StoreError) as error:
            log.error("a delivery to %s is not acknowledged: %s", endpoint.path, error or "the database is slow")
            raise Refused(
                answers.build_busy_answer("The event could not be written.", self.settings.retry_after)
            ) from None
        if answer is not None:
            return answer
        if reply is None:
            return answers.build_accepted_answer(event_id)
        return await reply.wait(max(0.0, answer_by - time.monotonic())) or answers.build_accepted_answer(event_id)

    async def _accept(
        self, endpoint: Endpoint, incoming: IncomingEvent, reply: Reply | None, request: Request
    ) -> tuple[Answer | None, str]:
        """Store an event and queue its run; return the answer if it can be given at once."""
        acceptance, event, superseded = await self.inbox.database.run(
            ledger.accept_event,
            incoming,
            now=time.time(),
            window=self.settings.same_body_within,
            coalesce=endpoint.is_coalesced,
            max_waiting=self.settings.max_waiting,
            paths=self._endpoints.keys(),
        )
        for event_id in superseded:
            if event_id in self._senders:
                answer = answers.build_answer({"status": "superseded", "event_id": event_id})
                self._senders.pop(event_id)[0].set_answer(answer)
        if acceptance in (Acceptance.NEW, Acceptance.RETRIED) and incoming.status is not Status.IGNORED:
            # The runner hears of the row after this: what was asked of the database first is answered first.
            if reply is not None:
                self._senders[event.id] = reply, weakref.ref(request)
            self.runner.wake()
        return self._answer_at_once(acceptance, event), event.id

    def _answer_at_once(self, acceptance: Acceptance, event: Event) -> Answer | None:
        if acceptance is Acceptance.FULL:
            log.warning("a delivery to %s is answered 503: %d events wait", event.path, self.settings.max_waiting)
            return answers.build_busy_answer("Too many events wait.", self.settings.retry_after)
        if acceptance is Acceptance.DUPLICATE:
            return answers.build_duplicate_answer(event)
        if event.status is Status.IGNORED:
            return answers.build_answer({"status": "ignored"})
        return None

    async def replay(self, event_id: str) -> Event:
        """Set an event to run again."""
        event = await self.inbox.database.run(ledger.replay_event, event_id, now=time.time())
        self.runner.wake()
        return event
