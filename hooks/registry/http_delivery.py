"""Delivery of events by HTTP POST to checked addresses."""

import asyncio
import socket
import time
from collections.abc import Sequence

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from hooks.addresses import Resolve, TargetRules
from hooks.errors import UnsafeTarget
from hooks.registry.delivery import (
    MAX_READ,
    DeliveryOutcome,
    DeliveryRequest,
    Destination,
    make_excerpt,
    parse_retry_after,
    resolve_host,
)


class PinnedResolver(AbstractResolver):
    """Resolver of one host, which returns only its checked addresses."""

    def __init__(self, host: str, addresses: Sequence[str]):
        self._host = host
        self._addresses = tuple(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the pinned addresses."""
        if host.rstrip(".") != self._host.rstrip("."):
            raise OSError(f"asked for {host!r}, pinned to {self._host!r}")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Do nothing, because the resolver holds no resources."""


TIMEOUT = 12.0
BODY_TIMEOUT = 2.0  # seconds for the response body, of which the log shows the beginning


class HttpDeliverer:
    """Delivers events by HTTP POST; ``timeout`` is in seconds for one attempt, including the DNS look-up."""

    def __init__(self, rules: TargetRules, *, timeout: float = TIMEOUT, resolve: Resolve = resolve_host):
        self.timeout = timeout
        self._rules = rules
        self._resolve = resolve

    async def deliver(self, destination: Destination, request: DeliveryRequest, now: float) -> DeliveryOutcome:
        """Send the request; return failures in the outcome and never raise them."""
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout):
                status, retry_after_header, body_start = await self._post(destination, request, now)
        except (aiohttp.ClientError, OSError, ValueError, UnsafeTarget) as error:
            is_late = isinstance(error, TimeoutError)
            text = f"no answer within {self.timeout:g} s" if is_late else _describe_error(error)
            return DeliveryOutcome(error=text, seconds=time.monotonic() - started_at)
        return DeliveryOutcome(
            status=status,
            excerpt=make_excerpt(body_start, (destination.secret,)),
            retry_after=parse_retry_after(retry_after_header, now),
            seconds=time.monotonic() - started_at,
        )

    async def _post(
        self, destination: Destination, request: DeliveryRequest, now: float
    ) -> tuple[int, str | None, bytes]:
        assert destination.url is not None
        target = self._rules.parse_url(destination.url)
        addresses = await self._rules.resolve_target(target, self._resolve)
        # Connections are not reused, so that each attempt resolves the name and checks its addresses again.
        connector = aiohttp.TCPConnector(
            resolver=PinnedResolver(target.host, addresses), use_dns_cache=False, force_close=True
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session,
            session.post(
                target.url, data=request.body, headers=build_headers(destination, request, now), allow_redirects=False
            ) as answer,
        ):
            body_start = b""
            try:
                async with asyncio.timeout(BODY_TIMEOUT):
                    while len(body_start) < MAX_READ and (
                        chunk := await answer.content.read(MAX_READ - len(body_start))
                    ):
                        body_start += chunk
            except (TimeoutError, aiohttp.ClientError):
                pass  # The status has arrived, and the body is only for the log.
            return answer.status, answer.headers.get("Retry-After"), body_start


def build_headers(destination: Destination, request: DeliveryRequest, now: float) -> dict[str, str]:
    """Build the headers of a delivery that is attempted ``now``, in seconds since 1970."""
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "robojax-webhooks",
        "Webhook-Id": request.id,
        "Webhook-Timestamp": str(int(now)),
    }
    if destination.secret:
        headers["X-Webhook-Secret"] = destination.secret
    return headers


def _describe_error(error: BaseException) -> str:
    """Describe an error without names of files or code."""
    if isinstance(error, UnsafeTarget):
        return str(error)
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "the target's certificate cannot be verified"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the target closed the connection without an answer"
    if isinstance(error, OSError):
        return f"no connection: {error.strerror or type(error).__name__}"
    return f"no HTTP answer ({type(error).__name__})"
