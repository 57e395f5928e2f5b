"""A request checked, limited and stored as an event."""

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
from hooks.queue import Runner
from hooks.receiver import endpoint as answers
from hooks.receiver import inbox as ledger
from hooks.receiver.endpoint import DAY, SECRET_HEADERS, Endpoint, ReceiverSettings
from hooks.receiver.events import Answer, Event, Status
from hooks.receiver.filters import Facts, Unusable, check, facts_of, is_quick, parse
from hooks.receiver.inbox import Arrival, Inbox, Verdict
from hooks.receiver.worker import Reply, Runs

DRAINED = 1 << 26  # bytes that are read and thrown away so that a sender hears why it is refused
DRAINED_WITHIN = 2.0


class TooLarge(Exception):
    """It has more bytes than it may have."""


class TooSlow(Exception):
    """It did not come in time; no more of it is waited for."""


class Broken(Exception):
    """Its encoding is broken, or its sender has gone."""


def declared(request: Request) -> int:
    """Bytes that it says it has; 0 when it does not say."""
    text = request.headers.get("content-length", "0")
    return int(text[:20]) if text.isdecimal() else 0


async def read_body(request: Request, most: int, within: float) -> bytes:
    """All of it.

    Raises:
        TooLarge, TooSlow, Broken: it cannot be had.
    """
    pieces: list[bytes] = []
    count = 0
    try:
        async with asyncio.timeout(within):
            async for piece in _pieces(request):
                count += len(piece)
                if count > most:
                    raise TooLarge
                pieces.append(piece)
    except TimeoutError:
        raise TooSlow from None
    except SanicException as error:
        raise Broken from error
    return b"".join(pieces)


async def discard(request: Request) -> None:
    """Read on what is not looked at: a sender that writes before it listens would not hear the answer."""
    stream = cast(Any, request.stream)
    if getattr(stream, "expecting_continue", False):
        # Who asks before sending is not told to go on, and will not send.
        leave(request)
        return
    count = 0
    with suppress(TimeoutError, SanicException):
        async with asyncio.timeout(DRAINED_WITHIN):
            async for piece in _pieces(request):
                count += len(piece)
                if count > DRAINED:
                    break
            else:
                return
    leave(request)


def leave(request: Request) -> None:
    """Close the connection after the answer, without what may still come of the body."""
    stream = cast(Any, request.stream)
    if stream is not None:
        stream.expecting_continue = False
        stream.request_body = None
        stream.keep_alive = False


def _pieces(request: Request) -> AsyncIterator[bytes]:
    if request.stream is None:
        return _whole(request.body)
    # Sanic calls the type of its own stream Stream, which is less than it is.
    return cast(Any, request.stream).__aiter__()


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


SOURCES = 10_000  # that are remembered; the one that was silent for longest is forgotten first


@dataclass
class _Bucket:
    left: float
    at: float


class Rates:
    """A bucket of tokens per source."""

    def __init__(self, rate: float, burst: int):
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, source: str, now: float) -> float:
        """Seconds until it may send again; 0 when it may now, which is counted.

        Args:
            now: monotonic.
        """
        bucket = self._buckets.setdefault(source, _Bucket(self._burst, now))
        self._buckets.move_to_end(source)
        if len(self._buckets) > SOURCES:
            self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + (now - bucket.at) * self._rate)
        bucket.at = now
        if bucket.left < 1:
            return (1 - bucket.left) / self._rate
        bucket.left -= 1
        return 0.0


ID_HEADERS = ("webhook-id", "x-github-delivery")
LONGEST_ID = 256


class Refused(Exception):
    """A request that becomes no event."""

    def __init__(self, told: Answer):
        super().__init__(told.status)
        self.told = told


async def read(endpoint: Endpoint, request: Request, settings: ReceiverSettings, rates: Rates) -> bytes:
    """The body of a request that may send: size, rate, secret, in this order, and as early as each can be told.

    Raises:
        Refused: it may not.
    """
    too_large = answers.refusal(413, f"The body has more than {settings.max_body} bytes.")
    if declared(request) > settings.max_body:
        raise Refused(too_large)
    wait = rates.take(request.remote_addr or request.ip or "", time.monotonic())
    if wait:
        headers = {"retry-after": str(max(1, round(wait)))}
        raise Refused(answers.answer({"error": "Too many deliveries from this address."}, 429, headers))
    refusal = endpoint.proofs.refuse_by_head(request.headers)
    if refusal is not None:
        raise Refused(refusal)
    try:
        content = await read_body(request, settings.max_body, settings.read_within)
    except TooLarge:
        raise Refused(too_large) from None
    except TooSlow:
        raise Refused(answers.refusal(408, f"The body took more than {settings.read_within:g} s.")) from None
    except Broken:
        raise Refused(answers.refusal(400, "The body cannot be read.")) from None
    # A signature of 5 MB takes 4 ms for each secret that may have made it.
    proven = partial(endpoint.proofs.refuse, request.headers, content, now=time.time())
    refusal = proven() if is_quick(content) else await asyncio.to_thread(proven)
    if refusal is not None:
        raise Refused(refusal)
    return content


def arrival_of(endpoint: Endpoint, request: Request, content: bytes) -> Arrival:
    """What is kept of a request whose sender is known.

    Raises:
        Refused: its body is not what the endpoint needs.
    """
    takes_payload = endpoint.handler.takes("payload")
    facts = Facts()
    try:
        if content or takes_payload:
            data = parse(content)
            facts = facts_of(data)
            if takes_payload:
                check(endpoint.handler.model, data)
    except Unusable as error:
        # A handler that takes no payload may be sent anything.
        if takes_payload:
            more = {"fields": list(error.fields)} if error.fields else {}
            raise Refused(answers.refusal(422, f"{str(error).capitalize()}.", **more)) from None
    delivery_id = next((request.headers[name] for name in ID_HEADERS if request.headers.get(name)), None)
    if delivery_id is not None and (len(delivery_id) > LONGEST_ID or not delivery_id.isprintable()):
        raise Refused(answers.refusal(422, "The id of the delivery is not usable."))
    kept = {name.lower(): text for name, text in request.headers.items() if name.lower() not in SECRET_HEADERS}
    return Arrival(
        id=secrets.token_hex(12),
        path=endpoint.path,
        body=content,
        headers=json.dumps(kept),
        lane=facts.repo_id or "",
        # An empty body says nothing, so two of them are two events.
        identity=f"body:{hashlib.sha256(content).hexdigest()}" if content and delivery_id is None else "",
        webhook_id=facts.webhook_id or "",
        delivery_id=delivery_id,
        repo=facts.repo,
        repo_type=facts.repo_type,
        scope=facts.scope,
        action=facts.action,
        status=Status.WAITING if endpoint.filter.wants(facts) else Status.IGNORED,
    )


log = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds between looks for replays by other processes
TIDY_EVERY = 60.0
HUB_LIMIT = 1000  # deliveries of one webhook in a day; the Hub's
WARNED_AT = 0.8  # of it


class Keeper:
    """Finds what other processes replay in a running receiver's inbox, and forgets what is old."""

    def __init__(self, inbox: Inbox, runner: Runner, settings: ReceiverSettings):
        self._inbox = inbox
        self._runner = runner
        self._settings = settings
        self._warned: dict[str, float] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        seen: int | None = None
        tidied, told = 0.0, ""
        while True:
            try:
                before, seen = seen, await self._inbox.database.run(ledger.version)
                if seen != before:
                    self._runner.wake()
                if time.monotonic() - tidied > TIDY_EVERY:
                    tidied = time.monotonic()
                    await self.tidy(time.time())
                told = ""
            except StoreError as error:
                # Once: a disk that is full stays so for long, and a log of it would fill another.
                if str(error) != told:
                    log.error("the inbox cannot be looked after: %s", error)
                told = str(error)
            await asyncio.sleep(LOOK_EVERY)

    async def tidy(self, now: float) -> None:
        """Forget what is old, and warn of webhooks that the Hub will soon hold back.

        Args:
            now: seconds since 1970.
        """
        kept = self._settings
        pruned = 1
        while pruned:
            # A few at a time: deliveries are written in between.
            pruned = await self._inbox.database.run(
                ledger.prune, now=now, kept=kept.kept, kept_dead=kept.kept_dead, kept_bytes=kept.kept_bytes
            )
        counts = await self._inbox.database.run(ledger.counts, since=now - DAY)
        for webhook_id, count in counts.items():
            if count >= WARNED_AT * HUB_LIMIT and now - self._warned.get(webhook_id, 0.0) >= DAY:
                self._warned[webhook_id] = now
                log.warning(
                    "webhook %s had %d deliveries within a day; the Hub stops at %d", webhook_id, count, HUB_LIMIT
                )


class Intake:
    """What there is between a server's start and its stop; made on its loop."""

    def __init__(self, inbox: Inbox, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic | None):
        self.inbox = inbox
        self.settings = settings
        self.rates = Rates(settings.rate, settings.burst)
        self.runner = Runner(inbox.database, ledger.QUEUE, self._run, self._limits)
        self._endpoints = endpoints
        self._runs = Runs(inbox, settings, app, self.runner.write)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beside = [
            asyncio.create_task(self.runner.run(), name="webhook events"),
            asyncio.create_task(Keeper(inbox, self.runner, settings).run(), name="webhook inbox"),
        ]
        self._is_ending = False
        # Senders that wait, by event. Their requests are not kept for longer than they: a thousand events may wait,
        # each with a large body.
        self._senders: dict[str, tuple[Reply, weakref.ref[Request]]] = {}

    @classmethod
    async def open(cls, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic) -> Self:
        """Open the inbox and go on with what it has.

        Raises:
            StoreError: it cannot be opened, or another receiver has it.
        """
        inbox = await asyncio.to_thread(Inbox, settings.database)
        try:
            inbox.own()
            waiting = await inbox.database.run(ledger.resume, now=time.time(), crashes=settings.crashes)
        except BaseException:
            inbox.close()
            raise
        for path in sorted(set(waiting) - set(endpoints)):
            log.warning("%d events wait for %s, which has no handler here; they wait on", waiting[path], path)
        return cls(inbox, settings, endpoints, app)

    def _limits(self, path: str) -> Mapping[str, int]:
        """How many handlers may run at once: of this endpoint, and of those that are called like it."""
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            return {path: 0}
        most = {"async": self.settings.concurrency} if endpoint.handler.is_async else {"sync": self.settings.threads}
        return most if endpoint.concurrency is None else most | {path: endpoint.concurrency}

    async def _run(self, row: sqlite3.Row) -> bool:
        event = ledger.event_of(row)
        reply, request = self._senders.pop(event.id, (None, None))
        try:
            return await self._runs.attempt(self._endpoints[event.path], event, reply, request and request())
        finally:
            if reply is not None:
                reply.tell(answers.accepted(event.id))  # unless it was told

    async def close(self) -> None:
        """Take nothing more, let what runs end for a while, leave the rest to the next start."""
        self._is_ending = self.runner.is_ending = True
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, *self._tasks, return_exceptions=True)
        await self.runner.close(self.settings.stop_within)
        self._runs.close()
        for event_id, (reply, _) in self._senders.items():
            reply.tell(answers.accepted(event_id))
        with suppress(StoreError):  # what could not be released is resumed anyway
            await self.inbox.database.run(ledger.QUEUE.release)
        await asyncio.to_thread(self.inbox.close)

    @staticmethod
    async def answer(
        intake: "Intake | None", settings: ReceiverSettings, endpoint: Endpoint, request: Request
    ) -> HTTPResponse:
        """What the sender of a request is told; always JSON."""
        try:
            if request.method != "POST":
                told = answers.answer({"error": "Method Not Allowed"}, 405, {"allow": "POST"})
            elif intake is None or intake._is_ending:
                told = answers.busy("The receiver is not running.", settings.retry_after)
            else:
                return answers.respond(await intake._receive(endpoint, request))
        except Refused as refused:
            told = refused.told
            if told.status == HTTPStatus.REQUEST_TIMEOUT:
                leave(request)
                return answers.respond(told)
        except Exception:
            log.exception("a delivery to %s failed", endpoint.path)
            told = answers.refusal(500, "Internal Server Error")
        await discard(request)
        return answers.respond(told)

    async def _receive(self, endpoint: Endpoint, request: Request) -> Answer:
        # The app that this is mounted in may cut an answer that takes longer.
        longest = max(0.1, 0.8 * request.app.config.RESPONSE_TIMEOUT)
        until = time.monotonic() + min(endpoint.answer_within, longest)
        content = await read(endpoint, request, self.settings, self.rates)
        request.body = content
        # In a thread where it may take long: as much is a listing of hundreds of files.
        how = partial(arrival_of, endpoint, request, content)
        arrival = how() if is_quick(content) else await asyncio.to_thread(how)
        reply = Reply() if endpoint.mode == "reply" and arrival.status is not Status.IGNORED else None
        task = asyncio.create_task(self._accept(endpoint, arrival, reply, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Shielded: when the sender goes away or waits no longer, what is accepted is still run.
        try:
            async with asyncio.timeout(min(self.settings.store_within, longest)):
                told, event_id = await asyncio.shield(task)
        except (TimeoutError, StoreError) as error:
            log.error("a delivery to %s is not acknowledged: %s", endpoint.path, error or "the database is slow")
            raise Refused(answers.busy("The event could not be written.", self.settings.retry_after)) from None
        if told is not None:
            return told
        if reply is None:
            return answers.accepted(event_id)
        return await reply.wait(max(0.0, until - time.monotonic())) or answers.accepted(event_id)

    async def _accept(
        self, endpoint: Endpoint, arrival: Arrival, reply: Reply | None, request: Request
    ) -> tuple[Answer | None, str]:
        """Log it and have it run; what its sender is told at once, if anything."""
        verdict, event, superseded = await self.inbox.database.run(
            ledger.accept,
            arrival,
            now=time.time(),
            window=self.settings.same_body_within,
            coalesce=endpoint.is_coalesced,
            max_waiting=self.settings.max_waiting,
            paths=self._endpoints.keys(),
        )
        for event_id in superseded:
            if event_id in self._senders:
                told = answers.answer({"status": "superseded", "event_id": event_id})
                self._senders.pop(event_id)[0].tell(told)
        if verdict in (Verdict.NEW, Verdict.AGAIN) and arrival.status is not Status.IGNORED:
            # The runner hears of the row after this: what was asked of the database first is answered first.
            if reply is not None:
                self._senders[event.id] = reply, weakref.ref(request)
            self.runner.wake()
        return self._told(verdict, event), event.id

    def _told(self, verdict: Verdict, event: Event) -> Answer | None:
        if verdict is Verdict.FULL:
            log.warning("a delivery to %s is told 503: %d events wait", event.path, self.settings.max_waiting)
            return answers.busy("Too many events wait.", self.settings.retry_after)
        if verdict is Verdict.DUPLICATE:
            return answers.duplicate(event)
        if event.status is Status.IGNORED:
            return answers.answer({"status": "ignored"})
        return None

    async def replay(self, event_id: str) -> Event:
        """Have an event run again."""
        event = await self.inbox.database.run(ledger.replay, event_id, now=time.time())
        self.runner.wake()
        return event
