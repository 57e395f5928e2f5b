"""A request becomes an event: every check in order, one transaction, then its run."""

import asyncio
import logging
import sqlite3
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Self

from sanic import HTTPResponse, Request, Sanic

from hooks.errors import StoreError
from hooks.queue import Runner
from hooks.receiving import answers, ledger
from hooks.receiving.arrivals import Rates, Refused, arrival_of, discard, leave, read
from hooks.receiving.endpoint import Endpoint
from hooks.receiving.event import Answer, Event, Status
from hooks.receiving.inbox import Inbox
from hooks.receiving.ledger import Arrival, Verdict
from hooks.receiving.payloads import is_quick
from hooks.receiving.runs import Reply, Runs
from hooks.receiving.settings import DAY, ReceiverSettings

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
