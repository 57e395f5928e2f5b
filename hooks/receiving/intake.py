"""A request becomes an event: every check in order, one transaction, then its run."""

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

from sanic import HTTPResponse, Request, Sanic

from hooks.errors import StoreError
from hooks.receiving import answers, body, ledger
from hooks.receiving.body import Broken, TooLarge, TooSlow
from hooks.receiving.dispatch import Dispatch
from hooks.receiving.endpoint import Endpoint
from hooks.receiving.event import Answer, Event, Status
from hooks.receiving.inbox import Inbox
from hooks.receiving.ledger import Arrival, Place, Verdict
from hooks.receiving.payloads import Facts, Unusable, facts_of, parse, payload_of
from hooks.receiving.rates import Rates
from hooks.receiving.reply import Reply
from hooks.receiving.secrets import SECRET_HEADERS
from hooks.receiving.settings import DAY, ReceiverSettings

log = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds between looks for replays by other processes
TIDY_EVERY = 60.0
HUB_LIMIT = 1000  # deliveries of one webhook in a day; the Hub's
ID_HEADERS = ("webhook-id", "x-github-delivery")
LONGEST_ID = 256


class Refused(Exception):
    """A request that becomes no event."""

    def __init__(self, told: Answer):
        super().__init__(told.status)
        self.told = told


@dataclass
class Intake:
    """What there is between a server's start and its stop."""

    inbox: Inbox
    dispatch: Dispatch
    settings: ReceiverSettings
    rates: Rates

    @classmethod
    async def open(cls, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic) -> Self:
        """Open the inbox and go on with what it has.

        Raises:
            StoreError: it cannot be opened, or another receiver has it.
        """
        inbox = await asyncio.to_thread(Inbox, settings.database)
        try:
            inbox.own()
            places = await inbox.database.run(ledger.resume, now=time.time(), crashes=settings.crashes)
        except BaseException:
            inbox.close()
            raise
        intake = cls(inbox, Dispatch(inbox, settings, endpoints, app), settings, Rates(settings.rate, settings.burst))
        intake._begin(endpoints, places)
        return intake

    def _begin(self, endpoints: Mapping[str, Endpoint], places: list[Place]) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._held = 0  # deliveries on their way into the inbox
        self._warned: dict[str, float] = {}
        self._is_ending = False
        for place in places:
            self.dispatch.push(place)
        for path in sorted({place.path for place in places} - set(endpoints)):
            count = sum(place.path == path for place in places)
            log.warning("%d events wait for %s, which has no handler here; they wait on", count, path)
        self._keeper = asyncio.create_task(self._keep(), name="webhook inbox")

    async def close(self) -> None:
        """Take nothing more, let what runs end for a while, leave the rest to the next start."""
        self._is_ending = True
        self._keeper.cancel()
        await asyncio.gather(self._keeper, *self._tasks, return_exceptions=True)
        await self.dispatch.close()
        with suppress(StoreError):  # what could not be released is resumed anyway
            await self.inbox.database.run(ledger.release)
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
                body.leave(request)
                return answers.respond(told)
        except Exception:
            log.exception("a delivery to %s failed", endpoint.path)
            told = answers.refusal(500, "Internal Server Error")
        await body.discard(request)
        return answers.respond(told)

    async def _receive(self, endpoint: Endpoint, request: Request) -> Answer:
        until = time.monotonic() + self._patience(endpoint, request)
        content = await self._read(endpoint, request)
        request.body = content
        arrival = _arrival(endpoint, request, content)
        reply = Reply() if endpoint.mode == "reply" and arrival.status is not Status.IGNORED else None
        task = asyncio.create_task(self._accept(endpoint, arrival, reply, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Shielded: when the sender goes away or waits no longer, what is accepted is still run.
        try:
            async with asyncio.timeout(self.settings.store_within):
                told, event_id = await asyncio.shield(task)
        except (TimeoutError, StoreError) as error:
            log.error("a delivery to %s is not acknowledged: %s", endpoint.path, error or "the database is slow")
            raise Refused(answers.busy("The event could not be written.", self.settings.retry_after)) from None
        if told is not None:
            return told
        if reply is None:
            return answers.accepted(event_id)
        return await reply.wait(max(0.0, until - time.monotonic())) or answers.accepted(event_id)

    def _patience(self, endpoint: Endpoint, request: Request) -> float:
        """Seconds that the answer may take; the app this is mounted in may cut it earlier."""
        return min(endpoint.answer_within, max(0.1, 0.8 * request.app.config.RESPONSE_TIMEOUT))

    async def _read(self, endpoint: Endpoint, request: Request) -> bytes:
        too_large = answers.refusal(413, f"The body has more than {self.settings.max_body} bytes.")
        if body.declared(request) > self.settings.max_body:
            raise Refused(too_large)
        wait = self.rates.take(request.remote_addr or request.ip or "", time.monotonic())
        if wait:
            headers = {"retry-after": str(max(1, round(wait)))}
            raise Refused(answers.answer({"error": "Too many deliveries from this address."}, 429, headers))
        refusal = endpoint.proofs.refuse_by_head(request.headers)
        if refusal is not None:
            raise Refused(refusal)
        try:
            content = await body.read(request, self.settings.max_body, self.settings.read_within)
        except TooLarge:
            raise Refused(too_large) from None
        except TooSlow:
            raise Refused(answers.refusal(408, f"The body took more than {self.settings.read_within:g} s.")) from None
        except Broken:
            raise Refused(answers.refusal(400, "The body cannot be read.")) from None
        refusal = endpoint.proofs.refuse(request.headers, content, now=time.time())
        if refusal is not None:
            raise Refused(refusal)
        return content

    async def _accept(
        self, endpoint: Endpoint, arrival: Arrival, reply: Reply | None, request: Request
    ) -> tuple[Answer | None, str]:
        """Log it and have it run; what its sender is told at once, if anything."""
        is_full = len(self.dispatch.known) + self._held >= self.settings.max_waiting
        self._held += 1
        now = time.time()
        try:
            verdict, event = await self.inbox.database.run(
                ledger.accept,
                arrival,
                now=now,
                window=self.settings.same_body_within,
                is_full=is_full,
                coalesce=endpoint.is_coalesced,
            )
            if verdict in (Verdict.NEW, Verdict.AGAIN) and arrival.status is not Status.IGNORED:
                self.dispatch.push(Place(event.id, event.path, arrival.lane, now), reply, request)
        finally:
            self._held -= 1
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
        for place in await self.inbox.database.run(ledger.waiting):
            self.dispatch.push(place)
        return event

    async def _keep(self) -> None:
        """Find what other processes replay, and forget what is old."""
        seen: int | None = None
        tidied = 0.0
        while True:
            try:
                seen, places = await self.inbox.database.run(ledger.changed, seen)
                for place in places or ():
                    self.dispatch.push(place)
                if time.monotonic() - tidied > TIDY_EVERY:
                    tidied = time.monotonic()
                    seen = None
                    await self._tidy()
            except StoreError as error:
                log.error("the inbox cannot be looked after: %s", error)
            await asyncio.sleep(LOOK_EVERY)

    async def _tidy(self) -> None:
        settings, now = self.settings, time.time()
        pruned = 1
        while pruned:
            # A few at a time: deliveries are written in between.
            pruned = await self.inbox.database.run(
                ledger.prune, now=now, kept=settings.kept, kept_dead=settings.kept_dead, kept_bytes=settings.kept_bytes
            )
        for webhook_id, count in (await self.inbox.database.run(ledger.counts, since=now - DAY)).items():
            if count >= 0.8 * HUB_LIMIT and now - self._warned.get(webhook_id, 0.0) > DAY:
                self._warned[webhook_id] = now
                log.warning(
                    "webhook %s had %d deliveries within a day; the Hub stops at %d", webhook_id, count, HUB_LIMIT
                )


def _arrival(endpoint: Endpoint, request: Request, content: bytes) -> Arrival:
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
                payload_of(endpoint.handler.model, data)
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
        identity=f"body:{hashlib.sha256(content).hexdigest()}" if content else "",
        webhook_id=facts.webhook_id or "",
        delivery_id=delivery_id,
        repo=facts.repo,
        repo_type=facts.repo_type,
        scope=facts.scope,
        action=facts.action,
        status=Status.WAITING if endpoint.filter.wants(facts) else Status.IGNORED,
    )
