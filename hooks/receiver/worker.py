"""Worker that runs the handlers of stored events, in order per repo and with retries."""

import asyncio
import contextvars
import functools
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from pydantic import BaseModel
from sanic import Request, Sanic
from sanic.compat import Header

from hooks.errors import RetryableError, StoreError
from hooks.receiver import endpoint as answers
from hooks.receiver import inbox as ledger
from hooks.receiver.endpoint import Endpoint, ReceiverSettings, backoff
from hooks.receiver.events import Answer, Event, Status
from hooks.receiver.filters import InvalidPayload, build_payload, parse_json
from hooks.receiver.inbox import EffectFailed, Inbox


class Reply:
    """Answer to a waiting sender, handed over from the handler's run to the request.

    A failure that is handed back to the sender is written as such first, so from ``hold_sender`` on the request waits
    for that instead of saying 202: an event must not be both accepted and handed back.
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
        """Keep the sender waiting until an answer is set; False when it has stopped waiting."""
        self._is_held = self._has_waiter and not self._answer.done()
        return self._is_held

    async def wait(self, seconds: float) -> Answer | None:
        """Wait this long for the answer; None without one."""
        try:
            done, _ = await asyncio.wait({self._answer}, timeout=seconds)
            if not done and self._is_held:
                await asyncio.wait({self._answer})
        finally:
            self._has_waiter = False
        return self._answer.result() if self._answer.done() else None


class DaemonThreadPool:
    """Pool of daemon threads, started on demand; an executor's threads would hold up the process's end."""

    def __init__(self, count: int):
        self._count = count
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0

    def run(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a call in a thread; cancelling the future stops the waiting only."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        # Whoever waited may have given up; its error is no news then.
        outcome.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        context = contextvars.copy_context()

        def work() -> None:
            result: object = None
            error: Exception | None = None
            try:
                result = context.run(call)
            except StopIteration:  # a future cannot carry it
                error = RuntimeError("StopIteration in a handler")
            except Exception as raised:
                error = raised
            except BaseException as raised:  # an exit of this thread is no exit of the process
                error = RuntimeError(f"{type(raised).__name__} in a handler")
            with suppress(RuntimeError):  # the loop has ended, and whoever waited with it
                loop.call_soon_threadsafe(_set_outcome, outcome, result, error)

        self._calls.put(work)
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._work, name=f"webhook-{self._started}", daemon=True).start()
        return outcome

    def close(self) -> None:
        """Let each thread end after its present call."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _set_outcome(outcome: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)


log = logging.getLogger(__name__)

LARGE_BODY = 1 << 18  # bytes of a body that is not read on the event loop


class HandlerTimeout(Exception):
    """A sync handler exceeded its timeout; its thread goes on."""


class HandlerRunner:
    """Runs handlers and records their outcomes.

    Args:
        write: writes what became of an event, for as long as that takes.
    """

    def __init__(self, inbox: Inbox, settings: ReceiverSettings, app: Sanic | None, write: Callable[..., Any]):
        self._inbox = inbox
        self._write = write
        self._settings = settings
        self._app = app
        self._threads = DaemonThreadPool(settings.threads)

    def close(self) -> None:
        """Let the handlers' threads end after their present calls."""
        self._threads.close()

    async def run_handler(self, endpoint: Endpoint, event: Event, reply: Reply | None, request: Request | None) -> bool:
        """Run an event's handler once; return whether the event is done.

        Args:
            reply: of the sender, if it waits.
            request: of the sender, if it still waits.
        """
        try:
            value = await self._call_handler(endpoint, event, request)
            answer = answers.convert_value(endpoint.handler.name, value)
            if answer.status >= 500:
                await self._record_failure(endpoint, event, RuntimeError(f"it answered {answer.status}"), reply, answer)
                return False
            await self._write(
                ledger.finish_event, event.id, answers.shorten_answer(answer), tuple(event.effects), now=time.time()
            )
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The handler's own; the lane goes on.
            await self._record_failure(endpoint, event, error, reply)
        except EffectFailed as error:
            await self._record_failure(endpoint, event, error.__cause__ or error, reply)
        except GeneratorExit:
            raise  # of this coroutine, when its loop has ended
        except BaseException as error:  # an exit or a panic of a library must not end the server, nor the lane
            await self._record_failure(endpoint, event, error, reply)
        else:
            if reply is not None:
                reply.set_answer(answer)
            return True
        return False

    async def _call_handler(self, endpoint: Endpoint, event: Event, request: Request | None) -> object:
        handler = endpoint.handler
        payload = None
        if handler.takes("payload"):
            read = functools.partial(_parse_payload, handler.model, event.body)
            payload = read() if event.size < LARGE_BODY else await asyncio.to_thread(read)
        if handler.takes("request") and request is None:
            request = _rebuild_request(event, self._app)
        call = handler.bind(payload, request, event)
        if handler.is_async:
            async with asyncio.timeout(endpoint.timeout):
                value = call()
                return await value if inspect.isawaitable(value) else value
        outcome = self._threads.run(call)
        done, _ = await asyncio.wait({outcome}, timeout=endpoint.timeout)
        if not done:
            raise HandlerTimeout(f"it took longer than {endpoint.timeout:g} s; its thread goes on")
        value = outcome.result()
        return await value if inspect.isawaitable(value) else value

    async def _record_failure(
        self, endpoint: Endpoint, event: Event, error: BaseException, reply: Reply | None, answer: Answer | None = None
    ) -> None:
        log.error("event %s: handler %s failed", event.id, endpoint.handler.name, exc_info=error)
        now = time.time()
        # To run it again would be beside itself, or in vain.
        is_final = isinstance(error, HandlerTimeout | InvalidPayload)
        delay = None if is_final else endpoint.get_retry_delay(error, event.failures + 1, self._settings)
        is_retried_here = isinstance(error, RetryableError) and delay is not None
        # Once this is decided, the sender waits until it is written whether the event is handed back to it.
        to_sender = reply is not None and not is_final and not is_retried_here and reply.hold_sender()
        write = self._inbox.database.run if to_sender else self._write
        try:
            status = await write(
                ledger.fail_event,
                event.id,
                _describe_error(error),
                now=now,
                attempts=self._settings.attempts,
                retry_at=None if delay is None else now + delay,
                to_sender=to_sender,
            )
        except StoreError as trouble:
            # Nobody knows that it was handed back, so it runs again here, whatever its sender does.
            log.error("event %s: its end cannot be written, it runs again: %s", event.id, trouble)
            if reply is not None:
                reply.set_answer(
                    answers.build_busy_answer("The event could not be written.", self._settings.retry_after)
                )
            status = await self._write(ledger.requeue_event, event.id, due=now + backoff(1, self._settings))
        if reply is not None:
            is_accepted = status is Status.WAITING
            reply.set_answer(
                answers.build_accepted_answer(event.id)
                if is_accepted
                else answer or answers.build_failure_answer(event.id)
            )
        if status is Status.DEAD:
            log.error("event %s of %s is a dead letter after %d attempts", event.id, event.path, event.attempt)


def _describe_error(error: BaseException) -> str:
    """Describe an error in text that a database takes: it may hold bytes that are no text, or fail to print."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:2000].encode("utf-8", "replace").decode()


def _rebuild_request(event: Event, app: Sanic | None) -> Request:
    """Rebuild the request of an event whose sender was answered before."""
    request = Request(event.path.encode(), Header(dict(event.headers)), "1.1", "POST", cast(Any, None), cast(Any, app))
    request.body = event.body
    return request


def _parse_payload(model: type[BaseModel] | None, body: bytes) -> Any:
    return build_payload(model, parse_json(body))
