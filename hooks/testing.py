"""Simulated deliveries for tests of receivers: duplicates, reordering, wrong secrets."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from hooks.payload import Payload
from hooks.signatures import sign_github, sign_standard

USER_AGENT = "robojax-webhook-simulator"


@dataclass(frozen=True)
class Delivery:
    """One simulated delivery.

    Attributes:
        id: its ``Webhook-Id``; the same in every copy.
        kind: the sample it was made of.
    """

    id: str
    kind: str
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class DeliveryOutcome:
    """Outcome of one simulated delivery.

    Attributes:
        status: of the answer; None when there was none.
        seconds: from the first byte sent to the last received.
        answer: the beginning of the body, or why there was none.
    """

    delivery: Delivery
    status: int | None
    seconds: float
    answer: str

    @property
    def is_accepted(self) -> bool:
        """Whether the answer was a 2xx, which the Hub counts as delivered."""
        return self.status is not None and 200 <= self.status < 300


def build_deliveries(
    payloads: Sequence[tuple[str, Payload]], *, copies: int = 1, is_reordered: bool = False, seed: int = 0
) -> list[Delivery]:
    """Build the deliveries to send, in order.

    Args:
        copies: how often each is sent, with one id.
        is_reordered: shuffled, as ``seed`` says.
    """
    deliveries = [Delivery(str(uuid.uuid4()), what, json.dumps(payload).encode()) for what, payload in payloads]
    sent = [delivery for delivery in deliveries for _ in range(copies)]
    if is_reordered:
        random.Random(seed).shuffle(sent)
    return sent


def build_headers(
    delivery: Delivery, *, secret: str | None, standard_secret: str | None, github_secret: str | None, now: float
) -> dict[str, str]:
    """Build the Hub's headers, and signatures where asked for; ``now`` in seconds since 1970."""
    headers = {"Content-Type": "application/json", "User-Agent": USER_AGENT, "Webhook-Id": delivery.id}
    if secret:
        headers["X-Webhook-Secret"] = secret
    if standard_secret:
        headers["webhook-timestamp"] = str(int(now))
        headers["webhook-signature"] = sign_standard(standard_secret, delivery.id, int(now), delivery.body)
    if github_secret:
        headers["X-Hub-Signature-256"] = sign_github(github_secret, delivery.body)
    return headers


async def send_deliveries(
    url: str,
    deliveries: Sequence[Delivery],
    *,
    secret: str | None = None,
    standard_secret: str | None = None,
    github_secret: str | None = None,
    at_once: int = 1,
    timeout: float = 30.0,
) -> AsyncIterator[DeliveryOutcome]:
    """Send deliveries, and yield each outcome as it arrives.

    Args:
        at_once: requests under way at one time; 1 keeps their order.
        timeout: of one request, in seconds.
    """
    limits = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=at_once)) as session:

        async def one(delivery: Delivery) -> DeliveryOutcome:
            secrets = build_headers(
                delivery,
                secret=secret,
                standard_secret=standard_secret,
                github_secret=github_secret,
                now=time.time(),
            )
            started_at = time.perf_counter()
            try:
                # A redirect would take the secret somewhere else.
                async with session.post(url, data=delivery.body, headers=secrets, allow_redirects=False) as answer:
                    text = (await answer.content.read(2000)).decode(errors="replace")
                    return DeliveryOutcome(delivery, answer.status, time.perf_counter() - started_at, text)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                reason = str(error) or f"no answer within {timeout:g} s"
                return DeliveryOutcome(delivery, None, time.perf_counter() - started_at, reason)

        waiting = list(reversed(deliveries))
        running: set[asyncio.Task[DeliveryOutcome]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.add(asyncio.create_task(one(waiting.pop())))
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
