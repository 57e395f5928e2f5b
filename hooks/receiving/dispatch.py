"""Runs accepted events: in order within a repo, side by side otherwise, again when they fail."""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from sanic import Request, Sanic

from hooks.errors import StoreError
from hooks.receiving import answers, ledger
from hooks.receiving.endpoint import Endpoint
from hooks.receiving.inbox import Inbox
from hooks.receiving.ledger import Place
from hooks.receiving.reply import Reply
from hooks.receiving.runs import STORE_PAUSE, Runs
from hooks.receiving.settings import ReceiverSettings

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Item:
    place: Place
    due: float  # monotonic: a wall clock that is set back delays nothing
    reply: Reply | None = None
    # Not kept for an event whose sender was answered: a thousand of them may wait, each with a large body.
    request: weakref.ref[Request] | None = None


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
        self._runs = Runs(inbox, settings, app)
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
                        item.place, item.due = place, min(item.due, _due(place.due))
                        item.reply = item.reply or reply
                lane.now.set()
            return
        if self._is_closing or place.path not in self._endpoints:
            return
        self.known.add(place.id)
        lane = self._lanes.setdefault(key, _Lane())
        lane.items.append(_Item(place, _due(place.due), reply, None if request is None else weakref.ref(request)))
        if lane.task is None:
            lane.task = asyncio.create_task(self._run_lane(key, lane), name=f"webhook lane {place.path}")

    async def close(self) -> None:
        """Let what runs end for a while; what does not is left to the next start."""
        self._is_closing = self._runs.is_ending = True
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for lane in self._lanes.values():
            lane.now.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._settings.stop_within)
            for task in late:
                task.cancel()
            if late:
                # A handler may refuse to be cancelled.
                await asyncio.wait(late, timeout=self._settings.stop_within)
        self._runs.close()

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
                    item.due = time.monotonic() + STORE_PAUSE
                    continue
                if event is None:
                    if item.reply is not None:
                        item.reply.tell(answers.answer({"status": "superseded", "event_id": item.place.id}))
                    return
                request = None if item.request is None else item.request()
                retry_at = await self._runs.attempt(endpoint, event, item.reply, request)
            if retry_at is None:
                return
            item.place, item.due = replace(item.place, due=retry_at), _due(retry_at)
            item.reply = item.request = None

    async def _until(self, item: _Item, lane: _Lane) -> None:
        while not self._is_closing and (left := item.due - time.monotonic()) > 0:
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


def _due(at: float) -> float:
    """When that is, in monotonic time; ``at``: seconds since 1970, as it is written down."""
    return time.monotonic() + at - time.time()
