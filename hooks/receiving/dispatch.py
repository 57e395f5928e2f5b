"""Runs accepted events: in order within a repo, side by side otherwise, again when they fail."""

import asyncio
import inspect
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from sanic import Request, Sanic
from sanic.compat import Header

from hooks.errors import RetryableError, StoreError
from hooks.receiving import answers, ledger
from hooks.receiving.endpoint import Endpoint, backoff
from hooks.receiving.event import Answer, Event, Status
from hooks.receiving.inbox import Inbox
from hooks.receiving.ledger import EffectFailed, Place
from hooks.receiving.payloads import Unusable, parse, payload_of
from hooks.receiving.reply import Reply
from hooks.receiving.settings import ReceiverSettings
from hooks.receiving.threads import Threads

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

log = logging.getLogger(__name__)

STORE_PAUSE = 0.5  # seconds between attempts to write what became of an event


class StillRuns(Exception):
    """A sync handler took longer than it may; its thread goes on."""


@dataclass(eq=False)
class _Item:
    place: Place
    reply: Reply | None = None
    request: Request | None = None


@dataclass(eq=False)
class _Lane:
    items: deque[_Item] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    now: asyncio.Event = field(default_factory=asyncio.Event)  # set: do not sleep on


class Dispatch:
    """What runs between a server's start and its stop; made on its loop.

    Attributes:
        known: ids of the events it has.
    """

    def __init__(
        self, inbox: Inbox, settings: ReceiverSettings, endpoints: Mapping[str, Endpoint], app: Sanic | None = None
    ):
        self.known: set[str] = set()
        self._inbox = inbox
        self._settings = settings
        self._endpoints = endpoints
        self._app = app
        self._threads = Threads(settings.threads)
        self._sync = asyncio.Semaphore(settings.threads)
        self._async = asyncio.Semaphore(settings.concurrency)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._is_closing = False

    def push(self, place: Place, reply: Reply | None = None, request: Request | None = None) -> None:
        """Have an event run after those of its lane; one that is here already is hurried on."""
        key = (place.path, place.lane or place.id)
        lane = self._lanes.get(key)
        if place.id in self.known:
            if lane is not None:
                for item in lane.items:
                    if item.place.id == place.id:
                        item.place = place
                lane.now.set()
            return
        if self._is_closing or place.path not in self._endpoints:
            return
        self.known.add(place.id)
        lane = self._lanes.setdefault(key, _Lane())
        lane.items.append(_Item(place, reply, request))
        if lane.task is None:
            lane.task = asyncio.create_task(self._run_lane(key, lane), name=f"webhook lane {place.path}")

    async def close(self) -> None:
        """Let what runs end for a while; what does not is left to the next start."""
        self._is_closing = True
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for lane in self._lanes.values():
            lane.now.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._settings.stop_within)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._threads.close()

    async def _run_lane(self, key: tuple[str, str], lane: _Lane) -> None:
        try:
            while lane.items and not self._is_closing:
                item = lane.items[0]
                try:
                    await self._run_item(item, lane)
                finally:
                    lane.items.popleft()
                    self._forget(item)
        finally:
            for item in lane.items:
                self._forget(item)
            del self._lanes[key]

    def _forget(self, item: _Item) -> None:
        self.known.discard(item.place.id)
        if item.reply is not None:
            item.reply.tell(answers.accepted(item.place.id))

    async def _run_item(self, item: _Item, lane: _Lane) -> None:
        endpoint = self._endpoints[item.place.path]
        while not self._is_closing:
            await self._until(item, lane)
            async with AsyncExitStack() as held:
                await self._take_turn(endpoint, held)
                if self._is_closing:
                    return
                try:
                    event = await self._inbox.database.run(ledger.begin, item.place.id)
                except StoreError as error:
                    log.error("event %s cannot begin: %s", item.place.id, error)
                    item.place = replace(item.place, due=time.time() + STORE_PAUSE)
                    continue
                if event is None:
                    if item.reply is not None:
                        item.reply.tell(answers.answer({"status": "superseded", "event_id": item.place.id}))
                    return
                retry_at = await self._run(endpoint, event, item)
            if retry_at is None:
                return
            item.place = replace(item.place, due=retry_at)
            item.reply = item.request = None

    async def _until(self, item: _Item, lane: _Lane) -> None:
        while not self._is_closing and (left := item.place.due - time.time()) > 0:
            lane.now.clear()
            try:
                async with asyncio.timeout(left):
                    await lane.now.wait()
            except TimeoutError:
                return

    async def _take_turn(self, endpoint: Endpoint, held: AsyncExitStack) -> None:
        if endpoint.concurrency is not None:
            own = self._own.setdefault(endpoint.path, asyncio.Semaphore(endpoint.concurrency))
            await held.enter_async_context(own)
        await held.enter_async_context(self._async if endpoint.handler.is_async else self._sync)

    async def _run(self, endpoint: Endpoint, event: Event, item: _Item) -> float | None:
        """One attempt; when the next one is due, or None when there is none."""
        try:
            value = await self._call(endpoint, event, item.request)
            told = answers.value_of(endpoint.handler.name, value)
            if told.status >= 500:
                return await self._fail(endpoint, event, RuntimeError(f"it answered {told.status}"), item.reply, told)
            await self._finish(event, told)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The handler's own; the lane goes on.
            return await self._fail(endpoint, event, error, item.reply)
        except EffectFailed as error:
            return await self._fail(endpoint, event, error.__cause__ or error, item.reply)
        except (Exception, SystemExit) as error:  # a handler must not end the server
            return await self._fail(endpoint, event, error, item.reply)
        if item.reply is not None:
            item.reply.tell(told)
        return None

    async def _call(self, endpoint: Endpoint, event: Event, request: Request | None) -> object:
        handler = endpoint.handler
        payload = payload_of(handler.model, parse(event.body)) if handler.takes("payload") else None
        if handler.takes("request") and request is None:
            request = _request_of(event, self._app)
        call = handler.bind(payload, request, event)
        if handler.is_async:
            async with asyncio.timeout(endpoint.timeout):
                value = call()
                return await value if inspect.isawaitable(value) else value
        outcome = self._threads.run(call)
        done, _ = await asyncio.wait({outcome}, timeout=endpoint.timeout)
        if not done:
            raise StillRuns(f"it took longer than {endpoint.timeout:g} s; its thread goes on")
        value = outcome.result()
        return await value if inspect.isawaitable(value) else value

    async def _finish(self, event: Event, told: Answer) -> None:
        await self._write(ledger.finish, event.id, answers.stored(told), tuple(event.effects), now=time.time())

    async def _fail(
        self, endpoint: Endpoint, event: Event, error: BaseException, reply: Reply | None, told: Answer | None = None
    ) -> float | None:
        log.error("event %s: handler %s failed", event.id, endpoint.handler.name, exc_info=error)
        now = time.time()
        delay = None
        if not isinstance(error, StillRuns | Unusable):
            delay = endpoint.delay(error, event.failures + 1, self._settings)
        # From here on the sender waits until it is written whether the event is handed back to it.
        is_ours = isinstance(error, RetryableError) and delay is not None
        to_sender = reply is not None and not is_ours and reply.decide()
        write = self._inbox.database.run if to_sender else self._write
        try:
            status = await write(
                ledger.fail,
                event.id,
                f"{type(error).__name__}: {error}"[:2000],
                now=now,
                attempts=self._settings.attempts,
                retry_at=None if delay is None else now + delay,
                to_sender=to_sender,
            )
        except StoreError as trouble:
            # Nobody knows that it was handed back, so it runs again here, whatever its sender does.
            log.error("event %s: its end cannot be written, it runs again: %s", event.id, trouble)
            if reply is not None:
                reply.tell(answers.busy("The event could not be written.", self._settings.retry_after))
            status = await self._write(ledger.again, event.id, now=now)
        if reply is not None:
            is_accepted = status is Status.WAITING
            reply.tell(answers.accepted(event.id) if is_accepted else told or answers.failed(event.id))
        if status is Status.DEAD:
            log.error("event %s of %s is a dead letter after %d attempts", event.id, event.path, event.attempt)
        return now + (delay or backoff(1, self._settings)) if status is Status.WAITING else None

    async def _write(
        self,
        transaction: Callable[Concatenate[sqlite3.Connection, str, Arguments], Result],
        event_id: str,
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Write what became of an event, for as long as that takes: a disk may be full for a while."""
        while True:
            try:
                return await self._inbox.database.run(transaction, event_id, *arguments, **named)
            except StoreError as error:
                log.error("event %s: what became of it cannot be written yet: %s", event_id, error)
                await asyncio.sleep(STORE_PAUSE)


def _request_of(event: Event, app: Sanic | None) -> Request:
    """What there is of the request of an event that was accepted before the last start."""
    request = Request(event.path.encode(), Header(dict(event.headers)), "1.1", "POST", cast(Any, None), cast(Any, app))
    request.body = event.body
    return request
