"""What has to hold before a request becomes an event: rate, size, secret, payload, cheapest first."""

import asyncio
import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from sanic import Request
from sanic.exceptions import SanicException

from hooks.receiving import answers
from hooks.receiving.endpoint import SECRET_HEADERS, Endpoint
from hooks.receiving.event import Answer, Status
from hooks.receiving.ledger import Arrival
from hooks.receiving.payloads import Facts, Unusable, check, facts_of, is_quick, parse
from hooks.receiving.settings import ReceiverSettings

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
