"""Deliveries of the stub: a v3 payload to each webhook that watches, as badly as it was told to.

The real Hub promises neither order nor that a delivery comes once; only its ``Webhook-Id`` stays the same.
"""

import http.client
import json
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.testing.stub_hub.webhooks import Webhook

LOST = 0  # in place of a status: sent by the Hub, but no answer
GATHER = 5.0  # seconds in which the next of those that are mixed up has to come
TIMEOUT = 10.0  # seconds that an answer may take


@dataclass
class DeliveryPlan:
    """``copies`` is how often each delivery is sent; ``reorder`` is how many consecutive deliveries are shuffled."""

    copies: int = 1
    reorder: int = 1


@dataclass
class Delivery:
    """One event for one webhook: what was sent and how each attempt ended (an HTTP status, or ``LOST``)."""

    id: str
    webhook_id: str
    payload: Mapping[str, Any]
    statuses: list[int] = field(default_factory=list)


class Deliveries:
    def __init__(self, find: Callable[[str], Webhook | None]):
        self.plan = DeliveryPlan()
        self.log: list[Delivery] = []
        self._find = find
        self._waiting: queue.Queue[tuple[Delivery, ...] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="stub-hub-deliveries", daemon=True)
        self._thread.start()

    def add(self, webhook: Webhook, payload: Mapping[str, Any]) -> Delivery:
        told = {**payload, "webhook": {"id": webhook.id, "version": 3}}
        delivery = Delivery(str(uuid.uuid4()), webhook.id, told)
        self.log.append(delivery)
        self._waiting.put((delivery,) * self.plan.copies)
        return delivery

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until all deliveries were sent; raises TimeoutError."""
        until = time.monotonic() + timeout
        with self._waiting.all_tasks_done:
            while self._waiting.unfinished_tasks:
                if not self._waiting.all_tasks_done.wait(until - time.monotonic()):
                    raise TimeoutError(f"{self._waiting.unfinished_tasks} deliveries are not done")

    def replay(self, webhook: Webhook, name: str) -> int:
        """Send one again, with its id, to where the webhook points now; KeyError when there is no such delivery."""
        for delivery in self.log:
            if delivery.id == name and delivery.webhook_id == webhook.id:
                delivery.statuses.append(self._post(webhook, delivery))
                return delivery.statuses[-1]
        raise KeyError(name)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        dice = random.Random(0)
        while (first := self._waiting.get()) is not None:
            batch, taken = list(first), 1
            while taken < self.plan.reorder:
                try:
                    further = self._waiting.get(timeout=GATHER)
                except queue.Empty:
                    break
                if further is None:
                    self._waiting.task_done()
                    self._waiting.put(None)
                    break
                batch += further
                taken += 1
            if self.plan.reorder > 1:
                dice.shuffle(batch)
            for delivery in batch:
                webhook = self._find(delivery.webhook_id)
                if webhook is not None and webhook.disabled is False:
                    delivery.statuses.append(self._post(webhook, delivery))
            for _ in range(taken):
                self._waiting.task_done()

    def _post(self, webhook: Webhook, delivery: Delivery) -> int:
        if webhook.url is None:
            return 200  # a job is started by the Hub itself
        headers = {"Content-Type": "application/json", "Webhook-Id": delivery.id, "User-Agent": "stub-hub"}
        if webhook.secret:
            headers["X-Webhook-Secret"] = webhook.secret
        where = urlsplit(webhook.url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        connection = kind(where.hostname or "", where.port, timeout=TIMEOUT)
        try:
            target = (where.path or "/") + (f"?{where.query}" if where.query else "")
            connection.request("POST", target, json.dumps(delivery.payload), headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return LOST
        finally:
            connection.close()
