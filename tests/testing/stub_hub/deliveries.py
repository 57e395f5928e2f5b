"""Deliveries of the stub: a v3 payload to each watching webhook, repeated and reordered by a plan.

The real Hub guarantees neither order nor single delivery; only its ``Webhook-Id`` stays the same.
"""

import http.client
import json
import queue
import random
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.testing.stub_hub.webhooks import Webhook

GATHER = 5.0  # Seconds to wait for the next delivery of a shuffled group.
TIMEOUT = 10.0  # Seconds allowed for the receiver's response.


@dataclass
class DeliveryPlan:
    """``copies`` is the number of times each delivery is sent; ``reorder`` is the size of shuffled groups."""

    copies: int = 1
    reorder: int = 1


@dataclass(frozen=True)
class Delivery:
    """One event for one webhook."""

    id: str
    webhook_id: str
    payload: Mapping[str, Any]


class Deliveries:
    """Thread that sends deliveries."""

    def __init__(self, find: Callable[[str], Webhook | None]):
        self.plan = DeliveryPlan()
        self._find = find
        self._waiting: queue.Queue[Delivery | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="stub-hub-deliveries", daemon=True)
        self._thread.start()

    def add(self, webhook: Webhook, payload: Mapping[str, Any]) -> None:
        delivered = {**payload, "webhook": {"id": webhook.id, "version": 3}}
        self._waiting.put(Delivery(str(uuid.uuid4()), webhook.id, delivered))

    def close(self) -> None:
        for _ in range(2):  # The first ends the wait for the rest of a group.
            self._waiting.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        dice = random.Random(0)
        while (first := self._waiting.get()) is not None:
            group = [first]
            with suppress(queue.Empty):
                while len(group) < self.plan.reorder and (further := self._waiting.get(timeout=GATHER)) is not None:
                    group.append(further)
            batch = group * self.plan.copies
            if self.plan.reorder > 1:
                dice.shuffle(batch)
            for delivery in batch:
                webhook = self._find(delivery.webhook_id)
                if webhook is not None and webhook.disabled is False and webhook.url is not None:
                    _post(webhook.url, webhook.secret, delivery)


def _post(url: str, secret: str | None, delivery: Delivery) -> None:
    headers = {"Content-Type": "application/json", "Webhook-Id": delivery.id, "User-Agent": "stub-hub"}
    if secret:
        headers["X-Webhook-Secret"] = secret
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT)
    try:
        connection.request("POST", where.path or "/", json.dumps(delivery.payload), headers)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass  # The Hub does not repeat a delivery to an absent receiver.
    finally:
        connection.close()
