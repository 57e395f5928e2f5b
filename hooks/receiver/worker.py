"""Worker of a receiver: accepts events, runs handlers in order per repo with retries, prunes the inbox."""

import asyncio
import functools
import inspect
import logging
import sqlite3
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self, cast

from sanic import Request, Sanic
from sanic.compat import Header

from hooks.errors import RetryableError, StoreError
from hooks.queue import QueueRunner
from hooks.receiver import endpoint as answers
from hooks.receiver import inbox as ledger
from hooks.receiver.endpoint import Endpoint, ReceiverSettings, backoff
from hooks.receiver.inbox import Acceptance, Answer, Event, EventInbox, EventStatus, IncomingEvent
from hooks.receiver.parsing import InvalidPayload, build_payload, parse_json
from hooks.threads import start_in_thread

log = logging.getLogger(__name__)

LARGE_BODY = 1 << 18  # bytes of a body above which a thread parses it
MAX_CRASHES = 20  # crashes of the process during an event, above which the event is a dead letter
POLL_INTERVAL = 0.5  # seconds between checks for replays by other processes
PRUNE_INTERVAL = 60.0


class Reply:
    """Answer to a waiting sender, passed from the handler's run to the request.

    After ``hold_sender``, the request waits for the inbox, so that an event is never both accepted and refused.
    """

    def __init__(self) -> None:
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._has_waiter = True
        self._is_held = False

    def set_answer(self, answer: Answer) -> None:
        """Set the answer; only the first call counts."""
        if not self._answer.done():
            self._answer.set_result(answer)

    def hold_sender(self) -> bool:
        """Keep the sender waiting until an answer is set; False if the sender has stopped waiting."""
        self._is_held = self._has_waiter and not self._answer.done()
        return self._is_held

    async def wait(self, seconds: float) -> Answer | None:
        """Wait for the answer; None after the timeout."""
        try:
            done, _ = await asyncio.wait({self._answer}, timeout=seconds)
            if not done and self._is_held:
                await asyncio.wait({self._answer})
        finally:
            self._has_waiter = False
        return self._answer.result() if self._answer.done() else None


class EventWorker:
    """Running part of a receiver, from the server's start to its stop; created on the server's loop."""

    def __init__(self, inbox: EventInbox, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic):
        self.inbox = inbox
        self.is_ending = False
        self._settings = settings
        self._endpoints = endpoints
        self._app = app
        self._runner = QueueRunner(inbox.database, ledger.QUEUE, self._run_event, self._get_limits)
        self._accepting: set[asyncio.Task[Any]] = set()
        # Waiting senders by event. Requests are weak references, because a thousand large bodies may wait.
        self._senders: dict[str, tuple[Reply, weakref.ref[Request]]] = {}
        self._background_tasks = [
            asyncio.create_task(self._runner.run(), name="webhook events"),
            asyncio.create_task(self._maintain(), name="webhook inbox"),
        ]

    @classmethod
    async def open(cls, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic) -> Self:
        """Open the inbox and resume its events; raise ``StoreError`` if another receiver uses the file."""
        inbox = await asyncio.to_thread(EventInbox, settings.database)
        try:
            inbox.lock()
            waiting = await inbox.database.run(ledger.resume_events, now=time.time(), max_crashes=MAX_CRASHES)
        except BaseException:
            inbox.close()
            raise
        for path in sorted(set(waiting) - set(endpoints)):
            log.warning("%d events wait for %s, which has no handler here; they stay in the inbox", waiting[path], path)
        return cls(inbox, settings, endpoints, app)

    async def close(self) -> None:
        """Stop accepting, wait a while for running handlers, and leave the rest to the next start."""
        self.is_ending = self._runner.is_ending = True
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, *self._accepting, return_exceptions=True)
        await self._runner.close(self._settings.stop_within)
        for event_id, (reply, _) in self._senders.items():
            reply.set_answer(answers.build_accepted_answer(event_id))
        with suppress(StoreError):  # Otherwise the next start resumes these events.
            await self.inbox.database.run(ledger.QUEUE.release_running)
        await asyncio.to_thread(self.inbox.close)

    async def deliver(
        self, endpoint: Endpoint, incoming: IncomingEvent, request: Request, *, store_within: float, answer_by: float
    ) -> Answer:
        """Store and run a delivery, answer by ``answer_by``; raise ``StoreError`` after ``store_within`` seconds."""
        reply = Reply() if endpoint.mode == "reply" else None
        task = asyncio.create_task(self._accept(incoming, reply, request))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)
        # Shielded, because an accepted event runs even if its sender disconnects.
        try:
            async with asyncio.timeout(store_within):
                acceptance, event = await asyncio.shield(task)
        except TimeoutError:
            raise StoreError("the database is slow") from None
        if acceptance is Acceptance.FULL:
            log.warning("a delivery to %s is answered 503: %d events wait", endpoint.path, self._settings.max_waiting)
            return answers.build_error(503, "Too many events wait.", retry_after=answers.RETRY_AFTER)
        if acceptance is Acceptance.DUPLICATE:
            return answers.build_duplicate_answer(event)
        accepted = answers.build_accepted_answer(event.id)
        return accepted if reply is None else await reply.wait(max(0.0, answer_by - time.monotonic())) or accepted

    async def _accept(self, incoming: IncomingEvent, reply: Reply | None, request: Request) -> tuple[Acceptance, Event]:
        acceptance, event = await self.inbox.database.run(
            ledger.accept_event,
            incoming,
            now=time.time(),
            window=self._settings.same_body_within,
            max_waiting=self._settings.max_waiting,
            paths=self._endpoints.keys(),
        )
        if acceptance is Acceptance.NEW:
            if reply is not None:
                self._senders[event.id] = reply, weakref.ref(request)
            self._runner.wake()
        return acceptance, event

    async def replay(self, event_id: str) -> Event:
        """Run an event again; raise ``UnknownEvent`` for an unknown id."""
        event = await self.inbox.database.run(ledger.replay_event, event_id, now=time.time())
        self._runner.wake()
        return event

    def _get_limits(self, path: str) -> Mapping[str, int]:
        """Return the limit of parallel handlers, which all async handlers share, and all sync handlers."""
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            return {path: 0}
        return {"async": self._settings.concurrency} if endpoint.handler.is_async else {"sync": self._settings.threads}

    async def _run_event(self, row: sqlite3.Row) -> bool:
        """Run an event's handler once; return whether the event is done."""
        event, endpoint = ledger.read_event(row), self._endpoints[row["path"]]
        reply, request = self._senders.pop(event.id, (None, None))
        try:
            value = await self._call_handler(endpoint, event, request and request())
            answer = answers.convert_value(endpoint.handler.name, value)
            if answer.status >= 500:
                await self._record_failure(endpoint, event, RuntimeError(f"it answered {answer.status}"), reply, answer)
                return False
            await self._runner.write(ledger.finish_event, event.id, answers.shorten_answer(answer), now=time.time())
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            await self._record_failure(endpoint, event, error, reply)  # The handler raised the error.
        except GeneratorExit:
            raise  # The loop of this coroutine has ended.
        except BaseException as error:  # SystemExit or a library's panic must not end the server.
            await self._record_failure(endpoint, event, error, reply)
        else:
            if reply is not None:
                reply.set_answer(answer)
            return True
        finally:
            if reply is not None:
                reply.set_answer(answers.build_accepted_answer(event.id))  # Ignored if another answer was set.
        return False

    async def _call_handler(self, endpoint: Endpoint, event: Event, request: Request | None) -> object:
        handler = endpoint.handler
        payload = None
        if handler.takes("payload"):

            def read() -> Any:
                return build_payload(handler.model, parse_json(event.body))

            payload = read() if event.size < LARGE_BODY else await asyncio.to_thread(read)
        if handler.takes("request") and request is None:
            request = _rebuild_request(event, self._app)
        call = handler.bind(payload, request, event)
        if handler.is_async:
            value = call()
        else:
            # Not in asyncio's thread pool, because the process would wait for it at its end.
            value = await asyncio.wrap_future(start_in_thread(functools.partial(_run_sync, call)))
        return await value if inspect.isawaitable(value) else value

    async def _record_failure(
        self, endpoint: Endpoint, event: Event, error: BaseException, reply: Reply | None, answer: Answer | None = None
    ) -> None:
        log.error("event %s: handler %s failed", event.id, endpoint.handler.name, exc_info=error)
        now = time.time()
        is_final = isinstance(error, InvalidPayload)  # A retry would read the same body.
        is_retryable = isinstance(error, RetryableError)
        delay = backoff(event.failures + 1, self._settings)
        if isinstance(error, RetryableError) and error.after is not None:
            delay = error.after
        # From here on the sender waits until the inbox decides whether the sender must send the event again.
        to_sender = reply is not None and not is_final and not is_retryable and reply.hold_sender()
        write = self.inbox.database.run if to_sender else self._runner.write
        try:
            status = await write(
                ledger.fail_event,
                event.id,
                _describe_error(error),
                now=now,
                attempts=self._settings.attempts,
                retry_at=None if is_final else now + delay,
                to_sender=to_sender,
            )
        except StoreError as trouble:
            # The failure is not stored, so the event runs again here.
            log.error("event %s: its outcome cannot be written, it runs again: %s", event.id, trouble)
            if reply is not None:
                reply.set_answer(
                    answers.build_error(503, "The event could not be written.", retry_after=answers.RETRY_AFTER)
                )
            status = await self._runner.write(ledger.requeue_event, event.id, due=now + backoff(1, self._settings))
        if reply is not None and status is EventStatus.WAITING:
            reply.set_answer(answers.build_accepted_answer(event.id))
        elif reply is not None:
            # The error's text is only in the log and in the inbox.
            failed = answers.build_error(500, "The handler of this webhook failed.", event_id=event.id)
            reply.set_answer(answer or failed)
        if status is EventStatus.DEAD:
            log.error("event %s of %s is a dead letter after %d attempts", event.id, event.path, event.attempt)

    async def _maintain(self) -> None:
        """Detect replays by other processes and prune old events, until cancelled."""
        version: int | None = None
        pruned_at, logged_error = 0.0, ""
        while True:
            try:
                last_version, version = version, await self.inbox.database.run(ledger.get_data_version)
                if version != last_version:
                    self._runner.wake()
                if time.monotonic() - pruned_at > PRUNE_INTERVAL:
                    pruned_at = time.monotonic()
                    await self.prune(time.time())
                logged_error = ""
            except StoreError as error:
                # Logged once, because repeating the error of a full disk would fill the log.
                if str(error) != logged_error:
                    log.error("the inbox cannot be maintained: %s", error)
                logged_error = str(error)
            await asyncio.sleep(POLL_INTERVAL)

    async def prune(self, now: float) -> None:
        """Delete old events at ``now`` (since 1970) in small batches, between which deliveries are written."""
        settings = self._settings
        while await self.inbox.database.run(
            ledger.prune_events,
            now=now,
            max_age=settings.kept,
            max_dead_age=settings.kept_dead,
            max_bytes=settings.kept_bytes,
        ):
            pass


def _run_sync(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StopIteration as error:  # A future cannot hold it.
        raise RuntimeError("StopIteration in a handler") from error


def _describe_error(error: BaseException) -> str:
    """Describe an error as valid UTF-8, although its text may contain lone surrogates or fail to print."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:2000].encode("utf-8", "replace").decode()


def _rebuild_request(event: Event, app: Sanic) -> Request:
    """Rebuild the request of an event whose sender already got a response."""
    request = Request(event.path.encode(), Header(dict(event.headers)), "1.1", "POST", cast(Any, None), app)
    request.body = event.body
    return request
